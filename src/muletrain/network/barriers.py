"""Barriers between the peers of a virtual world: frozen machines, cut links, packets that do not pass."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

    from muletrain.network.base import PeerId

DIRECT = ""
"""The way without a relay."""


class Watcher(Protocol):
    """Hears which streams the barriers end."""

    def broke(self, sender: PeerId, receiver: PeerId) -> None:
        """Everything under way from ``sender`` to ``receiver`` is lost."""
        ...

    def lost(self, peer: PeerId, other: PeerId) -> None:
        """``peer`` sees the end of all streams with ``other``."""
        ...


class Barriers:
    """Decides what passes between two peers. Pairs are unordered by default."""

    def __init__(self, alive: Collection[PeerId], watcher: Watcher, *, relays: bool) -> None:
        """``alive``: the peers that live now. ``relays``: members carry between two peers that are cut off."""
        self._alive, self._watcher, self._relays = alive, watcher, relays
        self._frozen: dict[PeerId, asyncio.Event] = {}
        self._held_up: dict[frozenset[PeerId], asyncio.Event] = {}
        self._cut: Counter[frozenset[PeerId]] = Counter()
        """How often each pair is cut."""
        self._one_way: Counter[tuple[PeerId, PeerId]] = Counter()
        """(sender, receiver) pairs in which the sender does not reach the receiver."""
        self._limits: dict[frozenset[PeerId], int] = {}
        """Bytes of the largest message that passes."""
        self._ways: dict[frozenset[PeerId], PeerId] = {}
        """The relay between two peers that are cut off."""

    # Delays: nothing is lost ----------------------------------------------------------------------------------------

    def freeze(self, peer: PeerId) -> None:
        """Stop ``peer`` like SIGSTOP, without refusals and answers."""
        self._frozen.setdefault(peer, asyncio.Event())

    def thaw(self, peer: PeerId) -> None:
        if event := self._frozen.pop(peer, None):
            event.set()

    async def awake(self, peer: PeerId) -> None:
        """Wait until ``peer`` is not frozen."""
        while (event := self._frozen.get(peer)) is not None:
            await event.wait()

    def hold_up(self, a: PeerId, b: PeerId) -> None:
        """Hold back all traffic of the pair until ``let_pass``; nobody is told. Then all traffic arrives, as with
        TCP."""
        self._held_up.setdefault(frozenset((a, b)), asyncio.Event())

    def let_pass(self, a: PeerId, b: PeerId) -> None:
        if event := self._held_up.pop(frozenset((a, b)), None):
            event.set()

    def takes(self, sender: PeerId, receiver: PeerId) -> bool:
        """Does ``receiver`` take messages of ``sender`` now?"""
        return receiver not in self._frozen and frozenset((sender, receiver)) not in self._held_up

    async def taken(self, sender: PeerId, receiver: PeerId) -> None:
        """Wait until ``receiver`` takes messages of ``sender``."""
        while self._held_up and (event := self._held_up.get(frozenset((sender, receiver)))) is not None:
            await event.wait()
        await self.awake(receiver)

    # Losses ---------------------------------------------------------------------------------------------------------

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Separate the pair until ``mend``: senders find out, and everything under way is lost. Cuts are counted."""
        self._cut[frozenset((a, b))] += 1
        self._broke(a, b)
        self.way(a, b)

    def mend(self, a: PeerId, b: PeerId) -> None:
        """Take one cut back. Both now learn that all streams have ended."""
        pair = frozenset((a, b))
        self._cut[pair] -= 1
        if self._cut[pair]:
            return
        del self._cut[pair]
        if self._ways.pop(pair, None) is None:
            self._lost(a, b)

    def cut_way(self, sender: PeerId, receiver: PeerId) -> None:
        """Cut one direction: ``sender`` does not reach ``receiver``, but still answers calls."""
        self._one_way[sender, receiver] += 1
        self._watcher.broke(sender, receiver)

    def mend_way(self, sender: PeerId, receiver: PeerId) -> None:
        self._one_way[sender, receiver] -= 1
        if not self._one_way[sender, receiver]:
            del self._one_way[sender, receiver]
        self._watcher.lost(receiver, sender)

    def pass_small(self, pair: tuple[PeerId, ...], limit: int | None) -> None:
        """Swallow the pair's frames, calls and answers of more than ``limit`` bytes; None: swallow nothing."""
        self._limits.pop(frozenset(pair), None)
        if limit is not None:
            self._limits[frozenset(pair)] = limit

    def too_large(self, a: PeerId, b: PeerId, nbytes: int) -> bool:
        return bool(self._limits) and nbytes > self._limits.get(frozenset((a, b)), nbytes)

    # Ways -----------------------------------------------------------------------------------------------------------

    def reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        """Does a message of ``sender`` find a way to ``receiver``, which lives?"""
        return (
            receiver in self._alive
            and self.way(sender, receiver) is not None
            and (sender, receiver) not in self._one_way
        )

    def way(self, a: PeerId, b: PeerId) -> PeerId | None:
        """DIRECT, or the relay between the pair; None: there is no way. A new relay ends the pair's streams."""
        if not self._cut or (pair := frozenset((a, b))) not in self._cut:
            return DIRECT
        if not self._relays:
            return None
        before = self._ways.pop(pair, None)
        able = [r for r in sorted(self._alive) if r not in pair and self.passes(a, b, r)]
        now = before if before in able else next(iter(able), None)
        if now is not None:
            self._ways[pair] = now
        if now != before:
            self._broke(a, b)
            self._lost(a, b)
        return now

    def passes(self, a: PeerId, b: PeerId, way: PeerId) -> bool:
        """Does a message that was sent by ``way`` arrive?"""
        if way == DIRECT:
            return not self._cut or frozenset((a, b)) not in self._cut
        alive = way in self._alive and way not in self._frozen
        return alive and self.passes(a, way, DIRECT) and self.passes(way, b, DIRECT)

    def relay_died(self, peer: PeerId) -> None:
        """Find another relay for each pair that ``peer`` carried for."""
        for pair in [sorted(p) for p, way in self._ways.items() if way == peer]:
            self.way(*pair)

    def _broke(self, a: PeerId, b: PeerId) -> None:
        self._watcher.broke(a, b)
        self._watcher.broke(b, a)

    def _lost(self, a: PeerId, b: PeerId) -> None:
        self._watcher.lost(a, b)
        self._watcher.lost(b, a)
