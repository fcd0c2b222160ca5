"""``PacedCompute`` is a real stage with a declared speed, for fleets emulated on one machine.

On shared cores one peer's sleep is another's speed-up, so slowing real peers does not emulate unequal
machines. Here tensors are real, but each call takes a declared time on the clock, mostly asleep.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from muletrain.compute.base import WrappedCompute
from muletrain.compute.slot import AT_ONCE, Slot, Turn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute, Microbatch, Update
    from muletrain.compute.results import Result

R = TypeVar("R")
_SMOOTHING = 0.3  # weight of the newest measurement of the real computation


class PacedCompute(WrappedCompute):
    """Paces ``inner``: one call at a time, a forward takes ``forward_s``, a backward ``backward_s``, the last stage's
    loss both.

    The real computation comes at the *end* of the declared time, so a call cancelled while asleep leaves nothing in the
    accumulator. The computation starts early by the usual duration, and the next call's time begins at this call's
    nominal end, so deviations do not add up. All remaining calls, ``apply`` included, take real time.
    """

    def __init__(self, inner: Compute, clock: Clock, forward_s: float, backward_s: float) -> None:
        super().__init__(inner)
        self._clock = clock
        self.forward_s = forward_s
        self.backward_s = backward_s
        self._slot = Slot()
        self._busy_until = float("-inf")
        self._real_s: dict[str, float] = {}

    async def forward(
        self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE, positions: Tensor | None = None
    ) -> Result:
        return await self._paced(
            turn, "forward", mb.share(len(inputs)), partial(self.inner.forward, mb, inputs, positions=positions)
        )

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        work = partial(self.inner.backward, mb, grad, accumulate=accumulate)
        return await self._paced(turn, "backward", mb.share(len(grad)), work)

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        work = partial(self.inner.loss_backward, mb, inputs, targets, accumulate=accumulate)
        return await self._paced(turn, "forward" if mb.heldout else "loss", mb.share(len(inputs)), work)

    async def _paced(self, turn: Turn, kind: str, share: float, work: Callable[[], Awaitable[R]]) -> R:
        """Do ``work`` on this ``share`` of a microbatch."""
        async with self._slot(turn):
            # the time of a part predicts nothing
            with self.jobs.at(f"paced {kind}") if share == 1.0 else nullcontext():
                return await self._at_pace(kind, share, work)

    async def _at_pace(self, kind: str, share: float, work: Callable[[], Awaitable[R]]) -> R:
        both_s = self.forward_s + self.backward_s
        service_s = share * {"forward": self.forward_s, "backward": self.backward_s, "loss": both_s}[kind]
        due = self._busy_until = max(self._clock.now(), self._busy_until) + service_s
        usual_s = self._real_s.get(kind, 0.0)
        await self._clock.sleep(max(0.0, due - usual_s - self._clock.now()))
        begin = self._clock.now()
        result = await work()
        took_s = self._clock.now() - begin
        # the first call is cold, and predicts nothing
        known = kind in self._real_s
        self._real_s[kind] = min(took_s, usual_s + _SMOOTHING * (took_s - usual_s)) if known else 0.0
        return result

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        async with self._slot(turn, brief=self.delayed):
            await self.inner.apply(gradient, update)
