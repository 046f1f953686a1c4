"""Taking turns: every subject of a comparison is visited in each round, in an order that alternates.

    round 0    warm A, time A | warm B, time B | warm C, time C
    round 1    warm C, time C | warm B, time B | warm A, time A     …

A machine gets slower and faster by tens of per cent within a minute (frequency, neighbours on the same host). Medians
of interleaved visits meet the same weather; the alternating order keeps a drift within a round from favouring anybody.

Between two visits the process may idle for a moment. OpenMP threads of torch and llama.cpp go on spinning for
milliseconds after a parallel region and would take the cores from whoever is measured next. Each visit then warms up
untimed, because caches, clocks and sleeping threads are not what a step costs. Rejected: one process a subject, which
would spare the pause but turn every round into a start of torch.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from nanokit.lab.progress import Progress, Silent, stop_if

WARM = 2  # untimed steps at the start of a visit
PAUSE_S = 0.1  # idle time after a visit, where a subject has threads of its own
FEWEST_ROUNDS = 2

Samples = dict[str, list[float]]
Visit = Callable[[], Mapping[str, Iterable[float]]]


@dataclass(frozen=True)
class Turns:
    """What came of the rounds: samples by series, in order, and how many rounds there were."""

    samples: Samples
    rounds: int
    wanted: int

    @property
    def remarks(self) -> list[str]:
        """A sentence when time ran out."""
        if self.rounds == self.wanted:
            return []
        return [f"{self.rounds} of {self.wanted} repeats: the time of the preset was over"]


@dataclass
class Rounds:
    """How many rounds, how long, with whom to talk meanwhile.

    wanted: rounds. budget_s: no further one is begun after so many seconds, except that there are `FEWEST_ROUNDS`.
    pause_s: idle time after every visit.
    """

    wanted: int
    budget_s: float
    pause_s: float = 0.0
    progress: Progress = field(default_factory=Silent)
    cancel: threading.Event | None = None

    def run(self, visits: Mapping[str, Visit]) -> Turns:
        """Visit everyone in every round. A visit returns its samples by series. Raises StoppedError when cancelled."""
        samples: Samples = {}
        self.progress.start(self.wanted * len(visits), "measuring")
        started = time.perf_counter()
        for done in range(self.wanted):
            if done >= FEWEST_ROUNDS and time.perf_counter() - started > self.budget_s:
                return Turns(samples, done, self.wanted)
            for name in order(visits, done):
                stop_if(self.cancel)
                for series, values in visits[name]().items():
                    samples.setdefault(series, []).extend(values)
                self.progress.step(name)
                if self.pause_s:
                    time.sleep(self.pause_s)
        return Turns(samples, self.wanted, self.wanted)


def order(names: Iterable[str], turn: int) -> list[str]:
    """Forwards in even turns, backwards in odd ones."""
    return list(names)[:: -1 if turn % 2 else 1]


def milliseconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


def in_turns(actions: Mapping[str, Callable[[], float]], times: int) -> Samples:
    """Call each action `times` times, alternating their order; what each returns is its sample."""
    samples: Samples = {name: [] for name in actions}
    for done in range(times):
        for name in order(actions, done):
            samples[name].append(actions[name]())
    return samples


def spread(values: Iterable[float]) -> dict[str, float]:
    """min, median, max and n of a series."""
    numbers = list(values)
    return {"min": min(numbers), "median": statistics.median(numbers), "max": max(numbers), "n": len(numbers)}
