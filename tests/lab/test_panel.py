"""Panels without a browser: every assertion is on the panel's state, because ipywidgets swallows what a
callback raises, and "clicking did not raise" would pass whatever happened.
"""

import threading
from dataclasses import dataclass

import plotly.graph_objects as go
import pytest
from toy import ToyParams

from nanokit.errors import NanokitError, ParameterError
from nanokit.lab import lock, plots
from nanokit.lab.panel import Panel
from nanokit.lab.progress import stop_if
from nanokit.lab.result import Result

WAIT = 20.0


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    """Another measurement on this machine must not make these tests busy."""
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


@dataclass(frozen=True)
class ToyResult(Result):
    curve: tuple[float, ...] = ()


def toy(p: ToyParams, *, progress=None, cancel=None) -> ToyResult:
    if progress:
        progress.start(p.depth, "guess")
    curve = []
    for step in range(p.depth):
        stop_if(cancel)
        curve.append(p.acceptance**step)
        if progress:
            progress.step()
    return ToyResult(params=p, metrics={"accepted": sum(curve)}, curve=tuple(curve))


def draw(result: ToyResult) -> go.Figure:
    xs = list(range(len(result.curve)))
    return plots.lines(f"{result.metrics['accepted']:.2f} accepted", {"toy": (xs, result.curve)}, x="i", y="share")


def panel(experiment=toy, p=None, plot=draw, **options) -> Panel:
    return Panel(experiment, p or ToyParams(), plot, interactive=True, **options)


def title(figure) -> str:
    return figure.layout.title.text


def test_panel_result_equals_the_direct_call():
    """Guards a control that does not reach the experiment."""
    shown = panel()
    shown.set(depth=7, acceptance=0.25, method="ngram", text="c", greedy=False, depths=[2])
    shown.run_button.click()
    assert shown.wait(WAIT)
    wanted = toy(ToyParams(depth=7, acceptance=0.25, method="ngram", text="c", greedy=False, depths=[2]))
    assert (shown.status, shown.error) == ("done", None)
    assert shown.result == wanted
    assert title(shown.figure) == title(draw(wanted))
    assert shown.message.startswith("Done in ")


def test_the_one_figure_widget_is_redrawn_in_place():
    """Guards a second 5 MB widget per run, and leftovers of the figure before."""
    shown = panel(plot=lambda r: draw(r) if r.params.depth < 5 else plots.bars("bars", {"a": [1.0]}, unit="s"))
    live = shown._box._live
    shown.run()
    assert shown.wait(WAIT)
    assert [len(trace.x) for trace in live.data] == [3]
    plots.mark(shown.figure, "limit", y=1.0)
    shown._box.show(shown.figure)
    assert len(live.layout.shapes) == 1
    shown.set(depth=5)
    shown.run()
    assert shown.wait(WAIT)
    assert shown._box._live is live
    assert [trace.type for trace in live.data] == ["bar"]
    assert title(live) == "bars"
    assert not live.layout.shapes
    assert live._widget_layout["title"]["text"] == "bars", "a reloaded page would show the figure before"


def test_an_error_is_shown_and_kept():
    """Guards issue ipywidgets#1971: an exception in a callback shows nothing at all."""

    def broken(p, *, progress=None, cancel=None):
        raise ZeroDivisionError("rate of nothing")

    shown = panel(broken)
    shown.run_button.click()
    assert shown.wait(WAIT)
    assert shown.status == "error"
    assert isinstance(shown.error, ZeroDivisionError)
    assert "rate of nothing" in shown._line.value
    assert "panel.error" in shown._line.value
    assert shown.result is None


def test_a_foreseen_error_shows_what_to_do_and_a_good_run_clears_it():
    def picky(p, *, progress=None, cancel=None):
        if p.depth == 9:
            raise NanokitError("too <deep>", found=9, do="lower depth")
        return toy(p)

    shown = panel(picky)
    shown.set(depth=9)
    shown.run()
    assert shown.wait(WAIT)
    assert shown.status == "error"
    assert "do: lower depth" in shown.message
    assert "too &lt;deep&gt;" in shown._line.value
    shown.set(depth=2)
    shown.run()
    assert shown.wait(WAIT)
    assert (shown.status, shown.error) == ("done", None)


def test_parameters_that_contradict_each_other_are_refused_without_a_run():
    shown = panel()
    shown.set(method="ngram", depth=9)
    shown.run_button.click()
    assert shown.wait(WAIT)
    assert shown.status == "error"
    assert isinstance(shown.error, ParameterError)
    assert shown.result is None


class Gate:
    """An experiment that waits in its middle, so that a test can act while it runs."""

    __name__ = "gate"

    def __init__(self):
        self.entered, self.open, self.depths = threading.Event(), threading.Event(), []

    def __call__(self, p, *, progress=None, cancel=None):
        self.depths.append(p.depth)
        progress.start(2, "wait")
        self.entered.set()
        while not self.open.wait(0.01):
            stop_if(cancel)
        return toy(p)


