"""Parameters of an experiment: one frozen dataclass is the source of the cell, the widgets, the command line
and the docs.

    @experiment_params
    class DecodeParams(Params):
        tokens: int = knob(0, "tokens to generate", low=1, high=512,
                           by_preset={"smoke": 8, "quick": 32, "full": 128})
        temperature: float = knob(0.0, "randomness", low=0.0, high=2.0, step=0.1)

The notebook's cell tagged `parameters` holds `DecodeParams.parameter_lines()`; the next cell says `p =
DecodeParams.from_notebook(globals())`. Every way in (cell, strings of a command line, keyword arguments) ends
in the same checks and the same `ParameterError`, which names the parameter, what was found and what is
allowed.

A knob whose size depends on the preset has an empty default (0, 0.0, "" or []: "as the preset says") and
`by_preset`; it is resolved at construction, so a record always shows what was really used.

Types are int, float, str, bool, list[int] and list[str], because papermill's line parser understands no
unions and no `Literal`, and because a command line must be able to say each of them. pydantic checks the
types strictly (a `True` is no int, a 7 is no str: papermill turns `-p name 007` into one); ranges and choices
are checked here, since pydantic's `Field(ge=...)` would report them without unit or preset. Its own
ValidationError was rejected as the face of a failure: it names its schema, not what a person may type.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform, get_args, get_type_hints

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from nanokit.errors import ParameterError
from nanokit.lab.values import TYPE_NAMES, closest, literal, type_name_of

PRESETS = ("smoke", "quick", "full")

Value = int | float | str | bool | list[int] | list[str]


@dataclass(frozen=True)
class Knob:
    """What is known of one parameter: for its check, its widget, its line in the cell and its help.

    type_name: one of `values.TYPE_NAMES`. default: as written in the cell. unit: "" for none. low, high:
    inclusive, for numbers and for each number of a list. step: of a slider only. choices: allowed values (of
    a list: of its members). by_preset: the value that an empty one stands for; keys are `PRESETS`.
    """

    name: str
    type_name: str
    default: Value
    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    step: float | None = None
    choices: tuple[int | float | str, ...] = ()
    by_preset: Mapping[str, Value] = dataclasses.field(default_factory=dict)

    @property
    def allowed(self) -> str:
        """The range or the choices in words, "" when anything of the type goes."""
        if self.choices:
            return " | ".join(str(choice) for choice in self.choices)
        unit = f" {self.unit}" if self.unit else ""
        if self.low is not None and self.high is not None:
            return f"{_bound(self.low)} to {_bound(self.high)}{unit}"
        if self.low is not None:
            return f"at least {_bound(self.low)}{unit}"
        return f"at most {_bound(self.high)}{unit}" if self.high is not None else self.unit

    @property
    def comment(self) -> str:
        """Help, range with unit, and what an empty value stands for: the comment of the line in the cell."""
        parts = [self.help, self.allowed]
        if self.by_preset:
            sizes = ", ".join(f"{preset} {self.by_preset[preset]}" for preset in PRESETS)
            parts.append(f"{literal(self.default)} as the preset says ({sizes})")
        return "; ".join(part for part in parts if part)

    def check(self, value: Value) -> None:
        """Raise ParameterError when value (already of the right type) is outside the range or the choices."""
        for item in value if isinstance(value, list) else [value]:
            outside = (
                item not in self.choices
                if self.choices
                else isinstance(item, int | float)
                and (
                    not math.isfinite(item)
                    or (self.low is not None and item < self.low)
                    or (self.high is not None and item > self.high)
                )
            )
            if outside:
                raise ParameterError(
                    f"parameter {self.name!r} ({self.help}) is out of range",
                    found=repr(item),
                    needed=self.allowed or "a finite number",
                )


def _bound(value: float) -> str:
    """A bound in full: %g makes 2147483647 of 31 bits into 2.14748e+09."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def knob(
    default: Any,
    help: str,  # noqa: A002 - the word that argparse and papermill use for it
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    choices: tuple[Any, ...] = (),
    by_preset: Mapping[str, Any] | None = None,
) -> Any:
    """A field of a Params dataclass; the arguments are those of `Knob`. Checked when the class is made."""
    facts = {
        "default": default,
        "help": help,
        "unit": unit,
        "low": low,
        "high": high,
        "step": step,
        "choices": choices,
        "by_preset": dict(by_preset or {}),
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"knob": facts})
    return dataclasses.field(default=default, metadata={"knob": facts})


