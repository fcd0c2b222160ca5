"""A whole run in one process: production peers on an in-memory network and a virtual clock, with faults drawn from a seed.

Everything from ``swarm`` down is what trains in production; tensors are real and tiny. What happens depends on the seed (and the hash
seed of the interpreter) alone, so a failing seed is replayed exactly.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from muletrain.clock import LoopClock
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.executor import InlineExecutor
from muletrain.compute.paced import PacedCompute
from muletrain.compute.torch_compute import StageSetup, TorchCompute
from muletrain.config.load import load_config
from muletrain.data.microbatch import sequence_length
from muletrain.errors import MuletrainError
from muletrain.events import FrameRefused, MicrobatchRerouted, Note, PeerLeft, PeerSuspected, StepApplied
from muletrain.model.spec import ModelSpec
from muletrain.network.memory import MemoryHub, MemoryNetwork
from muletrain.optim.schedule import learning_rate
from muletrain.sim.loop import Hang, run_virtually
from muletrain.swarm.checkpointing import Collector
from muletrain.swarm.context import Context, Plan
from muletrain.swarm.messages import Member
from muletrain.swarm.peer import Peer
from muletrain.swarm.roster import Genesis, Roster
from muletrain.swarm.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from torch import Tensor

    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.policy.partition import Cut

FORWARD_S, BACKWARD_S = 0.05, 0.1
"""Service times of a peer of speed 1."""
LIMIT_S = 6000.0
"""Virtual time after which a run counts as hung: several of the longest waits of the protocol one after the other."""
TOLERANCE = 1e-5
"""Norm of the difference over norm, per tensor (DESIGN, invariant 1)."""
POINTS = ("forward", "backward", "seal", "shard", "reduced", "round_entry")
"""Frames at which a peer may be killed exactly: between any two of them the protocol must be able to lose it."""
SHOWN = (Note, PeerLeft, PeerSuspected, MicrobatchRerouted, FrameRefused, StepApplied)
LEFT = "left in order"


@dataclass(frozen=True)
class Fault:
    """At ``at_s``: 'kill', 'freeze', 'cut' (one from everyone else, or two from each other), 'slow' or 'damage' (the next frame of)
    ``who``, for ``for_s``; 'join': a newcomer, whose name says its stage; or ``who`` wants to 'leave' in order, or to 'move' to the
    next stage. A kill or damage with ``on`` waits, from ``at_s`` on, for the ``nth`` frame of that kind that ``who`` would send: it
    dies instead, or that frame is damaged."""

    at_s: float
    kind: str
    who: tuple[str, ...]
    for_s: float = 0.0
    on: str = ""
    nth: int = 1

    def __str__(self) -> str:
        lasting = f" for {self.for_s:.1f} s" if self.for_s else ""
        exactly = f" at {self.on} {self.nth}" if self.on else ""
        return f"{self.kind} {', '.join(self.who)}{lasting}{exactly}"


@dataclass(frozen=True)
class Scenario:
    """A run to be: ``stages[k]`` replicas of stage k, the first ``trainers`` peers train, ``delay_s`` the longest one-way delay."""

    seed: int
    stages: tuple[int, ...]
    trainers: int
    steps: int
    microbatches: int
    delay_s: float
    faults: tuple[Fault, ...]
    rebalance: Literal["off", "paper", "throughput"] = "off"
    rebalance_s: float = 60.0
    capacity: int = 8
    """Requests a peer holds at once."""
    overrides: tuple[str, ...] = ()
    """Other settings of the run."""
    tolerance: float = TOLERANCE
    """Norm of the difference over norm, per tensor, that the weights may have from those of a single process."""

    @property
    def members(self) -> list[tuple[str, int]]:
        """(id, stage), stage by stage."""
        return [(f"peer-{s}{chr(97 + k)}", s) for s, replicas in enumerate(self.stages) for k in range(replicas)]

    @property
    def joining(self) -> list[str]:
        return [p for f in self.faults if f.kind == "join" for p in f.who]

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """Two or three stages of one to three replicas; up to four faults. No stage is killed off, nor left to a replica that may be
        behind, and the collector lives: stepping back to a checkpoint, and a collector's death, are not survived yet."""
        rng = random.Random(f"scenario/{seed}")
        stages = tuple(rng.randint(1, 3) for _ in range(rng.randint(2, 3)))
        base = cls(
            seed, stages, min(2, stages[0]), rng.randint(3, 5), rng.randint(4, 9), rng.choice([0.0, 0.01, 0.1]), ()
        )
        span = base.steps * base.microbatches * (FORWARD_S + BACKWARD_S) / min(stages)
        mortal = {s: [p for p, stage in base.members[1:] if stage == s][: n - 1] for s, n in enumerate(stages)}
        away: set[int] = (
            set()
        )  # stages in which somebody may be behind: killing the others there would lose the newest state
        faults: list[Fault] = []
        killed: set[int] = set()
        joined: list[str] = []
        for _ in range(rng.randint(0, 4)):
            at_s, lasting = rng.uniform(0.0, span), rng.uniform(0.2, 20.0)
            kind = rng.choice(["kill", "kill", "freeze", "cut", "slow", "damage", "leave", "move", "join", "join"])
            if kind == "join":
                joined.append(f"peer-{rng.randrange(len(stages))}j{len(joined)}")
                faults.append(Fault(at_s, kind, (joined[-1],)))
                continue
            if kind in ("kill", "leave", "move"):
                mortals = [p for s, peers in mortal.items() for p in peers] + joined
                # who leaves makes sure that another has its state
                victims = [p for p in mortals if _stage(p) not in away or kind != "kill"]
                if victims:
                    victim = rng.choice(victims)
                    (joined if victim in joined else mortal[_stage(victim)]).remove(victim)
                    killed |= {_stage(victim)} if kind == "kill" else set()
                    on = rng.choice(["", *POINTS]) if kind == "kill" else ""
                    faults.append(Fault(at_s, kind, (victim,), on=on, nth=rng.randint(1, 6)))
                continue
            peers = [*(p for p, _ in base.members), *joined]
            who, other = rng.choice(peers), rng.choice(peers)
            pair = kind == "cut" and other != who and rng.random() < 0.5
            cut_off = {_stage(who), _stage(other)} if pair else {_stage(who)}
            if kind == "slow" or not cut_off & killed:
                faults.append(Fault(at_s, kind, (who, other) if pair else (who,), lasting))
                away |= cut_off if kind != "slow" else set()
        return cls(**{**base.__dict__, "faults": tuple(sorted(faults, key=lambda f: f.at_s))})


