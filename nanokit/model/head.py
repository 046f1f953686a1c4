"""The output head, asked for what is needed.

The trunk returns hidden states; whoever samples or verifies asks the head for an argmax, a Gumbel-argmax, a
normaliser, the best few or the logits of given ids, and never for "the logits" by habit: over 49,152 ids they cost
more than anything else in a step, and later heads (screened, candidates only) answer most questions without them.
`FullHead` computes every logit: right by construction. It stands on a kernel backend, which multiplies with the head
matrix and answers questions about rows of logits (`Selection`).

Sparse edits (a repetition penalty on the ids seen so far, ids that are masked out) are inputs here rather than a
step after the head, since a head that does not compute all logits can only apply them while it computes.

Noise is an input as well, as a key for every row and not as numbers: a head that knows few logits needs the noise
of those few, and computing that of a whole vocabulary costs more than drawing. Rejected: a tensor [rows, vocab_size].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Edit:
    """A sparse change to one row of logits, applied in fp32 before anything else reads them.

    penalized: ids whose logit is divided by `penalty` where positive and multiplied where negative
    (Keskar et al. 2019, CTRL, section 4.1); each id counts once. masked: ids set to minus infinity.
    """

    penalized: tuple[int, ...] = ()
    penalty: float = 1.0
    masked: tuple[int, ...] = ()


Edits = Sequence[Edit | None]


class Noise(Protocol):
    """Standard Gumbel noise, a function of (seed, position, stream, token); see nanokit/engine/noise.py."""

    def key(self, row: int) -> tuple[int, int, int]:
        """seed, position and stream of a row."""
        ...

    def of(self, row: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Noise of these tokens in a row, float32 [len(ids)]."""
        ...


