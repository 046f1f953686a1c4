"""The screened head, in torch: the argmax over a vocabulary from little more than half of the head's bytes, and equal
to the full one. The contract of kernels/gpu/screen.py.

The codes of an 8-bit matrix are two nibbles each. The upper ones alone are a nearby matrix of 4 bits:

    w = s code + m      code = 16 hi + lo      hi = code >> 4 in -8 ... 7, lo in 0 ... 15
    Q = 16 s hi + (8 s + m)                    8 in the place of lo

Of a hidden state x, with D = w - Q, any centre mu and any positive factors f, one a column, row by row:

    w.x = Q.x + D.mu + D.(x - mu)      |D.(x - mu)| <= ||D / f|| ||f (x - mu)||      (Cauchy and Schwarz)

Q.x is a product of 4-bit codes; D.mu ("offset") and ||D / f|| ("radius") are known beforehand. So: multiply with Q;
compute the exact logits of the few ids that look best, and of every id whose upper bound reaches the best of those.
What is left out is smaller than something seen. Ids that equal the best are not left out, so the lowest of them wins
here as in a full head.

The bound is narrow where mu is the mean of the states to come and f^2 one over their deviation d in each column: with D
alike in all columns the square of the bound is about sum(d / r) sum(d r) for f^2 = r / d, which by the same inequality
is least at r = 1. Outlying columns of hidden states make that worth a text to measure on (the whole covariance in place
of d was tried: hardly narrower).

Upper bounds hold for the logits as they are computed, in fp32. Let e = 2^-24, K columns, S = || |s code| + |m| || and T
the like of Q; by Cauchy and Schwarz again the terms of a row's product sum to at most S ||x|| in magnitude. An fp32
sum in any order of K products, and of the minimums once in 16 columns, each addition rounded to nearest or cut off, of
weights and activations that were themselves rounded, is within (3 K + 8) e S ||x|| of the exact one (Higham 2002,
section 3.1). With the proxy's like, the sum with the offset and the bound's own rounding, "margin", that is
(3 K + 24) e (S + T), times ||x|| covers it all; what is relative to the offset, and to numbers near fp32's smallest, is
added apart. Scores logit / temperature + added need no more: both operations are monotone as they are rounded, so a
bound of the logit makes one of the score.

8 in the place of lo, whose mean is 7.5, widens ||D|| by a hundredth and keeps 16 s and 8 s in fp16 wherever s is;
15/2 s would take two more bytes for each group. Rejected: bounds without the exact logits of the few (both ends are
loose then, and ten thousands of ids survive), and a projection on the first principal directions of x (they hold little
of w).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.quant.qtensor import QTensor

FIRST = 16  # ids whose exact logit is computed before any bound is compared
ROUNDING = 2.0**-24
OF_OFFSET, TINY = 2.0**-21, 2.0**-60
OVERFLOW = 2.0**126  # of ||w|| ||x||: from here on a sum of products may be infinite
INFLATED = 1 + 2.0**-20  # for the few roundings of a bound itself
ROWS = 2048  # handled at a time, in fp64

Exact = Callable[[int, Tensor], Tensor]  # row, ids int64 [k] -> fp32 [k]


@dataclass(frozen=True)
class Screen:
    """What bounds are made of. centre, factor: fp32 [columns]; offset, radius, margin: fp32 [V], the last two rounded
    up; widest: the largest S or T of a row."""

    centre: Tensor
    factor: Tensor
    offset: Tensor
    radius: Tensor
    margin: Tensor
    widest: float

    def to(self, device: torch.device) -> "Screen":
        """The same, there."""
        names = ("centre", "factor", "offset", "radius", "margin")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def reach(self, x: Tensor) -> Tensor:
        """||f (x - mu)|| and ||x|| of every row, a little inflated: fp32 [n, 2]; infinite where a logit may overflow,
        and where x is not finite."""
        wide = x.double()
        apart = (wide - self.centre.double()) * self.factor.double()
        both = torch.stack([apart.norm(dim=1), wide.norm(dim=1)], dim=1)
        known = both[:, 1:] * self.widest < OVERFLOW
        return torch.where(known, both * INFLATED, torch.inf).float()

    def upper(self, proxy: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """The proxy's logits of one row, offset added, and what no logit of the row exceeds; infinite where nothing is
        known. proxy: fp32 [V]; reach: fp32 [2]."""
        middle = proxy + self.offset
        slack = self.radius * reach[0] + self.margin * reach[1] + (self.offset.abs() * OF_OFFSET + TINY)
        upper = middle + slack
        return middle, torch.where(upper.isnan(), torch.inf, upper)


def as_planes(matrix: QTensor, states: Tensor | None = None) -> tuple[QTensor, Screen]:
    """Q, as a matrix of 4-bit codes with scales and minimums, and the screen. matrix: [V, columns], 8-bit codes.

    states: fp32 [n, columns], hidden states like those to come; any answer is right without, from more exact logits.
    Raises ParameterError for a matrix without 8-bit codes, and for states that are not finite or of other columns.
    """
    low, high = matrix.code_range
    if len(matrix.shape) != 2 or matrix.table is not None or not -128 <= low <= high <= 127:
        raise ParameterError(
            "only a matrix of 8-bit codes has upper and lower nibbles",
            found=f"{matrix.format} {list(matrix.shape)}", needed="two dimensions, codes within -128 ... 127, no table",
        )  # fmt: skip
    centre, factor = _centre(matrix.shape[1], states)
    minimums = np.float32(8) * matrix.scales
    upper = QTensor(
        f"{matrix.format}-upper", matrix.shape, matrix.codes >> 4, np.float32(16) * matrix.scales,
        minimums if matrix.minimums is None else minimums + matrix.minimums, matrix.group, None, (-8, 7),
    )  # fmt: skip
    starts = range(0, matrix.shape[0], ROWS)
    parts = [_measure(matrix.rows(i, i + ROWS), upper.rows(i, i + ROWS), centre, factor) for i in starts]
    offset, radius, sizes, widest = (np.concatenate(part) for part in zip(*parts, strict=True))
    margin = (3 * matrix.shape[1] + 24) * ROUNDING * sizes
    return upper, Screen(
        torch.from_numpy(centre), torch.from_numpy(factor), torch.from_numpy(offset.astype(np.float32)),
        torch.from_numpy(_up(radius)), torch.from_numpy(_up(margin)), float(widest.max()),
    )  # fmt: skip


def screened_argmax(
    screen: Screen,
    x: Tensor,
    proxy: Tensor,
    exact: Exact,
    *,
    temperature: Tensor | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The id of each row's largest logit (of logit / temperature + added where given, each step rounded to fp32), among
    equals the lowest, and how many exact logits that took: both int64 [n]. -1 for a row that cannot be drawn from.

    x: fp32 [n, columns], as the head's product sees it (a quantized one widened again); proxy: Q.x, fp32 [n, V], by any
    product within the module's bound; exact(row, ids): the logits of these ids, bit for bit those of the full product,
    which has no bias. temperature: fp32 [n], above zero; added: fp32 [n, V], no NaN and no +inf (-inf masks).
    """
    answers, counts = [], []
    for row, reach in enumerate(screen.reach(x)):
        middle, upper = screen.upper(proxy[row], reach)
        scale = None if temperature is None else temperature[row]
        plus = None if added is None else added[row]
        first = score(middle, scale, plus).topk(min(FIRST, len(middle))).indices
        logits = torch.full_like(middle, -torch.inf)
        logits[first] = exact(row, first)
        left = score(upper, scale, plus) >= score(logits, scale, plus)[first].max()
        left[first] = False
        rest = left.nonzero()[:, 0]
        logits[rest] = exact(row, rest)
        scores = score(logits, scale, plus)
        best = int(scores.argmax())
        undrawable = not bool((logits < torch.inf).all()) or bool(scores[best] == -torch.inf)
        answers.append(-1 if undrawable else best)
        counts.append(len(first) + len(rest))
    return torch.tensor(answers, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)