def _stage(name: str) -> int:
    return int(name.split("-")[1][0])


@dataclass(frozen=True)
class _Facts:
    config: RunConfig
    spec: ModelSpec
    cut: Cut
    plan: Plan


class _Tokens:
    """Microbatches as pure functions of (seed, step, index)."""

    def __init__(self, facts: _Facts) -> None:
        self._sequences, self._length = facts.config.train.microbatch, facts.plan.sequence_length
        self._seed, self._vocab = facts.config.train.seed, facts.spec.vocab

    def microbatch(self, step: int, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        shape = (2, self._sequences, self._length(step))
        drawn = np.random.default_rng((self._seed, step, index)).integers(0, self._vocab, shape)
        return drawn[0], drawn[1]


@dataclass
class Outcome:
    """``violations``: broken promises, empty if all held. ``ends``: how each peer ended. ``timeline``: (virtual s, what)."""

    scenario: Scenario
    violations: list[str] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    timeline: list[tuple[float, str]] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    """Peers that came back when the others had finished and were gone: no number is lost by that, but a machine's work was."""
    virtual_s: float = 0.0
    difference: float = 0.0
    """The largest of a tensor from a single process's: norm of the difference over norm."""


def play(scenario: Scenario) -> Outcome:
    """Run the scenario to its end and check the invariants."""
    outcome = Outcome(scenario)
    expected = _reference(scenario)
    with tempfile.TemporaryDirectory(prefix="mule-fuzz-") as folder:
        world = _World(scenario, outcome, Path(folder))
        try:
            states = run_virtually(world.run(), LIMIT_S, outcome.violations)
        except Hang as e:
            outcome.violations.append(f"hang: {e}")
            return outcome
    for name, state in states.items():
        worst = max(
            float((state[k] - expected[k]).norm() / expected[k].norm()) for k in state if k.startswith("model/")
        )
        outcome.difference = max(outcome.difference, worst)
        if not worst <= scenario.tolerance:
            outcome.violations.append(
                f"{name} ended with other weights than a single process: relative difference {worst:.1e}"
            )
    outcome.violations += _unlike_replicas(states)
    gone = {p for f in scenario.faults if f.kind == "kill" for p in f.who}
    gone |= {p for p, end in outcome.ends.items() if end == LEFT}
    for name in [*(p for p, _ in scenario.members), *scenario.joining]:
        if name in gone or name in states or (name not in outcome.ends and name in scenario.joining):
            continue
        if (
            states and "no peer of stages" in outcome.ends.get(name, "")
        ) or "gives this peer the stage's state" in outcome.ends.get(name, ""):
            outcome.left_behind.append(name)
        else:
            outcome.violations.append(f"{name} did not survive: {outcome.ends.get(name, 'no end')}")
    return outcome


def _unlike_replicas(states: dict[str, dict[str, Tensor]]) -> Iterator[str]:
    """Peers that ended with other bits than the first of their last stage (during the run their seals would tell)."""
    firsts: dict[frozenset[str], str] = {}
    for name in sorted(states):
        first = firsts.setdefault(frozenset(states[name]), name)  # a stage is known by the names of its tensors
        if not all(torch.equal(value, states[first][key]) for key, value in states[name].items()):
            yield f"{name} and {first}, replicas of one stage, ended with other states"


class _World:
    def __init__(self, scenario: Scenario, outcome: Outcome, folder: Path) -> None:
        self._scenario, self._outcome, self._folder = scenario, outcome, folder
        self._rng = random.Random(f"world/{scenario.seed}")
        self._hub = MemoryHub()
        self._hub.delay_s = lambda sender, receiver: self._rng.uniform(0.3, 1.0) * scenario.delay_s
        self._hub.damage = self._damaged
        self._hub.sending = self._sending
        self._damaging: set[str] = set()
        self._doomed: list[tuple[Fault, Counter[tuple[str, str]]]] = []
        self._clock = LoopClock()
        self._computes: dict[str, PacedCompute] = {}
        self._facts = _facts(scenario)
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._peers: dict[str, Peer] = {}

    async def run(self) -> dict[str, dict[str, Tensor]]:
        """The state of every peer that came to the end."""
        genesis = self._genesis()
        networks = {name: self._hub.join(name) for name, _ in self._scenario.members}
        for name, _ in self._scenario.members:
            self._tasks[name] = asyncio.create_task(self._peer(name, genesis, networks[name]), name=name)
        faults = [asyncio.create_task(self._inject(f, networks, genesis)) for f in self._scenario.faults]
        while running := [t for t in self._tasks.values() if not t.done()]:  # newcomers, too
            await asyncio.wait(running)
        for fault in faults:
            fault.cancel()
        self._outcome.virtual_s = self._clock.now()
        return {name: t.result() for name, t in self._tasks.items() if not t.cancelled() and t.result() is not None}

    def _genesis(self) -> Genesis:
        members = tuple(
            Member(id=name, name=name, stage=stage, trainer=k < self._scenario.trainers, addresses=())
            for k, (name, stage) in enumerate(self._scenario.members)
        )
        return Genesis(
            run_id="fuzz", config=bytes(32), data=bytes(32), stages=len(self._scenario.stages), members=members,
            collector=members[0].id, first_step=0,
        )  # fmt: skip

    async def _peer(
        self, name: str, genesis: Genesis, network: MemoryNetwork, *, joining: bool = False
    ) -> dict[str, Tensor] | None:
        member = Member(id=name, name=name, stage=_stage(name), trainer=True, addresses=())
        roster = Roster(genesis, member if joining else name)
        network.on_refusal(lambda remote, reason: self._note(name, FrameRefused(remote=remote, reason=reason)))

        async def make(joins: bool) -> Peer:
            compute = PacedCompute(_compute(self._facts, roster.own.stage), self._clock, FORWARD_S, BACKWARD_S)
            self._computes[name] = compute
            ctx = Context(
                network, self._clock, compute, roster, self._facts.plan, lambda e: self._note(name, e), background=InlineExecutor()
            )  # fmt: skip
            collector = Collector(ctx, self._folder, 1, {}, {}) if name == genesis.collector else None
            peer = self._peers[name] = Peer(ctx, source=_Tokens(self._facts), collector=collector, joining=joins)
            return peer

        try:
            await Service(make, joining=joining).run()
            state = await self._computes[name].state()
        except MuletrainError as e:
            self._say(f"{name} ends: {e}")
            self._outcome.ends[name] = str(e)
            return None
        except Exception as e:
            self._outcome.violations.append(f"{name}: {type(e).__name__}: {e}")
            return None
        finally:
            await network.close()
        left = self._peers[name].left
        self._outcome.ends[name] = LEFT if left else "finished"
        return None if left else state

    async def _inject(self, fault: Fault, networks: dict[str, MemoryNetwork], genesis: Genesis) -> None:
        await self._clock.sleep(fault.at_s)
        name = fault.who[0]
        if fault.kind == "join":
            self._say(f"FAULT {fault}")
            network = networks[name] = self._hub.join(name)
            self._tasks[name] = asyncio.create_task(self._peer(name, genesis, network, joining=True), name=name)
            return
        if name not in self._tasks or self._tasks[name].done():  # has not come yet, or is gone
            return
        if fault.on:
            self._doomed.append((fault, Counter()))
            return
        self._say(f"FAULT {fault}")
        if fault.kind == "kill":
            self._kill(name)
            return
        if fault.kind == "move":
            self._peers[name].move((_stage(name) + 1) % len(self._scenario.stages))
            return
        if fault.kind == "leave":
            self._peers[name].leave()
            return
        pairs = [(name, other) for other in (fault.who[1:] or networks) if other != name]
        switches: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "freeze": (lambda: self._hub.freeze(name), lambda: self._hub.thaw(name)),
            "cut": (lambda: self._each(self._hub.cut, pairs), lambda: self._each(self._hub.mend, pairs)),
            "slow": (lambda: self._slow(name, 5.0), lambda: self._slow(name, 0.2)),
            "damage": (lambda: self._damaging.add(name), lambda: self._damaging.discard(name)),
        }
        begin, end = switches[fault.kind]
        begin()
        try:
            await self._clock.sleep(fault.for_s)
        finally:
            end()
            self._say(f"over: {fault}")

    def _kill(self, name: str) -> None:
        self._hub.kill(name)
        self._tasks[name].cancel()

    def _sending(self, sender: str, kind: str) -> None:
        """A peer has an appointment at its nth frame of some kind."""
        for fault, sent in self._doomed:
            if fault.who[0] == sender and not self._tasks[sender].cancelling():
                sent[sender, kind] += 1
                if sent[sender, fault.on] == fault.nth and kind == fault.on:
                    self._say(f"FAULT {fault}")
                    self._kill(sender) if fault.kind == "kill" else self._damaging.add(sender)

    @staticmethod
    def _each(switch: Callable[[str, str], None], pairs: list[tuple[str, str]]) -> None:
        for a, b in pairs:
            switch(a, b)

    def _slow(self, name: str, factor: float) -> None:
        compute = self._computes[name]
        compute.forward_s *= factor
        compute.backward_s *= factor

    def _damaged(self, sender: str, receiver: str, packed: bytes) -> bytes:
        """Where libp2p's encryption would notice: a frame of a damaging peer comes with a flipped bit in its prefix, once."""
        if sender not in self._damaging:
            return packed
        self._damaging.discard(sender)
        return bytes([packed[0] ^ 1]) + packed[1:]

    def _note(self, name: str, event: Event) -> None:
        if isinstance(event, SHOWN):
            fields = {
                k: v for k, v in event.__dict__.items() if k not in ("t", "peer", "sent", "lineage") and "_s" not in k
            }
            self._say(f"{name} {event.kind} {' '.join(f'{k}={v}' for k, v in fields.items())}")

    def _say(self, text: str) -> None:
        self._outcome.timeline.append((self._clock.now(), text))


