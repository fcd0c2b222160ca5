"""Tables by peer stay small with ``Recent``: in a long run machines come and go without end."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

V = TypeVar("V")
MOST = 4096
"""Entries, at most: as many as a run may have members."""


class Recent(OrderedDict[str, V]):
    """Keeps the entries that were set last."""

    def __setitem__(self, peer: str, value: V) -> None:
        super().__setitem__(peer, value)
        self.move_to_end(peer)
        if len(self) > MOST:
            self.popitem(last=False)
