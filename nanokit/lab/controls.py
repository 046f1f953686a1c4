"""Widgets for the parameters of an experiment, made from the dataclass that also checks them.

A number with both ends becomes a slider, choices a dropdown, a bool a checkbox, anything else a text; a
list is typed as JSON, as on the command line. The range lives in the dataclass alone: what a widget cannot
hold back (a slider set from Python does not snap to its step) is refused by `Params` when the values are
read.
"""

import json
import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from nanokit.lab.params import Knob, Params, Value, unknown_parameter
from nanokit.lab.values import parse_value

WIDTH = "316px"


class Controls:
    """One widget a parameter, in the order of the fields.

    widget: all of them, as a column. by_name: each, for tests and for keyboard focus. A change of `preset`
    moves the parameters that depend on it to the preset's sizes.
    """

    def __init__(self, params: Params, *, continuous: bool = False, hidden: Sequence[str] = ()) -> None:
        """params: first values. continuous: report while a slider is dragged (cheap live previews only).

        hidden: names that keep their values and are not shown. Raises ParameterError for an unknown one.
        """
        self._class = type(params)
        knobs = self._class.KNOBS
        labels = max((len(_label(knob)) for name, knob in knobs.items() if name not in hidden), default=0)
        style = {"description_width": f"{min(20 + 7 * labels, 150)}px"}
        layout = widgets.Layout(width=WIDTH)
        self.by_name: dict[str, Any] = {
            name: _widget(knob, getattr(params, name), continuous, style, layout) for name, knob in knobs.items()
        }
        for name in hidden:
            if name not in self.by_name:
                raise unknown_parameter(name, self.by_name)
        shown = [widget for name, widget in self.by_name.items() if name not in hidden]
        self.widget = widgets.VBox(shown, layout=widgets.Layout(overflow="hidden"))
        self.by_name["preset"].observe(self._take_preset, names="value")

    def params(self) -> Params:
        """The values now, checked. Raises ParameterError, as any other way in does."""
        values = {name: self._read(name) for name in self.by_name}
        return self._class.from_mapping(values)

    def set(self, **values: Value) -> None:
        """Move widgets from Python. Raises ParameterError for an unknown name or a value out of range."""
        for name, value in values.items():
            if name not in self.by_name:
                raise unknown_parameter(name, self.by_name)
            self._class.KNOBS[name].check(value)
            self.by_name[name].value = json.dumps(value) if isinstance(value, list) else value

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back after any value has changed."""
        for widget in self.by_name.values():
            widget.observe(lambda _change: callback(), names="value")

    def _read(self, name: str) -> Value:
        knob, value = self._class.KNOBS[name], self.by_name[name].value
        if knob.type_name.startswith("list"):
            parsed: Value = parse_value(name, knob.type_name, value)
            return parsed
        if knob.type_name == "float":
            return round(float(value), 9)  # a browser's 0.1 * 3 is 0.30000000000000004
        return value

    def _take_preset(self, change: Any) -> None:
        for name, knob in self._class.KNOBS.items():
            if knob.by_preset:
                self.set(**{name: knob.by_preset[change["new"]]})


def command(params: Params, notebook: str) -> str:
    """The shell line that repeats these parameters: `nanokit run NOTEBOOK -p name=value ...`, defaults left
    out.
    """
    words = ["nanokit", "run", notebook]
    for name, value in _unusual(params).items():
        words += ["-p", f"{name}={_argument(value)}"]
    return shlex.join(words)


def expression(params: Params) -> str:
    """The Python expression that makes these parameters, defaults left out."""
    return f"{type(params).__name__}({', '.join(f'{name}={value!r}' for name, value in _unusual(params).items())})"


def _unusual(params: Params) -> dict[str, Value]:
    usual = type(params)(preset=params.preset).to_dict() | {"preset": "quick"}
    return {name: value for name, value in params.to_dict().items() if value != usual[name]}


def _argument(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else str(value)


def _label(knob: Knob) -> str:
    name = knob.name.replace("_", " ")
    return f"{name} ({knob.unit})" if knob.unit and knob.unit not in name else name


def _widget(
    knob: Knob, value: Value, continuous: bool, style: dict[str, str], layout: widgets.Layout
) -> widgets.Widget:
    common: dict[str, Any] = {
        "description": _label(knob),
        "tooltip": knob.comment,
        "style": style,
        "layout": layout,
    }
    if knob.type_name.startswith("list"):
        return widgets.Text(value=json.dumps(value), continuous_update=False, **common)
    if knob.choices:
        return widgets.Dropdown(options=list(knob.choices), value=value, **common)
    if knob.type_name == "bool":
        return widgets.Checkbox(value=value, indent=True, **common)
    if knob.low is not None and knob.high is not None:
        if knob.type_name == "int":
            step, shown = float(int(knob.step or 1)), "d"
        else:
            step = knob.step or (knob.high - knob.low) / 100
            shown = f".{max(0, math.ceil(-math.log10(step)))}f"
        number = int if knob.type_name == "int" else float
        slider = widgets.IntSlider if knob.type_name == "int" else widgets.FloatSlider
        return slider(
            value=value,
            min=number(knob.low),
            max=number(knob.high),
            step=number(step),
            readout_format=shown,
            continuous_update=continuous,
            **common,
        )
    if knob.type_name in ("int", "float"):
        kind = widgets.IntText if knob.type_name == "int" else widgets.FloatText
        return kind(value=value, continuous_update=False, **common)
    return widgets.Text(value=value, continuous_update=False, **common)
