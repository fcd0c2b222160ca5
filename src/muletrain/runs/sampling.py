"""Text that the model writes while it trains, by its newest checkpoint, in a process of the lowest priority."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.runs.fleet import environment
from muletrain.runs.signals import begun_deaf

if TYPE_CHECKING:
    from muletrain.config.schema import RunConfig

SHARE = 0.01
"""Most of the time that writing may take: it uses a core of a machine that trains."""
FIRST_S = 5.0
"""Time that the first text is expected to take: the interpreter's imports, and a small model."""
LIMIT_S = 900.0
"""Most time for one text."""
FILE = "samples.jsonl"


class Sampling:
    """Starts the process when there is a newer checkpoint and ``SHARE`` allows it. After an error, which is said, or
    a text that took more than ``LIMIT_S``, no further one is written."""

    def __init__(self, folder: Path, config: RunConfig | None) -> None:
        """``folder``: the run's, whose ``FILE`` gets the texts. ``config``: of a run that this machine began."""
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._written: Path | None = None
        self._began_s = time.monotonic()
        writes = config is not None and config.model.factory is None
        self._due_s = self._began_s + FIRST_S / SHARE if writes else math.inf

    def look(self, checkpoint: Path | None) -> None:
        """Begin or end a text. ``checkpoint``: the newest one. Raises OSError, once, if no process can begin."""
        now = time.monotonic()
        if self._process is not None:
            code, late = self._process.poll(), now - self._began_s > LIMIT_S
            if code is not None or late:
                self.close()
                if code == 0:
                    self._due_s = now + (now - self._began_s) / SHARE
        elif now >= self._due_s and checkpoint not in (None, self._written) and checkpoint.is_dir():
            self._written, self._began_s, self._due_s = checkpoint, now, math.inf
            with begun_deaf():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(checkpoint), str(self._folder / FILE)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment(1),
                    start_new_session=True,
                )

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def main(checkpoint: Path, log: Path) -> int:
    """Write texts and their event. Returns the exit code."""
    os.nice(19)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    import torch

    from muletrain.events import EventLog, Sampled
    from muletrain.runs.checkpoint import Checkpoint
    from muletrain.runs.result import check_memory, samples

    torch.set_num_threads(1)
    with EventLog(log, "samples") as events:
        try:
            found = Checkpoint.open(checkpoint)
            check_memory(found.params)
            events.emit(Sampled(found.step, samples(found, found.computed())))
        except Exception as e:  # of torch, of the disk: training goes on whatever happens here
            events.note(f"no text is written while the run trains: {e}", "info")
            return 1
    return 0


def _end_with_parent() -> None:
    os.read(0, 1)  # until the parent ends; a lock of ``sys.stdin`` would be held at exit
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
