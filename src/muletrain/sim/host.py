"""A virtual host: production peers and clients on machines of one process, on a virtual clock and a network in memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from muletrain.clock import LoopClock
from muletrain.errors import MuletrainError
from muletrain.sim.loop import context_of, virtual_loop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine
    from contextvars import Context as Variables

    from muletrain.network.memory import MemoryHub, MemoryNetwork
    from muletrain.runtime.core.tasks import Tasks

T = TypeVar("T")


class VirtualHost:
    """Hosts machines by name, who share ``hub``. ``problems`` takes errors that production would not survive."""

    def __init__(self, hub: MemoryHub, problems: list[str]) -> None:
        self.hub, self.clock, self._problems = hub, LoopClock(), problems
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self._contexts: dict[str, Variables] = {}
        """Of machines on which nothing has begun yet."""

    def arrive(self, name: str) -> MemoryNetwork:
        """A machine comes. Returns its network. All that the machine does, others' calls included, runs in its
        context."""
        self._contexts[name] = context = context_of(name)
        return context.run(self.hub.join, name)

    def begin(self, name: str, life: Coroutine[Any, Any, Any]) -> None:
        """A machine begins to live its ``life``."""
        self.tasks[name] = asyncio.create_task(life, name=name, context=self._contexts.pop(name))

    async def live(self, name: str, network: MemoryNetwork, work: Awaitable[T], tasks: Tasks | None = None) -> T | None:
        """Returns the result of a peer's or a client's ``work``; None if an error ended it. ``tasks``: what it leaves
        behind."""
        try:
            return await work
        except MuletrainError as e:
            self.gave_up(name, e)
        except Exception as e:
            self._problems.append(f"{name}: {type(e).__name__}: {e}")
        finally:
            if tasks is not None:
                await tasks.close()
            await network.close()
        return None

    def gave_up(self, name: str, error: MuletrainError) -> None:
        """The peer or client of ``name`` ends with an ``error`` that it reports."""
        raise NotImplementedError

    def kill(self, name: str) -> None:
        """As SIGKILL does."""
        self.hub.kill(name)
        self.tasks[name].cancel()
        virtual_loop().thaw(name)

    def freeze(self, name: str, *, suspended: bool) -> None:
        """Stop ``name``: its timers, too, as SIGSTOP does. Its device goes on with what it has begun, unless it is
        ``suspended``."""
        self.hub.barriers.freeze(name)
        virtual_loop().freeze(name, suspended=suspended)

    def thaw(self, name: str) -> None:
        """What came for ``name`` reaches it before timers go off that were due meanwhile."""
        self.hub.barriers.thaw(name)
        virtual_loop().thaw(name)
