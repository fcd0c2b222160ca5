"""Locks of files, which end with the process that holds them. Some file systems have none (NFS without lockd, some of
FUSE): what to do then is the caller's choice."""

from __future__ import annotations

import fcntl
from enum import Enum


class Lock(Enum):
    """What came of taking a lock."""

    HELD = "held"
    TAKEN = "another process holds it"
    NONE = "the file system has no locks"


def lock(file: int, *, shared: bool = False) -> Lock:
    """Try to lock the open ``file``, alone or ``shared`` with others that do so. Never waits, never raises."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except OSError:
        return Lock.NONE
    return Lock.HELD
