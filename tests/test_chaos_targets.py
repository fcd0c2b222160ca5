"""``--chaos``: whom the faults of a plan hit, and when."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.errors import MuletrainError
from muletrain.events import (
    EventLog,
    FaultInjected,
    FrameRefused,
    Note,
    PeerDown,
    PeerJoined,
    RunFinished,
    RunStarted,
    StepApplied,
    StepDone,
    read_events,
)
from muletrain.network.libp2p import Libp2pNetwork
from muletrain.policy.chaos import Fault
from muletrain.runs.chaos import Injector, Points
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.view import FaultsView

if TYPE_CHECKING:
    from pathlib import Path


NAMES = ("peer-0", "peer-1", "peer-2", "peer-3")


class Recorder:
    """A fleet that notes what is done to it; nothing runs."""

    def __init__(self) -> None:
        self.running = list(NAMES)
        self.done: list[tuple[Any, ...]] = []

    def alive(self) -> list[str]:
        return self.running

    def signal(self, name: str, number: signal.Signals) -> None:
        self.done.append((number.name, name))
        if number == signal.SIGKILL:
            self.running.remove(name)

    def tell(self, name: str, line: str) -> None:
        self.done.append((name, line))

    def spawn(self, names: list[str]) -> None:
        self.done.append(("spawn", *names))

    def begin(self, spec: WorkerSpec) -> None:
        self.done.append(("begin", spec.name, spec.ticket))


class World:
    """peer-0 (collects checkpoints) and peer-2 serve stage 0, the others stage 1; time is ``now``."""

    def __init__(self, folder: Path, *plan: Fault, seed: int = 0) -> None:
        self.fleet, self.now, self.folder = Recorder(), 100.0, folder
        fleet: Any = self.fleet
        self.injector = Injector(plan, seed, fleet, folder, NAMES, now=lambda: self.now)
        for k, name in enumerate(NAMES):
            self.joins(name, k % 2)

    def joins(self, name: str, stage: int) -> None:
        joined = PeerJoined(
            peer_id=f"id-{name}",
            name=name,
            stage=stage,
            device="cpu",
            precision="fp32",
            trainer=True,
            params=1,
            threads=1,
            peer=name,
        )
        self.injector.see(joined)

    def begins(self) -> None:
        started = RunStarted(
            run_id="r",
            config_digest="",
            versions={},
            steps=100,
            stages=2,
            peers=4,
            microbatches=1,
            tokens_per_step=1,
            peer="peer-0",
        )
        self.injector.see(started)

    def step(self, number: int, *peers: str) -> list[tuple[Any, ...]]:
        """``peers`` applied it; what was done to the fleet then."""
        for peer in peers or self.fleet.running:
            applied = StepApplied(
                step=number,
                stage=0,
                lineage="",
                skipped=False,
                microbatches=1,
                recomputed=0,
                forward_s=0.0,
                backward_s=0.0,
                averaging_s=0.0,
                apply_s=0.0,
                wait_s=0.0,
                sent={},
                peer=peer,
            )
            self.injector.see(applied)
        self.injector.see(StepDone(step=number, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, duration_s=1.0, lineage=""))
        return self.tick()

    def tick(self, seconds: float = 0.0) -> list[tuple[Any, ...]]:
        self.now += seconds
        self.fleet.done.clear()
        self.injector.tick()
        return list(self.fleet.done)

    def ends(self, peer: str, reason: str = "all steps done") -> None:
        self.injector.see(RunFinished(steps=3, seconds=1.0, reason=reason, peer=peer))

    def injected(self) -> list[FaultInjected]:
        return [e for e in read_events(self.folder / "chaos.jsonl") if isinstance(e, FaultInjected)]


@pytest.mark.parametrize("seed", range(8))
def test_any_spares_the_collector_and_a_stages_last_peer(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, *(Fault("kill", step=k, target="any") for k in (1, 2, 3)), seed=seed)
    world.begins()
    assert world.tick() == []
    killed = [world.step(k) for k in (1, 2, 3)]
    assert {name for ((_, name),) in killed[:2]} in ({"peer-2", "peer-1"}, {"peer-2", "peer-3"})
    assert killed[2] == [], "nobody is left that may go"
    world.injector.close()
    (note,) = [e for e in read_events(tmp_path / "chaos.jsonl") if isinstance(e, Note) and e.level == "warning"]
    assert "not injected, for want of time or of a target: kill any@step3" in note.message
    assert [e.planned for e in world.injected()] == ["kill any@step1", "kill any@step2"]


def test_nobody_is_killed_whose_replica_may_be_behind(tmp_path: Path) -> None:
    freezes = [Fault("freeze", step=1, target=name, for_s=for_s) for name, for_s in (("peer-0", 4), ("peer-1", 10))]
    world = World(tmp_path, *freezes, Fault("kill", at_s=3, target="any"))
    world.begins()
    assert world.step(1) == [("SIGSTOP", "peer-0"), ("SIGSTOP", "peer-1")]
    assert world.tick(5) == [("SIGCONT", "peer-0")]
    assert world.step(2, "peer-2", "peer-3") == [], "neither of those that were away has taken a step"
    assert world.step(3, "peer-0", "peer-2", "peer-3") == [("SIGKILL", "peer-2")]
    assert world.tick(6) == [("SIGCONT", "peer-1")]


def test_what_is_asked_for_by_name_or_stage_is_done(tmp_path: Path) -> None:
    wanted = [Fault("kill", step=2, target="stage1"), Fault("kill", step=3, target="peer-0")]
    world = World(tmp_path, Fault("freeze", step=1, target="peer-1", for_s=10), *wanted)
    world.begins()
    assert world.step(1) == [("SIGSTOP", "peer-1")]
    assert world.step(2) == [("SIGKILL", "peer-3")]
    assert world.step(3) == [("SIGKILL", "peer-0")]


def test_time_counts_from_the_beginning_of_training(tmp_path: Path) -> None:
    world = World(tmp_path, Fault("corrupt", at_s=20, target="peer-3"))
    assert world.tick(50) == []
    world.begins()
    assert world.tick(19) == []
    assert world.tick(2) == [("peer-3", "corrupt")]
    assert [(e.what, e.who, e.planned) for e in world.injected()] == [("corrupt", ["peer-3"], "corrupt peer-3@20s")]


def test_a_partition_is_told_to_both_sides_and_mended(tmp_path: Path) -> None:
    world = World(tmp_path, Fault("partition", step=1, sides=(3, 1), for_s=5))
    world.begins()
    assert world.step(1) == [*((f"peer-{k}", "cut peer-3") for k in range(3)), ("peer-3", "cut peer-0 peer-1 peer-2")]
    assert world.tick(4) == []
    assert world.tick(1) == [(name, "cut") for name in NAMES]


def test_a_frozen_peer_does_not_outlast_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, Fault("freeze", step=1, target="peer-3", for_s=1000))
    world.begins()
    world.step(1)
    world.ends("peer-1")
    world.fleet.running = ["peer-3"]
    assert world.tick() == [("SIGKILL", "peer-3")]


def test_a_newcomer_is_started_and_can_be_hit(tmp_path: Path) -> None:
    world = World(tmp_path, Fault("join", step=1), Fault("partition", step=2, sides=(2, 2), for_s=5))
    world.injector.newcomer = WorkerSpec(role="join", name="", folder="f", ticket="secret")
    world.begins()
    assert world.step(1) == [("spawn", "peer-4"), ("begin", "peer-4", "secret")]
    told = dict(world.step(2))
    assert told["peer-0"] == "cut peer-2 peer-3 peer-4"
    assert told["peer-4"] == "cut peer-0 peer-1"


def test_at_an_exact_point_the_target_does_it_itself(tmp_path: Path) -> None:
    """It is told two steps ahead; a freeze ends so long after it happened; who is about to die, or just did, is not
    counted on."""
    freeze = Fault("freeze", step=6, phase="sealing", target="stage0", for_s=10)
    world = World(
        tmp_path,
        freeze,
        Fault("kill", step=6, phase="applying", target="peer-1"),
        Fault("kill", step=5, target="stage1"),
    )
    world.begins()
    assert world.step(3) == []
    (frozen, line), (_, other) = world.step(4)
    assert line.startswith("at 6 sealing {")
    assert other.startswith("at 6 applying {")
    assert world.step(5) == [("SIGKILL", "peer-3")], "peer-1 is about to die, but a stage that is named is hit"
    assert world.tick(100) == []
    happened = FaultInjected.from_json(line.split(maxsplit=3)[3])
    world.injector.see(replace(happened, peer=frozen))
    assert world.tick(9) == []
    assert world.tick(1) == [("SIGCONT", frozen)]
    world.injector.see(replace(happened, peer=frozen))
    assert world.tick(100) == [], "once"


def test_who_has_just_killed_itself_is_hit_no_more(tmp_path: Path) -> None:
    world = World(
        tmp_path, Fault("kill", step=3, phase="forward", target="peer-1"), Fault("corrupt", step=2, target="stage1")
    )
    world.begins()
    ((name, line),) = world.step(1)
    world.injector.see(replace(FaultInjected.from_json(line.split(maxsplit=3)[3]), peer=name))
    assert "peer-1" in world.fleet.running
    assert world.step(2) == [("peer-3", "corrupt")]


def test_who_dies_on_the_way_to_an_exact_point_is_replaced(tmp_path: Path) -> None:
    world = World(tmp_path, Fault("kill", step=3, phase="forward", target="any"))
    world.begins()
    ((first, _),) = world.step(1)
    world.fleet.running.remove(first)
    ((second, line),) = world.step(2)
    assert second != first
    assert line.startswith("at 3 forward {")
    world.injector.close()
    (note,) = [e for e in read_events(tmp_path / "chaos.jsonl") if isinstance(e, Note) and e.level == "warning"]
    assert "not injected, for want of time or of a target: kill any@step3:forward" in note.message


def test_a_move_leaves_no_stage_alone_and_a_newcomer_has_to_take_a_step_first(tmp_path: Path) -> None:
    moves = [Fault("move", step=1, target="any", stage=k) for k in (1, 0, 0)]
    world = World(tmp_path, *moves, Fault("kill", step=4, target="newcomer"))
    world.begins()
    (first, second) = world.step(1)
    assert first == ("peer-2", "move 1"), "not the coordinator"
    assert second in [("peer-1", "move 0"), ("peer-3", "move 0")]
    assert world.step(2) == [], "the other one of stage 1 is all that it can count on"
    world.joins("peer-2", stage=1)
    assert world.step(2, "peer-0", "peer-1", "peer-3") == [], "it has not come on yet"
    assert world.step(3) == [({"peer-1": "peer-3", "peer-3": "peer-1"}[second[0]], "move 0")]
    assert world.step(4) == [], "nobody joined since"


def test_points_of_a_step_are_hit_once_and_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr("os.killpg", lambda group, number: signals.append(number))
    network = Libp2pNetwork.__new__(Libp2pNetwork)
    with EventLog(tmp_path / "peer-1.jsonl", "peer-1") as log:
        points = Points(log)
        for what, phase in (("kill", "averaging"), ("freeze", "sealing")):
            event = FaultInjected(what=what, who=["peer-1"], for_s=0.0, planned=what, step=2)
            points.add(network, "5", phase, event.to_json())
        for phase in ("sealing", "averaging"):
            points.reached(phase, 3)
        assert signals == []
        points.reached("averaging", 5)
        points.reached("averaging", 5)
        assert signals == [signal.SIGKILL]
        assert [e.step for e in read_events(tmp_path / "peer-1.jsonl") if isinstance(e, FaultInjected)] == [5]
        points.reached("sealing", 5)
        assert signals == [signal.SIGKILL, signal.SIGSTOP]
        with pytest.raises(MuletrainError, match="no such point"):
            points.add(network, "5", "sleeping", event.to_json())


def test_nothing_is_held_open_for_peers_that_ended(tmp_path: Path) -> None:
    with LocalFleet(tmp_path, 1) as fleet:
        before = len(os.listdir("/proc/self/fd"))
        fleet.spawn(["peer-0"])
        assert fleet.alive() == ["peer-0"]
        assert len(os.listdir("/proc/self/fd")) > before
        fleet.signal("peer-0", signal.SIGKILL)
        while not fleet.exit_codes():
            time.sleep(0.01)
        assert fleet.alive() == []
        assert len(os.listdir("/proc/self/fd")) == before
        fleet.tell("peer-0", "stop")


def test_the_report_sets_faults_beside_what_was_noticed() -> None:
    view = FaultsView({"id-1": "peer-1", "id-2": "peer-2"}.__getitem__)

    def injected(what: Any, who: str, t: float) -> FaultInjected:
        return FaultInjected(what=what, who=[who], for_s=0.0, planned=f"{what} any@1s", step=7, t=t)

    for event in (
        PeerDown(peer_id="id-1", reason="before", t=1.0, peer="peer-0"),
        injected("kill", "peer-1", 10.0),
        injected("freeze", "peer-2", 11.0),
        FrameRefused(remote="id-2", reason="damaged, read before its fault", t=12.01, peer="peer-0"),
        injected("corrupt", "peer-2", 12.0),
        PeerDown(peer_id="id-1", reason="gone", t=12.5, peer="peer-3"),
        PeerDown(peer_id="id-1", reason="gone", t=13.0, peer="peer-0"),
        FrameRefused(remote="id-2", reason="damaged", t=13.01, peer="peer-0"),
    ):
        view.fold(event)
    assert list(view.rows()) == [
        ("7", "kill any@1s", "peer-1", "after 2.5 s by peer-0, peer-3"),
        ("7", "freeze any@1s", "peer-2", "not detected"),
        ("7", "corrupt any@1s", "peer-2", "after 10 ms by peer-0"),
    ]
