"""Who a peer is (an Ed25519 key) and how it proves that it holds the run's secret (HMAC challenge and response)."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.proto import crypto_pb2

if TYPE_CHECKING:
    from pathlib import Path

NONCE = 16
"""Bytes of a challenge."""


def write_identity(path: Path) -> None:
    """A new key in the form the libp2p daemon reads (key type, then private and public halves); mode 0400. Raises FileExistsError."""
    key = Ed25519PrivateKey.generate()
    data = key.private_bytes_raw() + key.public_key().public_bytes_raw()
    encoded = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.Ed25519, data=data).SerializeToString()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with os.fdopen(descriptor, "wb") as file:
        file.write(encoded)


def proof(secret: bytes, role: str, bound_to: list[str], nonces: bytes) -> bytes:
    """What only a holder of ``secret`` can say in ``role``, about exactly these names and this pair of challenges."""
    parts = ["muletrain admission", role, *bound_to]
    message = b"".join(len(p.encode()).to_bytes(4, "big") + p.encode() for p in parts) + nonces
    return hmac.new(secret, message, hashlib.sha256).digest()


def derive(key: bytes, about: bytes) -> bytes:
    """A nonce that only the holder of ``key`` can foretell, and that need not be remembered."""
    return hmac.new(key, about, hashlib.sha256).digest()[:NONCE]


def same(a: bytes, b: bytes) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(a, b)
