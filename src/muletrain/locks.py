"""Locks of files, which end with the holding process. Some file systems have no locks (NFS without lockd, some of
FUSE); the caller then decides how to continue."""

from __future__ import annotations

import fcntl
from enum import Enum


class Lock(Enum):
    """Result of an attempt to lock."""

    HELD = "held"
    TAKEN = "another process holds it"
    NONE = "the file system has no locks"


def lock(file: int, *, shared: bool = False) -> Lock:
    """Try to lock the open ``file``, exclusively or ``shared``. Never waits, never raises."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except OSError:
        return Lock.NONE
    return Lock.HELD
