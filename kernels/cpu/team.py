"""The threads that compute: one team for each set of cores and number of threads in the process.

A team's threads are C's own (c/team.c) and inherit the cores of the thread that first asks, so a caller pinned to half
of the machine gets a team on that half. Two hyperthreads of a core share its arithmetic and only get in each other's
way: the default is one thread a core.
"""

import os
import threading
from ctypes import c_int, c_void_p
from pathlib import Path

import psutil

from nanokit.errors import ParameterError
from nanokit.kernels.cpu.build import KernelError
from nanokit.kernels.cpu.library import Library

MOST_THREADS = 256  # TEAM_MAX_THREADS
CGROUP = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


class Team:
    """Threads of one library. Alive until the process ends; a forked child, which has none of them, starts its own."""

    def __init__(self, library: Library, threads: int) -> None:
        self.threads = threads
        self._create = library.declare("team_create", c_void_p, c_int)
        self._handle: int | None = None
        self._lock = threading.Lock()

    @property
    def handle(self) -> int:
        """The address of the C team, for a call. Raises KernelError when the system refuses threads or memory."""
        return self._handle or self._start()

    def _start(self) -> int:
        with self._lock:
            if self._handle is None:
                self._handle = self._create(self.threads)
            if self._handle is None:
                raise KernelError(
                    "the CPU kernels' threads could not be started", found=f"{self.threads} threads",
                    do="set NANOKIT_THREADS to fewer",
                )  # fmt: skip
            return self._handle

    def _forked(self) -> None:
        self._handle, self._lock = None, threading.Lock()


_teams: dict[tuple[Library, frozenset[int], int], Team] = {}
_lock = threading.Lock()


def team(library: Library, threads: int | None = None) -> Team:
    """The team of this library, of the calling thread's cores and of `threads` (default: `thread_count`).

    Raises ParameterError when threads is not within 1 ... 256.
    """
    count = thread_count() if threads is None else _checked("threads", str(threads))
    with _lock:
        return _teams.setdefault((library, frozenset(_cores()), count), Team(library, count))


def thread_count() -> int:
    """NANOKIT_THREADS, or the cores of the machine that this thread may use, less if a container is allowed fewer.

    Raises ParameterError.
    """
    asked = os.environ.get("NANOKIT_THREADS")
    if asked:
        return _checked("NANOKIT_THREADS", asked)
    return max(1, min(_physical(_cores()), _quota(), MOST_THREADS))


def _checked(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MOST_THREADS:
        return int(text)
    raise ParameterError(f"{name} is not a number of threads", found=repr(text), needed=f"1 to {MOST_THREADS}")


def _cores() -> set[int]:
    """The logical processors this thread may run on; macOS does not tell, so all."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _physical(cores: set[int]) -> int:
    """How many physical cores those are: by Linux's topology, else by the machine's total."""
    try:
        return len({(TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text() for core in cores})
    except OSError:
        return min(psutil.cpu_count(logical=False) or len(cores), len(cores))


def _quota() -> int:
    """Whole processors that the container's quota allows: a team that spins beyond it is put to sleep by the system."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
    except OSError:
        try:
            quota, period = ((CGROUP / f"cpu/cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return MOST_THREADS
    return MOST_THREADS if quota in ("max", "-1") else int(quota) // int(period)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for each in _teams.values():
        each._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
