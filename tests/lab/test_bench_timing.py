"""Taking turns: who is visited when, what a series holds, and neighbours that are gone when they should be."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from nanokit.lab.bench.neighbours import neighbours
from nanokit.lab.bench.timing import Rounds, in_turns, milliseconds, spread
from nanokit.lab.progress import StoppedError


def test_the_order_alternates_between_rounds():
    """A fixed order lets a drift within the round favour whoever comes first."""
    seen: list[str] = []
    visits = {name: lambda name=name: seen.append(name) or {name: [1.0]} for name in "abc"}
    turns = Rounds(3, budget_s=60).run(visits)
    assert "".join(seen) == "abccbaabc"
    assert turns.samples == {name: [1.0] * 3 for name in "abc"}
    assert turns.remarks == []


def test_steps_alternate_too():
    seen: list[str] = []
    samples = in_turns({name: lambda name=name: seen.append(name) or float(len(seen)) for name in "xy"}, 3)
    assert "".join(seen) == "xyyxxy"
    assert samples == {"x": [1.0, 4.0, 5.0], "y": [2.0, 3.0, 6.0]}


def test_a_visit_may_add_to_several_series():
    turns = Rounds(2, budget_s=60).run({"one": lambda: {"a": [1.0, 2.0], "b": [3.0]}, "two": lambda: {"a": [4.0]}})
    assert turns.samples == {"a": [1.0, 2.0, 4.0, 4.0, 1.0, 2.0], "b": [3.0, 3.0]}


def test_a_slow_machine_gets_fewer_rounds_but_two_and_a_remark():
    turns = Rounds(9, budget_s=0.0).run({"slow": lambda: {"a": [1.0]}})
    assert turns.rounds == 2
    assert turns.remarks == ["2 of 9 repeats: the time of the preset was over"]


def test_stop_is_heard_between_visits():
    cancel = threading.Event()
    done: list[int] = []

    def visit():
        done.append(1)
        cancel.set()
        return {}

    with pytest.raises(StoppedError):
        Rounds(5, budget_s=60, cancel=cancel).run({"a": visit, "b": visit})
    assert len(done) == 1


def test_the_process_idles_after_every_visit():
    """OpenMP threads of a peer spin on for milliseconds and would take the cores from the next one."""
    elapsed = milliseconds(lambda: Rounds(2, budget_s=60, pause_s=0.02).run({"a": lambda: {}, "b": lambda: {}}))
    assert elapsed >= 4 * 20


def test_spread():
    assert spread([3.0, 1.0, 2.0, 9.0]) == {"min": 1.0, "median": 2.5, "max": 9.0, "n": 4}


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_neighbours_compute_and_end_with_an_interrupt():
    """Ctrl-C in the middle of a disturbed phase must not leave a machine that is busy for ever."""
    pids: list[int] = []

    def phase() -> None:
        with neighbours(2) as running:
            pids.extend(running)
            before = [psutil.Process(pid).cpu_times().user for pid in pids]
            deadline = time.monotonic() + 20
            while any(psutil.Process(pid).cpu_times().user <= b for pid, b in zip(pids, before, strict=True)):
                assert time.monotonic() < deadline, "a neighbour does not compute"
                time.sleep(0.05)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        phase()
    assert len(set(pids)) == 2
    assert all(gone(pid) for pid in pids)


def test_neighbours_end_when_their_parent_was_killed():
    code = (
        "import time\nfrom nanokit.lab.bench.neighbours import neighbours\n"
        "with neighbours(1) as pids:\n    print(pids[0], flush=True)\n    time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=20)
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while not gone(pid):
        assert time.monotonic() < deadline, "the neighbour goes on without its parent"
        time.sleep(0.05)
