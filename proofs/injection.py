"""Carry out a scenario's faults on the peers of a virtual world."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from muletrain.runtime.members.row import Statements
from proofs.scenario import SUSPENDED, stage_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.wire.frame import Frame
    from proofs.scenario import Fault
    from proofs.world import World


PARTS = ("seal", "entry", "tied", "entries")
"""What a peer may state (``Statements``)."""


class _Doom(NamedTuple):
    """A fault that waits for its peer's nth frame of some kind."""

    fault: Fault
    begin: Callable[[], None]
    sent: list[str]
    begun: asyncio.Event


class Injection:
    """Carries out faults, some of which wait for a frame."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._doomed: list[_Doom] = []
        world.links.sending = self.sending  # type: ignore[method-assign]

    async def inject(self, fault: Fault) -> None:
        """Begin a fault at its time, and end it."""
        world, name = self._world, fault.who[0] if fault.who else ""
        await world.clock.sleep(fault.at_s)
        if (
            len(fault.who) == 1
            and fault.kind not in ("disk", "join")
            and (name not in world.tasks or world.tasks[name].done())
        ):  # has not come yet, or is gone
            return
        begin, end = self._actions(fault)
        if fault.on:
            self._doomed.append(doom := _Doom(fault, begin, [], asyncio.Event()))
            await doom.begun.wait()
        else:
            world.injected(str(fault), fault.kind, fault.who, fault.for_s)
            begin()
        if end is not None:
            try:
                await world.clock.sleep(fault.for_s)
            finally:
                end()
                world.say(f"over: {fault}")

    def _actions(self, fault: Fault) -> tuple[Callable[[], None], Callable[[], None] | None]:
        """The action of a fault, and the action that ends a lasting one."""
        world, name = self._world, fault.who[0] if fault.who else ""
        match fault.kind:
            case "join":
                return lambda: world.join(name, fault.how or name), None
            case "kill":
                return lambda: world.kill(name), None
            case "move":
                to = (stage_of(name) + 1) % len(world.scenario.stages) if fault.to is None else fault.to
                return lambda: world.peers[name].move(to), None
            case "leave":
                return lambda: world.peers[name].leave(), None
            case "stop":
                return lambda: world.peers[name].stop(), None
            case "kick":
                others = [(name, other) for other in world.scenario.names if other != name]
                return lambda: _each(world.hub.barriers.cut, others), None
        return self._switch(fault)

    def _switch(self, fault: Fault) -> tuple[Callable[[], None], Callable[[], None]]:
        """The actions that begin and end a lasting fault."""
        world, barriers, name = self._world, self._world.hub.barriers, fault.who[0] if fault.who else ""
        pairs = [(name, other) for other in (fault.who[1:] or world.networks) if other != name]
        sides = [(a, b) for a in fault.who for b in world.scenario.names if b not in fault.who]
        switches: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "freeze": (lambda: world.freeze(name, suspended=fault.how == SUSPENDED), lambda: world.thaw(name)),
            "cut": (lambda: _each(barriers.cut, pairs), lambda: _each(barriers.mend, pairs)),
            "partition": (lambda: _each(barriers.cut, sides), lambda: _each(barriers.mend, sides)),
            "blackhole": (lambda: _each(barriers.hold_up, sides), lambda: _each(barriers.let_pass, sides)),
            "slow": (lambda: self._slow(name, 5.0), lambda: self._slow(name, 0.2)),
            "corrupt": (lambda: self._corrupt(name, fault.how), lambda: self._corrupt(name, "")),
            "hang": (lambda: world.stages[name].hang(), lambda: world.stages[name].recover()),
            "one way": (lambda: barriers.cut_way(*fault.who), lambda: barriers.mend_way(*fault.who)),
            "small": (
                lambda: barriers.pass_small(fault.who, fault.limit),
                lambda: barriers.pass_small(fault.who, None),
            ),
            "disk": (lambda: self._disk(name, fault.how, True), lambda: self._disk(name, fault.how, False)),
            "directory": (lambda: self._directory(down=True), lambda: self._directory(down=False)),
            "lie": (lambda: self._lie(name, fault.how), lambda: self._lie(name, "")),
            "damage": (lambda: world.links.damaging.add(name), lambda: world.links.damaging.discard(name)),
        }
        return switches[fault.kind]

    def sending(self, sender: str, frame: Frame) -> None:
        """Begin the faults that wait for this frame."""
        world, kind = self._world, kind_of(frame)
        world.look_at(sender)
        for fault, begin, sent, begun in self._doomed:
            if fault.who[0] == sender and kind == fault.on and not world.tasks[sender].cancelling():
                sent.append(kind)
                if len(sent) == fault.nth:
                    world.injected(str(fault), fault.kind, fault.who, fault.for_s)
                    begin()
                    begun.set()

    def _slow(self, name: str, factor: float) -> None:
        compute = self._world.computes[name]
        compute.forward_s *= factor
        compute.backward_s *= factor

    def _corrupt(self, name: str, how: str) -> None:
        self._world.stages[name].how = how

    def _lie(self, name: str, how: str) -> None:
        self._world.liars[name].how = how

    def _directory(self, *, down: bool) -> None:
        self._world.hub.directory.down = down

    def _disk(self, name: str, how: str, broken: bool) -> None:
        disk = self._world.disks.of(name)
        match how:
            case "slow":
                disk.slow = broken
            case "full":
                disk.full = broken
            case "hangs":
                disk.hang() if broken else disk.recover()


def kind_of(frame: Frame) -> str:
    """The kind of ``frame``; of statements, what is stated."""
    said = frame.message
    stated = (name for name in PARTS if getattr(said, name, None))
    return next(stated, frame.kind) if isinstance(said, Statements) else frame.kind


def _each(switch: Callable[[str, str], None], pairs: list[tuple[str, str]]) -> None:
    for a, b in pairs:
        switch(a, b)
