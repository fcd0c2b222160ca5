"""The exception tree. Every message tells what is wrong, where, and what to do next."""

from __future__ import annotations

import errno


class MuletrainError(Exception):
    """Base of everything muletrain raises on purpose; the CLI prints its message without a traceback."""


class ConfigError(MuletrainError):
    """An invalid configuration. The message names the field, its file and line, and the remedy."""


class DataError(MuletrainError):
    """A corpus or tokenizer that cannot be used (missing, empty, unreadable, wrong digest)."""


class CheckpointError(MuletrainError):
    """A checkpoint that cannot be read or written (incomplete, corrupt, no space, wrong shapes)."""


class CapacityError(MuletrainError):
    """A stage that fits no machine; the message gives the numbers."""


class NetworkError(MuletrainError):
    """Base of errors between two peers. ``why`` is the reason alone, for sentences that name the peer themselves;
    ``doing``, which begins the message, is what failed with which peer."""

    def __init__(self, why: str, doing: str = "") -> None:
        super().__init__(f"{doing}: {why}" if doing else why)
        self.why, self.doing = why, doing


class PeerUnreachable(NetworkError):
    """The other side cannot be dialled, or the connection broke."""


class DeadlineExceeded(NetworkError):
    """The other side did not answer within the deadline."""


class Refused(NetworkError):
    """The other side refused. The message gives its reason, and what to do."""


class ProtocolError(NetworkError):
    """A message that no correct peer would send: wrong shape, size, kind, lineage or signature."""


class Malformed(ProtocolError):
    """A message that no correct peer of this version sends in any state. A peer that repeats it is banned for a
    while."""


class AdmissionError(MuletrainError):
    """A ticket or a peer that does not fit this run: wrong secret, run or version."""


class Expelled(MuletrainError):
    """The other members expelled this peer, because its results differ from theirs."""


_REMEDIES = {
    errno.ENOSPC: "free some space there and try again",
    errno.EDQUOT: "free some space there and try again",
    errno.EACCES: "give a place that this user may write to (or read), or change who may",
    errno.EPERM: "give a place that this user may write to (or read), or change who may",
    errno.EROFS: "give a place that can be written to",
    errno.EIO: "look at the disk or network drive",
    errno.ESTALE: "look at the network drive, and try again",
    errno.ENOTCONN: "look at the network drive, and try again",
}


def of_the_disk(error: BaseException) -> str | None:
    """The message for a disk or folder that cannot be used, such as a full or read-only one; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return None
    return f"{error.filename or 'a file of this run'}: {error.strerror}; {_REMEDIES[error.errno]}"
