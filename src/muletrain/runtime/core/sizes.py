"""Computes the largest possible size of a message from the bounds of its fields.

A receiver can refuse larger messages unread, and a field without a bound is found before a message is sent.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

_PREFIX = 5
"""Most bytes that msgpack puts before a text, bytes, a list or a map."""
_NUMBER = 9
_PER_CHARACTER = 4
"""Most bytes of a character in UTF-8."""


@functools.cache
def packed_size(model: type[BaseModel], standard: int, length: int) -> int:
    """Returns the most bytes of a ``model`` as msgpack. Lists with a bound of ``standard`` items count with ``length``
    items. Raises TypeError for a field without a bound, or of an unknown type."""
    schema: Any = model.__pydantic_core_schema__
    definitions = {d["ref"]: d for d in schema.get("definitions", ())}

    def items(bound: int | None, of: dict[str, Any]) -> int:
        if bound is None:
            raise TypeError(f"{model.__name__}: a list without max_length")
        return _PREFIX + (length if bound == standard else bound) * size(of)

    def size(of: dict[str, Any]) -> int:
        match of:
            case {"type": "definitions", "schema": inner}:
                return size(inner)
            case {"type": "definition-ref", "schema_ref": name}:
                return size(definitions[name])
            case {"type": "model" | "nullable" | "default" | "function-after", "schema": inner}:
                return size(inner)
            case {"type": "model-fields", "fields": fields}:
                names = sum(_PREFIX + _PER_CHARACTER * len(name) for name in fields)
                return _PREFIX + names + sum(size(f["schema"]) for f in fields.values())
            case {"type": "int" | "float" | "bool" | "none"}:
                return _NUMBER
            case {"type": "str", "max_length": bound}:
                return _PREFIX + _PER_CHARACTER * int(bound)
            case {"type": "bytes", "max_length": bound}:
                return _PREFIX + int(bound)
            case {"type": "literal", "expected": known}:
                return _PREFIX + max(_PER_CHARACTER * len(str(k)) for k in known)
            case {"type": "enum", "members": known}:
                return _PREFIX + max(_PER_CHARACTER * len(k.value) for k in known)
            case {"type": "tuple", "variadic_item_index": 0, "items_schema": [item]}:
                return items(of.get("max_length"), item)
            case {"type": "tuple", "items_schema": of_items} if "variadic_item_index" not in of:
                return _PREFIX + sum(map(size, of_items))
        raise TypeError(f"{model.__name__}: a {of['type']} without a bound")

    return size(schema)
