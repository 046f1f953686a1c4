"""Frozen settings whose mistakes are `ParameterError`s.

pydantic checks types and ranges and refuses unknown names, but reports all of it as its own ValidationError,
several lines a field. The decorator here keeps pydantic's checks and speaks the kit's language instead.
Rejected: checking by hand in `__post_init__` (every range written twice, once for the check and once for the
documentation).
"""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from nanokit.errors import ParameterError

Class = TypeVar("Class", bound=type)


def _parameter_error(cls: type, error: ValidationError) -> ParameterError:
    complaints = error.errors()
    first = complaints[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ParameterError):  # raised by the class's own __post_init__
        return cause
    name = ".".join(str(part) for part in first["loc"])
    names = [field.name for field in fields(cls)]
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    if first["type"] == "unexpected_keyword_argument":
        return ParameterError(
            f"{cls.__name__} has no parameter {name}{more}",
            found=f"{name}={first['input']!r}",
            needed=f"one of {', '.join(names)}",
        )
    return ParameterError(
        f"{cls.__name__}: {name} cannot be {first['input']!r}{more}",
        found=repr(first["input"]),
        needed=first["msg"],
    )


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: Class) -> Class:
    """Make `cls` a frozen, keyword-only pydantic dataclass that raises ParameterError for any wrong
    argument."""
    checked: Any = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))(cls)
    initialize: Callable[..., None] = checked.__init__

    @wraps(initialize)
    def checked_init(self: Any, **values: Any) -> None:
        try:
            initialize(self, **values)
        except ValidationError as error:
            raise _parameter_error(checked, error) from None

    checked.__init__ = checked_init
    return checked
