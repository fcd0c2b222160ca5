"""Peers that offer their parts of checkpoints to each other, without computing."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from muletrain.clock import LoopClock
from muletrain.config.load import load_config
from muletrain.events import (
    Event,
)
from muletrain.network.memory import MemoryHub
from muletrain.runs.assemble import RunFacts
from muletrain.runtime.checkpoint.checkpointing import Book, Checkpointing
from muletrain.runtime.checkpoint.messages import CheckpointEnd, PartReady
from muletrain.runtime.checkpoint.store import MARKER, CheckpointStore, Folder, Key
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.membership import Membership
from muletrain.runtime.members.roster import Genesis, Member, Roster
from muletrain.runtime.members.row import Row, Sync
from muletrain.wire.frame import Frame

FACTS = RunFacts.of(load_config(None, ["model.width=64", "model.heads=2", "train.steps=1000", "fleet.peers=3"]))
LINEAGE = bytes(32)
FILES = {"tokenizer.json": b"{}"}


def state(stage: int, elements: int = 1 << 19) -> dict[str, Tensor]:
    """2 MiB: a few pieces."""
    return {f"model/{stage}": torch.randn(elements), "loss_scale": torch.tensor([1.0, 2.0], dtype=torch.float64)}


class Offloads:
    """Nothing here computes; hashing has a thread."""

    n_params = n_trained = 0

    async def offload(self, fn: Any, *args: Any) -> Any:
        return await asyncio.to_thread(fn, *args)


class Stages:
    """Peers of some stages in memory, each with a folder of its own, but those in ``sharing``, who share the
    first's."""

    def __init__(self, folder: Path, keep: int = 2, stages: dict[str, int] | None = None, sharing: str = "") -> None:
        self.stages = stages or {"coordinator": 0, "one": 1, "other": 1}
        self.hub, self.clock = MemoryHub(), LoopClock()
        first = next(iter(self.stages))
        self.folders = {
            n: folder if n == first or n in sharing.split() else folder.with_name(f"of-{n}") for n in self.stages
        }
        self.places = {n: Folder(f, keep) for n, f in self.folders.items()}
        self.genesis = Genesis(
            run_id="run",
            config=bytes(32),
            data=bytes(32),
            stages=1 + max(self.stages.values()),
            coordinator=first,
            first_step=0,
            members=tuple(
                Member(id=n, name=n, stage=s, trainer=True, place=self.places[n].name) for n, s in self.stages.items()
            ),
        )
        self.plan = dataclasses.replace(FACTS.plan(), stages=self.genesis.stages, state_bytes=())
        self.events: list[Event] = []
        self.refused: list[str] = []
        self.contexts: dict[str, Context] = {}
        self.books = {n: Book(place, FACTS.manifest("run") | {"data": "d"}, FILES) for n, place in self.places.items()}
        self.checkpoints = {name: self._peer(name) for name in self.stages}

    def _peer(self, name: str) -> Checkpointing:
        compute: Any = Offloads()
        net = self.hub.join(name)
        ctx = Context(net, self.clock, compute, Roster(self.genesis, name), self.plan, self.events.append)
        own = Checkpointing(ctx, Membership(ctx), self.books[name])
        self.contexts[name] = ctx

        async def on_frame(sender: str, frame: Frame) -> None:
            match frame.kind:
                case PartReady.KIND:
                    own.on_ready(sender, PartReady.parse(frame))
                case CheckpointEnd.KIND:
                    await own.on_end(sender, CheckpointEnd.parse(frame))

        async def alive(sender: str, payload: bytes) -> bytes:
            return Row(current=True, step=0, stage=self.stages[name]).pack()

        net.serve(Sync.KIND, alive)
        net.on_refusal(lambda who, why: self.refused.append(why))
        net.receive(on_frame)
        return own

    async def write(self, step: int, *writers: str) -> None:
        states = {s: state(s) for s in set(self.stages.values())}
        await asyncio.gather(*(self.checkpoints[w].write(Key(step, LINEAGE), states[self.stages[w]]) for w in writers))

    async def checkpoint(self, step: int, by: str = "coordinator") -> bool:
        await self.write(step, *(n for n, c in self.checkpoints.items() if c.roles.is_writer()))
        return await asyncio.wait_for(self.checkpoints[by].ended(Key(step, LINEAGE)), 20.0)

    async def only(self, folder: Path, *expected: str) -> None:
        """Wait until all but those are gone: tidying up has a thread of its own."""
        for _ in range(1000):
            if names(folder) == list(expected):
                return
            await asyncio.sleep(0.02)
        assert names(folder) == list(expected)

    def kill(self, name: str) -> None:
        """Everyone has noticed."""
        self.hub.kill(name)
        del self.checkpoints[name]
        for ctx in self.contexts.values():
            ctx.roster.mark_dead(name)

    def of(self, kind: type[Event]) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    async def close(self) -> None:
        for ctx in self.contexts.values():
            await ctx.tasks.close()


def names(folder: Path) -> list[str]:
    """But the marker."""
    return sorted(p.name for p in folder.iterdir() if p.name != MARKER)


def held_up(monkeypatch: pytest.MonkeyPatch, place: CheckpointStore) -> tuple[threading.Event, threading.Event]:
    """From now on ``place`` sets the first event when it is to write a part, and does so when the second is set."""
    begun, go_on, write_part = threading.Event(), threading.Event(), place.write_part

    def slow(*args: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        write_part(*args)

    monkeypatch.setattr(place, "write_part", slow)
    return begun, go_on


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 40)

    asyncio.run(bounded())
