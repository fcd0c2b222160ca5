"""Ends the process of a peer whose event loop stands still: where it waits for a device that hangs, no watchdog in it
can look.

The limit counts while the process runs: one that was stopped, or whose machine slept, is not taken for one that hangs.
A call that keeps Python's interpreter lock for ever stops this thread, too; the others still do without the peer, which
answers no probe then.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from muletrain.runs.worker_files import EXIT_ERROR

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.events import EventLog

LIMIT_S = 600.0
"""Loops stand still for seconds where a machine is starved or a large tensor is copied; the process ends for nothing
less than this."""
LOOK_S = 1.0
SAY_S = 10.0
"""To say why, before the process ends all the same: the disk may be what hangs."""


class Guard:
    """A daemon thread that ``beat`` tells that the loop runs. The process ends, too, where that is cancelled and the
    loop does not end."""

    def __init__(self, log: EventLog, at: Callable[[], str], limit_s: float = LIMIT_S) -> None:
        """``at``: what the device's threads are at, in words."""
        self._log, self._at, self._limit_s = log, at, limit_s
        self._beats = 0
        threading.Thread(target=self._watch, daemon=True, name="guard").start()

    async def beat(self) -> None:
        """Until cancelled."""
        while True:
            self._beats += 1
            await asyncio.sleep(LOOK_S)

    def _watch(self) -> None:
        seen, still_s = 0, 0.0
        while still_s < self._limit_s:
            before = time.monotonic()
            time.sleep(LOOK_S)
            still_s += min(time.monotonic() - before, 2 * LOOK_S)
            if self._beats != seen:
                seen, still_s = self._beats, 0.0
        last_word = threading.Timer(SAY_S, os._exit, (EXIT_ERROR,))
        last_word.daemon = True
        last_word.start()
        self._log.note(
            f"the event loop of this peer has stood still for {still_s:.0f} s{self._at()}, so it ends. Look for errors of devices and "
            f"disks in the system log (dmesg), and restart the machine if there are any; then join again",
            "error",
        )
        where_it_hangs()
        os._exit(EXIT_ERROR)


def where_it_hangs() -> None:
    """Where each thread is, on standard error."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
