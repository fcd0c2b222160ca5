"""The protocol version of peers, and names of files, variables and exit codes that peer process and starting command
share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from muletrain import __version__

if TYPE_CHECKING:
    from pathlib import Path

PROTOCOL = f"muletrain {__version__}"
"""Version of the protocol of a run's peers: peers of other versions are refused."""
TICKET_FILE = "ticket"
OWNER_FILE = "owner.key"
"""The private key of the run's owner, in the founder's run folder."""
REMOVED_FILE = "removed"
"""Beside it: ids of the peers that the owner removed, a line each."""
PROBE_FILE = "probe"
"""File by which 'muletrain doctor --peers' asks 'muletrain start' to measure the fleet."""
STOP_FILE = "stop"
"""File by which 'muletrain stop' and the page ask the command that trains the run in this folder to end it."""
SCRATCH = "MULETRAIN_SCRATCH"
"""Environment variable: the folder for temporary files, which the starting command removes."""
LEFT = "left in order"
"""Reason for the end of a process that left a run, which may go on."""
EXIT_ERROR = 2
EXIT_NO_CHECKPOINT = 3
"""The run ended, but the last checkpoint could not be written."""
EXIT_SKIPPED = 4
"""The run ended, but the last updates were all skipped."""


def write_secret(path: Path, text: str) -> None:
    """Write a file that only the owner can read, and that is never half written."""
    partial = path.with_suffix(f".{os.getpid()}.partial")  # several peers may write into one folder
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)
