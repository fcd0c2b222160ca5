"""Identities: a peer's Ed25519 key, signatures, and the proof of holding the run's secret (HMAC challenge and
response)."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING, Any

import base58
import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hivemind.proto import crypto_pb2

if TYPE_CHECKING:
    from pathlib import Path

NONCE = 16
"""Bytes of a challenge."""
SIGNATURE = 64
_ID_PREFIX = bytes.fromhex("002408011220")
"""First bytes of the peer id of an Ed25519 key; the whole public key follows (libp2p, specs/peer-ids)."""
_MAX_ID = 64
"""Most characters of a peer id."""


class Key:
    """An Ed25519 private key: a peer's (named ``peer_id``) or a run owner's."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()
        self.peer_id = base58.b58encode(_ID_PREFIX + self.public).decode()

    @classmethod
    def new(cls) -> Key:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def of_seed(cls, seed: bytes) -> Key:
        """A key that is a function of 32 bytes, for tests and benchmarks."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def at(cls, path: Path) -> Key:
        """The key in the file ``path``; without that file, a new one, which only the file's owner can read.

        The file has the form that the libp2p daemon reads: key type, then private and public halves."""
        if path.exists():
            return cls(
                Ed25519PrivateKey.from_private_bytes(crypto_pb2.PrivateKey.FromString(path.read_bytes()).data[:32])
            )
        key = cls.new()
        data = key._private.private_bytes_raw() + key.public
        encoded = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.Ed25519, data=data).SerializeToString()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(descriptor, "wb") as file:
            file.write(encoded)
        return key

    def sign(self, what: str, *content: Any) -> bytes:
        """Sign ``content``. ``what`` keeps signatures of different kinds apart."""
        return self._private.sign(_said(what, content))


def signed(by: bytes, signature: bytes, what: str, *content: Any) -> bool:
    """Did the holder of the key with public half ``by`` sign exactly this?"""
    try:
        Ed25519PublicKey.from_public_bytes(by).verify(signature, _said(what, content))
    except (InvalidSignature, ValueError):
        return False
    return True


def public_half(peer: Any) -> bytes | None:
    """The public key in a peer id; None unless ``peer`` is the id of an Ed25519 key in canonical spelling."""
    if not isinstance(peer, str) or len(peer) > _MAX_ID:
        return None
    try:
        decoded = base58.b58decode(peer)
    except ValueError:
        return None
    whole = decoded.startswith(_ID_PREFIX) and len(decoded) == len(_ID_PREFIX) + 32
    return decoded[len(_ID_PREFIX) :] if whole and base58.b58encode(decoded).decode() == peer else None


def _said(what: str, content: tuple[Any, ...]) -> bytes:
    packed: bytes = msgpack.packb(["muletrain", what, *content])
    return packed


def proof(secret: bytes, role: str, bound_to: list[str], nonces: bytes) -> bytes:
    """Proof of holding ``secret``, for one ``role``, ``names`` and one pair of challenges only."""
    parts = ["muletrain admission", role, *bound_to]
    message = b"".join(len(p.encode()).to_bytes(4, "big") + p.encode() for p in parts) + nonces
    return hmac.new(secret, message, hashlib.sha256).digest()


def derive(key: bytes, about: bytes) -> bytes:
    """A nonce that only the holder of ``key`` can predict, and need not remember."""
    return hmac.new(key, about, hashlib.sha256).digest()[:NONCE]


def same(a: bytes, b: bytes) -> bool:
    """Are the two equal? Takes constant time."""
    return hmac.compare_digest(a, b)
