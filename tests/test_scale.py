"""Large fleets: what a message costs does not grow with the fleet."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from pydantic import ValidationError

from benchmarks.messages import run as messages
from muletrain.clock import LoopClock
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.schema import MAX_MICROBATCHES
from muletrain.events import StepApplied
from muletrain.model.spec import ModelSpec
from muletrain.network.answers import MAX_CALL
from muletrain.network.memory import MemoryHub, MemoryNetwork
from muletrain.runtime.core.waiting import MAX_SILENCE
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import Acquaintances, Member, Suspected
from muletrain.runtime.members.roster import MAX_MEMBERS, Genesis, Roster
from muletrain.runtime.members.row import Row, Sync
from muletrain.runtime.microbatch.position import Position
from muletrain.runtime.peer.messages import Report
from muletrain.runtime.peer.reporting import _short
from muletrain.sim.fleet.simulation import simulate_fleet, weather
from muletrain.sim.loop import run_virtually
from muletrain.sim.setting import setting
from tests.runners import runner_of
from tests.virtual import virtually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from types import FrameType

    from muletrain.events import TrafficClass
    from muletrain.runtime.core.plan import Plan
    from muletrain.sim.fleet.accounts import Outcome


def played(tmp_path: Path, peers: int, stages: int, batch: int, seconds: float) -> Outcome:
    """A second a microbatch and stage, 50 ms there and back."""
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'[[machines]]\nname = "a"\ncount = {peers}\nforward_ms = 333\nbackward_ms = 667\n[defaults]\nlocal_rtt_ms = 50\n'
    )
    settings = (
        "model.width=256",
        "model.heads=4",
        "model.context=512",
        "model.vocab=512",
        "train.microbatch=1",
        f"train.batch={batch}",
        f"fleet.stages={stages}",
        f"model.layers={stages}",
        "checkpoint.every=0",
    )
    fleet, config = load_fleet(file), load_config(None, settings)
    scene = setting(fleet, config, ModelSpec.from_config(config.model))
    return simulate_fleet(scene, config, weather(fleet.churn, tmp_path), hours=seconds / 3600, fidelity="protocol")


class Work:
    """Lines of ours that run, every turn of a loop counted, and messages that are sent meanwhile, from the first one
    on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines = self.messages = 0
        right = MemoryNetwork.send

        async def send(network: MemoryNetwork, *args: Any, **options: Any) -> int:
            self.messages += 1
            sys.settrace(self._enter)
            return await right(network, *args, **options)

        monkeypatch.setattr(MemoryNetwork, "send", send)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if "muletrain" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        self.lines += event == "line"
        return self._line


