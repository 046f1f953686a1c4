"""How many threads compute, and that a forked process, which has none of them, gets its own."""

import os
import signal
import threading
from ctypes import c_int, c_void_p
from pathlib import Path

import numpy as np
import pytest
import torch

from nanokit.errors import ParameterError
from nanokit.kernels.cpu import team as teams
from nanokit.kernels.cpu.compiler import NoKernelsError
from nanokit.kernels.cpu.library import Library, library
from nanokit.kernels.cpu.ops import Linear
from nanokit.quant.integer import integer_format


@pytest.fixture(scope="module")
def kernels() -> Library:
    try:
        return library()
    except NoKernelsError as error:
        pytest.skip(str(error))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two threads each, all of them this process's, in a container without a quota."""
    monkeypatch.delenv("NANOKIT_THREADS", raising=False)
    monkeypatch.setattr(teams, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(teams, "CGROUP", tmp_path)
    monkeypatch.setattr(teams, "_cores", lambda: set(range(8)))
    for core in range(8):
        place = tmp_path / f"cpu{core}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    return tmp_path


def test_one_thread_a_core(machine, monkeypatch) -> None:
    """Two hyperthreads of a core slow each other down; a pinned process has fewer cores than the machine."""
    assert teams.thread_count() == 4
    monkeypatch.setattr(teams, "_cores", lambda: {0, 1, 4})
    assert teams.thread_count() == 2


@pytest.mark.parametrize(
    ("name", "text", "threads"),
    [
        ("cpu.max", "max 100000\n", 4),
        ("cpu.max", "250000 100000\n", 2),
        ("cpu.max", "50000 100000\n", 1),
        ("cpu.max", "900000 100000\n", 4),
        ("cpu", ("300000\n", "100000\n"), 3),
        ("cpu", ("-1\n", "100000\n"), 4),
    ],
)
def test_quota_of_a_container(machine, name, text, threads) -> None:
    """A team of more threads than the quota allows spins its time away and is then put to sleep for the rest."""
    if isinstance(text, str):
        (machine / name).write_text(text)
    else:
        (machine / name).mkdir()
        (machine / name / "cpu.cfs_quota_us").write_text(text[0])
        (machine / name / "cpu.cfs_period_us").write_text(text[1])
    assert teams.thread_count() == threads


@pytest.mark.parametrize("text", ["0", "257", "-1", "two", "1.5", "٣", "9" * 40])
def test_threads_asked_for(machine, monkeypatch, text) -> None:
    monkeypatch.setenv("NANOKIT_THREADS", text)
    with pytest.raises(ParameterError, match="1 to 256"):
        teams.thread_count()


def test_one_team_for_all(kernels, monkeypatch) -> None:
    """A team for each engine would have more threads than cores; other cores are another team."""
    first = teams.team(kernels, 2)
    assert teams.team(kernels, 2) is first
    assert teams.team(kernels, 1) is not first
    assert kernels.declare("team_threads", c_int, c_void_p)(first.handle) == 2
    monkeypatch.setattr(teams, "_cores", lambda: {10**6})
    assert teams.team(kernels, 2) is not first


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_while_computing(kernels) -> None:
    """The child's copy of the team has no threads and a lock that nobody will ever open: a call would hang."""
    weights = np.random.default_rng(0).standard_normal((1024, 256), dtype=np.float32)
    linear = Linear(integer_format("int8-sym-g32").quantize(weights), threads=2, library=kernels)
    x = torch.ones(64, 256)
    expected = linear(x, "a8g32").numpy().tobytes()
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            linear(x, "a8g32")

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # torch's own threads do not outlive a fork: nothing of it but memory is used here
                os._exit(linear(x, "a8g32").numpy().tobytes() != expected)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        busy.join()
