"""Measures the fleet of a run that has not begun: the founder's part. ``probing.py`` is the members' part.

First all peers compute a block at the same time, because peers of one machine also share the machine in training. Then
pairs of machines measure their links in the rounds of a tournament (``planning/tournament.py``), so that no machine is
in two pairs at a time. The checked results become a fleet file in the run folder.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.config.surveyed import Found, Path, Paths, fleet_of, written
from muletrain.errors import MuletrainError, NetworkError, ProtocolError
from muletrain.events import FleetMeasured, Note, ProbeFailed, ProbeProgress
from muletrain.planning.tournament import rounds
from muletrain.runs.measure.probing import LIMIT_S, AskBlock, AskLink, BlockFound, LinkFound
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path as File

    from muletrain.clock import Clock
    from muletrain.compute.estimate import Offer
    from muletrain.events import Event
    from muletrain.model.chain import Model
    from muletrain.network.base import Network, PeerId

FILE = "fleet.toml"
BLOCK_S = 180.0
"""Longest measurement of a block [s], on slow and shared machines."""
MARGIN_S = 10.0
"""Time that a call may take beyond the measurement of a link [s]."""
AGAIN_S = 5.0
"""A link that fails within this time is measured once more [s]."""
TOTAL_S = 120.0
"""Target for all links together [s]; with many links, each gets less time."""
SHORTEST_S, LONGEST_S = 0.25, 0.5
"""Bounds of the time of a volley on a near link [s]."""
MOST_FLOPS = 1e17
"""Largest plausible speed of a peer [FLOP/s]."""


@dataclass
class Survey:
    """The survey of one run. ``people``: name and memory of each ready peer. ``sequences``: size of a microbatch."""

    net: Network
    emit: Callable[[Event], None]
    spec: Model
    sequences: int
    folder: File
    people: Callable[[], dict[PeerId, tuple[str, Offer]]]
    clock: Clock
    _at_work: asyncio.Lock = field(default_factory=asyncio.Lock)
    _wanted: bool = False
    """Whether to measure before the run begins."""
    _tried: Counter[PeerId] = field(default_factory=Counter)
    _worked: Counter[PeerId] = field(default_factory=Counter)
    """Pairs by peer: tried, and with a result."""

    def before_training(self) -> None:
        self._wanted = True

    async def settled(self) -> bool:
        """Finish the measurements due before the run begins. Returns whether that took time, so that peers may have
        come or gone."""
        if not self._wanted and not self._at_work.locked():
            return False
        wanted, self._wanted = self._wanted, False
        if wanted:
            await self.measure()
        async with self._at_work:
            return True

    async def measure(self) -> None:
        """Measure, write the file, and emit FleetMeasured; or emit ProbeFailed."""
        async with self._at_work:
            try:
                await self._measure()
            except MuletrainError as e:
                self.emit(ProbeFailed(reason=str(e)))

    async def _measure(self) -> None:
        self._tried, self._worked = Counter(), Counter()
        people = dict(sorted(self.people().items(), key=lambda p: p[1][0]))
        names = {peer: name for peer, (name, _) in people.items()}
        self.emit(ProbeProgress(done=0, total=1, what=f"measuring {plural(len(names), 'peer')}"))
        blocks = await self._blocks(names)
        places: dict[bytes, list[PeerId]] = {}
        for peer, block in blocks.items():
            places.setdefault(block.machine, []).append(peer)
        groups = list(places.values())
        paths, lacking = await self._paths(groups, names)
        peers = [
            self._found(names[p], place, blocks[p], people[p][1]) for place, group in enumerate(groups) for p in group
        ]
        lacking += [f"{name} did not answer and is left out" for peer, name in names.items() if peer not in blocks]
        fleet = fleet_of(peers, paths)
        tokens = f"{self.sequences} x {self.spec.context} tokens, width {self.spec.width}"
        stamp = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        about = [f"measured {stamp} before training (microbatches of {tokens}); for muletrain plan", *lacking]
        file = self.folder / FILE
        partial = file.with_suffix(".partial")
        partial.write_text(written(fleet, peers, about), encoding="utf-8")
        partial.replace(file)
        self.emit(FleetMeasured(path=str(file), peers=[p.name for p in peers], lacking=lacking))

    async def _blocks(self, names: dict[PeerId, str]) -> dict[PeerId, BlockFound]:
        ask = AskBlock(names=tuple(names.items()))
        calls = (ask.ask(self.net, p, timeout_s=BLOCK_S) for p in names)
        found = {}
        for peer, answer in zip(names, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            try:
                if isinstance(answer, BaseException):
                    raise answer
                found[peer] = answer
                self._flops(found[peer])
            except NetworkError as e:
                found.pop(peer, None)
                self._warn(f"{names[peer]} was not measured: {e}")
        if not found:
            raise NetworkError("no peer could be measured; see the warnings above")
        return found

    def _flops(self, block: BlockFound) -> float:
        """The speed [FLOP/s]; a backward has twice the operations of a forward. Raises ProtocolError if implausible."""
        if block.sequences > self.sequences:
            raise ProtocolError("it measured more than a microbatch")
        total = 3 * self.spec.layer_flops() * block.sequences * self.spec.context
        rate = total / (block.forward_s + block.backward_s)
        if rate > MOST_FLOPS:
            raise ProtocolError(f"{rate:.1e} FLOP/s is not plausible")
        return rate

    def _found(self, name: str, place: int, block: BlockFound, offer: Offer) -> Found:
        return Found(
            name=name,
            place=place,
            device=block.chip,
            forward_s=block.forward_s,
            backward_s=block.backward_s,
            flops=self._flops(block),
            memory_bytes=offer.device,
            host_bytes=offer.host,
            disk_bytes=block.disk,
        )

    async def _paths(self, groups: list[list[PeerId]], names: dict[PeerId, str]) -> tuple[Paths, list[str]]:
        """The paths between machines, and between two peers of a machine; and a sentence for each missing path."""
        inside = [((k, k), group[:2]) for k, group in enumerate(groups) if len(group) > 1]
        between = [[((a, b), [groups[a][0], groups[b][0]]) for a, b in pairs] for pairs in rounds(len(groups))]
        turns = [turn for turn in (inside, *between) if turn]
        seconds = min(LONGEST_S, max(SHORTEST_S, TOTAL_S / 3 / max(1, len(turns))))
        paths: Paths = {}
        lacking = []
        for done, turn in enumerate(turns):
            self.emit(
                ProbeProgress(done=done + 1, total=len(turns) + 1, what=f"links, round {done + 1} of {len(turns)}")
            )
            found = await asyncio.gather(*(self._pair(a, b, seconds, names) for _, (a, b) in turn))
            for ((i, j), (a, b)), (there, back) in zip(turn, found, strict=True):
                trips = [link.rtt_s for link in (there, back) if link is not None]
                for way, link, (x, y) in (((i, j), there, (a, b)), ((j, i), back, (b, a))):
                    if link is not None:  # a busy moment makes a trip longer, never shorter
                        paths[way] = Path(min(trips), link.bytes_per_s)
                    else:
                        lacking.append(
                            f"nothing arrived from {names[x]} at {names[y]}; the file has an almost useless link instead"
                        )
        return paths, lacking

    async def _pair(
        self, a: PeerId, b: PeerId, seconds: float, names: dict[PeerId, str]
    ) -> tuple[LinkFound | None, LinkFound | None]:
        """Both directions of a link. A peer that failed with two peers is skipped, because each try takes a while."""
        if any(self._tried[peer] >= 2 and not self._worked[peer] for peer in (a, b)):
            return None, None
        found = await self._link(a, b, seconds, names), await self._link(b, a, seconds, names)
        for peer in (a, b):
            self._tried[peer] += 1
            self._worked[peer] += any(found)
        return found

    async def _link(self, a: PeerId, b: PeerId, seconds: float, names: dict[PeerId, str]) -> LinkFound | None:
        """One direction of a link; measured again after an early failure."""
        ask = AskLink(to=b, seconds=seconds)
        begin, problem = self.clock.now(), ""
        while not problem or self.clock.now() - begin < AGAIN_S:
            try:
                return await ask.ask(self.net, a, timeout_s=LIMIT_S + MARGIN_S)
            except NetworkError as e:
                if problem:
                    break
                problem = str(e)
        self._warn(f"the link from {names[a]} to {names[b]} was not measured: {problem}")
        return None

    def _warn(self, message: str) -> None:
        self.emit(Note(level="warning", message=message))
