"""Asks another peer of the next stage for a gradient that came back and stands out (CONTRIBUTING, "How a step goes",
3).

Without this check, the receiver of a false gradient would appear to compute falsely. The receiver still has its
activations, so another peer computes the same microbatch from the same inputs, and accumulates nothing.

The first answers can be compared only with each other. So the first answer waits for another peer's answer, which is
usually in flight. If each stage had its first microbatch computed twice, the stages would do so one after the other,
and a pipeline of S stages would stand still for about S^2 / 2 service times.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from muletrain.errors import DeadlineExceeded
from muletrain.optim.norms import square_norm
from muletrain.policy.outliers import ALIKE, strange
from muletrain.runtime.core.times import PAUSE_S
from muletrain.runtime.microbatch.dispatcher import StageLost
from muletrain.wire.codec import decode

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.dispatcher import Answer, Dispatcher
    from muletrain.runtime.microbatch.messages import Forward
    from muletrain.wire.codec import Encoded

REMEMBERED = 64
"""Number of lengths of accepted gradients to remember."""
LOOK = 0.02
"""Pause between two checks whether another answer is still to come, as a share of the first answer's time."""


class _Gradient(NamedTuple):
    values: Tensor
    length: float
    """Norm of ``values``; infinite for non-finite values."""


class GradientCrossCheck:
    """Checks the answers of one dispatcher."""

    def __init__(self, ctx: Context, dispatcher: Dispatcher) -> None:
        self._ctx, self._dispatcher = ctx, dispatcher
        self._lengths: deque[float] = deque(maxlen=REMEMBERED)
        self._first: dict[PeerId, float] = {}
        """Lengths of the first answers, by answering peer, until some gradients were accepted."""
        self._second = asyncio.Event()
        """Set when two peers have answered."""
        self._beginning = asyncio.Lock()

    async def gradient(self, forward: Forward, sent: list[Encoded], answer: Answer) -> tuple[Tensor, bool]:
        """Returns the gradient to continue with, and whether to trust the gradient: not if no second peer agrees, and
        the gradient stands out or no earlier gradient was accepted."""
        first = await self._read(answer)
        if not forward.accumulate or answer.unfinite:
            return first.values, True
        if not self._lengths:
            await self._begin(answer, first.length)
            async with self._beginning:  # one comparison is enough
                if not self._lengths and not self._agreed():
                    return await self._compared(forward, sent, answer.peer, first)
        if strange(first.length, self._lengths or [*self._first.values()]):
            return await self._compared(forward, sent, answer.peer, first)
        self._remember(first)
        return first.values, True

    async def _begin(self, answer: Answer, length: float) -> None:
        """Wait for another peer's first answer, while there is one to come. Ends after ``microbatch/dispatcher._try``
        of the other peers."""
        self._first.setdefault(answer.peer, length)
        if len(self._first) > 1:
            self._second.set()
        while not self._second.is_set() and self._dispatcher.expects_another_than(answer.peer):
            with contextlib.suppress(DeadlineExceeded):
                await self._ctx.clock.deadline(
                    self._second.wait(), max(LOOK * answer.took_s, PAUSE_S), "another peer's first gradient"
                )

    def _agreed(self) -> bool:
        """Did several peers answer, with first gradients that do not stand out from each other?"""
        lengths = [*self._first.values()]
        return len(lengths) > 1 and min(lengths) > 0 and not strange(max(lengths), [min(lengths)])

    async def _compared(
        self, forward: Forward, sent: list[Encoded], peer: PeerId, first: _Gradient
    ) -> tuple[Tensor, bool]:
        """Returns the gradient that two peers agree on; three are asked at most."""
        asked, known_before = {peer: first}, bool(self._lengths)
        while len(asked) < 3 and not asked.keys() >= set(self._ctx.roster.stage(self._ctx.roster.own.stage + 1)):
            try:
                other = await self._dispatcher.request(forward, (), sent, asked, gradient=True)
            except StageLost:
                break
            gradient = await self._read(other)
            for known in asked.values():
                if await self._ctx.compute.offload(_alike, known, gradient):
                    self._blame({p for p, g in asked.items() if g is not known}, forward)
                    self._remember(known)
                    return known.values, True
            asked[other.peer] = gradient
        usual = min(
            asked, key=lambda p: (strange(asked[p].length, self._lengths), not asked[p].length, asked[p].length)
        )
        trusted = known_before and not strange(asked[usual].length, self._lengths)
        self._blame(asked.keys() - {usual} if trusted else set(), forward)
        self._remember(asked[usual])
        return asked[usual].values, trusted

    async def _read(self, answer: Answer) -> _Gradient:
        assert answer.gradient is not None  # asked for
        return await self._ctx.compute.offload(_decoded, answer.gradient)

    def _remember(self, gradient: _Gradient) -> None:
        if gradient.length < math.inf:
            self._lengths.append(gradient.length)

    def _blame(self, peers: set[PeerId], forward: Forward) -> None:
        for peer in sorted(peers):
            self._ctx.refused(
                peer,
                f"backward: its gradient of microbatch {forward.step}/{forward.index} differs from what its stage's other peers compute",
            )


def _decoded(gradient: Encoded) -> _Gradient:
    values = decode(gradient)
    return _Gradient(values, _length(values))


def _length(values: Tensor) -> float:
    squares = square_norm(values.view(-1))
    return math.sqrt(squares) if squares < math.inf else math.inf


def _alike(a: _Gradient, b: _Gradient) -> bool:
    if math.inf in (a.length, b.length):
        return a.length == b.length
    return _length(a.values - b.values) <= ALIKE * max(a.length, b.length)
