"""Sees what every peer holds after every step, while a virtual world runs: promises that hold at the end must hold on
the way, too."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import safetensors.torch

from muletrain.policy.deadline import CEILING_S
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.times import PATIENCE_S
from muletrain.runtime.peer.reporting import PeerHost
from muletrain.runtime.transfer.donor import MAX_COPIES
from proofs.scenario import FOR_EVER_S, stage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.events import StepApplied, StepDone, SteppedBack
    from muletrain.runtime.step.record import StepRecord
    from proofs.reference import History, VirtualCompute, VirtualSwapped
    from proofs.scenario import Scenario

DISTURBING = {"kill", "freeze", "hang", "cut", "partition", "blackhole", "damage", "one way", "small", "kick"}
"""Faults after which not everyone that worked on a step reports it as what it came to be."""


MERGED_S = 10.0
"""After the last fault all peers are in one lineage."""
KEPT_S = 1.0
"""After a checkpoint is complete its copies are on other disks, too, where these work."""
LARGE_S = 90.0
"""With large tensors they need so much more: a peer whose donors came to the end of the run waits a minute for a first
block."""
HELD_UP = 4.0
"""A step in which a device hangs, and nothing else happens, takes at most so many times as long as the shortest of the
run, and"""
HELD_UP_S, AT_FIRST_S = 16.0, 310.0
"""so much more: a peer refuses to be counted on after 8 s, and the others ask it again by then. In the first step
nobody knows yet how long the operations of a device take, and that comes after 300 s (``runtime.members.watchdog``)."""

MOST_TIMES, MOST_S, HANGING_S, HELD_S, GONE_S = 20.0, 200.0, 700.0, 100.0, 1100.0
"""A step takes at most this many undisturbed ones, the time that the faults last, and MOST_S; HANGING_S more if a
device hangs, HELD_S if a liar keeps microbatches to itself (the wait for a first round if it keeps a gradient), GONE_S if
a stage loses all peers or the run all trainers (the others wait 15 minutes for a newcomer)."""


def difference(state: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest of a weight from a single process's: norm of the difference over norm."""
    return max(float((state[k] - expected[k]).norm() / expected[k].norm()) for k in state if k.startswith("model/"))


