"""Clients and servers of a hub that lie: the weights are those of a single process, and nobody waits long."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from muletrain.config.schema import Codec
from muletrain.events import PoolWorked, ResultsDiffer
from muletrain.network.base import Channel
from muletrain.policy.passes import Pass
from muletrain.policy.pool import OWN, Pool
from muletrain.policy.worker import MOST_OUT, Standing
from muletrain.runtime.pool import work
from muletrain.runtime.pool.clients import Clients
from muletrain.runtime.pool.messages import MAX_KEPT, Give, Next, Result
from muletrain.runtime.pool.servers import StageServers
from muletrain.runtime.pool.weights import WeightsCopy, WeightsDownload
from muletrain.runtime.pool.work import PartWork
from muletrain.sim.loop import run_virtually
from muletrain.wire.codec import encode, encode_samples
from proofs import draws, reference
from proofs.hub_lies import CLIENT_LIES, SERVER_LIES
from proofs.play import play
from proofs.scenario import FOR_EVER_S, Fault, Scenario

if TYPE_CHECKING:
    from collections.abc import Collection

    from proofs.verdict import Outcome

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(800)
CLIENTS = tuple(f"client-{stage}{letter}" for stage in (0, 1) for letter in "abcd")
LIARS = "client-0a", "client-0b", "client-1a"
SERVERS = "peer-0a", "peer-0b", "peer-1a", "peer-1b"


def world(*faults: Fault, steps: int = 6, verify: float = 0.0) -> Scenario:
    overrides = (f"hub.verify={verify}",) if verify else ()
    return Scenario(1, (2, 2), 2, steps, 6, 0.01, faults, clients=CLIENTS, sequences=4, overrides=overrides, trace=True)


def lie(how: str, *who: str) -> tuple[Fault, ...]:
    return tuple(Fault(0.0, "lie", (w,), FOR_EVER_S, how=how) for w in who)


def kept(scenario: Scenario) -> Outcome:
    outcome = play(scenario)
    assert outcome.violations == []
    assert outcome.difference < 1e-5
    return outcome


def parts(outcome: Outcome) -> Counter[str]:
    """Parts that counted, by client."""
    found = Counter[str]()
    for event in outcome.events:
        if isinstance(event, PoolWorked):
            found.update({name: counts.get("parts", 0) for name, counts in event.clients.items()})
    return found


@pytest.mark.parametrize(
    ("how", "most_s"),
    {
        "silent": 13,
        "anew": 16,
        "downloads": 4,
        "hurry": 9,
        "twice": 4,
        "others": 6,
        "slow": 13,
        "unasked": 4,
        "unable": 9,
    }.items(),
)
def test_three_of_eight_clients_that_lie_cost_no_number_and_little_time(how: str, most_s: float) -> None:
    """Six honest steps take 3.2 s. Silent clients cost 34 s: nobody took their parts for half a minute."""
    assert how in CLIENT_LIES
    assert kept(world(*lie(how, *LIARS), verify=float(how == "hurry"))).virtual_s < most_s


@pytest.mark.parametrize(
    ("how", "most_s"),
    {"idle": 4, "hoards": 13, "much": 7, "weights": 4, "digest": 6, "servers": 4, "ended": 9}.items(),
)
def test_a_server_that_lies_to_its_clients_costs_no_number_and_little_time(how: str, most_s: float) -> None:
    assert how in SERVER_LIES
    assert kept(world(*lie(how, SERVERS[0]))).virtual_s < most_s


def test_lies_are_found_among_all_faults() -> None:
    """Cheap seeds of 'python -m proofs fuzz --kind "hub lie"'."""
    broken = {s: found for s in (1, 3, 8) if (found := play(draws.draw(s, "hub lie")).violations)}
    assert broken == {}


# 1: speeds ------------------------------------------------------------------------------------------------------------


def test_nobody_is_as_fast_as_it_says() -> None:
    """Two clients that stated a speed of 6e17 kept the server's own device from its work: no message has a speed of a
    client now, and one that has brought nothing back gets an equal share."""
    assert not {"speed", "room"} & {*Next.model_fields, *Result.model_fields}
    pool = Pool()
    for worker in (OWN, "a", "b"):
        pool.enlist(worker)
        pool.ready(worker, 1)
    assert (pool.speed(), pool.sharing_speed()) == (0.0, 0.0)
    pool.put(Pass.LOSS, 0, 0, 4, 0.0)
    assert [given.part.rows for w in ("a", "b") if (given := pool.take(w, 0.0)) is not None] == [2, 2]
    pool.put(Pass.LOSS, 0, 1, 4, 0.0)
    assert pool.take(OWN, 0.0) is not None, "nobody else has room"


@pytest.mark.parametrize(("how", "least"), [("hoards", 120), ("digest", 180)])
def test_a_server_whose_clients_do_nothing_does_not_keep_them(
    how: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients of the stage came, stayed, and had nothing to do. Of an honest server they compute 244 parts."""
    scenario = replace(world(*lie(how, SERVERS[0]), steps=12), slower=20.0)
    done = parts(kept(scenario))
    assert sum(done[name] for name in CLIENTS[:4]) > least
    monkeypatch.setattr(StageServers, "_left_out", lambda self, server: False)
    done = parts(kept(scenario))
    assert sum(done[name] for name in CLIENTS[:4]) < 140