def _facts(scenario: Scenario) -> _Facts:
    config = load_config(
        None,
            [
                "model.width=16", "model.heads=2", f"model.layers={len(scenario.stages)}", "model.context=4", "model.vocab=640",
                "model.dropout=0.1", "train.microbatch=1", f"train.batch={scenario.microbatches}", f"train.steps={scenario.steps}",
                f"train.seed={scenario.seed}", f"fleet.stages={len(scenario.stages)}", f"fleet.peers={sum(scenario.stages)}",
                "optimizer.warmup=1", "optimizer.eps=1e-5", "optimizer.clip=0.5",
                "wire.activations=fp32", "wire.gradients=fp32", "compute.precision=fp32", "checkpoint.every=0",
                *scenario.overrides,
            ],
    )  # fmt: skip
    spec = ModelSpec.from_config(config.model)
    plan = Plan(
        stages=len(scenario.stages), steps=scenario.steps, microbatches=scenario.microbatches, sequences=1, width=spec.width,
        vocab=spec.vocab,
        sequence_length=functools.partial(
            sequence_length, context=spec.context, start=config.train.sequence_start, warmup=config.train.sequence_warmup
        ),
        activations=config.wire.activations,
        gradients=config.wire.gradients, clip=config.optimizer.clip,
        lr=lambda step: learning_rate(config.optimizer, step, scenario.steps), checkpoint_every=0, capacity=scenario.capacity,
        rebalance=scenario.rebalance, rebalance_s=scenario.rebalance_s, work=(1.0,) * len(scenario.stages),
        state_bytes=(0,) * len(scenario.stages),
    )  # fmt: skip
    return _Facts(config, spec, spec.cut(len(scenario.stages)), plan)


