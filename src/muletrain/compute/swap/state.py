"""The state of a stage in backing memory: fp32 weights and both moments. P: parameters of the stage (flat).

There is one version, which ends with the process: a run continues from a checkpoint. An update may run beside the next
forward pass, which waits for the needed weights: no numbers change.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from muletrain.compute.arithmetic import MOMENTS, checked_state, state_layout, state_views
from muletrain.compute.swap.backing import update_window
from muletrain.errors import CheckpointError
from muletrain.optim.flat import flat_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from muletrain.compute.base import Update
    from muletrain.compute.swap.backing import Backing, Region
    from muletrain.optim.flat import FlatLayout
    from muletrain.optim.rules import Rule

IN_PLACE = 16
"""Times of ``update_window`` that are updated at a time where nothing is copied: each call of the rule costs time."""
KINDS = ("model", *MOMENTS)


class State:
    """Owns the newest weights and moments. A lock serializes updates, copies and digests. Updates change the trained
    parameters."""

    def __init__(self, layout: FlatLayout, backing: Backing, *, moments: bool = True) -> None:
        """``moments``: False: the weights alone, which only ``load_weights`` changes. Raises CapacityError if the backing
        memory is too small."""
        self.layout = layout
        self.in_place = not backing.on_disk
        """Are windows updated in place, or read from and written to a file?"""
        self._regions = {
            kind: backing.region(layout.trained if kind in MOMENTS else layout.size, copied=kind == "model")
            for kind in (KINDS if moments else KINDS[:1])
        }
        self._lock = threading.Lock()
        self._progress = threading.Condition()
        self._left: dict[int, int] = {}
        """Ranges that the running update has not changed yet: begin -> end, in update order."""
        self._begins: list[int] = []
        """Begins of the ranges, ascending."""
        self._broken: BaseException | None = None
        """Why that update will not end."""
        self.order: Sequence[Sequence[tuple[int, int]]] = ()
        """Parts in the order of need: ranges each."""

    @property
    def model(self) -> Region:
        """The newest weights, fp32 [P]; during an update, only where ``ready`` has returned."""
        return self._regions["model"]

    def begin(self, source: Callable[[str], Tensor]) -> None:
        """Fill in first weights by name, and zero moments. Raises CheckpointError for wrong shapes."""
        with self._whole():
            state = self._regions
            for name, view in self.layout.views(state["model"].values).items():
                value = source(name)
                if value.shape != view.shape:
                    raise CheckpointError(
                        f"{name} has shape {tuple(value.shape)}, but the model needs {tuple(view.shape)}"
                    )
                view.copy_(value)
            for kind in state.keys() & MOMENTS:
                for a, b in state[kind].windows():
                    state[kind].values[a:b].zero_()

    def update(self, rule: Rule, gradient: Tensor, update: Update) -> None:
        """Apply one update with ``gradient``, flat fp32 [G], which does not change."""
        with self._lock, torch.no_grad():
            regions = self._regions
            ranges = list(self._left.items()) or self._ranges(rule)
            buffers = torch.empty(1 if self.in_place else 4, max((b - a for a, b in ranges), default=0))
            for (a, b), coming in pairwise([*ranges, (0, 0)]):
                piece, *state = buffers[:, : b - a]
                update.write_scaled(gradient, a, piece)
                if self.in_place:
                    state = [regions[kind].values[a:b] for kind in KINDS]
                else:
                    for kind, values in zip(KINDS, state, strict=True):
                        regions[kind].read(a, values)
                weights, first, second = state
                rule.update(weights, piece, first, second, update.step, decayed=b <= self.layout.decayed)
                for kind, values in zip(KINDS, state, strict=True) if not self.in_place else ():
                    regions[kind].write(a, values)
                    regions[kind].expect(*coming)
                with self._progress:
                    self._left.pop(a, None)
                    self._progress.notify_all()

    def begin_update(self, rule: Rule) -> None:
        """``update`` follows in another thread. Until the end of the update, ``ready`` waits."""
        with self._whole():
            self._left = dict(self._ranges(rule))
            self._begins = sorted(self._left)

    def ready(self, begin: int, end: int) -> None:
        """Returns when the weights from ``begin`` to before ``end`` are the newest. Raises the error of a failed
        update."""
        self._wait(lambda: self._is_left(begin, end))

    def finish(self) -> None:
        """Returns when no weights are left to change. Raises the error of a failed update."""
        self._wait(lambda: bool(self._left))

    def _is_left(self, begin: int, end: int) -> bool:
        near = self._begins[max(0, bisect_right(self._begins, begin) - 1) : bisect_left(self._begins, end)]
        return any(self._left.get(a, 0) > begin for a in near)

    def _wait(self, lasts: Callable[[], bool]) -> None:
        with self._progress:
            while lasts():
                if self._broken is not None:
                    raise self._broken
                self._progress.wait()

    def abandon(self, why: BaseException) -> None:
        """The update that has begun will not end: ``ready`` raises ``why``."""
        with self._progress:
            self._broken = why
            self._progress.notify_all()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """No update is under way, and none begins to change anything."""
        self.finish()
        with self._lock:
            yield

    def _ranges(self, rule: Rule) -> list[tuple[int, int]]:
        """Ranges of each update: windows, or tensors where the rule needs whole ones. Never across ``decayed``. In the
        order of need."""
        ends = (0, self.layout.decayed), (self.layout.decayed, self.layout.learned)
        window = update_window(self.layout.size) * (IN_PLACE if self.in_place else 1)
        windows = [(a, min(a + window, end)) for begin, end in ends for a in range(begin, end, window)]
        needed = sorted((begin, n) for n, part in enumerate(self.order) for begin, _ in part)

        def first(changed: tuple[int, int]) -> int:
            begin, end = changed
            parts = needed[max(0, bisect_left(needed, (begin + 1, 0)) - 1) : bisect_left(needed, (end, 0))]
            return min((n for _, n in parts), default=0)

        return sorted(self.layout.trainable().ranges() if rule.by_tensor else windows, key=first)

    def digest(self) -> bytes:
        """BLAKE3 over the weights."""
        with self._whole():
            model = self.model
            if self.in_place:
                return flat_digest(model.values)
            hasher = blake3()
            for a, b in model.windows():
                hasher.update(model.values[a:b].numpy().data.cast("B"))
            return hasher.digest()

    def copied_weights(self, begin: int = 0, end: int | None = None) -> Tensor:
        """A copy of the weights from ``begin`` to ``end``, in memory."""
        with self._whole():
            return self.model.values[begin:end].clone()

    def copy(self) -> dict[str, Tensor]:
        """'model/NAME', and of trained parameters 'moment1/NAME', 'moment2/NAME', fp32: an immutable copy in backing
        memory."""
        with self._whole():
            return self._named({kind: region.copy() for kind, region in self._regions.items()})

    def named(self) -> dict[str, Tensor]:
        """The same, but no copy: valid until the next change."""
        with self._whole():
            return self._named({kind: region.values for kind, region in self._regions.items()})

    def _named(self, flats: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            f"{kind}/{name}": view
            for kind, flat in flats.items()
            for name, view in state_views(self.layout, kind, flat).items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Load a ``copy``. Absent moments become zero. Raises CheckpointError, and changes nothing then."""
        sources = {kind: checked_state(self.layout, state, kind) for kind in KINDS}
        with self._whole(), torch.no_grad():
            for kind, region in self._regions.items():
                layout = state_layout(self.layout, kind)
                for (a, b), name in zip(layout.ranges(), layout.names, strict=True):
                    if found := sources[kind]:
                        region.values[a:b].copy_(found[name].reshape(-1))
                    else:
                        region.values[a:b].zero_()
                    region.release(a, b)

    def load_weights(self, weights: Tensor) -> None:
        """Replace the weights by ``weights``, flat fp32 [P]; the moments stay."""
        with self._whole(), torch.no_grad():
            for a, b in self.model.windows():
                self.model.values[a:b].copy_(weights[a:b])
