"""A panel whose parameters change between the steps of a running generation, with tok/s drawn as it goes.

    LivePanel(stepper, p, "tour")

The stepper is the engine's side: `start` yields what each step produced, `update` changes the running
generation. Both are called by the panel's one worker thread only, `update` always between two steps, so a
stepper needs no lock and a change takes effect at a known token. Updating straight from the slider's
callback was rejected: that is another thread, in the middle of a step.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Protocol

import ipywidgets as widgets
import plotly.graph_objects as go

from nanokit.errors import NanokitError
from nanokit.lab import plots
from nanokit.lab.panelbase import PanelBase
from nanokit.lab.params import Params, Value
from nanokit.lab.progress import StoppedError
from nanokit.lab.unattended import headless

REDRAW_S = 0.2  # at most five redraws a second: more costs the model time and the eye gains nothing
ROWS = 4  # marks whose labels may stand one below the other
WINDOW_S = 1.0  # tok/s is taken over the last second: one step's time jumps too much to read


@dataclass(frozen=True)
class Event:
    """What one step produced. text: new characters, may be "". tokens: how many new tokens."""

    text: str
    tokens: int = 1


class Stepper(Protocol):
    """A generation that is advanced by iterating and steered between two steps.

    steers: the parameters that a running generation takes; a change of any other waits for the next run.
    """

    @property
    def steers(self) -> frozenset[str]: ...

    def start(self, params: Any) -> Iterator[Event]:
        """Begin; each `next` is one step. Closing the iterator ends the generation."""

    def update(self, params: Any) -> None:
        """Change the running generation from its next step on."""


@dataclass
class LiveRun:
    """What a run has shown so far.

    speed: (seconds since Run, tok/s over the last second), the points of the figure. changes: (seconds
    since Run, what changed), one entry a change. first_s: seconds to the first token, None before it.
    """

    params: Params
    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    first_s: float | None = None
    speed: list[tuple[float, float]] = field(default_factory=list)
    changes: list[tuple[float, dict[str, Value]]] = field(default_factory=list)


class LivePanel(PanelBase):
    """Sliders that steer a running generation, its text as it grows, tok/s over time. `result` is a LiveRun.

    Headless it runs once to the end with the given parameters and shows the static figure.
    """

    def __init__(
        self,
        stepper: Stepper,
        params: Params,
        name: str,
        *,
        hidden: Sequence[str] = (),
        interactive: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """name: what the measurement lock calls the run. hidden: parameters without a control. interactive:
        None = widgets unless `headless()`.
        """
        interactive = not headless() if interactive is None else interactive
        self._stepper, self._clock = stepper, clock
        self._moved = threading.Event()
        self._text = widgets.HTML(layout=widgets.Layout(width=f"{plots.WIDTH}px"))
        super().__init__(
            name,
            params,
            speed_figure(LiveRun(params)),
            notebook=None,
            interactive=interactive,
            hidden=hidden,
            below=(self._text,),
        )
        self.controls.on_change(self._moved.set)  # on whatever thread the front end uses: says so, no more
        if not interactive:
            self.run_headless(params)

    def measure(self, params: Params, cancel: threading.Event) -> str:
        """Iterate the stepper to its end, to Stop or to an error; draws what there is in each case."""
        if self.interactive:
            self._moved.set()  # a run that waited in the queue starts from the controls as they are by now
        run = self.result = LiveRun(params)
        started = drawn = self._clock()
        window: deque[tuple[float, int]] = deque()
        steps = self._stepper.start(params)
        try:
            for event in steps:
                run.seconds = self._clock() - started
                _count(run, event, window)
                if self._clock() - drawn >= REDRAW_S:
                    drawn = self._clock()
                    _add_speed(run, window)
                    self._show(run)
                if cancel.is_set():
                    raise StoppedError("the generation was stopped")
                self._apply_updates(run)
        finally:
            close = getattr(steps, "close", None)  # a generator's; a plain iterator has nothing to end
            if close is not None:
                close()
            _add_speed(run, window)
            self._show(run)
        return f"{run.tokens} tokens"

    def _apply_updates(self, run: LiveRun) -> None:
        """Between two steps: what the controls say now, if one has moved."""
        if not self._moved.is_set():
            return
        self._moved.clear()  # before the controls are read, so that a later move is not lost
        try:
            newest = self.params
        except NanokitError as error:
            self._fail(error)
            return
        before, after = run.params.to_dict(), newest.to_dict()
        changed = {name: after[name] for name in after if after[name] != before[name] and name in self._stepper.steers}
        if changed:
            run.params = newest.from_mapping({**before, **changed})
            self._stepper.update(run.params)
            run.changes.append((run.seconds, changed))

    def _show(self, run: LiveRun) -> None:
        self._tell("running", f"Running: {run.tokens} tokens …")
        self.draw(speed_figure(run))
        # A reversed column keeps the newest line in view without a script.
        self._text.value = (
            '<div style="display:flex;flex-direction:column-reverse;max-height:220px;overflow-y:auto;'
            'border-left:3px solid rgba(127,127,127,.5);padding:2px 12px;margin-top:6px">'
            f'<div role="log" style="white-space:pre-wrap;line-height:1.5">{escape(run.text)}</div></div>'
        )


def _count(run: LiveRun, event: Event, window: deque[tuple[float, int]]) -> None:
    run.text += event.text
    run.tokens += event.tokens
    if run.first_s is None and event.tokens:
        run.first_s = run.seconds
    window.append((run.seconds, event.tokens))
    while len(window) > 2 and run.seconds - window[0][0] > WINDOW_S:
        window.popleft()


def _add_speed(run: LiveRun, window: deque[tuple[float, int]]) -> None:
    """Tokens after the oldest event of the window, over the time since it: n intervals, not n + 1 points."""
    if len(window) < 2 or window[-1][0] == window[0][0]:
        return
    tokens = sum(count for _, count in window) - window[0][1]
    point = (round(window[-1][0], 3), round(tokens / (window[-1][0] - window[0][0]), 2))
    if not run.speed or run.speed[-1][0] < point[0]:
        run.speed.append(point)


def speed_figure(run: LiveRun) -> go.Figure:
    """tok/s over the seconds since Run, a dashed line where a parameter changed."""
    now = f"{run.speed[-1][1]:.1f} tok/s" if run.speed else "no token yet"
    fig = plots.lines(
        f"Speed of the running generation: {now}",
        {"decode": ([t for t, _ in run.speed], [speed for _, speed in run.speed])},
        x="time since Run (s)",
        y="speed (tok/s, last second)",
        summary=f"Decoding speed over time, {run.tokens} tokens in {run.seconds:.1f} s, now {now}.",
    )
    fig.update_xaxes(rangemode="tozero", visible=bool(run.speed))
    fig.update_yaxes(visible=bool(run.speed))
    for row, (at, changed) in enumerate(_joined(run.changes)):
        plots.mark(fig, ", ".join(f"{name} {value}" for name, value in changed.items()), x=at, row=row % ROWS)
    return fig


def _joined(changes: list[tuple[float, dict[str, Value]]]) -> list[tuple[float, dict[str, Value]]]:
    """A drag of a slider is many changes and one mark: those less than a window apart, at the last of them."""
    joined: list[tuple[float, dict[str, Value]]] = []
    for at, changed in changes:
        if joined and at - joined[-1][0] < WINDOW_S:
            joined[-1] = (at, joined[-1][1] | changed)
        else:
            joined.append((at, dict(changed)))
    return joined
