"""Machines that need minutes for a microbatch: nobody may take them for dead, or have all their work done twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.events import PeerDown, StepApplied
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.row import Row
from muletrain.runtime.microbatch.messages import Backward, Forward, Gap, Lost
from muletrain.runtime.microbatch.trainer import Trainer
from muletrain.runtime.recovery.rollback import JOIN_S
from muletrain.runtime.step.exchange import Exchange
from muletrain.runtime.step.state import Lasting
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.simulation import simulate_fleet
from proofs.draws import draw
from proofs.play import play
from proofs.scenario import FOR_EVER_S, Fault, Scenario, planned
from tests.tiny_fleets import run_of

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.runtime.core.messages import Message
    from proofs.verdict import Outcome

MICROBATCHES, MACHINES = 32, 4
KILL = (Fault(350.0, "kill", ("peer-0b",)),)


@pytest.mark.parametrize("forward_s", [30, 80])
def test_slowness_neither_ends_a_run_nor_causes_more_work(tmp_path: Path, forward_s: int) -> None:
    text = f'[[machines]]\nname = "a"\ncount = {MACHINES}\nforward_ms = {1000 * forward_s}\nbackward_ms = {2000 * forward_s}\n'
    scene, run = run_of(tmp_path, text, f"train.batch={MICROBATCHES}", "fleet.stages=2")
    of_work_s = 3 * forward_s * 2 * MICROBATCHES / MACHINES
    outcome = simulate_fleet(scene, run, Weather(), hours=2.6 * of_work_s / 3600, seed=0, fidelity="protocol")
    assert not outcome.failure
    assert outcome.steps >= 2
    assert outcome.repeated_microbatches < MICROBATCHES / 2, "of as many at each of two stages"


@pytest.mark.parametrize("on", ["", "shard"])
def test_what_a_replica_took_with_it_may_take_hours_to_be_run_again(on: str) -> None:
    """It dies at the end of a step of 96 minutes, before or after all microbatches are through, and the other one has half of
    them to run again. Nobody gives up meanwhile."""
    slower = 1600.0
    world = Scenario(1, (2, 2), 2, 1, 48, 0.02, (), slower=slower, longer=slower)
    outcome = play(replace(world, faults=(Fault(0.97 * world.step_s, "kill", ("peer-0b",), on=on),)))
    assert not outcome.violations
    assert {*outcome.ends.values()} == {"finished"}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Messages, by kind and the peer that they are sent to."""
    counted: Counter[tuple[str, str]] = Counter()
    right = Context.send

    async def send(self: Context, peer: str, message: Message, *args: Any, **more: Any) -> None:
        counted[message.KIND, peer] += 1
        await right(self, peer, message, *args, **more)

    monkeypatch.setattr(Context, "send", send)
    return counted


def test_full_peers_are_not_sent_what_they_refuse_all_the_time(sent: Counter[tuple[str, str]]) -> None:
    """Four trainers have more under way than the peers hold. What is refused has crossed the network in vain."""
    assert not play(Scenario(7, (2, 1, 2), 4, 2, 24, 0.01, (), capacity=4, slower=100.0, longer=100.0)).violations
    all_of: Counter[str] = Counter()
    for (kind, _), times in sent.items():
        all_of[kind] += times
    assert 0 < all_of[Lost.KIND] < all_of[Backward.KIND]


def test_who_refuses_all_but_says_that_it_is_back_and_has_room_is_soon_sent_nothing(
    sent: Counter[tuple[str, str]],
) -> None:
    lie = Fault(0.0, "lie", ("peer-1b",), FOR_EVER_S, how="full")
    assert not play(Scenario(1, (2, 2), 2, 3, 48, 0.01, (lie,), capacity=4)).violations
    assert sent[Forward.KIND, "peer-1b"] < 48, "of 144 microbatches"


def test_who_is_alone_gives_up_although_its_device_works() -> None:
    """All peers of the next stage are gone, and it computes one forward of 50 s after the other for nobody."""
    dead = tuple(Fault(2000.0, "kill", (who,)) for who in ("peer-1a", "peer-1b"))
    outcome = play(Scenario(1, (1, 2), 1, 3, 8, 0.02, dead, slower=1000.0, longer=1000.0))
    assert "no peer of stages [1] can be reached" in outcome.ends["peer-0a"]
    assert outcome.virtual_s < 2000.0 + 30.0 + 1.5 * JOIN_S


@pytest.mark.parametrize(("stages", "faults", "most"), [((3, 3, 3), (), 24), ((2, 2), (), 3), ((3, 3, 3), KILL, 45)])
def test_the_first_step_of_slow_machines_computes_little_twice(
    stages: tuple[int, ...], faults: tuple[Fault, ...], most: int
) -> None:
    """A planned pipeline, in which a microbatch has one way only. The first gradients are compared with others, which may be
    those of copies that nobody waits for any more. Who is at a copy when a step ends applies that step afterwards."""
    world = Scenario(5, stages, sum(stages), 2, 8, 0.02, faults, slower=1000.0, longer=1000.0)
    outcome = play(replace(world, overrides=(*planned(stages, "1f1b"), "optimizer.delayed=true")))
    assert not outcome.violations
    assert len(outcome.of(StepApplied, step=1)) == sum(stages) - len(faults)
    assert _recomputed(outcome, step=1) <= most
    assert {e.peer_id for e in outcome.of(PeerDown)} <= {peer for fault in faults for peer in fault.who}


