"""How long a launch takes: by CUDA events on a GPU, by the wall clock where kernels are interpreted; that says nothing.

A kernel of some microseconds is shorter than what the host needs to launch it. So the GPU first gets something to wait
with; meanwhile the host queues one event, a number of launches and another event, which then run one after the other
without a gap. Had the wait ended before the last launch was queued, gaps would be measured: the first event tells, and
the sample is taken again behind a longer wait.

Inputs rotate: each launch reads another copy, of which there are more than the cache holds.

Rejected: a CUDA graph of the launches (what does the host's part cost would go unseen, and whatever waits for the GPU
cannot be captured).
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nanokit.kernels.gpu import runtime

Actions = Sequence[Callable[[], object]]
CACHES = 4  # so many times the GPU's last cache do the copies of an input take


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one launch, and microseconds that the host needs to queue it; gaps: the GPU had to wait for the
    host, so that the former says more about the latter."""

    ms: tuple[float, ...]
    host_us: float
    gaps: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    def to_record(self) -> dict[str, Any]:
        """ms as min, median, max and n."""
        spread = {"min": min(self.ms), "median": self.median, "max": max(self.ms), "n": len(self.ms)}
        return {"ms": spread, "host_us": self.host_us, **({"gaps": True} if self.gaps else {})}


class Timer(Protocol):
    """What times, what it measures with, and how many bytes of copies defeat the caches."""

    timings: str
    rotated_bytes: int

    def __call__(self, actions: Actions) -> Timing: ...


class EventTimer:
    """See the module. rotated_bytes: `CACHES` times the last cache."""

    timings = "cuda events"
    samples, launches, warm = 7, 20, 3
    most_cycles = 1 << 28  # of waiting: more than a tenth of a second

    def __init__(self) -> None:
        self.rotated_bytes = CACHES * torch.cuda.get_device_properties(runtime.device()).L2_cache_size
        self._cycles = 1 << 21  # of the GPU's clock: about a millisecond

    def __call__(self, actions: Actions) -> Timing:
        """Time the actions in turn, each a launch or a few."""
        turn = itertools.cycle(actions)
        for _ in range(self.warm):
            next(turn)()
        torch.cuda.synchronize()
        taken = [self._sample(turn) for _ in range(self.samples)]
        return Timing(
            tuple(ms for ms, _, _ in taken),
            statistics.median(host for _, host, _ in taken),
            any(gaps for _, _, gaps in taken),
        )

    def _sample(self, turn: Iterator[Callable[[], object]]) -> tuple[float, float, bool]:
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self._cycles)
            begin.record()
            queued = time.perf_counter()
            for _ in range(self.launches):
                next(turn)()
            queued = time.perf_counter() - queued
            end.record()
            gaps = begin.query()
            end.synchronize()
            if not gaps or self._cycles >= self.most_cycles:
                return begin.elapsed_time(end) / self.launches, queued / self.launches * 1e6, gaps
            self._cycles *= 2


class ClockTimer:
    """The wall clock, twice, so that the code around it has run."""

    timings = "interpreter"
    rotated_bytes = 1

    def __call__(self, actions: Actions) -> Timing:
        taken = []
        for action in itertools.islice(itertools.cycle(actions), 2):
            started = time.perf_counter()
            action()
            taken.append((time.perf_counter() - started) * 1e3)
        return Timing(tuple(taken), statistics.median(taken) * 1e3)


def timer() -> Timer:
    """The one for this process. No CUDA call is reached where kernels are interpreted."""
    return ClockTimer() if runtime.INTERPRETED else EventTimer()
