"""One peer of production code, with the whole model: microbatches, the norm for clipping, the update, through
``TorchCompute`` as a run calls it. ``python -m benchmarks.gpu.peer --size small``; ``--eager``: with
``compute.compile = "off"``."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import torch

from benchmarks.gpu.cases import SIZES, parser, peak, tell, timed, weights
from benchmarks.swap.gpu import Case
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import stage_memory
from muletrain.compute.torch_compute import TorchCompute
from muletrain.model.make import make_stage
from muletrain.optim.norms import square_norm


class Peer:
    """The only stage of the model of ``case``."""

    def __init__(self, case: Case, *, compiled: bool) -> None:
        cut = case.spec.cut(1)
        shapes, first = make_stage(case.spec, 0, cut).shapes(), weights(case)
        setup = replace(case.setup, checkpointing="never", compiled=compiled)
        self.case = case
        self.compute = TorchCompute(case.spec, cut, 0, setup, lambda name: first(name, shapes[name]))
        self.estimate = stage_memory(
            case.spec, cut, 0, tokens=case.tokens, precision=setup.precision, checkpointing="never"
        )
        self.ending_s = 0.0
        """Of the last step: gradient to the host, norm, update."""

    def step(self, number: int, count: int) -> float:
        """One update over ``count`` microbatches. Returns the mean loss."""
        return asyncio.run(self._step(number, count))

    async def _step(self, number: int, count: int) -> float:
        compute, clock = self.compute, asyncio.get_running_loop().time
        losses = await asyncio.gather(*(self._one(Microbatch(number, index)) for index in range(count)))
        begin = clock()
        gradient = await compute.gradient(number)
        norm = (await compute.offload(square_norm, gradient)) ** 0.5 / count
        await compute.apply(gradient, Update(number, min(1.0, 1.0 / norm) / count, skip=False))
        self.ending_s = clock() - begin
        return sum(losses) / count

    async def _one(self, mb: Microbatch) -> float:
        loss, _ = await self.compute.loss_backward(mb, *self.case.batch(mb), accumulate=True)
        return loss


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--eager", action="store_true")
    given = options.parse_args()
    case = Case(SIZES[given.size], torch.device(given.device))
    peer = Peer(case, compiled=case.gpu and not given.eager)  # as 'auto' decides
    found = timed(case, peer.step, given.seconds)
    peer.compute.close()
    found |= {"ending_s": peer.ending_s, "peak_bytes": peak(case.device), "estimate_bytes": peer.estimate.on_device}
    if (compiling := peer.compute.compiling) is not None:
        found |= {"compile_s": compiling.seconds, "compile_error": compiling.error}
    tell(case, found)


if __name__ == "__main__":
    main()
