"""A server keeps the inputs of each part, and the place of its gradient."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.compute.base import Microbatch
from muletrain.compute.slot import Turn
from muletrain.errors import Malformed
from muletrain.optim.sketch import SIZE, sketch
from muletrain.policy.passes import LAST, Part, Pass
from muletrain.policy.pool import OWN
from muletrain.wire.codec import encoded_size

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from muletrain.compute.base import Compute
    from muletrain.network.base import PeerId
    from muletrain.optim.sketch import Sketch
    from muletrain.policy.passes import Place
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.pool.messages import Result
    from muletrain.wire.codec import Encoded


@dataclass
class KeptPart:
    """The inputs of a part. ``positions``: see ``Compute.forward``; ``gradient``: of the outputs;
    ``forward_at``: the worker that has the part's forward, given
    under ``forward_number``."""

    rows: int
    inputs: Encoded
    targets: Encoded | None = None
    positions: Encoded | None = None
    gradient: Encoded | None = None
    forward_at: PeerId | None = None
    forward_number: int = 0

    def tensors(self, what: Pass, *, has_forward: bool) -> list[Encoded]:
        """Returns the inputs of a pass, for a worker that ``has_forward`` of the part, or has not."""
        places = [] if self.positions is None else [self.positions]
        if what is Pass.FORWARD:
            return [self.inputs, *places]
        other = self.gradient if self.targets is None else self.targets
        assert other is not None  # only a forward does without
        return [other] if has_forward else [self.inputs, other, *places]


def check_result(plan: Plan, stage: int, part: Part | None, message: Result, tensors: list[Encoded]) -> None:
    """Raises Malformed for a result that ``part`` cannot have; for a part that was taken back meanwhile (None), only
    sizes are bounded."""
    if part is None:
        most = plan.sequences, plan.sequence_length(plan.steps), plan.width
        if any(encoded_size(t.codec, t.shape) > encoded_size(plan.activations, most) for t in tensors):
            raise Malformed(f"{message.KIND}: a tensor that is larger than {plan.activations} {most}")
        return
    gives = part.what is Pass.FORWARD or (part.what not in LAST and stage > 0)
    if len(tensors) != (gives and not message.problem):
        raise Malformed(f"{message.KIND}: {len(tensors)} tensors for a {part.what}")
    if part.what is Pass.CHECK and message.sketch is None and not message.problem:
        raise Malformed(f"{message.KIND}: no sketches of a part that is compared")
    shape = part.rows, plan.sequence_length(part.step), plan.width
    if any((t.shape, t.codec) != (shape, plan.activations) for t in tensors):
        raise Malformed(f"{message.KIND}: a tensor that is not {plan.activations} {shape}")


@dataclass
class _Accumulated:
    """A part whose gradient another worker has accumulated. ``at``: the worker whose accumulator has the gradient,
    under ``number``; None: the gradient was lost. ``claim``: the announced sketch."""

    kept: KeptPart
    at: PeerId | None
    number: int
    claim: Sketch | None


async def recomputed(
    compute: Compute, mb: Microbatch, inputs: Tensor, other: Tensor, seed: bytes, positions: Tensor | None = None
) -> dict[str, Sketch]:
    """Computes forward and backward of a part, and keeps nothing. ``other``: targets at the last stage, else the
    gradient of the outputs; ``positions``: see ``Compute.forward``.

    Returns sketches of the parameters' gradient and, where the stage has such tensors, of the
    outputs and of the inputs' gradient. Raises MuletrainError."""
    compute.discard(mb)
    try:
        found, last = {}, compute.stage == compute.stages - 1
        if last:
            _, result = await compute.loss_backward(mb, inputs, other, accumulate=True)
        else:
            outputs = await (await compute.forward(mb, inputs, positions=positions))
            found["outputs"] = await compute.offload(sketch, outputs.reshape(-1), seed)
            result = await compute.backward(mb, other, accumulate=True)
        if result is not None:
            found["inputs"] = await compute.offload(sketch, (await result).reshape(-1), seed)
        found["gradient"] = await compute.part_sketch(mb, seed)
        return found
    finally:
        compute.discard(mb)


async def computed_part(
    compute: Compute, mb: Microbatch, what: Pass, tensors: list[Tensor], seed: bytes, *, accumulate: bool, here: bool
) -> tuple[float, Tensor | None, dict[str, Sketch]]:
    """Computes a part, from the decoded ``KeptPart.tensors``. ``here``: the part's forward is here. Returns the loss, the
    output, if any, and the sketches of a check. Raises MuletrainError, and KeyError if the forward was dropped."""
    first, *rest = tensors
    loss, output = 0.0, None
    if what is Pass.CHECK:
        return loss, output, await recomputed(compute, mb, first, rest[0], seed, *rest[1:])
    if what is Pass.FORWARD:
        compute.discard(mb)
        output = await compute.forward(mb, first, Turn(1), *rest)
    elif compute.stage == compute.stages - 1:
        loss, output = await compute.loss_backward(mb, first, rest[0], Turn(1), accumulate=accumulate)
    else:
        if not here:
            compute.discard(mb)
            await compute.forward(mb, first, Turn(0), *rest[1:])
        output = await compute.backward(mb, first if here else rest[0], Turn(0), accumulate=accumulate)
    if what is Pass.AGAIN:  # the result has counted before
        return 0.0, None, {}
    return loss, None if output is None else await output, {}