def faults_of(checkpoint: Path, expected: dict[str, Tensor], tolerance: float) -> Iterator[str]:
    """What is wrong in a complete ``checkpoint``: parts that are not what its manifest says, weights that are not a
    single process's."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    weights: dict[str, Tensor] = {}
    for part in manifest["parts"]:
        content = (checkpoint / part["file"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != part["sha256"] or len(content) != part["size"]:
            yield f"{part['file']} is not what the manifest says"
            return
        weights |= safetensors.torch.load(content)
    names = {name for name in weights if name.startswith("model/")}
    if names != expected.keys():
        yield f"weights are missing: {sorted(expected.keys() - names)}"
    elif not (apart := difference(weights, expected)) <= tolerance:
        yield f"other weights than a single process's: difference {apart:.1e}"


class Witness:
    """``history``: a single process's state after each step. ``broken`` is told what does not hold."""

    def __init__(self, scenario: Scenario, history: History, broken: Callable[[str], None]) -> None:
        self._scenario, self._history, self._broken = scenario, history, broken
        self._together_s = max((f.at_s + f.for_s for f in scenario.faults), default=0.0) + (
            MERGED_S if scenario.longer == 1.0 else LARGE_S + scenario.longer * MERGED_S
        )
        self._records: dict[tuple[int, bytes], bytes] = {}
        self._in_need: set[str] = set()
        """Branches that began when a stage had nobody."""
        self._complete: list[tuple[float, int]] = []
        """When a checkpoint was complete, and its steps."""
        self._weights: dict[tuple[int, bytes], tuple[str, bytes]] = {}
        self._counted: Counter[tuple[int, int, str]] = Counter()
        self._applied_s: dict[int, float] = {-1: 0.0}
        """When each step was first applied somewhere."""
        self._faults: list[tuple[float, float]] = []
        """When each fault began and was over."""

    def disturbed(self, now: float, for_s: float) -> None:
        """A fault begins, and lasts ``for_s``."""
        self._faults.append((now, now + for_s))

    def applied(self, peer: str, record: StepRecord, compute: VirtualCompute | VirtualSwapped, now: float) -> None:
        """``peer`` has applied ``record``: its weights are a single process's after as many steps, and the same bits as
        its replicas'. Sides of a partition have met again by then."""
        if (
            now > self._together_s
            and self._records.setdefault((record.step, branch_of(record.hash)), record.hash) != record.hash
        ):
            self._broken(
                f"{peer} did step {record.step + 1} otherwise than others, long after every fault: two lineages"
            )
        self._applied_s.setdefault(record.step, now)
        digest = compute.weights_digest()
        first, known = self._weights.setdefault((compute.stage, record.hash), (peer, digest))
        if known != digest and self._scenario.same_bits:
            self._broken(f"{peer} and {first}, replicas of one stage, have other weights after step {record.step + 1}")
        if first == peer or known != digest:
            apart = difference(compute.weights(), self._history[record.step])
            if not apart <= self._scenario.tolerance:
                self._broken(
                    f"{peer} has other weights after step {record.step + 1} than a single process: difference {apart:.1e}"
                )

    def load(self, peer: str, requests: int, kept: tuple[int, int, int]) -> None:
        """No queue grows without bound, nor what is kept for others."""
        largest = (MAX_COPIES, 1, self._scenario.log_bytes)
        if any(n > most for n, most in zip(kept, largest, strict=True)):
            self._broken(f"{peer} keeps {kept} (states, parts, bytes of gradients), and may keep {largest}")
        if requests > self._scenario.capacity:
            self._broken(f"{peer} holds {requests} requests, and has room for {self._scenario.capacity}")

    def stepped_back(self, peer: str, back: SteppedBack, served: set[int]) -> None:
        """Nobody does while each stage has a live peer that can be reached; nor does a side of a partition that has
        every stage. ``served``: the stages of those that are still there; the others may have come to the end, and
        gone. What was complete some time before one stage alone lost its peers is where the run goes on."""
        lineage, scenario, kinds = back.lineage, self._scenario, {f.kind for f in self._scenario.faults}
        kept = [
            step for at_s, step in self._complete if at_s < min((f.at_s for f in scenario.faults), default=0.0) - KEPT_S
        ]
        lost = {stage_of(p) for f in scenario.faults for p in f.who}
        simple = kinds == {"kill"} and len(lost) == 1 and scenario.rebalance == "off" and not scenario.narrow
        if simple and kept and back.to < max(kept):
            self._broken(f"{peer} stepped back to step {back.to}, though checkpoint {max(kept)} was complete")
        parted = bool(kinds & {"partition", "blackhole"})
        gone = {p for f in scenario.faults if f.kind in {"kill", "leave", "move"} for p in f.who}
        safe = {stage_of(p) for p, _ in scenario.members if p not in gone} == set(range(len(scenario.stages)))
        safe &= not gone or scenario.rebalance == "off"  # else those that should be left may have moved
        if parted:
            safe = kinds <= {"partition", "blackhole", "slow"} and any(peer in side for side in scenario.whole_sides)
        if served != set(range(len(scenario.stages))):
            self._in_need.add(lineage)
        if safe and lineage not in self._in_need and not kinds & {"freeze", "hang", "cut", "one way"}:
            self._broken(f"{peer} stepped back, though every stage had a peer")

    def written(self, peer: str, step: int, folder: Path, now: float) -> None:
        """Whoever completed a checkpoint of ``step`` steps: all that is in it is right, and no more are there than are
        kept."""
        found = [f for f in folder.glob(f"step-{step:08d}*") if not f.name.endswith(".partial")]
        for checkpoint in found:
            for fault in faults_of(checkpoint, self._history[step - 1], self._scenario.tolerance):
                self._broken(f"{peer}: {checkpoint.name}: {fault}")
        if not found:
            self._broken(f"{peer}: the checkpoint of step {step} is not in its place")
        self._complete.append((now, step))
        steps = {f.name.split("-")[1] for f in folder.glob("step-*") if int(f.name.split("-")[1]) <= step}
        if len(steps) > self._scenario.keep:
            self._broken(f"{peer} keeps checkpoints of {len(steps)} steps, not {self._scenario.keep}")

    def reported(self, peer: str, event: StepApplied) -> None:
        """What peers say that they did adds up."""
        self._counted[event.step, event.stage, event.lineage] += event.microbatches
        if min(event.microbatches, event.recomputed) < 0:
            self._broken(
                f"{peer} counts {event.microbatches} microbatches of step {event.step}, {event.recomputed} again"
            )

    def told(self, peer: str, event: StepDone) -> None:
        """The run's report: losses and norms are a single process's."""
        scenario, at = self._scenario, event.step - 1
        lied = any(f.how == "done" for f in scenario.faults)  # trainers are believed, and any peer may become one
        every = {f.kind for f in scenario.faults}.isdisjoint(DISTURBING) and scenario.resume_s is None and not lied
        apart = 1000 * scenario.tolerance  # of sums of numbers that nearly cancel each other
        for name, said, right in (
            ("loss", event.loss if every else math.nan, self._history.losses[at]),
            ("norm", event.grad_norm, self._history.norms[at]),
        ):
            if math.isfinite(said) and math.isfinite(right) and abs(said - right) > apart * abs(right):
                self._broken(
                    f"{peer} reports a {name} of {said:.6g} for step {event.step}: a single process has {right:.6g}"
                )

    def ended(self) -> float:
        """Each microbatch was counted once for each stage, and none waited for a device that hangs. The longest step,
        in times that the median step took."""
        self._counted_once()
        self._in_time()
        ends = self._applied_s
        lengths = [ends[s] - ends[s - 1] for s in range(self._scenario.steps) if {s - 1, s} <= ends.keys()]
        return max(lengths) / statistics.median(lengths) if lengths and statistics.median(lengths) else 1.0

    def stood_s(self) -> float:
        """The longest time after the first fault in which no fault went on and no step was new [s]."""
        begin_s, end_s = min((begin for begin, _ in self._faults), default=math.inf), max(self._applied_s.values())
        moments = {*self._applied_s.values(), *(at_s for fault in self._faults for at_s in fault)}
        calm = pairwise(sorted(at_s for at_s in moments if begin_s <= at_s <= end_s))
        return max((b - a for a, b in calm if not any(begin <= a < over for begin, over in self._faults)), default=0.0)

    def _counted_once(self) -> None:
        faults, stages = self._scenario.faults, self._scenario.stages
        if faults and all(
            f.kind == "hang" and stages[stage_of(f.who[0])] > 1 for f in faults
        ):  # the last one is waited for
            self._not_held_up()
        if any(
            f.kind in DISTURBING or f.how in ("hurry", "history") for f in self._scenario.faults
        ):  # left out of steps
            return
        whole = self._scenario.microbatches
        last = max((step for step, _, _ in self._counted), default=0)
        cut_off = self._scenario.resume_s is not None  # the power failed while some applied the last step
        for (step, stage, _), counted in self._counted.items():
            if counted != whole and not (cut_off and step == last):
                self._broken(f"step {step}, stage {stage}: {counted} of {whole} microbatches were counted")

    def _in_time(self) -> None:
        s = self._scenario
        gone = {p for f in s.faults if f.kind in ("kill", "kick", "leave", "move", "hang") for p in f.who}
        needed = [{p for p, k in s.members if k == stage} for stage in range(len(s.stages))]
        needed.append({p for p, _ in s.members[: s.trainers]})
        waits_s = MOST_S + HANGING_S * any(f.kind == "hang" for f in s.faults) + GONE_S * any(n <= gone for n in needed)
        waits_s += HELD_S * any(f.how in ("work", "idle", "fast") for f in s.faults)
        waits_s += CEILING_S * any(f.how == "holds" for f in s.faults)
        waits_s += PATIENCE_S * (s.alone and any(f.how == "hangs" for f in s.faults))  # its state is not copied
        lasting_s = sum(f.for_s for f in s.faults if f.for_s < FOR_EVER_S)
        most_s = MOST_TIMES * s.step_s + lasting_s + math.exp(s.skew) * waits_s
        ends = [0.0, *(self._applied_s[step] for step in sorted(self._applied_s))]
        for step, (begin, end) in enumerate(pairwise(ends)):
            if end - begin > most_s:
                self._broken(f"step {step + 1} took {end - begin:.0f} s; with these faults it may take {most_s:.0f} s")

    def _not_held_up(self) -> None:
        ends, steps = self._applied_s, range(self._scenario.steps)
        lengths = [ends[s] - ends[s - 1] for s in steps if {s - 1, s} <= ends.keys()]
        begins_s = min(f.at_s for f in self._scenario.faults)
        for step, length in enumerate(lengths):
            least_s = AT_FIRST_S if begins_s < ends[0] else HELD_UP_S
            least_s *= max(1.0, self._scenario.longer) * math.exp(self._scenario.skew)  # by each one's own clock
            if length > HELD_UP * min(lengths) + least_s:
                self._broken(
                    f"step {step + 1} took {length:.1f} s, the shortest {min(lengths):.1f} s: it waited for a device"
                )


class Watched(PeerHost):
    """The host of a peer whose every applied step the witness sees."""

    def __init__(
        self,
        witness: Witness,
        name: str,
        compute: VirtualCompute | VirtualSwapped,
        clocks: tuple[Clock, Clock],
        ends_s: float,
    ) -> None:
        """``clocks``: the world's, and the peer's own. The peer ends the run at ``ends_s`` on its own clock."""
        self._witness, self._name, self._compute, self._ends_s = witness, name, compute, ends_s
        self._world, self._own = clocks

    def applied(self, record: StepRecord) -> bool:
        self._witness.applied(self._name, record, self._compute, self._world.now())
        return self._own.now() > self._ends_s
