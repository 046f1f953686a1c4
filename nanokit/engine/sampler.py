"""Drawing the next token of every row, asking the head for no more than the rows need.

    all greedy                  head.argmax                          nothing leaves the head but one id a row
    all temperature alone       head.gumbel(noise)                   one id as well
    others                      head.logits, filter, Gumbel-argmax   once for all rows: weights are read once

Every draw is argmax over the kept tokens of logits / T + gumbel(seed, position, token), so a row's token
depends on its own logits, seed and position only, and turning a filter on changes the token only if it drops
the winner. Order as in transformers: repetition penalty and masks (edits of the head), temperature, top-k,
top-p, min-p.

Filters work on a few of the largest logits and widen only when those do not carry enough probability: a full
sort of 49,152 logits costs more than the rest of a step. Logits are fp32; probabilities and their sums are
float64. Passes over the vocabulary (the largest few, the sum of all weights, the noise) are the head's backend's
(`Selection`); what is decided on a few is decided here, in numpy, alike for every backend. Rejected: filtering by
setting dropped logits to -inf in place (it keeps ties beyond k, and the noise of all tokens would be needed).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanokit.engine.noise import Noise
from nanokit.engine.sampling import Sampling
from nanokit.errors import NanokitError
from nanokit.model.head import Edit, Edits, Head, Selection, gumbel_argmax

# A sum of fp32-rounded probabilities that misses top_p by less than this has reached it: with (.5, .3, .2)
# and .8 two are kept, although .5 + .3 comes out a little below .8. A backend's sum of all weights may be off by
# 1e-9 of itself: a thousandth of this, so it cannot undo that.
TOP_P_SLACK = 1e-6
FIRST_LOOK = 64  # candidates that filters look at before they widen; usually enough, and as cheap to find as one
WIDEN = 8


@dataclass(frozen=True)
class Row:
    """One draw. position: absolute index in its sequence of the token to be drawn."""

    sampling: Sampling
    seed: int
    position: int
    edit: Edit | None


def kept(logits: Tensor, sampling: Sampling, selection: Selection) -> NDArray[np.int64]:
    """Ids that top-k, top-p and min-p leave, in ascending order: none only of a row that cannot be drawn from, and none
    whose logit is -inf. logits: fp32 [V] where `selection` reads them, edits applied.
    """
    vocab_size = len(logits)
    top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
    nucleus = sampling.top_p < 1.0
    count = top_k or min(FIRST_LOOK, vocab_size)
    ids, total = selection.look(logits, count, sampling.temperature)
    if len(ids) == 0:
        return ids
    while True:
        looked_at = selection.values(logits, ids)
        # exp((logit - max) / T): probabilities up to their normaliser
        mass = np.exp((looked_at.astype(np.float64) - looked_at[0]) / sampling.temperature)
        reached = mass.cumsum()
        if top_k:
            total = reached[-1]
        needed = (sampling.top_p - TOP_P_SLACK) * total
        if top_k or count == vocab_size or mass[-1] < sampling.min_p or (nucleus and reached[-1] >= needed):
            break
        count = min(count * WIDEN, vocab_size)
        ids = selection.largest(logits, count)
    end = int(reached.searchsorted(needed)) + 1 if nucleus else len(ids)  # first place where the sum has reached it
    if sampling.min_p > 0.0 or looked_at[-1] == -np.inf:  # both fall, so that what is dropped lies at the end
        end = min(end, int(((mass >= sampling.min_p) & (looked_at > -np.inf)).sum()))
    ids = ids[:end]
    ids.sort()
    return ids


def draw(head: Head, hidden: Tensor, rows: Sequence[Row]) -> list[int | NanokitError]:
    """The next token of every row, or the error that keeps one row from being drawn.

    hidden: [len(rows), hidden_size]. A row that fails does not fail its neighbours.
    """
    pairs = zip(_tokens(head, hidden, rows), rows, strict=True)
    return [token if token >= 0 else _undrawable(row, head.vocab_size) for token, row in pairs]


def _tokens(head: Head, hidden: Tensor, rows: Sequence[Row]) -> list[int]:
    """The token of every row; -1 where none can be drawn."""
    if not rows:
        return []
    edits: Edits | None = [row.edit for row in rows] if any(row.edit for row in rows) else None
    if all(row.sampling.is_greedy for row in rows):
        tokens: list[int] = head.argmax(hidden, edits).tolist()
        return tokens
    noise = Noise([row.seed for row in rows], [row.position for row in rows])
    if not any(row.sampling.is_greedy or row.sampling.is_filtered for row in rows):
        tokens = head.gumbel(hidden, [row.sampling.temperature for row in rows], noise, edits).tolist()
        return tokens
    logits = head.logits(hidden, edits=edits)
    return [_token(head.selection, logits[index], row, noise, index) for index, row in enumerate(rows)]


def _token(selection: Selection, logits: Tensor, row: Row, noise: Noise, index: int) -> int:
    if row.sampling.is_greedy:
        return selection.argmax(logits)
    ids = kept(logits, row.sampling, selection) if row.sampling.is_filtered else None
    if ids is not None and len(ids) == 0:
        return -1
    return gumbel_argmax(selection, logits, row.sampling.temperature, noise, index, ids)


def _undrawable(row: Row, vocab_size: int) -> NanokitError:
    if row.edit and len(set(row.edit.masked)) == vocab_size:
        return NanokitError(
            f"no token is left to draw at position {row.position}",
            found="every logit is minus infinity",
            needed="at least one token that is not suppressed",
            do="shorten `suppress`",
        )
    return NanokitError(
        f"the model's output at position {row.position} is not a number",
        found="NaN or infinity in the hidden state or logits",
        needed="finite values",
        do="check the model file, and the activation mode if it is not fp32",
    )