def test_stop_ends_the_run_and_drops_what_waits():
    """Guards a Stop that is heard only after the run, and a queued run that starts after Stop."""
    gate = Gate()
    shown = panel(gate)
    shown.run_button.click()
    assert gate.entered.wait(WAIT)
    assert shown.status == "running"
    assert "1 of 2" in shown.message
    assert not shown.stop_button.disabled
    shown.run()
    shown.stop_button.click()
    assert shown.wait(WAIT)
    assert shown.status == "stopped"
    assert "run before" not in shown.message, "there is none"
    assert gate.depths == [3]
    assert shown.stop_button.disabled


def test_a_refused_press_of_run_leaves_stop_alive():
    """The message of the refusal used to switch Stop off while the run before went on."""
    gate = Gate()
    shown = panel(gate)
    shown.run()
    assert gate.entered.wait(WAIT)
    shown.set(method="ngram", depth=9)
    shown.run_button.click()
    assert (shown.status, shown.stop_button.disabled) == ("error", False)
    shown.stop_button.click()
    assert shown.wait(WAIT)
    assert (shown.status, shown.stop_button.disabled) == ("stopped", True)


def test_runs_pressed_meanwhile_are_coalesced_latest_wins():
    """Guards a backlog of runs after five impatient clicks."""
    gate = Gate()
    shown = panel(gate)
    shown.run()
    assert gate.entered.wait(WAIT)
    for depth in (4, 5, 6):
        shown.set(depth=depth)
        shown.run()
    gate.open.set()
    assert shown.wait(WAIT)
    assert gate.depths == [3, 6]
    assert shown.result == toy(ToyParams(depth=6))


def test_busy_when_something_else_is_measured():
    """Guards two measurements at once: wrong results and worthless timings."""
    shown = panel()
    with lock.measuring("a cell"):
        shown.run()
        assert shown.wait(WAIT)
    assert shown.status == "busy"
    assert "a cell" in shown.message
    assert shown.result is None
    shown.run()
    assert shown.wait(WAIT)
    assert shown.status == "done"


def test_live_preview_redraws_without_a_run():
    shown = panel(live=lambda p: plots.figure(f"preview {p.depth}"))
    assert title(shown.figure) == "preview 3"
    shown.set(depth=5)
    assert title(shown.figure) == "preview 5"
    assert (shown.result, shown.status) == (None, "idle")


def test_headless_runs_once_with_p_and_makes_no_widget(monkeypatch):
    """Guards 5 MB of widget state in executed notebooks, and a second run where a cell has the result."""
    monkeypatch.setenv("NANOKIT_HEADLESS", "1")
    shown = Panel(toy, ToyParams(depth=4), draw)
    assert (shown.status, shown.result) == ("done", toy(ToyParams(depth=4)))
    assert shown.widget is None
    assert shown._box._live is None
    data, _ = shown._repr_mimebundle_()
    assert data["application/vnd.plotly.v1+json"]["layout"]["title"]["text"] == title(shown.figure)
    given = toy(ToyParams())
    again = Panel(lambda p, **_: pytest.fail("ran again"), ToyParams(), draw, result=given)
    assert again.result is given


def test_headless_errors_are_raised():
    """Guards an executed notebook that passes although its experiment failed."""

    def broken(p, *, progress=None, cancel=None):
        raise NanokitError("no")

    with pytest.raises(NanokitError, match="no"):
        Panel(broken, ToyParams(), draw, interactive=False)


def test_repr_is_stable_and_the_bundle_has_a_picture_beside_the_widget(monkeypatch):
    """Guards nbval on random ids, and an empty cell on GitHub."""
    from nanokit.lab import pictures

    monkeypatch.setattr(pictures, "png", lambda fig: b"png")
    first, second = panel(), panel()
    assert (
        repr(first) == repr(second) == ("Panel(toy: preset, depth, acceptance, prompts, method, text, greedy, depths)")
    )
    data, metadata = first._repr_mimebundle_()
    assert set(data) == {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}
    assert data["text/plain"] == repr(first)
    assert metadata["image/png"]["alt"] == "Press Run to measure"


def test_copy_names_no_notebook_that_was_not_given():
    """It named the tour, which would refuse another experiment's parameters."""
    shown = panel()
    shown.set(depth=2)
    assert shown.command == "ToyParams(depth=2)"


def test_the_last_word_of_the_status_line_is_the_runs_own(monkeypatch):
    """A queued run that ends before Run's callback goes on was covered by "the current run ends first" for good."""
    gate = Gate()
    shown = panel(gate)
    submit = shown._worker.submit

    def submit_and_lose_the_processor(params):
        gate.open.set()
        submit(params)
        assert shown.wait(WAIT)

    shown.run()
    assert gate.entered.wait(WAIT)
    monkeypatch.setattr(shown._worker, "submit", submit_and_lose_the_processor)
    shown.run()
    assert shown.status == "done"


def test_copy_shows_the_command_escaped():
    shown = panel(notebook="toy")
    shown.set(text="<b>")
    shown.copy_button.click()
    assert "&#x27;text=&lt;b&gt;&#x27;" in shown._command.value
    shown.set(depth=2)
    assert shown._command.value == "", "the line would contradict the slider"
