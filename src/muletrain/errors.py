"""The exception tree. Every message tells the problem, its place, and the remedy."""

from __future__ import annotations

import errno


class MuletrainError(Exception):
    """Base of all deliberate muletrain errors; the CLI prints the message without a traceback."""


class ConfigError(MuletrainError):
    """An invalid configuration. The message names the field, its file and line, and the remedy."""


class DataError(MuletrainError):
    """A corpus or tokenizer that cannot be used (missing, empty, unreadable, wrong digest)."""


class CheckpointError(MuletrainError):
    """A checkpoint that cannot be read or written (incomplete, corrupt, no space, wrong shapes)."""


class CapacityError(MuletrainError):
    """A stage that fits no machine; the message gives the numbers."""


class NetworkError(MuletrainError):
    """Base of errors between two peers. ``why`` is the reason alone, for sentences that name the peer separately;
    ``doing``, which begins the message, names the failed action and the peer."""

    def __init__(self, why: str, doing: str = "") -> None:
        super().__init__(f"{doing}: {why}" if doing else why)
        self.why, self.doing = why, doing


class PeerUnreachable(NetworkError):
    """The remote peer cannot be dialled, or the connection broke."""


class DeadlineExceeded(NetworkError):
    """The remote peer did not answer within the deadline."""


class Refused(NetworkError):
    """The remote peer refused. The message gives the peer's reason, and the remedy."""


class ProtocolError(NetworkError):
    """A message that no correct peer would send: wrong shape, size, kind, lineage or signature."""


class Malformed(ProtocolError):
    """A message that no correct peer of this version sends in any state. Repetition gets a peer banned for a while."""


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
    """The message for an unusable disk or folder, such as a full or read-only disk; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return None
    return f"{error.filename or 'a file of this run'}: {error.strerror}; {_REMEDIES[error.errno]}"
