"""Membership in a run: certificates under the owner's key, and renewals that end certificates.

A run has an owner: a key pair, with the public half in the ticket. A *certificate* says that the owner admitted a peer,
or a member that the owner admitted (one level: a newcomer does not depend on one machine, and a guest brings no
guests). A *renewal* begins an epoch: the owner names the peers that stay, and the digest of a new secret. Certificates
of an older epoch count for the named peers only. Every other peer is out, with all peers admitted by that peer and all
reserve identities, and that peer's ticket is void.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from muletrain.errors import AdmissionError
from muletrain.network.identity import SIGNATURE, public_half, signed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from muletrain.network.identity import Key

OWNER = ""
"""The issuer of a certificate that the owner signed; else the issuer is a peer id."""
VISIT_S = 600.0
"""Time for which a visitor is admitted [s], to ask a question."""
MAX_KEPT = 4096
"""Most peers that a renewal names."""

FOREIGN_OWN = "the certificate that came is not one of this run; ask for the current ticket"
NO_HOST = "this member cannot let others in; use a ticket that names other members, too"


@dataclass(frozen=True, slots=True)
class Certificate:
    """``issuer`` admitted ``peer`` in ``epoch``, until a wall time [s] (infinite: for good)."""

    peer: str
    issuer: str
    epoch: int
    until: float
    signature: bytes


Chain = tuple[Certificate, ...]
"""A peer's certificate and, if a member is the issuer, that member's certificate."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The owner's list of the peers that stay. ``secret``: SHA-256 of the secret that admits from now on."""

    epoch: int
    kept: tuple[str, ...]
    secret: bytes
    signature: bytes


class Trust:
    """Judges which peers belong to the run, this one included."""

    def __init__(
        self, run_id: str, owner: bytes | Key, secret: bytes, key: Key, now: Callable[[], float] = time.time
    ) -> None:
        """``owner``: the public key in the ticket, or the whole key on the owner's machine. ``key``: this peer's."""
        self._run_id, self._key, self._now = run_id, key, now
        self._owner_key = None if isinstance(owner, bytes) else owner
        self._owner = owner if isinstance(owner, bytes) else owner.public
        self.secret: bytes | None = secret
        """The secret that admits newcomers. None: a renewal came without the new one."""
        self.renewal: Renewal | None = None
        self._kept: frozenset[str] = frozenset()
        self._chain: Chain = ()

    @property
    def epoch(self) -> int:
        return 0 if self.renewal is None else self.renewal.epoch

    @property
    def chain(self) -> Chain:
        """Our own certificates, which prove our membership in the run."""
        if not self.current(self._key.peer_id, self._chain):
            self._chain = () if self._owner_key is None else (self._certificate(self._key.peer_id, math.inf),)
        return self._chain

    @property
    def belongs(self) -> bool:
        """Do we belong to the run ourselves?"""
        return self.current(self._key.peer_id, self.chain)

    def remains(self, peer: str) -> bool:
        """Did the last renewal name ``peer``?"""
        return peer in self._kept

    # Judging --------------------------------------------------------------------------------------------------------

    def genuine(self, peer: str, chain: Chain) -> bool:
        """Was ``peer`` ever admitted by the owner or a member that may? Checks signatures; the answer holds for good,
        and ``current`` applies renewals."""
        match chain:
            case _ if peer in self._kept:
                return True
            case (leaf,):
                linked = leaf.issuer == OWNER or leaf.issuer in self._kept
            case (leaf, above):
                linked = leaf.issuer == above.peer and above.issuer == OWNER and above.until == math.inf
            case _:
                return False
        return linked and leaf.peer == peer and all(map(self._signed, chain))

    def current(self, peer: str, chain: Chain) -> bool:
        """Does ``chain``, which is genuine, still count?"""
        if peer in self._kept:
            return True
        in_force = all(c.epoch == self.epoch or c.peer in self._kept for c in chain)
        return bool(chain) and in_force and chain[0].until > self._now()

    def _signed(self, c: Certificate) -> bool:
        by = self._owner if c.issuer == OWNER else public_half(c.issuer)
        return by is not None and signed(
            by, c.signature, "certificate", self._run_id, c.peer, c.issuer, c.epoch, c.until
        )

    # Letting in -----------------------------------------------------------------------------------------------------

    def issue(self, peer: str, *, visitor: bool) -> Chain:
        """A new chain for ``peer``. Raises AdmissionError if this peer may not admit anybody."""
        until = self._now() + VISIT_S if visitor else math.inf
        own = self.chain
        if self._owner_key is not None:
            return (self._certificate(peer, until),)
        named = self.remains(self._key.peer_id)
        let_in_by_owner = len(own) == 1 and own[0].issuer == OWNER and own[0].until == math.inf
        if self.secret is None or not (named or let_in_by_owner):
            raise AdmissionError(NO_HOST)
        return (self._certificate(peer, until), *(() if named else own))

    def welcomed(self, chain: Chain) -> None:
        """Take our own chain from the member that admitted us. Raises AdmissionError if no member would accept the
        chain."""
        if not self.genuine(self._key.peer_id, chain) or not self.current(self._key.peer_id, chain):
            raise AdmissionError(FOREIGN_OWN)
        self._chain = chain

    def _certificate(self, peer: str, until: float) -> Certificate:
        key, issuer = (self._owner_key, OWNER) if self._owner_key is not None else (self._key, self._key.peer_id)
        content = (peer, issuer, self.epoch, until)
        return Certificate(*content, key.sign("certificate", self._run_id, *content))

    # Renewing -------------------------------------------------------------------------------------------------------

    def renew(self, kept: Iterable[str], secret: bytes) -> Renewal:
        """The owner's renewal: only ``kept`` stay, and peers that come with the new ``secret`` are admitted."""
        assert self._owner_key is not None
        content = (self.epoch + 1, tuple(sorted(kept)), hashlib.sha256(secret).digest())
        return Renewal(*content, self._owner_key.sign("renewal", self._run_id, *content))

    def adopt(self, renewal: Renewal, secret: bytes | None) -> None:
        """Apply ``renewal``, if new; a ``secret`` with another digest is ignored. Raises AdmissionError without the
        owner's signature."""
        content = (renewal.epoch, renewal.kept, renewal.secret)
        if not signed(self._owner, renewal.signature, "renewal", self._run_id, *content):
            raise AdmissionError("a renewal that the run's owner did not sign")
        if renewal.epoch > self.epoch:
            self.renewal, self._kept = renewal, frozenset(renewal.kept)
        if renewal.epoch == self.epoch:
            named = (s for s in (secret, self.secret) if s is not None and hashlib.sha256(s).digest() == renewal.secret)
            self.secret = next(named, None)


