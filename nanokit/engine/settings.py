"""Frozen settings, and functions of many options, whose mistakes are `ParameterError`s.

pydantic checks types and ranges and refuses unknown names, but reports all of it as its own ValidationError,
several lines a field. The decorators here keep pydantic's checks and speak the kit's language instead.
Rejected: checking by hand in `__post_init__` (every range written twice, once for the check and once for the
documentation).
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar, dataclass_transform

from pydantic import ConfigDict, ValidationError, validate_call
from pydantic.dataclasses import dataclass

from nanokit.errors import ParameterError

Class = TypeVar("Class", bound=type)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _parameter_error(owner: str, names: Iterable[str], error: ValidationError) -> ParameterError:
    complaints = error.errors()
    first = complaints[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ParameterError):  # raised by the class's own __post_init__
        return cause
    name = str(first["loc"][0])  # what follows is the place in a list, or the type tried of several
    wrong = {complaint["loc"][0] for complaint in complaints}
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    if first["type"] == "unexpected_keyword_argument":
        return ParameterError(
            f"{owner} has no parameter {name}{more}",
            found=f"{name}={first['input']!r}",
            needed=f"one of {', '.join(names)}",
        )
    return ParameterError(
        f"{owner}: {name} cannot be {first['input']!r}{more}",
        found=repr(first["input"]),
        needed=first["msg"].removeprefix("Input should be "),
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
            raise _parameter_error(checked.__name__, (field.name for field in fields(checked)), error) from None

    checked.__init__ = checked_init
    return checked


def checked_call(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make `function` raise ParameterError for an argument that is unknown or not of its annotated type."""
    validated = validate_call(function)

    @wraps(function)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        try:
            return validated(*args, **options)
        except ValidationError as error:
            raise _parameter_error(function.__name__, signature(function).parameters, error) from None

    return checked