class Parts:
    """The parts at one server. ``under_way``: parts as cut by the latest pass through each microbatch;
    ``accumulated``: parts whose gradients are not here."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, int], dict[int, KeptPart]] = {}
        self._accumulated: dict[Place, _Accumulated] = {}

    # Under way --------------------------------------------------------------------------------------------------------

    def begin(self, mb: Microbatch) -> None:
        """A microbatch begins to pass through, perhaps again."""
        self._under_way[mb.step, mb.index] = {}

    def keep(self, part: Part, kept: KeptPart) -> None:
        """Keep the inputs of ``part`` of a microbatch that passes through."""
        self._under_way.setdefault((part.step, part.index), {})[part.first] = kept

    def find(self, part: Part) -> KeptPart | None:
        """Returns the inputs of ``part``; None: the part is not wanted any more."""
        if part.what is Pass.AGAIN:
            lost = self._accumulated.get(part.place)
            return None if lost is None else lost.kept
        return self._under_way.get((part.step, part.index), {}).get(part.first)

    def of(self, mb: Microbatch) -> dict[int, KeptPart]:
        """Returns the parts of a microbatch that passes through, by first sequence."""
        return dict(sorted(self._under_way.get((mb.step, mb.index), {}).items()))

    def through(self, mb: Microbatch, own: Compute) -> None:
        """A microbatch has passed through, or will not: keep only the inputs for its gradient. ``own``: the server's
        device, which may have its forwards."""
        for first, kept in self._under_way.pop((mb.step, mb.index), {}).items():
            if kept.forward_at == OWN:
                own.discard(mb._replace(first=first))

    def end(self, step: int, own: Compute, whole: int) -> None:
        """Nothing of ``step`` is computed any more. ``own``: see ``through``; ``whole``: sequences of a microbatch."""
        self.forget_gradients(step)
        for index in [i for s, i in self._under_way if s == step]:
            self.through(Microbatch(step, index, 0, whole), own)

    def forwards_at(self, worker: PeerId) -> set[int]:
        """Returns the numbers of the forwards at ``worker`` that are of use."""
        kept = (kept for parts in self._under_way.values() for kept in parts.values())
        return {k.forward_number for k in kept if k.forward_at == worker}

    def forward_lost(self, worker: PeerId, part: Part | None = None) -> None:
        """``worker`` has no forward (of ``part``) any more."""
        for mb, parts in self._under_way.items():
            for first, kept in parts.items():
                if kept.forward_at == worker and (part is None or part.place == (*mb, first)):
                    kept.forward_at = None

    # Gradients --------------------------------------------------------------------------------------------------------

    def accumulated(self, part: Part, kept: KeptPart, worker: PeerId, number: int, claim: Sketch | None) -> None:
        """The gradient of ``part`` is in the accumulator of ``worker``. ``claim``: the announced sketch."""
        self._accumulated[part.place] = _Accumulated(kept, worker, number, claim)

    def claimed(self, worker: PeerId, numbers: Collection[int]) -> Sketch:
        """Returns the sum of the sketches that ``worker`` announced for the gradients ``numbers``."""
        mine = (g.claim for g in self._accumulated.values() if g.at == worker and g.number in numbers)
        return sum((claim for claim in mine if claim is not None), np.zeros(SIZE))

    def holders(self, of_step: int | None = None) -> dict[PeerId, set[int]]:
        """Returns the numbers of the gradients (``of_step``; None: of all steps) in the accumulator of each worker."""
        found = defaultdict[str, set[int]](set)
        for (step, *_), gradient in self._accumulated.items():
            if gradient.at is not None and of_step in (None, step):
                found[gradient.at].add(gradient.number)
        return dict(found)

    def arrived(self, worker: PeerId, numbers: Collection[int]) -> None:
        """The gradients ``numbers`` of ``worker`` are here."""
        here = [p for p, g in self._accumulated.items() if g.at == worker and g.number in numbers]
        for place in here:
            del self._accumulated[place]

    def computed_here(self, part: Part) -> None:
        """The gradient of ``part`` is here, and counts nowhere else."""
        self._accumulated.pop(part.place, None)

    def holders_of(self, mb: Microbatch) -> set[PeerId]:
        """Returns the workers that accumulated parts of a microbatch."""
        return {g.at for (*of, _), g in self._accumulated.items() if of == [mb.step, mb.index] and g.at is not None}

    def take_back(self, mb: Microbatch) -> set[PeerId]:
        """A microbatch does not count. Returns the workers that accumulated parts of the microbatch."""
        holders = self.holders_of(mb)
        for place in [p for p in self._accumulated if p[:2] == (mb.step, mb.index)]:
            del self._accumulated[place]
        return holders

    def again(self, worker: PeerId, of_step: int | None = None) -> list[Part]:
        """Returns the parts to compute again (``of_step``; None: of all steps) if ``worker`` is gone."""
        mine = ((place, g.kept.rows) for place, g in self._accumulated.items() if g.at == worker)
        return [Part(Pass.AGAIN, *place, rows) for place, rows in mine if of_step in (None, place[0])]

    def holder_at(self, place: Place) -> PeerId | None:
        """Returns the worker whose accumulator has the gradient of a part; None: no worker's."""
        gradient = self._accumulated.get(place)
        return None if gradient is None else gradient.at

    def lost(self, worker: PeerId) -> None:
        """``worker`` is gone, with its forwards and its accumulator."""
        self.forward_lost(worker)
        for gradient in self._accumulated.values():
            if gradient.at == worker:
                gradient.at = None

    def forget_gradients(self, step: int) -> None:
        """Accumulated gradients of ``step`` do not count."""
        for place in [p for p in self._accumulated if p[0] == step]:
            del self._accumulated[place]

    def complete(self, step: int) -> bool:
        """Are all gradients of ``step`` here?"""
        return all(place[0] != step for place in self._accumulated)
