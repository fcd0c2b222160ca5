"""``PooledCompute`` is a stage whose work clients do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.compute.base import WrappedCompute
from muletrain.compute.results import Result
from muletrain.compute.slot import AT_ONCE
from muletrain.errors import MuletrainError
from muletrain.policy.passes import Pass
from muletrain.runtime.pool.desk import Call

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.compute.base import Microbatch, Update
    from muletrain.compute.slot import Turn
    from muletrain.runtime.pool.clients import Clients
    from muletrain.runtime.pool.desk import PartsDesk


class PooledCompute(WrappedCompute):
    """See ``Compute``. ``inner`` holds and updates the stage; a ``desk`` has the passes computed."""

    def __init__(self, desk: PartsDesk) -> None:
        super().__init__(desk.inner)
        self._desk = desk
        self._costs: dict[Microbatch, int] = {}
        """Costs of the last pass of each microbatch, in forward passes of a sequence."""

    @property
    def clients(self) -> Clients:
        return self._desk.clients

    # Forward and backward -------------------------------------------------------------------------------------------

    async def forward(
        self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE, positions: Tensor | None = None
    ) -> Result:
        if mb.heldout:  # clients compute only training microbatches
            return await self.inner.forward(mb, inputs, turn, positions)
        call = Call(mb, Pass.FORWARD, turn, accumulate=False, sequences=len(inputs), inputs=inputs, positions=positions)
        return Result(await self._computed(call))

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        if self._desk.kept_sequences(mb) != len(grad):
            raise MuletrainError(f"no forward of microbatch {mb.step}/{mb.index} is kept")
        call = Call(mb, Pass.BACKWARD, turn, accumulate, sequences=len(grad))
        output = await self._computed(call, grad)
        return None if self.stage == 0 else Result(output)

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        if mb.heldout:
            return await self.inner.loss_backward(mb, inputs, targets, turn, accumulate=False)
        call = Call(mb, Pass.LOSS, turn, accumulate, sequences=len(inputs), inputs=inputs, targets=targets)
        output = await self._computed(call)
        return call.loss, None if self.stage == 0 else Result(output)

    async def _computed(self, call: Call, grad: Tensor | None = None) -> Tensor:
        output = await self._desk.computed(call, grad)
        self._costs[call.mb] = call.what.cost * call.sequences
        return output

    def busy_s(self, mb: Microbatch, took_s: float) -> float:
        """By the speed of all workers: workers compute parts of several microbatches at once, and a microbatch alone
        waits for its slowest part. By the time of a pass, a server with clients would look as slow as a server without
        clients."""
        cost, speed = self._costs.pop(mb, 0), self._desk.pool.sharing_speed()
        return cost / speed if cost and speed else took_s

    def discard(self, mb: Microbatch) -> None:
        self._costs.pop(mb, None)
        self._desk.discard(mb)

    # The accumulator and the step -----------------------------------------------------------------------------------

    async def gather(self, step: int) -> None:
        await self._desk.accumulators.gather(step)
        await self.inner.gather(step)

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        turn.begins()
        self._desk.end_step(update.step)
        self._desk.close(rest=not self.delayed)
        self._costs = {mb: cost for mb, cost in self._costs.items() if mb.step > update.step}
        await self.inner.apply(gradient, update)
        self.clients.report(update.step + 1)

    def clear(self, step: int) -> None:
        """Passes in progress go on, but gradients are accumulated anew."""
        self._desk.forget_gradients(step)
        self.inner.clear(step)

    # The state ------------------------------------------------------------------------------------------------------

    async def digest(self) -> bytes:
        digest = await self.inner.digest()
        self.clients.begin(digest, self.inner.newest_for())
        return digest

    async def load_state(self, state: dict[str, Tensor]) -> None:
        self._desk.close()
        await self.inner.load_state(state)

    async def end(self, *, over: bool) -> None:
        await self.clients.end(over=over)