def _compute(facts: _Facts, stage: int) -> TorchCompute:
    config = facts.config
    setup = StageSetup(
        optimizer=config.optimizer, total_steps=config.train.steps, seed=config.train.seed,
        sequences=config.train.microbatch, precision=config.compute.precision, inline=True,
    )  # fmt: skip
    return TorchCompute(facts.spec, facts.cut, stage, setup)


def _reference(scenario: Scenario) -> dict[str, Tensor]:
    """The state of a single process after the same steps: the stages in turn, no network, no protocol, no faults."""

    async def train() -> dict[str, Tensor]:
        facts = _facts(scenario)
        tokens = _Tokens(facts)
        stages = [_compute(facts, s) for s in range(len(scenario.stages))]
        for step in range(scenario.steps):
            for index in range(scenario.microbatches):
                mb = Microbatch(step, index)
                inputs, targets = (torch.from_numpy(a) for a in tokens.microbatch(step, index))
                hidden = inputs
                for compute in stages[:-1]:
                    hidden = await compute.forward(mb, hidden)
                _, gradient = await stages[-1].loss_backward(mb, hidden, targets, accumulate=True)
                for compute in reversed(stages[:-1]):
                    assert gradient is not None
                    gradient = await compute.backward(mb, gradient, accumulate=True)
            means = [compute.gradient().clone() / scenario.microbatches for compute in stages]
            norm = float(torch.cat(means).double().norm())
            clip = facts.config.optimizer.clip
            scale = min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0
            for compute, mean in zip(stages, means, strict=True):
                await compute.apply(mean, Update(step, scale, skip=not math.isfinite(norm)))
        states = [await compute.state() for compute in stages]
        return {name: tensor for state in states for name, tensor in state.items()}

    problems: list[str] = []
    return run_virtually(train(), LIMIT_S, problems)


def readable(outcome: Outcome) -> Iterator[str]:
    """Lines for people: what the scenario was, what happened, what was broken."""
    s = outcome.scenario
    yield (
        f"seed {s.seed}: stages of {', '.join(map(str, s.stages))} replicas, {s.trainers} trainers, {s.steps} steps of "
        f"{s.microbatches} microbatches, delays up to {1000 * s.delay_s:.0f} ms"
    )
    yield from (f"{t:9.3f} s  {text}" for t, text in outcome.timeline)
    yield from (f"VIOLATION  {v}" for v in outcome.violations)
