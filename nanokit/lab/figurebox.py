"""One live figure that is redrawn in place.

A panel owns exactly one FigureWidget and changes its traces and layout: a widget per redraw would send
megabytes of JavaScript each time, and plotly 7.1's `update_display_data` draws a second figure instead of replacing
the first. Headless, no widget is made at all; the current figure is then shown as a static one.
"""

from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from nanokit.lab import pictures


class FigureBox:
    """current: the figure shown. widget: what holds it in a front end, None when headless."""

    def __init__(self, first: go.Figure, *, interactive: bool) -> None:
        self.current = first
        self._live: go.FigureWidget | None = None
        self.widget: widgets.Widget | None = None
        if interactive:
            self._live = go.FigureWidget(first)
            self._live._config = {"displaylogo": False, "displayModeBar": "hover"}
            # FigureWidget.layout is the figure's: the size in the page is that of a box around it.
            width, _ = pictures.size(first)
            self.widget = widgets.Box([self._live], layout=widgets.Layout(width=f"{width + 8}px", flex="0 0 auto"))

    def show(self, fig: go.Figure) -> None:
        """Draw fig in place of the current one. Callable from any thread, one at a time."""
        self.current = fig
        live = self._live
        if live is None:
            return
        if [trace.type for trace in live.data] != [trace.type for trace in fig.data]:
            live.data = ()
            live.add_traces(fig.data)
        old, new = live.to_dict(), fig.to_dict()
        with live.batch_update():
            for trace, was, becomes in zip(live.data, old["data"], new["data"], strict=True):
                _replace(trace, was, becomes, keep={"uid", "type"})
            _replace(live.layout, old["layout"], new["layout"], keep=set())
        live._repr_mimebundle_()  # only here does plotly renew the state that a reloaded page is drawn from


def _replace(target: Any, old: dict[str, Any], new: dict[str, Any], *, keep: set[str]) -> None:
    """Set what differs, clear what is gone: one small message, and no leftovers of the figure before."""
    for key in (old.keys() | new.keys()) - keep:
        if old.get(key) != new.get(key):
            target[key] = new.get(key)
