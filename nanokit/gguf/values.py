"""One value of the metadata, a number, a text or an array of them, and as what it is stored.

A length is compared with the bytes that are left before anything is made from it; arrays of arrays are refused, as ggml
does.
"""

import struct
from typing import Any, NamedTuple

import numpy as np

from nanokit.gguf import types
from nanokit.gguf.cursor import U32, U64, Cursor


class ValueKind(NamedTuple):
    """As what the file stores a value: "UINT32", "STRING", …; element: of an array, "" otherwise."""

    type: str
    element: str = ""


def read_value(cursor: Cursor, what: str) -> tuple[Any, ValueKind]:
    """The value that begins here, with its type before it; `what` it is, for messages."""
    type_id: int = cursor.number(U32, f"the type of {what}")
    if type_id == types.STRING:
        return cursor.string(what), ValueKind("STRING")
    if type_id == types.ARRAY:
        return _read_array(cursor, what)
    if type_id not in types.SCALARS:
        cursor.fail(f"{what} has an unknown type", found=type_id, needed="0 to 12, as GGUF numbers them")
    name, layout = types.SCALARS[type_id]
    value = cursor.number(layout, what)
    return _as_bool(cursor, what, value) if type_id == types.BOOL else value, ValueKind(name)


def _as_bool(cursor: Cursor, what: str, value: int) -> bool:
    if value > 1:
        cursor.fail(f"{what} is no truth value", found=value, needed="0 or 1")
    return value == 1


def _read_array(cursor: Cursor, what: str) -> tuple[list[Any], ValueKind]:
    """A list of Python values; an empty one is allowed."""
    type_id: int = cursor.number(U32, f"the element type of {what}")
    if type_id != types.STRING and type_id not in types.SCALARS:
        name = types.VALUE_NAMES.get(type_id, f"type {type_id}")
        cursor.fail(f"{what} is an array of {name}", found=name, needed="numbers, truth values or strings")
    kind = ValueKind("ARRAY", types.VALUE_NAMES[type_id])
    n: int = cursor.number(U64, f"the length of {what}")
    least = U64.size if type_id == types.STRING else types.SCALARS[type_id][1].size
    if n * least > cursor.size - cursor.at:
        cursor.fail(
            f"the array of {what} reaches past the end of the file",
            found=f"{cursor.size - cursor.at} bytes left of a file of {cursor.size}",
            needed=f"at least {n * least} bytes for {n} elements",
        )
    cursor.elements_left -= n
    if cursor.elements_left < 0:
        cursor.fail(
            f"{what} is too long",
            found=f"{n} elements",
            needed=f"{types.MAX_ELEMENTS} in all arrays together",
        )
    if type_id == types.STRING:
        return _read_strings(cursor, what, n), kind
    begin = cursor.need(n * least, what)
    values: list[Any] = np.frombuffer(cursor.mapped, types.SCALARS[type_id][1].format, n, begin).tolist()
    return [_as_bool(cursor, what, value) for value in values] if type_id == types.BOOL else values, kind


def _read_strings(cursor: Cursor, what: str, n: int) -> list[str]:
    """The vocabulary's loop: `cursor.string` unrolled, as hundreds of thousands of calls would cost."""
    mapped, size, at, length_at = cursor.mapped, cursor.size, cursor.at, U64.unpack_from
    strings: list[str] = []
    add = strings.append
    try:
        for _ in range(n):
            begin = at + 8
            end = begin + length_at(mapped, at)[0]
            if end > size:
                break
            add(str(mapped[begin:end], "utf-8"))
            at = end
    except (struct.error, UnicodeDecodeError):
        pass  # read once more below, which says what is wrong and where
    cursor.at = at
    while len(strings) < n:
        strings.append(cursor.string(f"element {len(strings)} of {what}"))
    return strings