def unknown_parameter(name: str, known: Iterable[str], where: str = "") -> ParameterError:
    """The error for a name that is none of the known ones, with the closest of them."""
    names = list(known)
    return ParameterError(
        f"unknown parameter {name!r}{where}",
        found=name,
        needed=f"one of {', '.join(names)}" if names else "no parameters: there are none",
        do=f"did you mean {best!r}?" if (best := closest(name, names)) else None,
    )


Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(knob,))
def experiment_params(cls: Class) -> Class:
    """Make cls a frozen, keyword-only, strictly checked dataclass and fill its `KNOBS`.

    Raises TypeError, at import, when a knob contradicts itself: a programmer's error, not a user's.
    """
    strict = ConfigDict(strict=True, extra="forbid")
    made: Any = pydantic_dataclass(frozen=True, kw_only=True, config=strict)(cls)
    hints = get_type_hints(made)
    knobs = {}
    for field in dataclasses.fields(made):
        if "knob" not in field.metadata:
            raise TypeError(f"{cls.__name__}.{field.name}: declare it with knob(...)")
        type_name = _type_name(hints[field.name])
        knobs[field.name] = Knob(name=field.name, type_name=type_name, **field.metadata["knob"])
        if problem := _contradiction(knobs[field.name]):
            raise TypeError(f"{cls.__name__}.{field.name}: {problem}")
    made.KNOBS = knobs
    check_types = made.__init__

    def checked_init(self: Any, **values: Any) -> None:
        try:
            check_types(self, **values)
        except ValidationError as error:
            raise _explained(error, self.KNOBS) from None
        for knob_ in self.KNOBS.values():
            if knob_.by_preset and not getattr(self, knob_.name) and self.preset in PRESETS:
                object.__setattr__(self, knob_.name, knob_.by_preset[self.preset])
        for knob_ in self.KNOBS.values():
            knob_.check(getattr(self, knob_.name))
        self.check()

    made.__init__ = checked_init
    return made


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _contradiction(knob_: Knob) -> str | None:
    """What is wrong with the declaration, or None. `=` and `#` in a line would blind papermill's parser."""
    if knob_.type_name not in TYPE_NAMES:
        return f"type {knob_.type_name}; allowed are {', '.join(TYPE_NAMES)}"
    if knob_.by_preset and (set(knob_.by_preset) != set(PRESETS) or knob_.default):
        return f"by_preset needs an empty default and the keys {', '.join(PRESETS)}"
    line = f"{literal(knob_.default)} {knob_.comment}"
    if not knob_.help or any(sign in line for sign in "#=\n"):
        return "help is needed, and neither help nor default may hold `#`, `=` or a line break"
    for value in [knob_.default, *knob_.by_preset.values()]:
        if value != [] and type_name_of(value) != knob_.type_name:
            return f"{value!r} is not of type {knob_.type_name}"
    for value in knob_.by_preset.values() or [knob_.default]:
        try:
            knob_.check(value)
        except ParameterError as error:
            return str(error)
    return None


def _explained(error: ValidationError, knobs: Mapping[str, Knob]) -> ParameterError:
    """pydantic's first complaint as one of ours."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    if name not in knobs:
        return unknown_parameter(name, knobs)
    knob_ = knobs[name]
    return ParameterError(
        f"parameter {name!r} ({knob_.help}) has the wrong type",
        found=f"{first['input']!r} ({type(first['input']).__name__})",
        needed=f"{knob_.type_name}: {TYPE_NAMES[knob_.type_name]}" + (f", {knob_.allowed}" if knob_.allowed else ""),
    )


@experiment_params
class Params:
    """Base of all parameter dataclasses: decorate a subclass with `experiment_params`."""

    KNOBS: ClassVar[Mapping[str, Knob]] = {}

    preset: str = knob("quick", "size of the experiment", choices=PRESETS)

    def check(self) -> None:
        """Override to compare parameters with each other; raise ParameterError. Presets are resolved by then."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Typed values by name. Raises ParameterError for an unknown name, a wrong type, a value out of
        range.
        """
        return cls(**values)

    @classmethod
    def from_notebook(cls, namespace: Mapping[str, Any]) -> Self:
        """Take the parameters out of a notebook's `globals()`; every other name there is left alone."""
        return cls(**{name: namespace[name] for name in cls.KNOBS if name in namespace})

    @classmethod
    def parameter_lines(cls) -> str:
        """The text of the notebook's parameters cell: `name: type = default  # help; range; presets`."""
        return "\n".join(f"{k.name}: {k.type_name} = {literal(k.default)}  # {k.comment}" for k in cls.KNOBS.values())

    def to_dict(self) -> dict[str, Value]:
        """Name -> value, presets resolved, in the order of the fields; lists are copies."""
        values = {name: getattr(self, name) for name in self.KNOBS}
        return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}
