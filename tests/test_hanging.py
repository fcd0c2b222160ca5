"""Devices that hang while the event loop answers: the others go on soon, and the peer ends itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.compute import jobs
from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch
from muletrain.compute.jobs import Jobs
from muletrain.compute.torch_compute import TorchCompute
from muletrain.events import MicrobatchesRerun, MicrobatchRerouted, Note, PeerDown, StepApplied, SteppedBack, StepWaits
from muletrain.network.memory import MemoryHub
from muletrain.runs.worker_files import EXIT_ERROR
from muletrain.runtime.core.meter import DeviceHung
from muletrain.runtime.core.times import LOOK_S
from muletrain.runtime.members import watchdog
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.runtime.members.watchdog import Watchdog, hung_s
from proofs import reference
from proofs.draws.basic import draw
from proofs.play import play
from proofs.scenario import FOR_EVER_S, Fault, Scenario
from proofs.verdict import Outcome, readable

from . import hanging_worker
from .fleet_run import checkpoint_weights, run_fleet
from .reference import train_plainly
from .test_equivalence import facts_of, relative_difference

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.runs.fleet import LocalFleet

STEPS, MICROBATCHES, DELAY_S = 8, 8, 0.01
LATE_S, OUT_S = jobs.FLOOR_S, watchdog.OUT * jobs.FLOOR_S
"""For operations that take less than half a second."""


def hanging(*faults: Fault, stages: tuple[int, ...] = (2, 2), steps: int = STEPS, **other: Any) -> Outcome:
    outcome = play(Scenario(1, stages, 2, steps, MICROBATCHES, DELAY_S, faults, **other))
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


def lengths_s(outcome: Outcome) -> list[float]:
    """From when one step was first applied somewhere until the next one was."""
    first: dict[int, float] = {0: 0.0}
    for event in outcome.of(StepApplied):
        first.setdefault(event.step, event.t)
    return [first[s] - first[s - 1] for s in sorted(first) if s]


# --- whole runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [(), ("optimizer.delayed=true",)], ids=["at once", "delayed"])
@pytest.mark.parametrize("victim", [pytest.param("peer-0b", marks=pytest.mark.slow), "peer-1b"])
def test_a_device_that_hangs_for_ever_holds_up_one_step_and_ends_its_peer(
    victim: str, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operation returns, those of the update included; the peer answers every probe."""
    monkeypatch.setattr(watchdog, "PATIENCE_S", 2.0)
    monkeypatch.setattr(watchdog, "HUNG", 10.0)
    outcome = hanging(Fault(2.0, "hang", (victim,), FOR_EVER_S), steps=30, overrides=overrides)
    lengths = lengths_s(outcome)
    assert len(lengths) == 30
    usual_s = sorted(lengths)[15]
    assert sum(length > 2 * usual_s for length in lengths) <= 2, "the later ones do without the peer"
    assert max(lengths) < OUT_S + 5.0 + 2 * usual_s
    assert re.search("the device has been at '.*' for 2[0-2] s, so this peer ends", outcome.ends[victim])


def test_copies_go_out_for_what_a_late_device_owes_and_nothing_is_run_again_if_it_comes_back() -> None:
    """Lateness changes routing alone; afterwards the peer gets as much as before."""
    outcome = hanging(Fault(2.0, "hang", ("peer-1b",), LATE_S + 3.0))
    copies = outcome.of(MicrobatchRerouted, stage=1)
    assert copies
    assert 0.0 < min(e.t for e in copies) - 2.0 < 2 * LATE_S + 1.0
    assert not [*outcome.of(PeerDown), *outcome.of(MicrobatchesRerun)]
    assert outcome.of(StepApplied, "peer-1b", step=STEPS)[0].microbatches in (3, 4, 5), "of 8"


