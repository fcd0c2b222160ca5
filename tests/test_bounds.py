"""What one message can make its receiver hold and compute: every kind has a bound (docs/reference/messages.md, where the table
names each)."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import random
import re
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgpack
import pytest

import muletrain.runs
import muletrain.runtime
from muletrain.errors import Malformed, ProtocolError
from muletrain.policy.cover import Cover, resolve
from muletrain.runtime.core.messages import Header, Message
from muletrain.runtime.members.rebalancing import Rebalancer
from muletrain.runtime.microbatch.messages import TrainerDone
from muletrain.wire.frame import MAX_HEADER

from .mutations import mutated_header
from .targets import KINDS as FRAMES

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.timeout(300)

MEMORY_TIMES = 80
"""Bytes that a header or a call may cost its receiver, for each of its own: of many empty lists Python makes so
much."""
CPU_S_PER_BYTE = 3e-6
"""Of a header or a call. What is fine costs a tenth of it; the rest is room for a machine that does other things."""
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "messages.md"


def below(cls: type[Header]) -> Iterator[Any]:
    """The program's headers that derive from ``cls``."""
    for sub in cls.__subclasses__():
        yield from below(sub)
        if sub.__module__.startswith("muletrain."):
            yield sub


def headers() -> dict[str, type[Header]]:
    """Every message of all modules by kind, and the answer to each call."""
    for package in (muletrain.runtime, muletrain.runs):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)

    kinds = {c.KIND: c for c in below(Message) if "KIND" in c.__dict__}
    return kinds | {f"answer to {kind}": c.ANSWER for kind, c in kinds.items() if c.ANSWER is not None}


HEADERS = headers()

# Every kind ---------------------------------------------------------------------------------------------------------------


def filled(schema: dict[str, Any], length: int, wrong: Any = None) -> Any:
    """A message with ``length`` items in each list at the top, ``wrong`` ones if there are some, and few in those
    inside."""
    known = {d["ref"]: d for d in schema.get("definitions", ())}

    def fill(of: dict[str, Any], length: int) -> Any:
        match of:
            case {"type": "definition-ref", "schema_ref": name}:
                return fill(known[name], length)
            case {"type": "model-fields", "fields": fields}:
                return {name: fill(f["schema"], length) for name, f in fields.items()}
            case {"schema": inner}:
                return fill(inner, length)
            case {"type": "str", "max_length": most}:
                return "a" * min(length, most)
            case {"type": "bytes", "max_length": most}:
                return bytes(max(of.get("min_length", 0), min(length, most)))
            case {"type": "tuple", "variadic_item_index": 0, "items_schema": [item], "max_length": most}:
                few = min(length, most)
                return [wrong] * few if wrong is not None else [fill(item, 3) for _ in range(few)]
            case {"type": "tuple", "items_schema": items}:
                return [fill(item, 3) for item in items]
            case {"type": "literal", "expected": [first, *_]}:
                return first
        return {"float": 0.5, "bool": True}.get(of["type"], of.get("ge", 0))

    return fill(schema, length)


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_a_message_costs_its_receiver_a_bounded_multiple_of_its_bytes(name: str) -> None:
    """A message or answer with a field that has no bound has no largest size, and fails here."""
    cls = HEADERS[name]
    assert cls.most() > 0
    schema: Any = cls.__pydantic_core_schema__
    for length in (30_000, 100):
        contents = [filled(schema, length, wrong) for wrong in (None, "", [], {})]
        for n, content in enumerate([*contents, {f"n{k}": 0 for k in range(length)}]):
            payload: bytes = msgpack.packb(content)
            seconds, peak = cost(cls, payload)
            assert seconds <= 0.05 + CPU_S_PER_BYTE * len(payload), (n, length)
            assert peak <= (1 << 16) + MEMORY_TIMES * len(payload), (n, length)


