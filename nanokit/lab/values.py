"""The six types a parameter may have: their names, their text in a cell, and reading them from a command
line.
"""

import difflib
import json
import math
from collections.abc import Iterable
from typing import Any

from nanokit.errors import ParameterError

TYPE_NAMES: dict[str, str] = {
    "int": "a whole number",
    "float": "a finite number",
    "str": "a text",
    "bool": "true or false",
    "list[int]": "a JSON list of whole numbers, [1, 3]",
    "list[str]": 'a JSON list of texts, ["a", "b"]',
}


def literal(value: Any) -> str:
    """The value as a Python literal with double quotes, one line: what the parameters cell holds."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(literal(item) for item in value)}]"
    return repr(value)


def type_name_of(value: Any) -> str | None:
    """The type name of a literal's value, None when it is none of the six (an empty list counts as
    list[int]).
    """
    if isinstance(value, list):
        members = {type(item) for item in value}
        return {frozenset({int}): "list[int]", frozenset({str}): "list[str]", frozenset(): "list[int]"}.get(
            frozenset(members)
        )
    name = type(value).__name__
    return name if name in TYPE_NAMES else None


def parse_value(name: str, type_name: str, text: str) -> Any:
    """Read text as type_name. Raises ParameterError naming the parameter when it is not of that type."""

    def refuse() -> ParameterError:
        return ParameterError(
            f"parameter {name!r} is not {TYPE_NAMES[type_name].split(',')[0]}",
            found=repr(text),
            needed=f"{type_name}: {TYPE_NAMES[type_name]}",
        )

    if type_name == "str":
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes of a command line that are no UTF-8 come as lone surrogates
            raise ParameterError(f"parameter {name!r} is not UTF-8", found=ascii(text), needed="UTF-8 text") from None
        return text
    if type_name == "bool":
        if text.lower() not in ("true", "false"):
            raise refuse()
        return text.lower() == "true"
    try:
        value = {"int": int, "float": float}.get(type_name, json.loads)(text)
    except ValueError as error:
        raise refuse() from error
    if type_name == "float" and not math.isfinite(value):
        raise refuse()
    if type_name.startswith("list"):
        member = int if type_name == "list[int]" else str
        if not isinstance(value, list) or any(type(item) is not member for item in value):
            raise refuse()
    return value


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a person most likely meant, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None