def test_a_device_that_returns_after_its_peer_was_given_up_takes_part_again() -> None:
    outcome = hanging(Fault(2.0, "hang", ("peer-1b",), OUT_S + 6.0), steps=24)
    assert all("of its device does not return" in e.reason for e in outcome.of(PeerDown)), "it answers"
    assert {e.peer_id for e in outcome.of(PeerDown)} == {"peer-1b"}
    assert outcome.of(StepApplied, "peer-1b", step=24)[0].microbatches


def test_the_last_peer_of_a_stage_is_not_given_up_for_being_slow() -> None:
    outcome = hanging(Fault(2.0, "hang", ("peer-1a",), 60.0), stages=(2, 1))
    assert not [*outcome.of(SteppedBack), *outcome.of(PeerDown)]
    assert max(lengths_s(outcome)) < 60.0 + 10.0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stages", [(2, 2), (2, 3)])
def test_a_device_that_hangs_in_the_first_step_teaches_nobody_to_wait(stages: tuple[int, ...]) -> None:
    """The first wait for a record, of two minutes, made the next ones so long that the replica which had gone on gave
    up, and with it the run. Found by 'python -m proofs fuzz' (seed 200031)."""
    faults = Fault(0.0563, "freeze", ("peer-1a",), for_s=4.8446), Fault(0.6659, "hang", ("peer-0a",), for_s=FOR_EVER_S)
    outcome = play(Scenario(200031, stages, 2, 3, 5, DELAY_S, faults, overrides=("optimizer.delayed=true",)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert max(e.t for e in outcome.of(StepApplied)) < 400.0
    assert {tuple(e.names) for e in outcome.of(StepWaits, what="the stage's replicas to seal")} == {("peer-0a",)}


def test_a_late_peer_is_not_counted_on_again_because_it_answers() -> None:
    """Without delays it was believed dead for being behind, asked, alive because it answered, and so on: no time passed
    any more."""
    hang = Fault(1.701858464617255, "hang", ("peer-0a",), FOR_EVER_S)
    scenario = Scenario(331, (3, 1), 2, 5, 6, 0.0, (hang,), overrides=("optimizer.delayed=true",), stalls=0.1)
    outcome = play(replace(scenario, relays=True, apart=True))
    assert outcome.violations == []
    assert len(outcome.of(PeerDown, peer_id="peer-0a")) <= 2 * len(scenario.members)


def test_a_step_that_waits_for_a_device_is_a_broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the watchdog; and the fuzzer draws such worlds."""
    monkeypatch.setattr(Watchdog, "look", lambda self, seconds: None)
    outcome = play(Scenario(1, (2, 2), 2, 3, MICROBATCHES, DELAY_S, (Fault(1.0, "hang", ("peer-1b",), 200.0),)))
    assert any("it waited for a device" in violation for violation in outcome.violations)
    drawn = [draw(seed) for seed in range(100)]
    assert sum(any(f.kind == "hang" for f in s.faults) for s in drawn) > 5


# --- real threads --------------------------------------------------------------------------------------------------------

SCENARIO = Scenario(1, (2, 2), 1, 1, 4, 0.0, ())


def real_compute() -> TorchCompute:
    facts = reference.facts_of(SCENARIO)
    setup = StageSetup(facts.config.optimizer, 1, 1, facts.config.train.microbatch)
    return TorchCompute(facts.spec, facts.cut, 0, setup)


def context(compute: Any, notes: list[Any], *, replicas: int = 2) -> Context:
    members = tuple(Member(id=f"p{k}", name=f"p{k}", stage=0, trainer=True) for k in range(replicas))
    genesis = Genesis(
        run_id="run", config=bytes(32), data=bytes(32), stages=1, members=members, coordinator="p0", first_step=0
    )
    plan = reference.facts_of(SCENARIO).plan
    nothing: Any = None
    return Context(
        MemoryHub().join("p0"), LoopClock(), compute, Roster(genesis, "p0"), plan, emit=notes.append, tasks=nothing
    )


def test_a_thread_that_never_returns_is_found_out_though_its_caller_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real loop: the call was cancelled, and others wait behind it."""
    monkeypatch.setattr(jobs, "UNMEASURED_S", 0.5)
    monkeypatch.setattr(jobs, "FLOOR_S", 0.5)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.05)
    monkeypatch.setattr(watchdog, "PATIENCE_S", 1.0)
    monkeypatch.setattr(watchdog, "HUNG", 8.0)
    release, compute, notes = threading.Event(), real_compute(), list[Any]()

    def forward(*_: Any) -> None:
        release.wait(60)

    monkeypatch.setattr(compute.arithmetic, "forward", forward)

    async def scenario() -> None:
        ctx = context(compute, notes)
        watching = asyncio.create_task(Watchdog(ctx).run())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(compute.forward(Microbatch(0, 0), torch.zeros(1, 4, dtype=torch.int64)), 0.1)
        digest = asyncio.create_task(compute.digest())
        await asyncio.sleep(1.0)
        assert ctx.meter.late
        with pytest.raises(DeviceHung, match="the device has been at 'forward' for 4 s, so this peer ends"):
            await watching
        assert not ctx.meter.works.is_set()
        digest.cancel()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        release.set()
        compute.close()


# --- limits --------------------------------------------------------------------------------------------------------------


class Looked:
    """A watchdog on a clock of its own."""

    def __init__(self, *, replicas: int = 2) -> None:
        self.now, self.jobs, self.notes = 0.0, Jobs(lambda: self.now), list[Any]()
        self.ctx = context(self, self.notes, replicas=replicas)
        self.watchdog = Watchdog(self.ctx)

    def usually(self, what: str, seconds: float, times: int = 15) -> None:
        for _ in range(times):
            job = self.jobs.begin(what)
            self.now += seconds
            self.jobs.end(job)

    def pass_s(self, seconds: float) -> None:
        self.watchdog.look(0.0)
        for _ in range(round(seconds / LOOK_S)):
            self.watchdog.look(LOOK_S)

    @property
    def state(self) -> tuple[bool, bool]:
        return bool(self.ctx.meter.late), not self.ctx.meter.works.is_set()


@pytest.mark.parametrize(("usual_s", "late_s"), [(0.01, 2.0), (0.5, 2.0), (10.0, 40.0), (0.0, 300.0)])
def test_what_is_late_is_measured_in_usual_times(usual_s: float, late_s: float) -> None:
    looked = Looked()
    if usual_s:
        looked.usually("forward", usual_s)
    job = looked.jobs.begin("forward")
    looked.pass_s(late_s - LOOK_S)
    assert looked.state == (False, False)
    looked.pass_s(LOOK_S)
    assert looked.state == (True, not usual_s)
    with pytest.raises(DeviceHung, match="the device has been at 'forward'"):
        looked.ctx.who_is_there()  # a wait is given up meanwhile
    looked.pass_s(3 * late_s)
    assert looked.state == (True, True)
    looked.jobs.end(job)
    looked.pass_s(LOOK_S)
    assert looked.state == (False, False)
    looked.jobs.begin("forward")
    with pytest.raises(DeviceHung, match="forward"):
        looked.pass_s(hung_s(max(late_s, looked.jobs.late_s("forward"))) + LOOK_S)


def test_an_operation_that_is_broken_off_says_nothing_of_the_others() -> None:
    looked = Looked()
    with contextlib.suppress(ValueError), looked.jobs.at("forward"):
        looked.now += 0.1
        raise ValueError("broken off")
    assert not looked.jobs.known("forward")
    assert (looked.jobs.late_s("forward"), looked.jobs.longest_s()) == (jobs.UNMEASURED_S, 0.0)
    looked.usually("loss", 100.0, times=1)
    assert looked.jobs.late_s("forward") == looked.jobs.longest_s() == 400.0


def test_slow_calls_now_and_then_are_usual() -> None:
    looked = Looked()
    for seconds in (0.1, 0.1, 6.0) * 5:
        looked.usually("forward", seconds, times=1)
    assert looked.jobs.late_s("forward") == pytest.approx(2 * 6.0)


def test_a_process_that_was_stopped_counts_a_moment_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGSTOP, a laptop's sleep: an hour passes between two looks."""
    looked, slept = Looked(), list[float]()
    looked.usually("forward", 0.1)
    looked.jobs.begin("forward")

    class Clock:
        def now(self) -> float:
            return looked.now

        def stood_still_s(self) -> float:
            return 0.0

        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            looked.now += seconds if len(slept) > 1 else 3600.0
            if len(slept) == 3:
                raise asyncio.CancelledError

    monkeypatch.setattr(looked.ctx, "clock", Clock())
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(looked.watchdog.run())
    assert looked.state == (False, False)


def test_what_runs_beside_the_device_only_ends_a_peer_that_waits_for_very_long() -> None:
    """States are written and hashed there, on disks that may be slow."""
    looked = Looked()
    looked.jobs.begin("state", device=False)
    looked.pass_s(1000.0)
    assert looked.state == (False, False)
    with pytest.raises(DeviceHung, match="the thread beside the device has been at 'state'"):
        looked.pass_s(hung_s(jobs.UNMEASURED_S))


def test_the_last_of_a_stage_stays_in() -> None:
    looked = Looked(replicas=1)
    looked.usually("forward", 0.1)
    looked.jobs.begin("forward")
    looked.pass_s(100.0)
    assert looked.state == (True, False)


# --- processes ---------------------------------------------------------------------------------------------------------

ENDS = """
import asyncio, sys, threading, time
from muletrain.events import EventLog
from muletrain.runs import guard
from pathlib import Path

async def main():
    log = EventLog(Path(sys.argv[1]), "peer")
    beating = asyncio.create_task(guard.Guard(log, lambda: " while the device is at 'apply'", 3.0).beat())
    await asyncio.sleep(5.0)
    print("alive", flush=True)
    {then}

asyncio.run(main())
time.sleep(6.0)
print("goes on")
"""


@pytest.mark.parametrize(
    "then",
    [
        "threading.Event().wait()",  # the loop waits for a thread that hangs
        "loop = asyncio.get_running_loop(); loop.run_in_executor(None, threading.Event().wait)",  # it does not end
    ],
)
def test_a_process_whose_loop_stands_still_ends(tmp_path: Path, then: str) -> None:
    code = ENDS.replace("{then}", then)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "log")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == EXIT_ERROR, done.stderr
    assert done.stdout == "alive\n", "it beats"
    assert "has stood still for 3 s while the device is at 'apply', so it ends" in (tmp_path / "log").read_text()
    assert "in wait" in done.stderr, "where it hangs"