def cost(cls: type[Header], payload: bytes) -> tuple[float, int]:
    """CPU seconds, the least of three, and bytes at most."""

    def taken() -> float:
        begin = time.process_time()
        with contextlib.suppress(ProtocolError):
            cls.unpack(payload)
        return time.process_time() - begin

    seconds = min(taken() for _ in range(3))
    tracemalloc.start()
    try:
        taken()
        return seconds, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_is_larger_than_its_kind_can_be_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack, "unpackb", lambda *_, **__: pytest.fail("unpacked"))
    for cls in HEADERS.values():
        if cls.most() < 1 << 20:
            with pytest.raises(Malformed, match="are accepted"):
                cls.unpack(bytes(cls.most() + 1))


def test_every_header_is_a_message_or_an_answer_to_one_or_a_part_of_these() -> None:
    """Else nothing here measures it."""
    schemas = str([cls.__pydantic_core_schema__ for cls in HEADERS.values()])
    assert [cls for cls in below(Header) if not cls.__subclasses__() and repr(cls) not in schemas] == []


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_a_mutated_message_or_answer_is_refused_or_read_whole(name: str) -> None:
    cls, rng = HEADERS[name], random.Random(name)
    content: bytes = msgpack.packb(filled(cast("Any", cls.__pydantic_core_schema__), 3))
    for _ in range(100):
        with contextlib.suppress(ProtocolError):
            cls.unpack(mutated_header(rng, content))


def test_a_field_without_a_bound_is_found() -> None:
    class Loose(Message):
        names: tuple[str, ...]

    with pytest.raises(TypeError, match="a list without max_length"):
        Loose.most()


def test_the_table_names_every_kind_and_its_bound() -> None:
    found = re.findall(r"^\| (answer to )?`([\w.]+)` \| ([\d.]+ [kM]?B)", PAGE.read_text(), re.MULTILINE)
    rows = {answer + kind: most for answer, kind, most in found}
    assert len(rows) == len(found)
    assert rows == {name: size(name, cls) for name, cls in HEADERS.items()}


def size(name: str, cls: type[Header]) -> str:
    """Most bytes of a header in a run of 64 microbatches, or of a call, which carries at most 1 MB."""
    most = min(cls.most(64), MAX_HEADER if name in FRAMES else 1 << 20)
    for unit, step in (("B", 1000), ("kB", 1000), ("MB", 1000)):
        if most < step or unit == "MB":
            return f"{most:.0f} {unit}" if unit == "B" or most >= 10 else f"{most:.1f} {unit}"
        most = most / 1000  # type: ignore[assignment]
    raise AssertionError


# Work that is more than it looks --------------------------------------------------------------------------------------------


def test_a_replica_that_claims_all_microbatches_does_not_stop_the_others_for_long() -> None:
    sealed = {f"r{k:02}": frozenset(range(64 * k, 64 * k + 64)) for k in range(15)}
    sealed["liar"] = frozenset(range(64 * 15))
    begin = time.process_time()
    assert resolve(sealed, 64 * 15) == Cover(("liar",), tuple(sorted(sealed.keys() - {"liar"})), ())
    sealed["liar"] = frozenset(range(0, 64 * 15, 64))
    assert resolve(sealed, 64 * 15).dropped == ("liar",)
    assert time.process_time() - begin < 0.2


def test_what_is_nested_deeply_harms_nobody() -> None:
    deep = b"[" * 60_000
    asked = Rebalancer.__new__(Rebalancer)
    asked._ctx = cast("Any", SimpleNamespace(roster=None))
    assert asked._read("a", deep) is None
    from muletrain.events import Event, EventError

    with pytest.raises(EventError):
        Event.from_json(deep)
    with pytest.raises(ProtocolError):
        TrainerDone.unpack(b"\x91" * 60_000)


def test_many_wrong_fields_are_not_described_one_by_one() -> None:
    names: bytes = msgpack.packb({f"n{k}": 0 for k in range(10_000)})
    with pytest.raises(Malformed, match="fields are invalid"):
        TrainerDone.unpack(names)
