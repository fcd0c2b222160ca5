"""Donors of a stage's state, with small blocks, on a network in memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.config.schema import Codec
from muletrain.events import Event, FrameRefused
from muletrain.network.memory import MemoryHub, MemoryNetwork
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.core import blocks as transfer
from muletrain.runtime.core.lifecycle import Lifecycle
from muletrain.runtime.core.plan import Plan
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.membership import Membership
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.transfer import donor as snapshot
from muletrain.runtime.transfer.donor import Receiver, Snapshots
from muletrain.strategies.swarm import SWARM

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor


SIZES = {"loss_scale": 2, "model/a": 700, "model/empty": 0, "model/b": 1301, "moment1/a": 700}


class State:
    """What a transfer asks of a ``Compute``."""

    n_params = n_trained = 2001

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {n: torch.randn(size, generator=generator) for n, size in SIZES.items()}
        self.tensors["loss_scale"] = self.tensors["loss_scale"].double()
        self.loaded: dict[str, Tensor] | None = None

    async def state(self) -> dict[str, Tensor]:
        return {n: t.clone() for n, t in self.tensors.items()}

    async def load_state(self, state: dict[str, Tensor]) -> None:
        self.loaded = {n: t.clone() for n, t in state.items()}

    async def offload(self, fn: Any, *args: Any) -> Any:
        return fn(*args)


class Stage:
    """Donors 'a', 'b', 'c' and the taker 't'."""

    def __init__(self, donors: str = "abc", *, taker_trains: bool = True) -> None:
        self.hub, self.said = MemoryHub(), list[Event]()
        names = (*donors, "t")
        members = tuple(Member(id=n, name=n, stage=0, trainer=n != "t" or taker_trains) for n in names)
        genesis = Genesis(
            run_id="r", config=bytes(32), data=bytes(32), stages=1, coordinator=names[0], first_step=0, members=members
        )
        plan = Plan(1, 1, 1, 1, 1, 2, lambda s: 1, Codec.FP32, Codec.FP32, None, lambda s: 0.0, 0, 8, SWARM)
        self.networks: dict[str, MemoryNetwork] = {n: self.hub.join(n) for n in names}
        self.states: dict[str, Any] = {n: State(2 if n == "t" else 1) for n in names}
        self.contexts = {
            n: Context(self.networks[n], LoopClock(), self.states[n], Roster(genesis, n), plan, emit=self.said.append)
            for n in names
        }
        self.at = {
            n: SimpleNamespace(
                step=3,
                applied=bytes(32),
                settled=True,
                away=False,
                life=Lifecycle(),
                chain=Chain(3, (bytes(32),)),
            )
            for n in names
        }
        self.logs: dict[str, Any] = {n: GradientLog(self.contexts[n], 0) for n in donors}
        for n in donors:
            position: Any = self.at[n]
            Snapshots(self.contexts[n], position, self.logs[n], Membership(self.contexts[n]))
            self.networks[n].receive(self._nothing)
        self.receiver = Receiver(self.contexts["t"])
        self.networks["t"].receive(self._nothing)

    async def _nothing(self, sender: str, frame: Any) -> None:
        raise AssertionError

    def check(self) -> None:
        """What was loaded is the donors' state."""
        loaded, right = self.states["t"].loaded, self.states["a"].tensors
        assert loaded is not None
        assert loaded.keys() == right.keys()
        assert all(torch.equal(loaded[n], right[n]) for n in right)


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BLOCK", 100)  # not a whole number of elements, and blocks that span tensors
    monkeypatch.setattr(snapshot, "PAUSE_S", 0.01)
    monkeypatch.setattr(snapshot, "pause_s", lambda tries: 0.01 * 2**tries)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def refused(stage: Stage) -> list[str]:
    return [e.remote for e in stage.said if isinstance(e, FrameRefused)]
