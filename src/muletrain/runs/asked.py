"""Requests from outside to a command: signals that ask for the end, and a reader that closes the output."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, cast

from muletrain.runs.signals import ENDING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType

BY_SIGNAL = 128
"""The exit code of a command that a signal ended is this plus the signal's number."""
AGAIN_S = 1.0
"""Seconds after which a further signal is a further wish: ``timeout`` sends two at once, systemd and Slurm may, too."""
CLOSED = {errno.EPIPE: signal.SIGPIPE, errno.EIO: signal.SIGHUP}
"""Errors of an output without a reader (a pipe or a terminal), and the signal that each stands for."""


class Asked:
    """The wish that a command should end: the first asks for an orderly end, and a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.number = 0
        """The first signal, or the one that a closed output stands for; 0: nobody asked."""
        self.at_once: Collection[int] = ()
        """Signals that raise KeyboardInterrupt also as the first: the current work need not end in order."""
        self._last_s = -AGAIN_S

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """A signal came. Raises KeyboardInterrupt, see ``Asked``."""
        again = time.monotonic() - self._last_s >= AGAIN_S
        first, self.number = self.number == 0, self.number or number
        if again:
            self._last_s = time.monotonic()
        if again and (number in self.at_once or not first):
            raise KeyboardInterrupt

    def closed(self, number: int) -> None:
        """Nobody reads our output any more."""
        if not self.number:
            self.number, self._last_s = number, time.monotonic()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Within the context, signals and closed outputs are heard. A SIGHUP that is ignored (``nohup``) stays so."""
        numbers = [n for n in ENDING if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.hear) for number in numbers}
        outputs = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (cast("TextIO", Outlet(stream, self.closed)) for stream in outputs)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = outputs
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def cleaned_up() -> Iterator[None]:
    """Within the context, before any work that could end in order, a signal raises SystemExit: partial results are
    removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(BY_SIGNAL + number)

    numbers = [n for n in ENDING if signal.getsignal(n) is signal.SIG_DFL]  # Ctrl-C raises KeyboardInterrupt
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Outlet:
    """A stream for text that discards everything once the reader has gone, and then calls ``closed``."""

    def __init__(self, stream: TextIO, closed: Callable[[int], None]) -> None:
        self._stream, self._closed = stream, closed

    def write(self, text: str) -> int:
        """As ``TextIO.write``."""
        try:
            return self._stream.write(text)
        except OSError as e:
            self._lose(e)
            return len(text)

    def flush(self) -> None:
        """As ``TextIO.flush``."""
        try:
            self._stream.flush()
        except OSError as e:
            self._lose(e)

    def _lose(self, error: OSError) -> None:
        if error.errno not in CLOSED:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # buffered text would fail at the end of the process
        os.close(nowhere)
        self._closed(CLOSED[error.errno])

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
