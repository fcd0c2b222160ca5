"""A server has some of its clients' results computed a second time, and compares (``hub.verify``).

A random share of parts is checked, the first gradients, and all results that are far larger or smaller than
usual. Another worker computes the part again, and sends sketches (``optim.sketch``) of the results. If the sketches
differ beyond rounding, the server's own device decides on expulsions. An accumulator must be the sum of the gradients
that its client announced, by their sketches, so a client cannot have one gradient checked and hand over another.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from muletrain.optim.sketch import packed, sketch, unpacked
from muletrain.policy.outliers import FACTOR, alike
from muletrain.policy.passes import Part, Pass
from muletrain.policy.pool import OWN
from muletrain.runtime.pool.messages import Result

if TYPE_CHECKING:
    import random

    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.network.base import PeerId
    from muletrain.optim.sketch import Sketch
    from muletrain.policy.passes import Place
    from muletrain.runtime.pool.clients import Clients
    from muletrain.runtime.pool.parts import KeptPart

RECENT, LEAST = 64, 16
"""Most results that define the usual value, and fewest losses and gradients."""
MOST_LOSS = 1e12
"""Before that, a client's loss beyond ``FACTOR`` times this is not believed."""


def checked_message(number: int, found: dict[str, Sketch]) -> Result:
    """Returns a client's answer with the sketches ``found``."""
    outputs, inputs = (packed(found[name]) if name in found else None for name in ("outputs", "inputs"))
    return Result(number=number, sketch=packed(found["gradient"]), outputs=outputs, inputs=inputs)


def checked_sketches(message: Result) -> dict[str, Sketch]:
    """Returns the sketches in a client's answer."""
    named = {"outputs": message.outputs, "inputs": message.inputs, "gradient": message.sketch}
    return {name: unpacked(packed_) for name, packed_ in named.items() if packed_ is not None}


@dataclass
class _Case:
    """A part under check. ``by``: the worker of each result; ``second``: a worker with different results."""

    part: Part
    kept: KeptPart
    found: dict[str, Sketch]
    by: dict[str, PeerId]
    second: tuple[PeerId, dict[str, Sketch]] | None = None

    def differing(self, found: dict[str, Sketch]) -> list[str]:
        """Returns the names of results that differ from ``found``."""
        return [name for name, first in self.found.items() if not alike(first, found.get(name, np.zeros(())))]


@dataclass
class _Usual:
    """The lengths of recent results of one kind."""

    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def stands_out(self, length: float) -> bool:
        usual = statistics.median(self.lengths or [length])
        self.lengths.append(length)
        return not usual / FACTOR <= length <= usual * FACTOR