def test_results_that_nobody_asked_for_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They filled a server's memory, and then ended it: no message has room for so many numbers."""
    right, asked = Clients.verdicts, list[int]()

    def verdicts(self: Clients, client: str, numbers: Collection[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        asked.append(len(numbers))
        return right(self, client, numbers)

    monkeypatch.setattr(Clients, "verdicts", verdicts)
    kept(world(*lie("unasked", CLIENTS[0])))
    assert 6 * MAX_KEPT <= max(asked) < 7 * MAX_KEPT, "those of one call, and results of parts that it had"


@pytest.mark.parametrize("how", ["servers", "ended"])
def test_a_server_takes_no_client_away_from_the_others(how: str) -> None:
    """All clients of the stage knew none but "nobody" when it went, or believed that the run had ended. Of an honest server
    they compute 164 parts."""
    outcome = kept(world(*lie(how, SERVERS[0]), Fault(1.0, "kill", SERVERS[:1]), steps=8))
    assert {outcome.ends[client] for client in CLIENTS} == {"left in order"}
    assert sum(parts(outcome)[name] for name in CLIENTS[:4]) > 140
    assert outcome.virtual_s < 10


# 2, 8: work that never comes ------------------------------------------------------------------------------------------


def test_one_whose_work_is_lost_again_and_again_is_left_out_for_longer_and_longer() -> None:
    standing, out, version = Standing(), list[int](), 0
    for _ in range(8):
        standing.lapsed(version)
        begin = version = version + 1
        while standing.left_out(version):
            version += 1
        out.append(version - begin)
    assert out == [0, 1, 2, 4, 8, MOST_OUT, MOST_OUT, MOST_OUT]
    standing.kept()
    standing.lapsed(version)
    assert not standing.left_out(version + 1), "a loss now and then costs nothing"


def test_clients_whose_accumulators_come_late_get_less_and_less_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server computed their work again in each step."""
    scenario = world(*lie("slow", *LIARS), steps=16)
    remembered = kept(scenario).virtual_s
    monkeypatch.setattr(Standing, "left_out", lambda self, version: False)
    assert remembered < 0.9 * kept(scenario).virtual_s


def test_two_clients_that_lose_each_result_do_not_pass_the_same_part_to_each_other() -> None:
    """The server's own device never had a turn: each part was free only until the other one took it."""
    pair = CLIENTS[:2]
    assert kept(replace(world(*lie("silent", *pair)), stages=(1, 1), clients=pair)).virtual_s < 10


def test_a_client_that_loses_parts_again_and_again_gets_no_more_in_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part cost four times its time, though the client kept calling: steps took 73 s instead of 19 s."""
    silent = replace(world(*lie("silent", *CLIENTS[:3]), steps=8), stages=(1, 1), clients=CLIENTS[:4], slower=20.0)
    honest = kept(replace(silent, faults=())).virtual_s
    assert kept(silent).virtual_s < 1.45 * honest, "1.2 to 1.4, as clients draw"
    monkeypatch.setattr(Standing, "left_out", lambda self, version: False)
    assert play(silent).violations or kept(silent).virtual_s > 2 * honest


@pytest.mark.parametrize(("how", "most_s"), [("hang", 450), ("unable", 370)])
def test_clients_that_compute_nothing_in_step_after_step_are_left_out(how: str, most_s: float) -> None:
    """Their devices hang, or they say too late that they could not compute. Each step began with parts for them: 16 steps
    took 512 and 438 s instead of 113 s."""
    hang = tuple(Fault(0.0, "hang", (client,), FOR_EVER_S) for client in LIARS)
    scenario = replace(world(*(hang if how == "hang" else lie(how, *LIARS)), steps=16), slower=20.0)
    assert kept(scenario).virtual_s < most_s


def test_nobody_waits_half_a_minute_for_one_of_whom_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = world(*lie("silent", *LIARS))
    hastened = kept(scenario).virtual_s
    monkeypatch.setattr(Pool, "_hasten", lambda self: None)
    assert hastened < 0.5 * kept(scenario).virtual_s


# 3, 4: weights --------------------------------------------------------------------------------------------------------


def test_a_client_that_always_downloads_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers behind slow links."""
    narrow = tuple((server, 2e5) for server in SERVERS)
    honest = kept(replace(world(), narrow=narrow)).virtual_s
    scenario = replace(world(*lie("downloads", *LIARS)), narrow=narrow)
    bounded = kept(scenario).virtual_s
    assert bounded < 1.5 * honest
    right = WeightsCopy.__init__

    def urgent(self: WeightsCopy, *args: Any) -> None:
        right(self, *args)
        self.channel = Channel.PIPE

    monkeypatch.setattr(WeightsCopy, "__init__", urgent)
    assert kept(scenario).virtual_s > 1.1 * bounded, "weights yield to the step's traffic"


def test_ten_honest_clients_behind_slow_links_do_not_stop_averaging() -> None:
    """Six steps took 73 s: their weights and the gradients of servers took turns."""
    clients = tuple(f"client-0{letter}" for letter in "abcdefghij")
    narrow = (*((c, 3e3) for c in clients), *((server, 1e6) for server in SERVERS))
    assert kept(replace(world(), clients=clients, narrow=narrow)).virtual_s < 20


# 5: wrong weights -----------------------------------------------------------------------------------------------------


def test_a_server_that_gives_wrong_weights_is_known_by_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of the whole stage went from server to server, and nobody knew whose chunk was wrong."""
    scenario, wrong = world(*lie("weights", SERVERS[0]), steps=8), list[WeightsDownload]()
    right = WeightsDownload.__init__

    def made(self: WeightsDownload, *args: Any) -> None:
        right(self, *args)
        wrong.append(self)

    monkeypatch.setattr(WeightsDownload, "__init__", made)
    done = parts(kept(scenario))
    assert {server for download in wrong for server in download.wrong} == {SERVERS[0]}
    assert sum(done[name] for name in CLIENTS[:4]) > 0.3 * sum(parts(kept(world(steps=8)))[n] for n in CLIENTS[:4])


# 6: offences ---------------------------------------------------------------------------------------------------------


def test_clients_put_no_offence_on_their_server() -> None:
    """Where half of the results were false from the beginning, none stood out: the false gradients were in the server's
    sum, which other servers found false in two steps, and then in the weights. (Two that lie alike may confirm each
    other: in half of the draws they do.)"""
    scenario = world(*(Fault(0.0, "corrupt", (client,), FOR_EVER_S, how="huge") for client in CLIENTS[:2]), verify=0.02)
    assert not any(isinstance(event, ResultsDiffer) for event in kept(replace(scenario, seed=2)).events)


# 7: memory ------------------------------------------------------------------------------------------------------------


def test_a_server_fills_no_clients_memory() -> None:
    """It was 4,291 forwards and 322 gradients."""
    facts = reference.facts_of(world())
    compute, length = reference.client_compute(facts, 0), facts.plan.sequence_length(0)
    parts = PartWork(compute, facts.plan)
    inputs = encode_samples(torch.zeros(1, length, dtype=torch.int64))
    gradient = encode(torch.ones(1, length, facts.plan.width), Codec.FP32)
    about: dict[str, Any] = {"generation": 0, "step": 0, "first": 0, "rows": 1, "whole": 4}

    async def filled(numbers: int) -> list[Result]:
        await parts.begin_anew(0, 0)
        for n in range(numbers):
            await parts.compute(Give(number=n, index=n, what=Pass.FORWARD, accumulate=False, **about), [inputs])
        backwards = (
            Give(number=numbers + n, index=n, what=Pass.BACKWARD, accumulate=True, has_forward=True, **about)
            for n in range(numbers)
        )
        return [(await parts.compute(give, [gradient]))[0] for give in backwards]

    found = run_virtually(filled(MAX_KEPT + 6), 1e6, [])
    assert [result.problem for result in found[:6]] == ["its forward is not here"] * 6
    assert len(parts.forwards()) <= MAX_KEPT
    assert sum(not result.problem for result in found) == work.UNCOUNTED == len(parts.uncounted())
    assert found[-1].problem == "the server does not say which results count"
