"""What every panel has: controls, one figure, a status line, Run, Stop and Copy parameters.

Errors: ipywidgets swallows what a callback raises (nothing is shown in the notebook), so every failure ends
in the panel: its message, what to do, and `panel.error` for the traceback. Status is a value, not only a
text, because a headless test that clicks a button would otherwise pass whatever happened.

Readers: a front end with a kernel draws the widgets; GitHub, an unexecuted or an untrusted notebook gets
the PNG that is put beside them. The repr is short and the same in every run, since nbval compares it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Literal

import ipywidgets as widgets
import plotly.graph_objects as go

from nanokit.errors import NanokitError
from nanokit.lab import pictures
from nanokit.lab.controls import WIDTH, Controls, command, expression
from nanokit.lab.figurebox import FigureBox
from nanokit.lab.lock import BusyError, measuring
from nanokit.lab.params import Params, Value
from nanokit.lab.progress import StoppedError
from nanokit.lab.worker import Worker

Status = Literal["idle", "running", "done", "stopped", "busy", "error"]

SIGNS = {"idle": "○", "running": "▶", "done": "✓", "stopped": "■", "busy": "!", "error": "✗"}
ALARM = "border-left:3px solid #D55E00;padding-left:8px"


class PanelBase:
    """Subclasses say what a run is (`measure`) and may add widgets below the figure.

    status: idle, running, done, stopped, busy or error. result: of the last run that ended well. error: the
    exception of the last run that did not, None after a good one. figure: what is drawn now. message: the
    text of the status line.
    """

    def __init__(
        self,
        name: str,
        params: Params,
        first: go.Figure,
        *,
        notebook: str | None,
        interactive: bool,
        continuous: bool = False,
        hidden: Sequence[str] = (),
        below: tuple[widgets.Widget, ...] = (),
    ) -> None:
        self.status: Status = "idle"
        self.message = "Ready: set the parameters, then press Run."
        self.result: Any = None
        self.error: BaseException | None = None
        self.interactive = interactive
        self._going = False  # a run is under way, whatever the status line says at the moment
        self._name, self._notebook = name, notebook
        self._worker = Worker(self._run)
        self._box = FigureBox(first, interactive=interactive)
        self.controls = Controls(params, continuous=continuous, hidden=hidden)
        self._line = widgets.HTML()
        self._bar = widgets.FloatProgress(min=0, max=1, layout=widgets.Layout(width=WIDTH, height="16px"))
        self._command = widgets.HTML()
        self.run_button = _button("Run", "play", "Measure with these parameters", self.run, "primary")
        self.stop_button = _button("Stop", "stop", "End the run at its next step", self.stop)
        self.copy_button = _button("Copy parameters", "terminal", "The command that repeats this", self.copy)
        self.widget = self._arrange(below) if interactive else None
        self.controls.on_change(self._forget_command)
        self._tell("idle", self.message)

    # ------------------------------------------------------------------ what a person or a test does

    @property
    def params(self) -> Params:
        """The values of the controls, checked. Raises ParameterError."""
        return self.controls.params()

    @property
    def figure(self) -> go.Figure:
        return self._box.current

    @property
    def command(self) -> str:
        """What repeats the parameters now set: a shell line, or Python where no notebook takes them."""
        return expression(self.params) if self._notebook is None else command(self.params, self._notebook)

    def set(self, **values: Value) -> None:
        """Move controls from Python, as a person would. Raises ParameterError."""
        self.controls.set(**values)

    def run(self) -> None:
        """What Run does: start in the background, or queue behind the current run in place of what waits
        there.
        """
        try:
            params = self.params
        except NanokitError as error:
            self._fail(error)
            return
        if self._worker.running:  # said before it is submitted: afterwards it could cover "Done" for good
            self._tell("running", "The current run ends first; then these parameters are measured.")
        self._worker.submit(params)

    def stop(self) -> None:
        """What Stop does: the run ends at its next step; a waiting one is dropped."""
        self._worker.stop()

    def copy(self) -> None:
        """What Copy parameters does: show the command line, selected by one click."""
        try:
            line = self.command
        except NanokitError as error:
            self._fail(error)
            return
        text = escape(line).replace(" -p ", ' <span style="white-space:nowrap">-p</span> ')
        self._command.value = (
            '<code title="one click selects it" style="display:block;user-select:all;white-space:pre-wrap;'
            "overflow-wrap:anywhere;line-height:1.5;font-size:12px;padding:6px 8px;border-radius:4px;"
            f'background:rgba(127,127,127,.15)">{text}</code>'
        )

    def _forget_command(self) -> None:
        self._command.value = ""  # it would name other values than the controls beside it

    def wait(self, timeout: float | None = None) -> bool:
        """Block until no run is left; False when timeout (seconds) passed first."""
        return self._worker.wait(timeout)

    # ------------------------------------------------------------------ what a run is

    def measure(self, params: Params, cancel: threading.Event) -> str:
        """Do one run, set `result`, draw; returns what the status line says of it. Raises StoppedError when
        stopped.
        """
        raise NotImplementedError

    def run_headless(self, params: Params) -> None:
        """One run, here and now; errors are raised, so that an executed notebook fails where it should."""
        with measuring(self._name):
            self.message = self.measure(params, threading.Event())
        self.status = "done"

    def _run(self, params: Params, cancel: threading.Event) -> None:
        started = time.perf_counter()
        self._going = True
        try:
            with measuring(self._name):
                self._tell("running", "Running …")
                said = self.measure(params, cancel)
        except Exception as error:  # noqa: BLE001 - the top of a thread: shown in the panel, kept in panel.error
            self._going = False
            self._fail(error, time.perf_counter() - started)
        else:
            self._going = False
            self.error = None
            self._tell("done", f"{said} in {time.perf_counter() - started:.1f} s.")

    # ------------------------------------------------------------------ what it looks like

    after_stop = ""  # what the status line adds when a run was stopped

    def draw(self, fig: go.Figure) -> None:
        """Replace the figure; callable from the worker."""
        self._box.show(fig)

    def report(self, done: int, total: int, text: str) -> None:
        """Progress of the current run, for `CallbackProgress`."""
        doing = f": {text}" if text and done < total else ""
        self._tell("running", f"Running {min(done + 1, total)} of {total}{doing} …", share=done / max(total, 1))

    def _fail(self, error: BaseException, seconds: float | None = None) -> None:
        self.error = error
        if isinstance(error, StoppedError):
            self._tell("stopped", f"Stopped after {seconds or 0:.1f} s.{self.after_stop}")
        elif isinstance(error, BusyError):
            self._tell("busy", str(error))
        elif isinstance(error, NanokitError):
            self._tell("error", str(error))
        else:
            kind = type(error).__name__
            self._tell("error", f"{kind}: {error}\n  do: `raise panel.error` in a cell shows the traceback")

    def _tell(self, status: Status, message: str, share: float | None = None) -> None:
        """State, text and buttons in one place, so that they never contradict each other."""
        self.status, self.message = status, message
        alarm = ALARM if status in ("error", "busy") else ""
        self._line.value = (
            f'<div role="status" style="line-height:1.4;white-space:pre-wrap;overflow-wrap:anywhere;{alarm}">'
            f"<b>{SIGNS[status]}</b> {escape(message)}</div>"
        )
        self._bar.value = share or 0.0
        self._bar.layout.visibility = "hidden" if share is None else "visible"
        self.stop_button.disabled = not self._going

    def _arrange(self, below: tuple[widgets.Widget, ...]) -> widgets.Widget:
        """Controls left, figure right; the figure wraps below the controls where the page is narrow."""
        buttons = widgets.HBox([self.run_button, self.stop_button, self.copy_button])
        left = widgets.VBox(
            [self.controls.widget, buttons, self._bar, self._line, self._command],
            layout=widgets.Layout(width="332px", flex="0 0 auto", padding="8px 12px 8px 0"),
        )
        right = widgets.VBox([self._box.widget, *below], layout=widgets.Layout(flex="0 0 auto"))
        return widgets.HBox([left, right], layout=widgets.Layout(flex_flow="row wrap", align_items="flex-start"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}: {', '.join(self.controls.by_name)})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        data, metadata = pictures.bundle(self.figure)
        if self.widget is not None:
            del data[pictures.PLOTLY_MIME]  # a front end would show it in place of the widgets
            data |= self.widget._repr_mimebundle_()
        return {**data, "text/plain": repr(self)}, metadata


def _button(text: str, icon: str, tooltip: str, action: Callable[[], None], style: str = "") -> widgets.Button:
    width = {"Run": "76px", "Stop": "76px"}.get(text, "158px")
    button = widgets.Button(
        description=text, icon=icon, tooltip=tooltip, button_style=style, layout=widgets.Layout(width=width)
    )
    button.on_click(lambda _button: action())
    return button
