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
    """A new key in the form the libp2p daemon reads (key type, then private and public halves); mode 0400."""
    key = Ed25519PrivateKey.generate()
    data = key.private_bytes_raw() + key.public_key().public_bytes_raw()
    encoded = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.Ed25519, data=data).SerializeToString()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o400)
    with os.fdopen(descriptor, "wb") as file:
        file.write(encoded)


def proof(secret: bytes, role: str, run_id: str, caller: str, callee: str, nonces: bytes) -> bytes:
    """What only a holder of ``secret`` can say in ``role`` to this other side, about this pair of challenges."""
    message = "\0".join(["muletrain admission", role, run_id, caller, callee]).encode() + b"\0" + nonces
    return hmac.new(secret, message, hashlib.sha256).digest()


def same(a: bytes, b: bytes) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(a, b)
