"""An experiment with sliders: the same function that a cell, a test and the command line call.

    p = TourParams.from_notebook(globals())
    result = lab.tour(p)
    Panel(lab.tour, p, plots.tour, result=result, notebook="tour")

Anything that touches a model runs on Run only, in the panel's worker thread and under the measurement lock.
Cheap arithmetic may be `live`: it redraws while a slider moves. Headless (`nanokit run`, pytest, nbval) a
panel is the experiment's static figure: no widget, one run with p unless `result` says that it has been
done.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import plotly.graph_objects as go

from nanokit.errors import NanokitError
from nanokit.lab import plots
from nanokit.lab.panelbase import PanelBase
from nanokit.lab.params import Params
from nanokit.lab.progress import CallbackProgress, Progress
from nanokit.lab.result import Result
from nanokit.lab.unattended import headless


class Experiment(Protocol):
    """Pure: no display, no globals; reports to `progress`, raises StoppedError soon after `cancel` is set."""

    @property
    def __name__(self) -> str: ...

    def __call__(
        self, p: Any, /, *, progress: Progress | None = None, cancel: threading.Event | None = None
    ) -> Result: ...


class Panel(PanelBase):
    """One experiment with its controls, figure, status, Run, Stop and Copy parameters; see PanelBase."""

    def __init__(
        self,
        experiment: Experiment,
        params: Params,
        plot: Callable[[Any], go.Figure],
        *,
        result: Result | None = None,
        live: Callable[[Any], go.Figure] | None = None,
        notebook: str | None = None,
        hidden: Sequence[str] = (),
        interactive: bool | None = None,
    ) -> None:
        """experiment, params, plot: `plot(experiment(params))` is the figure. result: of params, when a
        cell has it.

        live: arithmetic on params that redraws the figure while a slider moves. hidden: parameters without
        a control. notebook: which one Copy parameters names; None copies Python. interactive: None = widgets
        unless `headless()`. Headless, an error of the experiment is raised.
        """
        interactive = not headless() if interactive is None else interactive
        self.after_stop = " The figure is of the run before." if result is not None else ""
        self._experiment, self._plot, self._live = experiment, plot, live
        super().__init__(
            experiment.__name__,
            params,
            _first_figure(params, plot, result, live),
            notebook=notebook,
            interactive=interactive,
            continuous=live is not None,
            hidden=hidden,
        )
        self.result = result
        if interactive and live is not None:
            self.controls.on_change(self._preview)
        if not interactive and result is None:
            self.run_headless(params)

    def measure(self, params: Params, cancel: threading.Event) -> str:
        self.result = self._experiment(params, progress=CallbackProgress(self.report), cancel=cancel)
        self.draw(self._plot(self.result))
        self.after_stop = " The figure is of the run before."
        return "Done"

    def _preview(self) -> None:
        """A slider has moved: redraw what costs nothing. While a run is going its own figure comes next
        anyway.
        """
        assert self._live is not None
        if self._going:
            return
        try:
            self.draw(self._live(self.params))
        except NanokitError as error:
            self._fail(error)


def _first_figure(
    params: Params,
    plot: Callable[[Any], go.Figure],
    result: Result | None,
    live: Callable[[Any], go.Figure] | None,
) -> go.Figure:
    if result is not None:
        return plot(result)
    if live is not None:
        return live(params)
    empty = plots.figure("Press Run to measure")
    empty.update_xaxes(visible=False)
    empty.update_yaxes(visible=False)
    return empty
