"""The measurement lock: a second measurement is refused at once, from any thread, process or kernel."""

import subprocess
import sys
import threading

import pytest

from nanokit.lab import lock
from nanokit.lab.lock import BusyError, measuring


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    """Other sessions on this machine may be measuring."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def in_thread(action):
    """The exception that action raised in another thread, or None."""
    raised: list[Exception | None] = []

    def run():
        try:
            action()
            raised.append(None)
        except BusyError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert raised, "the other thread waited instead of being refused"
    return raised[0]


def enter():
    with measuring("another"):
        pass


ENTER = "from nanokit.lab.lock import measuring\nwith measuring('another'): print('entered')"


def in_process():
    return subprocess.run([sys.executable, "-c", ENTER], capture_output=True, text=True, timeout=60, check=False)


def test_a_widget_callback_cannot_measure_beside_a_cell():
    with measuring("decode of 40 tokens"):
        error = in_thread(enter)
    assert "busy: decode of 40 tokens is being measured" in str(error)
    assert "this process" in str(error)
    assert in_thread(enter) is None


def test_another_process_is_refused_and_told_what_runs():
    with measuring("prefill"):
        refused = in_process()
    assert "busy: prefill is being measured" in refused.stderr
    assert "entered" in in_process().stdout


def test_an_unattended_run_waits_for_its_turn(monkeypatch):
    """`nanokit run` failed in its eighth cell because a panel was measuring: nobody was there to be told."""
    monkeypatch.setenv("NANOKIT_HEADLESS", "1")
    with measuring("a first"):
        waiting = subprocess.Popen([sys.executable, "-c", ENTER], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=1.5)
    out, _ = waiting.communicate(timeout=30)
    assert out == "entered\n"


def test_the_holder_may_enter_again_and_still_holds_afterwards():
    """An experiment that calls another one must neither refuse itself nor release the lock too early."""
    with measuring("tour"):
        with measuring("memory bandwidth"):
            pass
        assert isinstance(in_thread(enter), BusyError)


def test_a_failure_releases_the_lock():
    with pytest.raises(ZeroDivisionError), measuring("a failing one"):
        raise ZeroDivisionError
    assert in_thread(enter) is None


def test_a_lost_note_does_not_hide_that_it_is_busy():
    with measuring("decode"):
        lock.lock_path().with_suffix(".json").write_text("{half")
        assert "busy: something" in str(in_thread(enter))
