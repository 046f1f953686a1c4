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
        if len(values) < 2:
            continue
        tenths = statistics.quantiles(values, n=10) if len(values) >= FEW else [min(values), max(values)]
        low, high = tenths[0], tenths[-1]
        if high > LIMIT * low > 0:
            found.append(
                f"{name} varies {high / low:.1f}-fold ({low:.3g} to {high:.3g}): something else was using this "
                "machine; do not quote its times"
            )
    return found
