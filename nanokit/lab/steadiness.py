"""Whether samples may be quoted at all: a median of times that vary many-fold says nothing about the code.

Two programs with as many threads as cores do not slow each other to a half: waiting threads spin, and single steps
take many times as long. A kit that measures has to say so instead of printing the median in bold.
"""

import statistics
from collections.abc import Mapping, Sequence

LIMIT = 2.0  # above what frequency changes and page faults do, far below what a second busy program does
FEW = 10


def remarks(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """A sentence for each series whose spread exceeds `LIMIT`: between its first and last decile, or between its
    extremes when there are fewer than ten samples."""
    found = []
    for name, values in samples.items():
        low, high = _range(values)
        if high > LIMIT * low > 0:
            found.append(
                f"{name} varies {high / low:.1f}-fold ({low:.3g} to {high:.3g}): something else was using this "
                "machine; do not quote its times"
            )
    return found


def disturbance(*series: Sequence[float]) -> float:
    """How many-fold the least steady of the series varies, and 1 where none of them would be remarked."""
    folds = [high / low for low, high in map(_range, series) if low > 0]
    return max((fold for fold in folds if fold > LIMIT), default=1.0)


def _range(values: Sequence[float]) -> tuple[float, float]:
    tenths = statistics.quantiles(values, n=10) if len(values) >= FEW else [min(values), max(values)]
    return tenths[0], tenths[-1]
