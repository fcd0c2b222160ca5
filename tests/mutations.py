"""Frames that no correct peer would send: mutations of valid ones, drawn from a seed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgpack

from muletrain.wire.frame import PREFIX

if TYPE_CHECKING:
    import random

NASTY: list[Any] = [
    *(-1, 0, 1, 63, 2**31, 2**47, 2**48, 2**63, 2**64 - 1, 1e308, -0.0, math.nan, math.inf, None, True, "", "x" * 5000),
    *(b"", bytes(32), bytes(33), [], [0] * 100, [[]], {}, {"a": 1}, "\x1b[2J\0", "peer", [2**48], [-1], [1.5], ["a"]),
]
CODECS = ["fp32", "fp16", "bf16", "int8", "raw", "uint16", "int32", "pickle", ""]


def mutated(rng: random.Random, packed: bytes) -> bytes:
    """``packed``, a whole frame, with something changed: bytes anywhere or in the header, a field, a tensor's
    description or content."""
    return rng.choice([_anywhere, _in_header, _field, _field, _field, _tensor, _tensor, _payload])(rng, packed)


def mutated_header(rng: random.Random, packed: bytes) -> bytes:
    """``packed``, a call or an answer, with something changed: bytes anywhere, or a field."""
    if rng.random() < 0.3:
        return _edited(rng, packed)
    fields = msgpack.unpackb(packed)
    fields[rng.choice([*fields, "unknown"])] = rng.choice(NASTY)
    changed: bytes = msgpack.packb(fields)
    return changed


def _parts(packed: bytes) -> tuple[bytes, bytes]:
    length = PREFIX.unpack(packed[: PREFIX.size])[3]
    return packed[PREFIX.size : PREFIX.size + length], packed[PREFIX.size + length :]


def _joined(header: bytes, payload: bytes) -> bytes:
    return PREFIX.pack(b"MT", 1, 0, len(header), len(payload)) + header + payload


def _edited(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, what = rng.randint(0, len(changed)), rng.randbytes(rng.randint(1, 4))
        end = {"insert": at, "set": at + len(what), "cut": at + rng.randint(1, 40)}[
            rng.choice(["insert", "set", "cut"])
        ]
        changed[at:end] = what
    return bytes(changed)


def _anywhere(rng: random.Random, packed: bytes) -> bytes:
    return rng.choice([_edited(rng, packed), packed[: rng.randrange(len(packed))], packed + rng.randbytes(30)])


def _in_header(rng: random.Random, packed: bytes) -> bytes:
    header, payload = _parts(packed)
    return _joined(_edited(rng, header), payload)


def _field(rng: random.Random, packed: bytes) -> bytes:
    header, payload = _parts(packed)
    kind, fields, tensors = msgpack.unpackb(header)
    name = rng.choice([*fields, "unknown"])
    if rng.random() < 0.1:
        kind = rng.choice(["", "hello", "unknown", "forward", "part", "shard", "k" * 64])
    elif rng.random() < 0.1:
        fields.pop(name, None)
    else:
        fields[name] = rng.choice([*NASTY, rng.getrandbits(6), rng.randbytes(32)])
    return _joined(msgpack.packb([kind, fields, tensors]), payload)


def _tensor(rng: random.Random, packed: bytes) -> bytes:
    """Another codec or shape, or more of them, perhaps with a payload that fits it."""
    header, payload = _parts(packed)
    kind, fields, tensors = msgpack.unpackb(header)
    if not tensors or rng.random() < 0.1:
        tensors = [*tensors, [rng.choice(CODECS), [rng.randint(0, 9)]]]
    tensor = rng.choice(tensors)
    if rng.random() < 0.5:
        tensor[0] = rng.choice(CODECS)
    else:
        tensor[1] = rng.choice(
            [
                [],
                [0],
                [1 << 20],
                [1 << 40],
                [-1],
                [1.5],
                [[]],
                tensor[1][::-1],
                [1, *tensor[1]],
                [2 * n for n in tensor[1]],
            ]
        )
    size = rng.choice([len(payload), len(payload) // 2, 2 * len(payload), 4 * len(payload)])
    return _joined(msgpack.packb([kind, fields, tensors]), (payload * 4)[:size])


def _payload(rng: random.Random, packed: bytes) -> bytes:
    """Numbers of any value: not finite, beyond the vocabulary."""
    header, payload = _parts(packed)
    return _joined(header, rng.choice([rng.randbytes(len(payload)), b"\xff" * len(payload), _edited(rng, payload)]))
