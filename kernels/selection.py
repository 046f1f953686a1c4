"""Questions about one row of fp32 logits, in torch and numpy: the contract of kernels/cpu/select.py and
kernels/gpu/select.py.

Any backend's selection gives the same ids. A row that holds a NaN or +inf, or nothing above -inf, cannot be drawn
from: `argmax` says -1 and `gumbel_candidates` none. logits: fp32 [V], here on the CPU; answers lie there, wherever a
backend's logits do.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Gumbel noise -log(-log(u)) lies in [-3.14, 22.88] for u in [2**-33, 1 - 2**-33] (nanokit/engine/noise.py).
NOISE_SPAN = 26.1


def argmax(logits: Tensor) -> int:
    """The id of the largest logit, among equals the lowest; -1 when the row cannot be drawn from."""
    top, best = logits.max(dim=0)  # NaN if any is
    return int(best) if bool(torch.isfinite(top)) else -1


def values(logits: Tensor, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The logits of these ids, in their order."""
    chosen: NDArray[np.float32] = logits.numpy()[ids]
    return chosen


def largest(logits: Tensor, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest logits (all where there are fewer), largest first, among equals the lowest id first.

    No NaN. `torch.topk` alone picks any of several equal ones at the edge.
    """
    row = logits.numpy()
    if count >= len(row):
        return np.argsort(-row, kind="stable")
    edge = torch.topk(logits, count, sorted=True).values[-1].item()
    above = np.flatnonzero(row > edge)
    equal = np.flatnonzero(row == edge)[: count - len(above)]
    ids = np.concatenate([above, equal])
    return ids[np.lexsort((ids, -row[ids]))]


def mass(logits: Tensor, temperature: float) -> float:
    """Sum of exp((logit - max) / temperature), to 1e-9 of the exact one; NaN when the row cannot be drawn from."""
    if argmax(logits) < 0:
        return float("nan")
    wide = logits.double()
    return float(((wide - wide.max()) / temperature).exp().sum())


def look(logits: Tensor, count: int, temperature: float) -> tuple[NDArray[np.int64], float]:
    """What a filter asks first: `largest` and `mass`; no ids when the row cannot be drawn from."""
    weighed = mass(logits, temperature)
    return (np.empty(0, np.int64), weighed) if np.isnan(weighed) else (largest(logits, count), weighed)


def normalizer(logits: Tensor) -> Tensor:
    """log of the sum of exp(logit) of every row, fp32 [n] on the CPU; logits [n, V]. NaN where a row cannot be drawn
    from."""
    tops = logits.amax(dim=-1)
    return torch.where(tops.isfinite(), logits.double().logsumexp(dim=-1), torch.nan).float()


def gumbel_candidates(
    logits: Tensor, temperature: float, seed: int, position: int, stream: int, ids: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Ids, ascending, of all tokens that can be the argmax of logits / temperature + gumbel_all(seed, position,
    stream), and of others; none when the row cannot be drawn from. ids: look among these only, ascending.

    Here: those that the widest noise could lift to the top. A backend that computes the noise leaves fewer.
    """
    row = logits.numpy() if ids is None else values(logits, ids)
    top = row.max(initial=-np.inf)
    if not np.isfinite(top):
        return np.empty(0, np.int64)
    with np.errstate(over="ignore"):  # to infinity, which wins or loses as it should
        scores = row / np.float32(temperature)
    best = scores.max()
    least = best if np.isinf(best) else best - NOISE_SPAN - abs(best) * np.float32(2**-22)
    places = np.flatnonzero((scores >= least) & (scores > -np.inf))
    return places if ids is None else ids[places]
