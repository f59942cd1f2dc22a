"""Hostile values for every field of a message, found by its descriptor: nothing that is added later is forgotten."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

MANY = 1_100_000
"""More than the longest session of an emulated model."""
LONG = "\N{GREEK SMALL LETTER ALPHA}" * 600_000
LARGEST = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
}
"""Kinds of whole numbers that the contract has; another one is a KeyError here, and then a line more."""

Change = Callable[[Any], None]


def hostile(message: Descriptor, depth: int = 4) -> Iterator[tuple[str, Change]]:
    """(name, change) for each hostile value of each field, those of messages inside included; the change is made to a
    message that was good."""
    for field in message.fields:
        name = field.name
        if _map(field):
            yield f"{name}: many", lambda m, f=field: _fill_map(getattr(m, f.name), f)
            yield f"{name}: NaN", lambda m, f=name: getattr(m, f).update({1: math.nan})
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from _inside(field, depth)
        elif field.is_repeated:
            yield f"{name}: none", lambda m, f=name: m.ClearField(f)
            yield f"{name}: many", lambda m, f=field: _repeat(m, f.name, MANY, _scalars(f)[0][1])
            for label, value in _scalars(field):
                yield f"{name}: {label}", lambda m, f=name, v=value: _repeat(m, f, 2, v)
        else:
            for label, value in _scalars(field):
                yield f"{name}: {label}", lambda m, f=name, v=value: setattr(m, f, v)


def _inside(field: FieldDescriptor, depth: int) -> Iterator[tuple[str, Change]]:
    name, inner = field.name, field.message_type
    yield f"{name}: none", lambda m: m.ClearField(name)
    if field.is_repeated:
        yield f"{name}: many", lambda m: getattr(m, name).extend([inner._concrete_class()] * MANY)
    else:
        yield f"{name}: empty", lambda m: (m.ClearField(name), getattr(m, name).SetInParent())
    if depth:
        for label, change in hostile(inner, depth - 1):
            if field.is_repeated:
                yield f"{name}[].{label}", lambda m, c=change: c(getattr(m, name).add())
            else:
                yield f"{name}.{label}", lambda m, c=change: (getattr(m, name).SetInParent(), c(getattr(m, name)))


def _repeat(message: Message, name: str, count: int, value: Any) -> None:
    getattr(message, name)[:] = [value] * count


def _fill_map(entries: Any, field: FieldDescriptor) -> None:
    values = {FieldDescriptor.TYPE_DOUBLE: 0.5, FieldDescriptor.TYPE_UINT32: 1}
    value = values[field.message_type.fields_by_name["value"].type]
    entries.update(dict.fromkeys(range(MANY // 10), value))


def _scalars(field: FieldDescriptor) -> list[tuple[str, Any]]:
    kind = field.type
    if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return [(str(value), value) for value in (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-30, 1e30)]
    if kind == FieldDescriptor.TYPE_STRING:
        return [("empty", ""), ("long", LONG), ("control characters", "\0\r\n\x1b[2J")]
    if kind == FieldDescriptor.TYPE_BYTES:
        return [("empty", b""), ("long", b"\xff" * MANY)]
    if kind == FieldDescriptor.TYPE_BOOL:
        return [("true", True), ("false", False)]
    if kind == FieldDescriptor.TYPE_ENUM:
        return [("unknown", 99), ("negative", -1)]
    return [(str(value), value) for value in (0, 10**9, *LARGEST[kind])]


def _map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def messages(message: Descriptor, depth: int = 4) -> st.SearchStrategy[Any]:
    """Random messages: any fields set, to values that are likely to be at some edge."""
    return st.builds(_assembled(message), st.fixed_dictionaries({}, optional=_fields(message, depth)))


def _assembled(message: Descriptor) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: message._concrete_class(**fields)


def _fields(message: Descriptor, depth: int) -> dict[str, st.SearchStrategy[Any]]:
    found: dict[str, st.SearchStrategy[Any]] = {}
    for field in message.fields:
        if _map(field):
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            found[field.name] = st.dictionaries(_values(key), _values(value), max_size=3)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth:
                inner = messages(field.message_type, depth - 1)
                found[field.name] = st.lists(inner, max_size=3) if field.is_repeated else inner
        else:
            values = _values(field)
            found[field.name] = st.lists(values, max_size=8) if field.is_repeated else values
    return found


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.type
    if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return st.sampled_from([0.0, 0.5, 1.0]) | st.floats(width=32)
    if kind == FieldDescriptor.TYPE_STRING:
        return st.text(max_size=12)
    if kind == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=12)
    if kind == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.TYPE_ENUM:
        return st.integers(0, 6)
    low, high = LARGEST[kind]
    return st.integers(0, 12) | st.integers(low, high)
