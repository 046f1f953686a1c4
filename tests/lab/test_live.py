"""The live panel with a scripted stepper and a scripted clock: no model, no waiting."""

import threading

import pytest

from nanokit.lab import lock
from nanokit.lab.live import Event, LivePanel, LiveRun, speed_figure
from nanokit.lab.params import Params, experiment_params, knob

WAIT = 20.0


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


@experiment_params
class StreamParams(Params):
    temperature: float = knob(0.0, "randomness", low=0.0, high=2.0, step=0.1)
    max_tokens: int = knob(20, "length", unit="tokens", low=1, high=100)
    question: str = knob("why", "what is asked")


class Scripted:
    """A stepper whose every step takes `step_s` on its own clock and passes a gate when there is one."""

    steers = frozenset({"temperature", "max_tokens"})

    def __init__(self, step_s=0.1, at_step=None):
        self.now, self.step_s, self.at_step = 0.0, step_s, at_step or {}
        self.updates, self.threads, self.closed, self.steps = [], set(), False, 0

    def clock(self):
        return self.now

    def start(self, params):
        self.params = params
        self.threads.add(threading.get_ident())
        try:
            while self.steps < self.params.max_tokens:
                self.steps += 1
                self.now += self.step_s
                if self.steps in self.at_step:
                    self.at_step[self.steps]()
                yield Event(f"w{self.steps} ")
        finally:
            self.closed = True

    def update(self, params):
        self.threads.add(threading.get_ident())
        self.updates.append((self.steps, params))
        self.params = params


class Pause:
    """What a step waits in, so that a test can act in its middle."""

    def __init__(self):
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.go_on.wait(WAIT)


def panel(stepper, interactive=True, **values):
    return LivePanel(stepper, StreamParams(**values), "stream", interactive=interactive, clock=stepper.clock)


def test_runs_to_its_end_and_counts():
    stepper = Scripted()
    shown = panel(stepper, interactive=False, max_tokens=30)
    run = shown.result
    assert (run.tokens, run.text.split()[-1]) == (30, "w30")
    assert run.first_s == pytest.approx(0.1)
    assert run.seconds == pytest.approx(3.0)
    assert [speed for _, speed in run.speed] == pytest.approx([10.0] * len(run.speed))
    assert stepper.closed


def test_redraws_at_most_five_times_a_second():
    """Guards a panel that slows the model down by drawing each token."""
    stepper = Scripted(step_s=0.01)
    run = panel(stepper, interactive=False, max_tokens=100).result
    assert len(run.speed) <= 1.0 / 0.2 + 1
    times = [t for t, _ in run.speed]
    assert times == sorted(set(times))


def test_a_slider_moved_while_running_changes_the_next_step():
    """Guards an update that restarts the generation, comes late, or runs on another thread in mid-step."""
    pause = Pause()
    stepper = Scripted(at_step={5: pause})
    shown = panel(stepper)
    shown.run_button.click()
    assert pause.entered.wait(WAIT)
    shown.set(temperature=0.7)
    shown.set(temperature=1.5, max_tokens=8)
    pause.go_on.set()
    assert shown.wait(WAIT)
    assert shown.status == "done", shown.message
    assert [(step, p.temperature, p.max_tokens) for step, p in stepper.updates] == [(5, 1.5, 8)]
    assert shown.result.tokens == 8
    assert [changed for _, changed in shown.result.changes] == [{"temperature": 1.5, "max_tokens": 8}]
    assert len(stepper.threads) == 1
    assert threading.get_ident() not in stepper.threads
    assert "temperature 1.5" in shown.figure.layout.annotations[0].text


def test_a_slider_moved_before_run_is_no_change():
    stepper = Scripted()
    shown = panel(stepper)
    shown.set(temperature=1.0)
    shown.run()
    assert shown.wait(WAIT)
    assert stepper.params.temperature == 1.0
    assert (stepper.updates, shown.result.changes) == ([], [])


def test_a_run_that_waited_starts_from_the_controls_as_they_are(monkeypatch):
    """A slider moved between a second press of Run and its turn was forgotten: the panel showed another value."""
    pause = Pause()
    stepper = Scripted(at_step={5: pause})
    shown = panel(stepper)
    shown.run()
    assert pause.entered.wait(WAIT)
    shown.run()
    shown.set(temperature=1.5)
    stepper.params = StreamParams(max_tokens=5)  # the first run ends here
    monkeypatch.setattr(stepper, "update", lambda params: stepper.updates.append((stepper.steps, params)))
    pause.go_on.set()
    assert shown.wait(WAIT)
    assert shown.result.params.temperature == 1.5


def test_what_cannot_change_on_the_way_is_not_marked_as_changed():
    """Another question waits for the next run; a dashed line would say that the text beside it is its answer."""
    pause = Pause()
    stepper = Scripted(at_step={5: pause})
    shown = panel(stepper)
    shown.run()
    assert pause.entered.wait(WAIT)
    shown.set(question="how", temperature=0.7)
    pause.go_on.set()
    assert shown.wait(WAIT)
    assert [changed for _, changed in shown.result.changes] == [{"temperature": 0.7}]
    assert shown.result.params == StreamParams(temperature=0.7)
    assert not shown.figure.layout.annotations[0].text.startswith("question")


def test_stop_closes_the_generation_and_keeps_the_text():
    """Guards an engine that goes on decoding, unseen, after Stop."""
    pause = Pause()
    stepper = Scripted(at_step={3: pause})
    shown = panel(stepper)
    shown.run()
    assert pause.entered.wait(WAIT)
    shown.stop_button.click()
    pause.go_on.set()
    assert shown.wait(WAIT)
    assert shown.status == "stopped"
    assert stepper.closed
    assert shown.result.text == "w1 w2 w3 "
    assert "w3" in shown._text.value


def test_an_error_in_a_step_is_shown_with_the_text_so_far():
    def fail():
        raise MemoryError("no page left")

    stepper = Scripted(at_step={4: fail})
    shown = panel(stepper)
    shown.run()
    assert shown.wait(WAIT)
    assert (shown.status, type(shown.error)) == ("error", MemoryError)
    assert "no page left" in shown.message
    assert shown.result.tokens == 3


def test_model_text_is_escaped():
    """Guards HTML from a model that runs in the reader's page."""

    class Markup(Scripted):
        def start(self, params):
            yield Event("<script>x</script>")

    shown = panel(Markup())
    shown.run()
    assert shown.wait(WAIT)
    assert "&lt;script&gt;" in shown._text.value
    assert "<script>" not in shown._text.value


def test_a_drag_is_one_mark():
    """Guards a figure full of lines after one drag of a slider."""
    changes = [(t, {"temperature": t}) for t in (1.0, 1.3, 1.9)] + [(4.0, {"max_tokens": 9})]
    fig = speed_figure(LiveRun(StreamParams(), changes=changes))
    assert [note.text for note in fig.layout.annotations] == ["temperature 1.9", "max_tokens 9"]
    assert [shape.x0 for shape in fig.layout.shapes] == [1.9, 4.0]


def test_copy_gives_python_since_no_notebook_takes_these_parameters():
    """`nanokit run tour -p temperature=…` would be refused: the live panel's parameters are not the notebook's."""
    shown = panel(Scripted())
    shown.set(temperature=0.5)
    shown.copy()
    assert shown.command == "StreamParams(temperature=0.5)"
