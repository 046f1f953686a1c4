"""How far a figure from few samples may be off: standard errors and intervals, 95 % each."""

import math

import numpy as np

Z95 = 1.959963984540054  # of the normal distribution, two-sided


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The interval of a share, 95 % (Wilson 1927): with p = hits / of and z = 1.96,
    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n). Unlike p ± 1.96 se it stays within 0 and 1 and has a width even
    where every sample hit. Raises ValueError for no samples."""
    if not 0 <= hits <= of or of == 0:
        raise ValueError(f"{hits} hits of {of}")
    p, z = hits / of, Z95
    middle = p + z * z / (2 * of)
    half = z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    below, above = (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)
    return max(0.0, below), min(1.0, above)


def standard_error(values: np.ndarray) -> float:
    """Of the mean: the samples' standard deviation (n - 1) over √n; infinite for fewer than two."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf
