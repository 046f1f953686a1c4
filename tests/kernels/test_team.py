"""The team of threads: every item once and before what follows it, whoever calls, in whatever state of the caller.

Phases are driven from Python: the C team calls back into these functions, whose shared state the interpreter's lock
protects. What only a data race would show is test_sanitizers.py's.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, POINTER, Structure, c_int, c_long, c_void_p
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored import random_weights

from nanokit.kernels.cpu.library import Library
from nanokit.kernels.cpu.ops import Linear
from nanokit.kernels.cpu.team import team
from nanokit.quant.qtensor import QTensor

WORK = CFUNCTYPE(None, c_void_p, c_long, c_long)
SOON = CFUNCTYPE(None, c_void_p, c_void_p)
ENTRY = CFUNCTYPE(None, c_void_p, c_void_p)


class Cursor(Structure):
    _fields_ = [("phases", c_long)]


@dataclass
class Phase:
    """n items, m that follow; what happened, in order: (whether it followed, first, end). shares: where those of the
    threads that ran out of items begin."""

    n: int
    m: int
    smallest: int = 1
    events: list[tuple[bool, int, int]] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)

    def check(self, calls: int) -> None:
        """Every item once a call; nothing that follows before all items of its call are done."""
        for follows, count in ((False, self.n), (True, self.m)):
            items = [i for which, first, end in self.events if which == follows for i in range(first, end)]
            assert sorted(items) == sorted(list(range(count)) * calls)
        done = 0
        for follows, first, end in self.events:
            if follows:
                assert done % max(self.n, 1) == 0
            else:
                done += end - first
        assert all(share in range(0, self.n, self.smallest) or share == 0 for share in self.shares)
        assert len(self.shares) >= calls * (self.n > 0)


Run = Callable[[list[Phase], int], None]


@pytest.fixture(scope="module")
def run(kernels: Library) -> Iterator[Run]:
    """Run phases in one call of a team of so many threads."""
    create = kernels.declare("team_create", c_void_p, c_int)
    destroy = kernels.declare("team_destroy", None, c_void_p)
    call = kernels.declare("team_run", None, c_void_p, ENTRY, c_void_p)
    work = (c_long, c_long, WORK, c_long, WORK, SOON, c_void_p)
    phase = kernels.declare("team_phase", None, c_void_p, POINTER(Cursor), *work)
    share = kernels.declare("team_share", c_long, c_void_p, c_long, c_long)
    teams: dict[int, int] = {}

    def run_phases(phases: list[Phase], threads: int) -> None:
        handle = teams.setdefault(threads, create(threads)) if threads not in teams else teams[threads]
        noted = [
            (
                WORK(lambda _, first, end, p=p: p.events.append((False, first, end))),
                WORK(lambda _, first, end, p=p: p.events.append((True, first, end))),
                SOON(lambda team, _, p=p: p.shares.append(share(team, p.n, p.smallest))),
            )
            for p in phases
        ]

        def entry(_team: int, _argument: int) -> None:
            cursor = Cursor(0)
            for p, (work, then, soon) in zip(phases, noted, strict=True):
                phase(handle, ctypes.byref(cursor), p.n, p.smallest, work, p.m, then, soon, None)

        call(handle, ENTRY(entry), None)

    yield run_phases
    for handle in teams.values():
        destroy(handle)


phases = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(1, 4)), max_size=12)


@given(shapes=phases, threads=st.integers(1, 5), calls=st.integers(1, 3))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_item_is_done_once_and_in_order(
    run: Run, shapes: list[tuple[int, int, int]], threads: int, calls: int
) -> None:
    """Fewer items than threads, none, few or many that follow: a counter that is not set back, or a phase that ends
    early, loses or repeats items, or never ends."""
    made = [Phase(*shape) for shape in shapes]
    for _ in range(calls):
        run(made, threads)
    for each in made:
        each.check(calls)


def test_phases_follow_one_another(run: Run) -> None:
    """Work of a phase must not start before all of the phase before it is done: hundreds of them in a call."""
    order: list[int] = []

    class Noting(list):
        def __init__(self, index: int) -> None:
            self._index = index

        def append(self, event: tuple[bool, int, int]) -> None:
            order.append(self._index)

    made = [Phase(1 + i % 7, i % 4, events=Noting(i)) for i in range(600)]
    run(made, 3)
    assert order == sorted(order)
    assert set(order) == set(range(600))


def test_calls_from_several_threads_queue_up(kernels: Library) -> None:
    """Widget callbacks and a worker thread may compute at once: two steps in one's phases would mix their items."""
    linears = [Linear(random_weights("Q4_1", 90, 64, i), library=kernels, threads=3) for i in range(4)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = [linear(x, "a8g32") for linear in linears]
    wrong: list[int] = []

    def caller(i: int) -> None:
        wrong.extend(i for _ in range(40) if not torch.equal(linears[i](x, "a8g32"), expected[i]))

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes(kernels: Library) -> None:
    """A child inherits the team's memory and none of its threads: waiting for them would hang a DataLoader's worker."""
    linear = Linear(random_weights("Q4_1", 300, 256), library=kernels, threads=3)
    x = torch.ones(3, 256)
    expected = linear(x, "a16")
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x, "a16"), expected) else 1)
    waiting = threading.Timer(60, os.kill, (child, 9))
    waiting.start()
    _, status = os.waitpid(child, 0)
    waiting.cancel()
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(linear(x, "a16"), expected)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush denormals")
@pytest.mark.parametrize("threads", [1, 3])
def test_the_callers_denormals_change_nothing(kernels: Library, threads: int) -> None:
    """Threads that flush and threads that do not would make a result depend on who computed it; and the caller's own
    mode is none of the kernels' to change."""
    scales = np.full((40, 2), 1e-30, np.float32)
    q = QTensor("w", (40, 64), np.full((40, 64), 9, np.int8), scales, None, 32, None, (0, 15))
    x = torch.full((7, 64), 1e-8)  # a scale of 1e-8 / 127 times 1e-30 is denormal; the product would be 6e-36
    results = []
    tiny = torch.tensor([1e-30])
    for flush in (False, True):
        assert torch.set_flush_denormal(flush)
        try:
            results.append(Linear(q, library=kernels, threads=threads)(x, "a8g32"))
            assert bool((tiny * 1e-12 == 0).all()) == flush
        finally:
            torch.set_flush_denormal(False)
    assert torch.equal(*results)
    assert not results[0].any()


def test_teams_are_of_the_size_asked_for(kernels: Library) -> None:
    count = kernels.declare("team_threads", c_int, c_void_p)
    create = kernels.declare("team_create", c_void_p, c_int)
    for threads in (1, 2, 7):
        assert count(team(kernels, threads).handle) == threads
        assert team(kernels, threads) is team(kernels, threads)
    assert create(0) is create(-1) is create(257) is None