def test_what_a_message_costs_does_not_grow_with_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages, three times as many peers; two steps, with all that is agreed on at their ends."""
    each = []
    before = sys.gettrace()
    for peers in (8, 24):
        with monkeypatch.context() as patched:
            work = Work(patched)
            try:
                outcome = played(tmp_path, peers, 2, 2 * peers, 22.0)
            finally:
                sys.settrace(before)
            assert outcome.steps > 2
            each.append(work.lines / work.messages)
    assert each[1] < 1.3 * each[0]


def test_whether_a_peer_is_there_is_a_short_answer() -> None:
    """Silent peers are asked all the time: that must not become dearer with every microbatch of the step."""
    member = Member(id="p0", name="p0", stage=0, trainer=True)
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=1, members=(member,), coordinator="p0", first_step=0
    )

    async def scenario() -> list[Row]:
        nothing, count = cast("Any", None), 2000
        plan = cast("Plan", SimpleNamespace(stages=1, microbatches=count, delayed=False))
        ctx = Context(
            MemoryHub().join("p0"), LoopClock(), nothing, Roster(genesis, "p0"), plan, emit=lambda event: None
        )
        position = Position(ctx, 0, genesis.lineage)
        position.work.complete(range(count), [1.0] * count)
        kinds: list[dict[str, bool]] = [{"brief": True}, {}, {"through": True}]
        answers = [position.row(0, genesis.lineage, **kind) for kind in kinds]
        await ctx.tasks.close()
        return answers

    brief, asked, whole = run_virtually(scenario(), 1.0, [])
    assert len(whole.completed) == 2000
    assert len(brief.pack()) < 220
    assert len(asked.pack()) < 220, "a trainer asks a thousand peers who has a microbatch"
    for known in ("current", "step", "stage", "lineage", "branch", "rival"):
        assert getattr(brief, known) == getattr(whole, known)


def test_the_largest_answers_are_no_larger_than_a_call_carries() -> None:
    every, losses = tuple(range(MAX_MICROBATCHES)), (2.5,) * MAX_MICROBATCHES
    held = {"accumulated": every, "accumulated_losses": losses, "completed": every, "losses": losses}
    members = tuple(
        Member(
            id=f"12D3KooW{k:044}",
            name=f"laptop-of-somebody-{k}",
            stage=k % 16,
            trainer=True,
            device="NVIDIA GeForce RTX 4090",
        )
        for k in range(MAX_MEMBERS)
    )
    for answer in (Row(current=True, step=1 << 20, stage=15, **held), Acquaintances(members=members)):
        assert MAX_CALL // 2 < len(answer.pack()) < MAX_CALL


def test_a_report_of_a_step_in_a_run_of_a_thousand_fits_into_its_message() -> None:
    """The peer that made it ended after its first step."""
    took = dict.fromkeys(("forward_s", "backward_s", "averaging_s", "apply_s", "wait_s"), 1.0)
    sent: dict[str, dict[TrafficClass, int]] = {f"12D3KooW{k:044}": {"control": 1000 + k} for k in range(1000)}
    step: dict[str, Any] = {"step": 1, "stage": 0, "lineage": "ab" * 32, "skipped": False, "microbatches": 1}
    event = StepApplied(**step, recomputed=0, **took, sent=sent)
    with pytest.raises(ValidationError):
        Report(event=event.to_json())
    short = _short(event)
    Report(event=short.to_json())
    assert short.sent.keys() - sent.keys() == {"others"}
    assert sum(c["control"] for c in short.sent.values()) == sum(c["control"] for c in sent.values())


def test_what_a_roster_answers_follows_the_news() -> None:
    """Answers are kept until something changes."""
    members = tuple(Member(id=f"p{k}", name=f"p{k}", stage=k % 2, trainer=k < 3, place="here") for k in range(6))
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=2, members=members, coordinator="p0", first_step=0
    )
    roster = Roster(genesis, "p2")

    def answers() -> tuple[Any, ...]:
        return (
            roster.stage(0),
            roster.stage(1),
            roster.receivers(),
            roster.others(),
            roster.everyone(),
            roster.replicas(),
            roster.trainers(),
            roster.members(),
            roster.coordinator(),
        )

    def found() -> tuple[Any, ...]:
        roster._answers.clear()
        return answers()

    newcomer = members[0].model_copy(update={"id": "p9", "name": "p9"})
    back, self_at_7 = members[5].model_copy(update={"since": 3}), members[2].model_copy(update={"since": 7})
    news = [
        lambda: roster.mark_dead("p0"),
        lambda: roster.admit(newcomer),
        lambda: roster.mark_alive("p9"),
        lambda: roster.mark_alive("p0"),
        lambda: roster.moved("p4", 1),
        lambda: roster.left("p1"),
        lambda: roster.mark_alive("p1"),
        lambda: roster.expel("p3"),
        lambda: roster.moved(roster.own.id, 1),
        lambda: roster.hear_of(self_at_7),
        lambda: roster.left("p5"),
        lambda: roster.hear_of(back),
        lambda: roster.hear_of(newcomer.model_copy(update={"id": "p8", "name": "p8"})),
    ]
    for heard in news:
        before, version = answers(), roster.version
        heard()
        assert answers() == found() != before
        assert roster.version > version


def test_those_that_are_asked_first_are_spread_evenly() -> None:
    members = tuple(Member(id=f"p{k:02}", name=f"p{k}", stage=0, trainer=True) for k in range(40))
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=1, members=members, coordinator="p00", first_step=0
    )
    asked = [Roster(genesis, m.id).spread(8) for m in members]
    assert {len(set(peers)) for peers in asked} == {8}
    assert all(m.id not in peers for m, peers in zip(members, asked, strict=True))
    times = [sum(m.id in peers for peers in asked) for m in members]
    assert max(times) <= 10
    assert min(times) >= 6
    after_us = tuple(f"p{k % 40:02}" for k in range(6, 45))
    assert Roster(genesis, "p05").spread(100) == after_us


def test_replicas_tell_each_other_which_gaps_they_filled() -> None:
    """A replica freezes, and all 16 stages lack what it held: each asked the others five times a second, and the number of
    questions grew with the stage."""
    play = messages.played(48, "freeze")
    assert play["kinds"]["sync"] < 50, "98 before"
    assert play["step_s"] < 45


@pytest.mark.parametrize(("peers", "stages", "at_once"), [(40, 1, 8), (200, 1, 40), (501, 1, 100), (400, 16, 8 + 15)])
def test_all_replicas_are_asked_what_they_know_before_a_wait_is_given_up(peers: int, stages: int, at_once: int) -> None:
    """Some at a time, with one peer of each other stage; one that is believed dead beside them."""
    members = tuple(Member(id=f"p{k:03}", name=f"p{k}", stage=k % stages, trainer=True) for k in range(peers))
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=stages, members=members, coordinator="p000", first_step=0
    )
    asked: Counter[str] = Counter()

    def answers(peer: str) -> Callable[[str, bytes], Awaitable[bytes]]:
        async def answer(sender: str, payload: bytes) -> bytes:
            asked[peer] += 1
            return Row(current=True, step=0, stage=genesis.members[int(peer[1:])].stage).pack()

        return answer

    async def scenario() -> None:
        hub = MemoryHub()
        nets = {m.id: hub.join(m.id) for m in members}
        for peer, net in nets.items():
            net.serve(Sync.KIND, answers(peer))
        plan = cast("Plan", SimpleNamespace(stages=stages, microbatches=1, delayed=False, chunk=1, tied=None))
        compute = cast("Any", SimpleNamespace(n_params=1, n_trained=1, offload=None))
        ctx = Context(nets["p007"], LoopClock(), compute, Roster(genesis, "p007"), plan, emit=lambda event: None)
        exchange = runner_of(ctx).exchange
        for _ in range(MAX_SILENCE - 1):
            before = asked.total()
            await exchange.ask_everyone()
            assert asked.total() - before == at_once
        ctx.roster.mark_dead("p023")
        before = asked["p023"]
        await exchange.ask_everyone()
        await asyncio.sleep(1)
        assert asked["p023"] == before + 1
        await ctx.tasks.close()
        for net in nets.values():
            await net.close()

    virtually(scenario(), 100.0)
    assert asked.keys() >= {m.id for m in members if m.stage == members[7].stage} - {"p007"}


def test_of_many_lost_replicas_a_few_at_a_time_are_asked_after_and_none_votes_after_a_minute() -> None:
    members = tuple(Member(id=f"p{k:03}", name=f"p{k}", stage=0, trainer=True) for k in range(40))
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=1, members=members, coordinator="p000", first_step=0
    )
    asked: list[str] = []

    async def hears(sender: str, payload: bytes) -> bytes:
        asked.append(Suspected.unpack(payload).peer)
        return b"alive"

    async def scenario() -> None:
        hub = MemoryHub()
        nets = {m.id: hub.join(m.id) for m in members}
        for net in nets.values():
            net.serve(Suspected.KIND, hears)
        plan = cast("Plan", SimpleNamespace(stages=1, microbatches=1, delayed=False, chunk=1, tied=None))
        compute = cast("Any", SimpleNamespace(n_params=1, n_trained=1, offload=None))
        ctx = Context(nets["p007"], LoopClock(), compute, Roster(genesis, "p007"), plan, emit=lambda event: None)
        exchange, lost = runner_of(ctx).exchange, [f"p{k:03}" for k in range(10, 30)]
        for peer in lost:
            ctx.roster.mark_dead(peer, doubtful=True)
        exchange.make_sure()
        await asyncio.sleep(0.05)
        assert len(set(asked)) == 8
        assert {*lost} <= {*ctx.roster.voters(0)}
        for _ in range(70):
            await asyncio.sleep(1)
            exchange.make_sure()
        assert ctx.roster.doubted() == ()
        assert len(asked) < 3000
        await ctx.tasks.close()
        for net in nets.values():
            await net.close()

    virtually(scenario(), 200.0)
