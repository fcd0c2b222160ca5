"""The verdict on a virtual world: what happened, and which promises were broken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from muletrain.errors import Expelled
from muletrain.events import Event, MicrobatchesRerun, ReplicaApart
from muletrain.runtime.core.meter import DeviceHung
from muletrain.runtime.pool.servers import NoServer
from proofs.scenario import CALM
from proofs.witness import difference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from muletrain.errors import MuletrainError
    from proofs.scenario import Scenario

E = TypeVar("E", bound=Event)
LEFT = "left in order"
POWERLESS = "lost power when the run had nothing left to do"


@dataclass
class Outcome:
    """``violations``: broken promises, empty if all held. ``ends``: how each peer ended. ``timeline``: (virtual s,
    what)."""

    scenario: Scenario
    violations: list[str] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    errors: dict[str, MuletrainError] = field(default_factory=dict)
    """What ended each peer that ended with an error."""
    timeline: list[tuple[float, str]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """All events, in virtual time; those of the peers' slots with ``Scenario.trace``."""
    left_behind: list[str] = field(default_factory=list)
    """Peers that came back after the run had ended: no number is lost, but a machine's work."""
    lineages: dict[str, bytes] = field(default_factory=dict)
    """Final lineage of each peer."""
    steps: dict[str, int] = field(default_factory=dict)
    """Steps that each peer did."""
    virtual_s: float = 0.0
    longest: float = 1.0
    """Longest step, relative to the shortest."""
    stood_s: float = 0.0
    """The longest time after the first fault in which no fault went on and no step was new [s]."""
    difference: float = 0.0
    """Largest error of a tensor: norm of the difference from a single process, over norm."""

    def of(self, kind: type[E], *peers: str, **fields: Any) -> list[E]:
        """The events of a kind, of all peers or of ``peers``, with these values of their ``fields``."""
        return [
            e
            for e in self.events
            if isinstance(e, kind)
            and (not peers or e.peer in peers)
            and all(getattr(e, name) == value for name, value in fields.items())
        ]


def judge(outcome: Outcome, states: dict[str, dict[str, Tensor]], history: list[dict[str, Tensor]]) -> None:
    """Compare the ``states`` of peers that reached the end with a single process's (``history``: after each step),
    and find the peers that did not."""
    scenario = outcome.scenario
    early = scenario.time_limit_s is not None or any(f.kind == "stop" for f in scenario.faults)
    for name, state in states.items():
        steps = outcome.steps[name]
        if not (steps == scenario.steps or (early and steps > 0)):
            outcome.violations.append(f"{name} ended after {steps} of {scenario.steps} steps")
            continue
        worst = difference(state, history[steps - 1])
        outcome.difference = max(outcome.difference, worst)
        if not worst <= outcome.scenario.tolerance:
            outcome.violations.append(
                f"{name} ended with other weights than a single process: relative difference {worst:.1e}"
            )
    outcome.violations += _unlike_replicas(states, outcome.lineages)
    outcome.violations += _in_vain(outcome) if CALM in scenario.kinds else ()
    _survival(outcome, states)


def _in_vain(outcome: Outcome) -> Iterator[str]:
    """What peers lost by each other although nothing failed."""
    if again := [e for e in outcome.of(MicrobatchesRerun) if e.microbatches]:
        yield f"nothing failed, and {again[0].peer} had {again[0].microbatches} microbatches run again"
    if apart := outcome.of(ReplicaApart):
        yield f"nothing failed, and {apart[0].peer} left {apart[0].name} out of {apart[0].steps} steps: {apart[0].why}"


def _unlike_replicas(states: dict[str, dict[str, Tensor]], lineages: dict[str, bytes]) -> Iterator[str]:
    """Peers whose final bits, moments included, differ from the first peer's of their last stage and lineage."""
    firsts: dict[tuple[bytes, frozenset[str]], str] = {}
    for name in sorted(states):
        # a stage is known by the names of its tensors
        first = firsts.setdefault((lineages[name], frozenset(states[name])), name)
        if not all(torch.equal(value, states[first][key]) for key, value in states[name].items()):
            yield f"{name} and {first}, replicas of one stage, ended with other states"


def _survival(outcome: Outcome, states: dict[str, dict[str, Tensor]]) -> None:
    """Check that every peer that was not killed reaches the end, leaves in order, or finds the others gone."""
    scenario = outcome.scenario
    gone = {p for f in scenario.faults if f.kind == "kill" for p in f.who}
    corrupt = {p for f in scenario.faults if f.kind == "corrupt" for p in f.who}
    gone |= {p for p in corrupt if isinstance(outcome.errors.get(p), Expelled)}
    hung = {p for f in scenario.faults if f.kind == "hang" for p in f.who}
    gone |= {p for p in hung if isinstance(outcome.errors.get(p), DeviceHung)}
    gone |= {p for f in scenario.faults if f.kind in ("kick", "lie") for p in f.who}
    gone |= {p for p, end in outcome.ends.items() if end in (LEFT, POWERLESS)}
    stateless = {p for p, end in outcome.ends.items() if "gives this peer the stage's state" in end}
    for name in scenario.names:
        if name in gone or name in states or (name not in outcome.ends and name in scenario.joining):
            continue
        end = outcome.ends.get(name, "")
        alone = "no peer of stages" in end or "no trainer can" in end or isinstance(outcome.errors.get(name), NoServer)
        if name in stateless or (
            alone and (states or stateless)
        ):  # a client gives up before a server that asks for a state
            outcome.left_behind.append(name)
        else:
            outcome.violations.append(f"{name} did not survive: {outcome.ends.get(name, 'no end')}")


def readable(outcome: Outcome) -> Iterator[str]:
    """Lines for people: what the scenario was, what happened, what was broken."""
    s = outcome.scenario
    yield (
        f"seed {s.seed}: stages of {', '.join(map(str, s.stages))} replicas, {s.trainers} trainers, {s.steps} steps of "
        f"{s.microbatches} microbatches, delays up to {1000 * s.delay_s:.0f} ms{', '.join(('', *s.overrides))}"
    )
    if s.kinds:
        yield f"drawn: {', '.join(s.kinds)}"
    if s.stalls:
        yield f"{100 * s.stalls:.0f} % of the frames are overtaken by what goes by other streams"
    if s.weight != 1.0:
        yield f"a byte of a tensor counts for {s.weight:.0f}; {1000 * s.queue_s:.0f} ms of data wait in front of each link"
    yield from (f"the links of {peer} carry {rate / 1e3:.0f} kB/s" for peer, rate in s.narrow)
    yield from (f"{t:9.3f} s  {text}" for t, text in outcome.timeline)
    yield from (f"VIOLATION  {v}" for v in outcome.violations)
