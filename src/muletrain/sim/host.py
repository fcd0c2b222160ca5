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
    """Hosts machines by name on one ``hub``. Errors that would end a production process as a bug go to ``problems``."""

    def __init__(self, hub: MemoryHub, problems: list[str]) -> None:
        self.hub, self.clock, self._problems = hub, LoopClock(), problems
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self._contexts: dict[str, Variables] = {}
        """Contexts of machines before ``begin``."""

    def arrive(self, name: str) -> MemoryNetwork:
        """Add a machine. Returns its network. Everything on the machine, incoming calls included, runs in one
        context."""
        self._contexts[name] = context = context_of(name)
        return context.run(self.hub.join, name)

    def begin(self, name: str, life: Coroutine[Any, Any, Any]) -> None:
        """Start the ``life`` of the machine ``name``."""
        self.tasks[name] = asyncio.create_task(life, name=name, context=self._contexts.pop(name))

    async def live(self, name: str, network: MemoryNetwork, work: Awaitable[T], tasks: Tasks | None = None) -> T | None:
        """Returns the result of the ``work`` of a peer or client; None after an error. ``tasks`` are closed at the end."""
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
        """Note that an ``error`` ended the peer or client on ``name``."""
        raise NotImplementedError

    def kill(self, name: str) -> None:
        """Kill the processes of the machine ``name``, as SIGKILL does."""
        self.hub.kill(name)
        self.tasks[name].cancel()
        virtual_loop().thaw(name)

    def freeze(self, name: str, *, suspended: bool) -> None:
        """Stop the machine ``name`` and its timers, as SIGSTOP does. The device finishes the current operation, unless the
        machine is ``suspended``."""
        self.hub.barriers.freeze(name)
        virtual_loop().freeze(name, suspended=suspended)

    def thaw(self, name: str) -> None:
        """Continue the machine ``name``: waiting messages arrive before the timers that were due meanwhile."""
        self.hub.barriers.thaw(name)
        virtual_loop().thaw(name)
