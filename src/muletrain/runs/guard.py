"""Ends the process of a peer with a hanging event loop. While the loop itself waits for a device, no watchdog in the
loop can run.

Time counts only while the process runs, so a stopped process or a sleeping machine does not count as hanging. A call
that never releases Python's interpreter lock stops this thread, too. Members still notice: the peer answers no probe.
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
"""Seconds that the event loop may stand still before the process ends. A starved machine or a copy of a large tensor
stops the loop for some seconds."""
LOOK_S = 1.0
"""Seconds between two beats, and between two checks."""
SAY_S = 10.0
"""Most seconds for writing the reason: the disk itself may hang."""


class Guard:
    """A daemon thread that ends the process when ``beat`` stops: because the loop hangs, or stays open after ``beat``
    was cancelled. Construct a guard in the watched loop."""

    def __init__(self, log: EventLog, at: Callable[[], str], limit_s: float = LIMIT_S) -> None:
        """``at`` describes the current work of the device's threads, for the error."""
        self._log, self._at, self._limit_s = log, at, limit_s
        self._beats, self._loop = 0, asyncio.get_running_loop()
        threading.Thread(target=self._watch, daemon=True, name="guard").start()

    async def beat(self) -> None:
        """Tell the guard that the loop runs, until cancelled."""
        while True:
            self._beats += 1
            await asyncio.sleep(LOOK_S)

    def _watch(self) -> None:
        seen, still_s = 0, 0.0
        while still_s < self._limit_s:
            before = time.monotonic()
            time.sleep(LOOK_S)
            if self._loop.is_closed():  # a peer in the process of its command has ended, and the command goes on
                return
            still_s += min(time.monotonic() - before, 2 * LOOK_S)
            if self._beats != seen:
                seen, still_s = self._beats, 0.0
        last_word = threading.Timer(SAY_S, os._exit, (EXIT_ERROR,))
        last_word.daemon = True
        last_word.start()
        self._log.note(
            f"the event loop of this peer has stood still for {still_s:.0f} s{self._at()}, so it ends. Look for errors of "
            f"devices and disks in the system log (dmesg), and restart the machine if there are any; then join again",
            "error",
        )
        where_it_hangs()
        os._exit(EXIT_ERROR)


def where_it_hangs() -> None:
    """Write the stack of each thread to standard error."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