class Checks:
    """The checks of one server. ``share``: share of parts to check."""

    def __init__(self, clients: Clients, clock: Clock, share: float, rng: random.Random) -> None:
        self._clients, self._clock, self._share, self._rng = clients, clock, share, rng
        self._forwards: dict[Place, tuple[PeerId, Sketch]] = {}
        """Forwards to check once their backward is there."""
        self._cases: dict[Place, _Case] = {}
        self._usual: dict[str, _Usual] = {}
        self._first: set[PeerId] = set()
        """Clients that brought the first ``LEAST`` gradients. Each one's first is checked: where most gradients are false
        from the beginning, none is far from the rest."""
        self._losses: deque[float] = deque(maxlen=RECENT)
        """Sizes of recent losses that counted [nats/token, times the sequences of a microbatch]."""

    def believes(self, part: Part, loss: float, worth: float) -> bool:
        """Is ``loss`` plausible for a client's ``part``? Only passes of the last stage have a loss, about as large as
        earlier counted losses. ``worth``: sequences that the part counts for."""
        if part.what is not Pass.LOSS:
            return loss == 0
        known = statistics.median(self._losses) if len(self._losses) >= LEAST else MOST_LOSS
        return abs(loss) <= FACTOR * max(known, 1.0) * worth

    def counted(self, part: Part, loss: float, worth: float) -> None:
        """A part's share of the loss counts. ``worth``: see ``believes``."""
        if part.what is Pass.LOSS and worth:
            self._losses.append(abs(loss) / worth)

    async def drawn(
        self, client: PeerId, what: Pass, rows: int, values: Tensor | None, claim: Sketch | None, seed: bytes
    ) -> tuple[bool, Sketch | None]:
        """Is a result of ``client`` to be checked, and what is then the sketch of its tensor, if any? ``claim``: the
        announced sketch of the parameters' gradient."""
        if not self._share:
            return False, None
        length = 0.0 if values is None else float(await self._clients.inner.offload(values.norm)) / rows**0.5
        odd = values is not None and self._usual.setdefault(what, _Usual()).stands_out(length)
        if claim is not None:
            usual = self._usual.setdefault("gradient", _Usual())
            if len(usual.lengths) < LEAST and client not in self._first:
                odd = True
                self._first.add(client)
            odd |= usual.stands_out(float(np.linalg.norm(claim)) / rows)
        if not odd and self._rng.random() >= self._share:
            return False, None
        return True, None if values is None else await self._clients.inner.offload(sketch, values.reshape(-1), seed)

    def came(
        self, worker: PeerId, part: Part, kept: KeptPart, drawn: tuple[bool, Sketch | None], claim: Sketch | None
    ) -> None:
        """A result of a client counts."""
        place, (checked, values) = part.place, drawn
        forward = self._forwards.pop(place, None)
        if part.what is Pass.FORWARD:
            if values is not None:
                self._forwards[place] = worker, values
            return
        if claim is None or not (checked or forward):
            return
        if (before := self._cases.get(place)) is not None and self._clients.pool.wants(before.part):
            return
        check = part._replace(what=Pass.CHECK)
        case = _Case(check, kept, {"gradient": claim}, {"gradient": worker})
        if values is not None:
            case.found["inputs"], case.by["inputs"] = values, worker
        if forward is not None:
            case.by["outputs"], case.found["outputs"] = forward
        if self._clients.pool.can_check(part.step, *case.by.values()):
            self._cases[place] = case
            self._clients.pool.put_part(check, self._clock.now(), barred=case.by.values())

    def find(self, part: Part) -> KeptPart | None:
        """Returns the inputs for computing ``part`` again; None: the check is no longer wanted."""
        case = self._cases.get(part.place)
        return None if case is None else case.kept

    def checked(self, worker: PeerId, part: Part, found: dict[str, Sketch]) -> None:
        """``worker`` computed ``part`` again. Expel clients with wrong results."""
        if (case := self._cases.get(part.place)) is None:
            return
        if case.second is not None and worker != OWN:
            return
        differing = case.differing(found)
        if differing and worker != OWN:
            case.second = worker, found
            self._clients.pool.put_part(part, self._clock.now(), OWN, only=OWN)
            self._clients.feed()
            return
        del self._cases[part.place]
        guilty = {case.by[name] for name in differing}
        if case.second is not None and any(
            name in found and not alike(found[name], told) for name, told in case.second[1].items()
        ):
            guilty.add(case.second[0])
        for client in sorted(guilty):
            self._clients.expel(
                client, "its results are wrong: this server computed a part again, and found another one"
            )

    def concerned(self, step: int) -> set[PeerId]:
        """Returns the clients whose results of ``step`` are being checked."""
        open_ = (
            case for case in self._cases.values() if case.part.step == step and self._clients.pool.wants(case.part)
        )
        return {client for case in open_ for client in case.by.values()}

    def forget(self, step: int) -> None:
        """Stop the checks of ``step`` that are in progress."""
        for places in (self._cases, self._forwards):
            for place in [p for p in places if p[0] == step]:
                del places[place]

    def forget_microbatch(self, step: int, index: int) -> None:
        """A microbatch passes through anew."""
        for place in [p for p in self._forwards if p[:2] == (step, index)]:
            del self._forwards[place]