def test_a_machine_that_was_suspended_for_an_hour_goes_on() -> None:
    """All deadlines are over when it wakes up, and it has heard nobody meanwhile."""
    slower = 1400.0
    asleep = (Fault(800.0, "freeze", ("peer-1b",), 4200.0),)
    outcome = play(Scenario(5, (2, 2), 4, 2, 16, 0.01, asleep, slower=slower, longer=3 * slower))
    assert not outcome.violations
    assert {*outcome.ends.values()} == {"finished"}


@pytest.mark.parametrize(
    ("seed", "asleep", "within_s", "most"),
    [
        (35, (("peer-0c", 885.3, 1429.5), ("peer-1b", 985.2, 2439.6)), 6000, 40),  # before: 10,459 s, and 161
        (71, (("peer-0b", 783.6, 3359.8), ("peer-1b", 796.2, 1348.1)), 9000, 230),  # before: 15,522 s, and 515
    ],
)
def test_what_is_run_again_for_those_that_sleep_is_not_begun_by_everybody(
    seed: int, asleep: tuple[tuple[str, float, float], ...], within_s: float, most: int
) -> None:
    """Every 30 s the next trainer began the same microbatches, of which each takes minutes; and replicas that waited for
    another stage counted as getting nowhere after a minute."""
    faults = tuple(Fault(at_s, "freeze", (who,), for_s) for who, at_s, for_s in asleep)
    outcome = play(replace(draw(seed, "minutes"), faults=faults))
    assert not outcome.violations
    assert outcome.virtual_s < within_s
    assert _recomputed(outcome) < most


def slow(kind: str, who: str, at: float = 0.0, slower: float = 40.0, **how: Any) -> Scenario:
    """Six peers that need seconds for a microbatch, and hold many; a fault after a share of a step."""
    world = Scenario(3, (3, 3), 2, 3, 12, 0.01, (), slower=slower, longer=slower, capacity=24)
    return replace(world, faults=(Fault(at * world.step_s, kind, (who,), **how),))


def test_who_is_told_of_missing_microbatches_and_does_nothing_holds_up_a_step_for_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was its turn for as long as a full queue takes, and the others gave up the record before that."""
    right = Trainer.on_gap

    def on_gap(self: Trainer, sender: str, gap: Gap) -> None:
        if self._ctx.net.peer_id != "peer-0b":
            right(self, sender, gap)

    monkeypatch.setattr(Trainer, "on_gap", on_gap)
    outcome = play(slow("kill", "peer-1b", 0.9, on="shard"))
    assert not outcome.violations
    assert outcome.virtual_s < 260.0


def test_a_replica_that_never_seals_is_left_out_before_the_others_give_up() -> None:
    outcome = play(slow("lie", "peer-0b", slower=120.0, for_s=FOR_EVER_S, how="seals"))
    assert not outcome.violations
    assert outcome.virtual_s < 1000.0


@pytest.mark.parametrize("seed", [11, 300028])
def test_worlds_in_which_somebody_gave_up(seed: int) -> None:
    """One that could not reach a slow peer, before that may have done its queue; one that slept measured by its first
    answer that all answers take half an hour, and did not notice that others were gone."""
    assert not play(draw(seed, "sleep")).violations


def test_what_a_peer_accumulates_anew_is_no_progress() -> None:
    """It may have dropped its accumulator, as one that stands out, and says that it is at work; or it says anything."""
    answers = iter([(0,), (0, 1), (0, 1), (), *[(0,), ()] * 20])
    asked, grew = Counter[str](), list[int]()

    async def probe(peer: str, lineage: bytes, step: int, *, record: bool) -> Row:
        asked[peer] += 1
        return Row(current=True, step=0, stage=1, accumulated=next(answers))

    async def scenario() -> None:
        ctx: Any = SimpleNamespace(detector=SimpleNamespace(probe=probe), plan=SimpleNamespace(microbatches=9))
        state: Any = SimpleNamespace(step=0, lineage=b"", work=SimpleNamespace(complete=lambda *_: False))
        waits: Any = SimpleNamespace(grew=lambda: grew.append(asked["a"]), came_on=lambda: None)
        nothing: Any = None
        lasting = Lasting(ctx, *[nothing] * 7, waits)
        exchange = Exchange(lasting, state)
        for _ in range(30):
            await exchange.ask("a")

    asyncio.run(scenario())
    assert grew == [1, 2]


def _recomputed(outcome: Outcome, step: int | None = None) -> int:
    """Microbatches that were computed again in ``step``, or in all."""
    return sum(e.recomputed for e in outcome.of(StepApplied) if step in (None, e.step))