def test_a_process_outlives_a_peer_that_ended_in_it(tmp_path: Path) -> None:
    """A lone peer runs in the process of its command, which measures the model afterwards."""
    code = ENDS.replace("{then}", "beating.cancel()")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "log")], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "alive\ngoes on\n"), done.stderr


@pytest.mark.timeout(600)
def test_a_process_whose_compute_thread_never_returns_ends_and_costs_no_number(tmp_path: Path) -> None:
    facts, cache = facts_of(tmp_path, "train.steps=8")
    expected, _ = train_plainly(facts, facts.source(cache))
    victim, codes = "peer-3", dict[str, int | None]()

    def wrap(name: str) -> list[str]:
        return [sys.executable, hanging_worker.__file__] if name == victim else []

    def tick(fleet: LocalFleet) -> None:
        codes.update(fleet.exit_codes())

    events = run_fleet(facts.config, tmp_path / "run", wrap=wrap, tick=tick, lost={victim})
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    notes = [e.message for e in events if isinstance(e, Note) and e.peer == victim and e.level == "error"]
    assert any("so this peer ends. Look for the device's errors" in note for note in notes), notes
    assert codes[victim] == EXIT_ERROR
    assert "in wait" in (tmp_path / "run" / f"{victim}.log").read_text(), "where it hangs"
