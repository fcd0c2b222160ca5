"""What a peer process and whoever started it agree on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

TICKET_FILE = "ticket"
OWNER_FILE = "owner.key"
"""The private key of the run's owner, where it was founded."""
REMOVED_FILE = "removed"
"""Beside it: ids of those that the owner removed, a line each."""
PROBE_FILE = "probe"
"""'muletrain doctor --peers' asks 'muletrain start' by it."""
SCRATCH = "MULETRAIN_SCRATCH"
"""Environment: the folder for temporary files, which goes with whoever started the process."""
EXIT_ERROR = 2
EXIT_NO_CHECKPOINT = 3
"""The run came to its end, but its last checkpoint is nowhere."""


def write_secret(path: Path, text: str) -> None:
    """Readable by the owner only, and never half written."""
    partial = path.with_suffix(f".{os.getpid()}.partial")  # the peers of one machine write into one folder
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)
