"""Drawing the next token of every row, asking the head for no more than each row needs.

    greedy                      head.argmax                          nothing leaves the head but one id
    temperature alone           head.gumbel(noise)                   one id as well
    top-k, top-p or min-p       head.logits, filter, Gumbel-argmax   the row's logits leave the head

Every draw is argmax over the kept tokens of logits / T + gumbel(seed, position, token), so a row's token
depends on its own logits, seed and position only, and turning a filter on changes the token only if it drops
the winner. Order as in transformers: repetition penalty and masks (edits of the head), temperature, top-k,
top-p, min-p.

Filters work on a few of the largest logits, found by `topk`, and widen only when those do not carry enough
probability: a full sort of 49,152 logits costs more than the rest of a step. Logits are fp32; probabilities
and their sums are float64. Rejected: filtering by setting dropped logits to -inf in place (it keeps ties
beyond k, and the noise of all tokens would be needed).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanokit.engine.noise import gumbel_all, gumbel_of
from nanokit.engine.sampling import Sampling
from nanokit.errors import NanokitError
from nanokit.model.head import Edit, Head

# A sum of fp32-rounded probabilities that misses top_p by less than this has reached it: with (.5, .3, .2)
# and .8 two are kept, although .5 + .3 comes out a little below .8.
TOP_P_SLACK = 1e-6
FIRST_LOOK = 64  # candidates that top-p looks at before it widens; usually enough, and as cheap to find as one
WIDEN = 8


@dataclass(frozen=True)
class Row:
    """One draw. position: absolute index in its sequence of the token to be drawn."""

    sampling: Sampling
    seed: int
    position: int
    edit: Edit | None


def largest(logits: Tensor, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest logits, largest first, among equals the lowest id first. logits: [V], no
    NaN.

    `torch.topk` alone picks any of several equal ones at the edge.
    """
    values = logits.numpy()
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    edge = torch.topk(logits, count, sorted=True).values[-1].item()
    above = np.flatnonzero(values > edge)
    equal = np.flatnonzero(values == edge)[: count - len(above)]
    ids = np.concatenate([above, equal])
    return ids[np.lexsort((ids, -values[ids]))]


def kept(logits: Tensor, sampling: Sampling) -> NDArray[np.int64]:
    """Ids that top-k, top-p and min-p leave, in ascending order: never none, and none whose logit is -inf.

    logits: fp32 [V] on the CPU, edits applied, at least one finite.
    """
    vocab_size = len(logits)
    values = logits.numpy()
    top = float(values.max())

    def weights(ids: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        """exp((logit - max) / T): probabilities up to their normaliser."""
        scaled: NDArray[np.float64] = np.exp((values[ids].astype(np.float64) - top) / sampling.temperature)
        return scaled

    needed = sampling.top_p - TOP_P_SLACK
    if 0 < sampling.top_k < vocab_size:
        ids = largest(logits, sampling.top_k)
        mass = weights(ids)
        total = mass.sum()
    elif sampling.top_p < 1.0:
        total = weights(slice(None)).sum()
        ids = largest(logits, FIRST_LOOK)
        mass = weights(ids)
        while len(ids) < vocab_size and mass.sum() < needed * total:
            ids = largest(logits, len(ids) * WIDEN)
            mass = weights(ids)
    else:
        ids = np.arange(vocab_size)
        mass = weights(ids)
        total = mass.sum()
    if sampling.top_p < 1.0:
        end = int(np.searchsorted(np.cumsum(mass), needed * total)) + 1  # first place where the sum has reached it
        ids, mass = ids[:end], mass[:end]
    keep = (mass >= sampling.min_p) & (values[ids] > -np.inf)
    return np.sort(ids[keep])


def filtered_draw(logits: Tensor, row: Row) -> int:
    """The token of one row whose sampling filters. logits: fp32 [V], edits applied. Raises NanokitError."""
    logits = logits.float().cpu()
    top = logits.max().item()  # NaN if any is
    if top == -np.inf:
        raise _all_masked(row)
    if not np.isfinite(top):
        raise _not_finite(row)
    ids = kept(logits, row.sampling)
    scores = logits.numpy()[ids] / np.float32(row.sampling.temperature)
    return int(ids[np.argmax(scores + gumbel_of(row.seed, row.position, ids))])


def _not_finite(row: Row) -> NanokitError:
    return NanokitError(
        f"the model's output at position {row.position} is not a number",
        found="NaN or infinity in the hidden state or logits",
        needed="finite values",
        do="check the model file, and the activation mode if it is not fp32",
    )


def _all_masked(row: Row) -> NanokitError:
    return NanokitError(
        f"no token is left to draw at position {row.position}",
        found="every logit is minus infinity",
        needed="at least one token that is not suppressed",
        do="shorten `suppress`",
    )


def draw(head: Head, hidden: Tensor, rows: Sequence[Row]) -> list[int | NanokitError]:
    """The next token of every row, or the error that keeps one row from being drawn.

    hidden: [len(rows), hidden_size]. A row that fails does not fail its neighbours.
    """
    results: list[int | NanokitError | None] = [None] * len(rows)
    finite = torch.isfinite(hidden).all(dim=-1).tolist()
    greedy, pure, filtered = [], [], []
    for index, row in enumerate(rows):
        if not finite[index]:
            results[index] = _not_finite(row)
        elif row.sampling.is_greedy:
            greedy.append(index)
        elif row.sampling.is_filtered:
            filtered.append(index)
        else:
            pure.append(index)

    def edits(indices: list[int]) -> list[Edit | None] | None:
        found = [rows[index].edit for index in indices]
        return found if any(found) else None

    def store(indices: list[int], ids: Tensor) -> None:
        for index, token in zip(indices, ids.tolist(), strict=True):
            results[index] = token

    if greedy:
        store(greedy, head.argmax(_select(hidden, greedy), edits=edits(greedy)))
    if pure:
        noise = np.stack([gumbel_all(rows[i].seed, rows[i].position, head.vocab_size) for i in pure])
        temperature = torch.tensor([rows[i].sampling.temperature for i in pure], device=hidden.device)
        store(
            pure,
            head.gumbel(
                _select(hidden, pure),
                temperature,
                torch.from_numpy(noise).to(hidden.device),
                edits=edits(pure),
            ),
        )
    if filtered:
        logits = head.logits(_select(hidden, filtered), edits=edits(filtered))
        for index, row_logits in zip(filtered, logits, strict=True):
            try:
                results[index] = filtered_draw(row_logits, rows[index])
            except NanokitError as error:
                results[index] = error
    return [result for result in results if result is not None]


def _select(hidden: Tensor, indices: list[int]) -> Tensor:
    return hidden if len(indices) == len(hidden) else hidden[indices]