def score(logits: Tensor, temperature: Tensor | None, added: Tensor | None) -> Tensor:
    """logit / temperature + added, each where given. Never NaN: what is no number, as a masked id's sum of two
    infinities, scores -inf."""
    scores = logits if temperature is None else logits / temperature
    scores = scores if added is None else scores + added
    return torch.where(scores.isnan(), -torch.inf, scores)


def _centre(columns: int, states: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and factors, fp32 [columns]. A column that hardly varies counts as if by a thousandth of the most."""
    if states is None:
        return np.zeros(columns, np.float32), np.ones(columns, np.float32)
    if states.ndim != 2 or len(states) == 0 or states.shape[1] != columns or not bool(states.isfinite().all()):
        raise ParameterError(
            "the hidden states do not fit the matrix",
            found=f"{list(states.shape)}", needed=f"some rows of {columns} finite numbers",
        )  # fmt: skip
    wide = states.double().cpu().numpy()
    deviation = wide.std(axis=0)
    most = deviation.max() or 1.0
    return wide.mean(axis=0).astype(np.float32), np.sqrt(most / np.maximum(deviation, most / 1000)).astype(np.float32)


def _measure(matrix: QTensor, upper: QTensor, centre: np.ndarray, factor: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of each row: D.mu, ||D / f||, S + T, and the larger of S and T, in fp64."""
    (w, size), (nearby, size_nearby) = _widened(matrix), _widened(upper)
    residual = w - nearby
    offset, radius = residual @ centre.astype(np.float64), np.linalg.norm(residual / factor, axis=1)
    return offset, radius, size + size_nearby, np.maximum(size, size_nearby)


def _widened(q: QTensor) -> tuple[np.ndarray, np.ndarray]:
    """The weights, and the norm of each row's | scale code | + | minimum |, fp64."""
    product = (q.codes.reshape(*q.scales.shape, q.group) * q.scales[..., None].astype(np.float64)).reshape(q.shape)
    minimum = np.zeros(1) if q.minimums is None else np.repeat(q.minimums.astype(np.float64), q.group, axis=-1)
    return product + minimum, np.linalg.norm(np.abs(product) + np.abs(minimum), axis=1)


def _up(values: np.ndarray) -> np.ndarray:
    """As float32, not below."""
    return np.nextafter(values.astype(np.float32), np.float32(np.inf))
