"""Signals that ask a command to end. The command alone answers, and the command's processes ignore such signals: batch
systems and systemd send a signal to every process of a job."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C; the end that ``timeout``, systemd, Slurm and ``docker stop`` ask for; a closed terminal; Slurm's warning."""


@contextmanager
def begun_deaf() -> Iterator[None]:
    """A process that is started meanwhile gets no ``ENDING`` before it calls ``ignore``. Our signals wait until the end
    of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore ``ENDING`` in this process, including pending signals."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
