"""A plain PyTorch loop: weights in the working precision, fp32 masters, fused AdamW, clipping; blocks and loss compiled
with ``--compile``. ``python -m benchmarks.gpu.loop --size small --compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.cases import SIZES, parser, peak, tell, timed, weights
from benchmarks.swap.gpu import Case
from muletrain.compute.base import Microbatch
from muletrain.compute.probe import precision_dtype
from muletrain.model.stage import Block, Stage, rope_table


class Loop:
    """The model of ``case`` and its optimizer."""

    def __init__(self, case: Case, *, compiled: bool) -> None:
        self.case, spec = case, case.spec
        self.model, first = Stage(spec, None, spec.cut(1)), weights(case)
        shapes = self.model.shapes()
        masters = {name: first(name, shape).to(case.device) for name, shape in shapes.items()}
        dtype = precision_dtype(case.setup.precision)
        self.model.bind({name: value.to(dtype, copy=True) for name, value in masters.items()})
        self.masters, self.working = [*masters.values()], [*self.model.parameters()]
        optimizer = case.setup.optimizer
        groups = [
            {"params": [p for p in self.masters if p.dim() > 1], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in self.masters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=1e-4, betas=optimizer.betas, eps=optimizer.eps, fused=True)
        self.rope = rope_table(spec.context, spec.head_width, spec.rope_theta, case.device, dtype)
        self.block: Callable[..., Any] = Block.forward
        self.head: Callable[..., Any] = self._head
        if compiled:
            backend = "inductor" if case.gpu else "aot_eager"  # g++ takes minutes for a model that computes for seconds
            self.block = torch.compile(Block.forward, dynamic=False, backend=backend)
            self.head = torch.compile(self._head, dynamic=False, backend=backend)

    def _head(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(self.model.model.norm(x), self.model.lm_head.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def loss(self, mb: Microbatch) -> torch.Tensor:
        inputs, targets = (ids.to(self.case.device, non_blocking=True) for ids in self.case.batch(mb))
        x = self.model.model.embed_tokens(inputs)
        for block in self.model.model.layers.values():
            x = self.block(block, x, 0, self.rope, None, None)  # without dropout the layer's number says nothing
        found: torch.Tensor = self.head(x, targets)
        return found

    def step(self, number: int, count: int) -> float:
        """One update over ``count`` microbatches. Returns the mean loss."""
        total = torch.zeros((), device=self.case.device)
        for index in range(count):
            loss = self.loss(Microbatch(number, index)) / count
            loss.backward()
            total += loss.detach()
        for master, working in zip(self.masters, self.working, strict=True):
            assert working.grad is not None
            master.grad = working.grad.float()
            working.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        self.adamw.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.working, self.masters)
        return float(total)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--compile", action="store_true")
    given = options.parse_args()
    case = Case(SIZES[given.size], torch.device(given.device))
    found = timed(case, Loop(case, compiled=given.compile).step, given.seconds)
    tell(case, found | {"peak_bytes": peak(case.device)})


if __name__ == "__main__":
    main()
