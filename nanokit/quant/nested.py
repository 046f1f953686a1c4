"""Scales that are quantized themselves, as QLoRA does it: a byte for each block's peak in place of four.

    mean     of all peaks of a matrix, fp32
    second   for 256 peaks in a row (the last of a matrix may be fewer): the largest |peak - mean|, fp32
    code     the LEVELS entry nearest to (peak - mean) / second, a tie the lower; 0 stands for a second of 0
    kept     max(0, LEVELS[code] * second + mean), each operation rounded once to fp32

Dettmers et al. 2023, arXiv:2305.14314, section 3, and bitsandbytes, which counts the 256 along the rows without a break
between them. Peaks are at least 0 and far from 0 on average: without the mean, the sign would be wasted.

LEVELS is the signed dynamic type of eight bits (Dettmers 2015, arXiv:1511.04561): behind the sign, n zeros are a factor
of 10^-n, a one ends them, and what bits are left name one of the equal parts of .1 … 1, of which it takes the middle.
Eight bits of zeros are 0, and the pattern left over is 1; -1 has none, and the least level is -.993. No level is
farther than 9/1280 from a number in -1 … 1 (`FURTHEST`), hence no kept peak farther than that part of `second` from the
weights' own.

Differences from bitsandbytes: codes are the nearest in fp64, where its search is coarser and takes the other neighbour
of a peak that is almost half way; the mean is rounded once; and a kept peak below zero, which it allows (of a block of
zeros among large ones), is 0 here.
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

NEST = 256  # peaks that share a second scale
FURTHEST = 9 / 1280  # half the width of the widest part of .1 … 1


def _levels() -> np.ndarray:
    above = [(0.1 + 0.9 * (np.arange(64 >> n) + 0.5) / (64 >> n)) / 10.0**n for n in range(7)]
    positive = np.concatenate(above)
    return np.sort(np.concatenate([-positive, [0.0], positive, [1.0]])).astype(np.float32)


LEVELS = _levels()
BOUNDS = (LEVELS[1:].astype(np.float64) + LEVELS[:-1]) / 2


@dataclass(frozen=True)
class Nested:
    """Peaks of blocks as they are kept. codes: uint8 (…, rows, blocks of a row); seconds: fp32 [1, n], of all nests of
    the matrix; mean: an fp32 number; start: how many peaks of the matrix come before these."""

    codes: np.ndarray
    seconds: np.ndarray
    mean: float
    start: int = 0

    def rows(self, first: int, end: int) -> "Nested":
        """Those of the rows first … end - 1 (of the first dimension, where there are more than two)."""
        return replace(self, codes=self.codes[first:end], start=self.start + first * prod(self.codes.shape[1:]))

    def peaks(self) -> np.ndarray:
        """What is kept of the peaks, fp32 of the shape of `codes`; not finite where mean or seconds are not."""
        nests = (self.start + np.arange(self.codes.size)) // NEST
        with np.errstate(over="ignore", invalid="ignore"):
            off = LEVELS[self.codes] * self.seconds[0, nests].reshape(self.codes.shape)
            return np.maximum(off + np.float32(self.mean), np.float32(0))


def nests_of(count: int) -> int:
    """Second scales of so many peaks."""
    return -(-count // NEST)


def nest(peaks: np.ndarray) -> Nested:
    """Quantize the peaks of a matrix, fp32 [n, 1] of zero or more. Peaks that are not finite give a
    mean that is not, and with it no kept peak that is."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.float32(peaks.mean(dtype=np.float64))
        off = peaks.reshape(-1) - mean
        seconds = np.maximum.reduceat(np.abs(off), np.arange(0, len(off), NEST))
        spread = np.repeat(seconds, NEST)[: len(off)].astype(np.float64)
        shares = np.divide(off, spread, out=np.zeros(len(off)), where=spread != 0)
    codes = np.searchsorted(BOUNDS, shares, side="left").astype(np.uint8)
    return Nested(codes.reshape(peaks.shape), seconds[None], float(mean))
