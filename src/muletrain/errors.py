"""The exception tree. Every message says what is wrong, where, and what to do next."""

from __future__ import annotations

import errno


class MuletrainError(Exception):
    """Base of everything muletrain raises on purpose; the CLI prints its message without a traceback."""


class ConfigError(MuletrainError):
    """A configuration that cannot be run. The message names the field, the file and line, and the remedy."""


class DataError(MuletrainError):
    """A corpus or tokenizer that cannot be used (missing, empty, unreadable, of another digest)."""


class CheckpointError(MuletrainError):
    """A checkpoint that cannot be read or written (incomplete, corrupt, no space, other shapes)."""


class CapacityError(MuletrainError):
    """A stage that fits no machine; the message gives the numbers."""


class NetworkError(MuletrainError):
    """Base of what can go wrong between two peers."""


class PeerUnreachable(NetworkError):
    """The other side cannot be dialled, or the connection broke."""


class DeadlineExceeded(NetworkError):
    """The other side did not answer within the deadline."""


class Refused(NetworkError):
    """The other side answered, and said no (with a reason that says what to do)."""


class ProtocolError(NetworkError):
    """Something arrived that no correct peer would send: wrong shape, size, kind, lineage or signature."""


class Malformed(ProtocolError):
    """What no correct peer of this version sends, whatever state it is in: whoever keeps doing it is banned for a
    while."""


class AdmissionError(MuletrainError):
    """A ticket or a peer that does not fit this run: wrong secret, other run, other version."""


class Expelled(MuletrainError):
    """The others of a run let this peer go: it does not compute what they compute."""


def no_room(error: BaseException) -> str | None:
    """What to tell people where a disk is full; None if that is not it."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return f"{error.filename or 'a file of this run'}: {error.strerror}; free some space there and try again"
