"""Tickets: one line of text by which another machine can join a run."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

import msgpack

from muletrain.errors import AdmissionError
from muletrain.runs.worker_files import OWNER_FILE, TICKET_FILE

PREFIX = "mule1-"
MAX_ADDRESSES = 16
"""Most addresses in a ticket that a member passes on."""
_MAX_CHARACTERS = 8192


@dataclass(frozen=True)
class Ticket:
    """Holds addresses of some members, the run's id, the secret that admits a peer, and the public key of the run's
    owner, by which a newcomer recognises members."""

    run_id: str
    secret: bytes
    owner: bytes
    addresses: tuple[str, ...]

    @staticmethod
    def new_run(folder: Path) -> Ticket:
        """Make a ticket with a new id and secret, and no addresses yet. The owner's key goes to ``folder``, for the
        founder."""
        from muletrain.network.identity import Key  # importing hivemind is slow

        return Ticket(secrets.token_hex(8), secrets.token_bytes(32), Key.at(folder / OWNER_FILE).public, ())

    def passed_on(self, founder: str, own: list[str]) -> Ticket:
        """The ticket that a member passes on: addresses of the founder and of the member, at most half of the room each
        if there are too many."""
        known = [a for a in self.addresses if a.endswith(f"/p2p/{founder}")]
        room = max(MAX_ADDRESSES // 2, MAX_ADDRESSES - len(own))
        addresses = dict.fromkeys((*known[:room], *own, *self.addresses))
        return dataclasses.replace(self, addresses=tuple(addresses)[:MAX_ADDRESSES])

    def ports(self) -> str:
        """Describe the members' listening addresses, for people."""
        found: dict[str, list[str]] = {}
        for parts in (a.split("/") for a in self.addresses):
            if len(parts) > 4 and parts[3] == "tcp":
                found.setdefault(parts[4], []).append(parts[2])
        return ", ".join(f"TCP port {port} of {' or '.join(dict.fromkeys(h))}" for port, h in found.items())

    def __str__(self) -> str:
        body = msgpack.packb([self.run_id, self.secret, self.owner, list(self.addresses)])
        return PREFIX + base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")

    def __repr__(self) -> str:  # a ticket must not end up in a log by accident
        return f"Ticket(run_id={self.run_id!r}, addresses={self.addresses!r})"

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Read a ticket. Raises AdmissionError for a damaged ticket."""
        text = text.strip()
        if not text.startswith(PREFIX) or len(text) > _MAX_CHARACTERS:
            raise AdmissionError(
                f"not a ticket: it should begin with '{PREFIX}'; 'muletrain start' prints one to copy whole"
            )
        encoded = text.removeprefix(PREFIX)
        try:
            data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
            body, check = data[:-4], data[-4:]
            if check != _check(body):
                raise ValueError
            match msgpack.unpackb(body, max_ext_len=0):
                case [str() as run_id, bytes() as secret, bytes() as owner, list() as addresses] if len(secret) == len(
                    owner
                ) == 32 and all(isinstance(a, str) for a in addresses):
                    return cls(run_id, secret, owner, tuple(addresses))
            raise ValueError
        except (ValueError, binascii.Error, msgpack.UnpackException):
            raise AdmissionError(
                "the ticket is damaged (a part is missing or mistyped); copy it again, whole"
            ) from None


def _check(body: bytes) -> bytes:
    return hashlib.sha256(b"ticket" + body).digest()[:4]


def read_ticket(given: str | None) -> str | None:
    """The ticket in an argument, in the named file or run folder, or, with '-', on standard input, because all users of a
    machine see the arguments of a process. Raises AdmissionError."""
    if given is None or given.startswith(PREFIX):
        return given
    if given == "-":
        return sys.stdin.readline()
    path = Path(given)
    try:
        return (path / TICKET_FILE if path.is_dir() else path).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise AdmissionError(
            f"not a ticket: it should begin with '{PREFIX}', or name a file with one ({e}); copy it again, whole"
        ) from e