# On the wire ----------------------------------------------------------------------------------------------------------


def packed_chain(chain: Chain) -> list[Any]:
    return [list(astuple(c)) for c in chain]


def read_chain(content: Any) -> Chain:
    """The chain in ``content``; signatures are not checked. Raises AdmissionError."""
    if isinstance(content, list) and len(content) <= 2:
        return tuple(map(_read_certificate, content))
    raise AdmissionError("malformed certificate")


def _read_certificate(content: Any) -> Certificate:
    match content:
        case [str() as peer, str() as issuer, int() as epoch, float() as until, bytes() as signature] if (
            len(signature) == SIGNATURE and epoch >= 0
        ):
            return Certificate(peer, issuer, epoch, until, signature)
    raise AdmissionError("malformed certificate")


def unpacked(data: bytes) -> Any:
    """The unpacked content of msgpack; None for garbage."""
    try:
        return msgpack.unpackb(data, max_ext_len=0)
    except Exception:  # msgpack raises a dozen unrelated types
        return None


def chain_bytes(chain: Chain) -> bytes:
    packed: bytes = msgpack.packb(packed_chain(chain))
    return packed


def chain_from(data: bytes) -> Chain:
    """The chain that ``chain_bytes`` packed. Raises AdmissionError."""
    return read_chain(unpacked(data))


def packed_renewal(renewal: Renewal | None) -> list[Any] | None:
    return None if renewal is None else list(astuple(renewal))


def read_renewal(content: Any) -> Renewal:
    """The renewal in ``content``; the signature is not checked. Raises AdmissionError."""
    match content:
        case [int() as epoch, list() as kept, bytes() as secret, bytes() as signature] if (
            epoch > 0 and len(kept) <= MAX_KEPT and all(isinstance(p, str) for p in kept)
        ):
            return Renewal(epoch, tuple(kept), secret, signature)
    raise AdmissionError("malformed renewal")