class Selection(Protocol):
    """What a backend answers about a row of logits; kernels/selection.py says it in full, and every backend gives the
    same ids. logits: fp32 [V] where the backend leaves them, perhaps on a GPU, edits applied; answers: on the CPU."""

    def argmax(self, logits: Tensor) -> int:
        """The id of the largest; -1 when the row cannot be drawn from."""
        ...

    def values(self, logits: Tensor, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """The logits of these ids, float32 [len(ids)]."""
        ...

    def largest(self, logits: Tensor, count: int) -> NDArray[np.int64]:
        """Ids of the `count` largest, largest first, among equals the lowest id first."""
        ...

    def look(self, logits: Tensor, count: int, temperature: float) -> tuple[NDArray[np.int64], float]:
        """`largest` and `mass` at once; no ids when the row cannot be drawn from."""
        ...

    def mass(self, logits: Tensor, temperature: float) -> float:
        """Sum of exp((logit - max) / temperature), to 1e-9."""
        ...

    def normalizer(self, logits: Tensor) -> Tensor:
        """log of the sum of exp(logit) of every row of [n, V]."""
        ...

    def gumbel_candidates(
        self,
        logits: Tensor,
        temperature: float,
        seed: int,
        position: int,
        stream: int,
        ids: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Ids of the few that can win a draw (among `ids` only), ascending; none when the row cannot be drawn from."""
        ...


class Head(Protocol):
    """What samplers and verifiers may ask. hidden: [rows, hidden_size], finite; all arithmetic and results in fp32."""

    vocab_size: int
    selection: Selection

    def logits(self, hidden: Tensor, ids: Tensor | None = None, edits: Edits | None = None) -> Tensor:
        """Logits of all ids [rows, vocab_size], or of the given ids [rows, len(ids)]; the caller's to change."""
        ...

    def argmax(self, hidden: Tensor, edits: Edits | None = None) -> Tensor:
        """The id of the largest logit, int64 [rows]; among equals the lowest id; -1 where edits leave none."""
        ...

    def gumbel(self, hidden: Tensor, temperature: Sequence[float], noise: Noise, edits: Edits | None = None) -> Tensor:
        """argmax(logits / temperature + noise), int64 [rows]: a draw from softmax(logits / temperature); -1 for a row
        that cannot be drawn from (see Selection). temperature: one a row, all above zero."""
        ...

    def normalizer(self, hidden: Tensor, edits: Edits | None = None) -> Tensor:
        """log of the sum of exp(logit) over the vocabulary, [rows]."""
        ...

    def logprobs(self, hidden: Tensor, n: int, edits: Edits | None = None) -> tuple[Tensor, Tensor]:
        """The n most likely ids, int64 [rows, n], with their log probabilities [rows, n], best first."""
        ...


class HeadProduct(Protocol):
    """What FullHead asks of a kernel backend: a bound model has all three."""

    selection: Selection

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """fp32 [rows, vocab_size] or [rows, len(ids)], not used again by the backend."""
        ...

    def argmax(self, hidden: Tensor) -> Tensor:
        """int64 [rows], among equals the lowest id; -1 for a row that cannot be drawn from."""
        ...


class FullHead:
    """Every logit, by one product with the head matrix."""

    def __init__(self, product: HeadProduct, vocab_size: int) -> None:
        self._product, self.selection, self.vocab_size = product, product.selection, vocab_size

    def logits(self, hidden: Tensor, ids: Tensor | None = None, edits: Edits | None = None) -> Tensor:
        out = self._product.logits(hidden, ids)
        if edits is not None:
            for row, edit in zip(out, edits, strict=True):
                if edit is not None:
                    _apply(row, edit, ids)
        return out

    def argmax(self, hidden: Tensor, edits: Edits | None = None) -> Tensor:
        if edits is None:
            return self._product.argmax(hidden)
        best = [self.selection.argmax(row) for row in self.logits(hidden, edits=edits)]
        return torch.tensor(best, dtype=torch.int64)

    def gumbel(self, hidden: Tensor, temperature: Sequence[float], noise: Noise, edits: Edits | None = None) -> Tensor:
        rows = enumerate(zip(self.logits(hidden, edits=edits), temperature, strict=True))
        best = [gumbel_argmax(self.selection, logits, t, noise, row) for row, (logits, t) in rows]
        return torch.tensor(best, dtype=torch.int64)

    def normalizer(self, hidden: Tensor, edits: Edits | None = None) -> Tensor:
        return self.selection.normalizer(self.logits(hidden, edits=edits))

    def logprobs(self, hidden: Tensor, n: int, edits: Edits | None = None) -> tuple[Tensor, Tensor]:
        logits = self.logits(hidden, edits=edits)
        ids = [self.selection.largest(row, n) for row in logits]
        values = np.stack([self.selection.values(row, few) for row, few in zip(logits, ids, strict=True)])
        return torch.from_numpy(np.stack(ids)), torch.from_numpy(values) - self.selection.normalizer(logits)[:, None]


def gumbel_argmax(
    selection: Selection,
    logits: Tensor,
    temperature: float,
    noise: Noise,
    row: int,
    ids: NDArray[np.int64] | None = None,
) -> int:
    """argmax of logits / temperature + noise of a row, over the vocabulary or over `ids` (ascending); -1 when the row
    cannot be drawn from. logits: fp32 [V]; division and sum in fp32."""
    few = selection.gumbel_candidates(logits, temperature, *noise.key(row), ids)
    if len(few) < 2:
        return int(few[0]) if len(few) else -1
    with np.errstate(over="ignore"):
        scores = selection.values(logits, few) / np.float32(temperature)
    return int(few[np.argmax(scores + noise.of(row, few))])


def _apply(row: Tensor, edit: Edit, ids: Tensor | None) -> None:
    """Edit one row of logits in place; with `ids`, column j of the row is the logit of ids[j]. An id that comes twice
    is written twice with the same value."""
    for chosen, change in ((edit.penalized, edit.penalty), (edit.masked, None)):
        if not chosen:
            continue
        columns = torch.from_numpy(np.array(chosen, np.int64)).to(row.device)
        if ids is not None:
            columns = torch.isin(ids.to(row.device), columns).nonzero().squeeze(-1)
        if change is None:
            row[columns] = -torch.inf
        else:
            value = row[columns]
            row[columns] = torch.where(value > 0, value / change, value * change)
