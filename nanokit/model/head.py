"""The output head, asked for what is needed.

The trunk returns hidden states; whoever samples or verifies asks the head for an argmax, a Gumbel-argmax, a
normaliser, the best few or the logits of given ids, and never for "the logits" by habit: over 49,152 ids they cost
more than anything else in a step, and later heads (screened, candidates only) answer most questions without them.
`FullHead` is the reference: it computes every logit in fp32 and is right by construction.

Sparse edits (a repetition penalty on the ids seen so far, ids that are masked out) are inputs here rather than a
step after the head, since a head that does not compute all logits can only apply them while it computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
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


class Head(Protocol):
    """What samplers and verifiers may ask. hidden: [rows, hidden_size]; all arithmetic and results in fp32."""

    vocab_size: int

    def logits(self, hidden: Tensor, ids: Tensor | None = None, edits: Edits | None = None) -> Tensor:
        """Logits of all ids [rows, vocab_size], or of the given ids [rows, len(ids)]."""
        ...

    def argmax(self, hidden: Tensor, edits: Edits | None = None) -> Tensor:
        """The id of the largest logit, int64 [rows]; among equals the lowest id."""
        ...

    def gumbel(self, hidden: Tensor, temperature: Tensor, noise: Tensor, edits: Edits | None = None) -> Tensor:
        """argmax(logits / temperature + noise), int64 [rows]: with Gumbel noise [rows, vocab_size] a draw
        from softmax(logits / temperature). temperature: [rows], all above zero."""
        ...

    def normalizer(self, hidden: Tensor, edits: Edits | None = None) -> Tensor:
        """log of the sum of exp(logit) over the vocabulary, [rows]."""
        ...

    def logprobs(self, hidden: Tensor, n: int, edits: Edits | None = None) -> tuple[Tensor, Tensor]:
        """The n most likely ids, int64 [rows, n], with their log probabilities [rows, n], best first."""
        ...


class FullHead:
    """Every logit, by one product with the head matrix.

    weight: [vocab_size, hidden_size] fp32 (for tied models the embedding itself, not a copy); bias: [vocab_size].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.vocab_size = weight.shape[0]

    def logits(self, hidden: Tensor, ids: Tensor | None = None, edits: Edits | None = None) -> Tensor:
        weight, bias = self.weight, self.bias
        if ids is not None:
            weight, bias = weight[ids], None if bias is None else bias[ids]
        out = torch.nn.functional.linear(hidden.float(), weight, bias)
        if edits is not None:
            for row, edit in zip(out, edits, strict=True):
                if edit is not None:
                    _apply(row, edit, ids)
        return out

    def argmax(self, hidden: Tensor, edits: Edits | None = None) -> Tensor:
        return self.logits(hidden, edits=edits).argmax(dim=-1)

    def gumbel(self, hidden: Tensor, temperature: Tensor, noise: Tensor, edits: Edits | None = None) -> Tensor:
        return (self.logits(hidden, edits=edits) / temperature[:, None] + noise).argmax(dim=-1)

    def normalizer(self, hidden: Tensor, edits: Edits | None = None) -> Tensor:
        return self.logits(hidden, edits=edits).logsumexp(dim=-1)

    def logprobs(self, hidden: Tensor, n: int, edits: Edits | None = None) -> tuple[Tensor, Tensor]:
        logprob = self.logits(hidden, edits=edits).log_softmax(dim=-1)
        best = logprob.topk(n, dim=-1)
        return best.indices, best.values


def _apply(row: Tensor, edit: Edit, ids: Tensor | None) -> None:
    """Edit one row of logits in place; with `ids`, column j of the row is the logit of ids[j]."""
    for chosen, change in ((edit.penalized, edit.penalty), (edit.masked, None)):
        if not chosen:
            continue
        columns = torch.tensor(sorted(set(chosen)), dtype=torch.int64, device=row.device)
        if ids is not None:
            columns = torch.isin(ids, columns).nonzero().squeeze(-1)
        if change is None:
            row[columns] = -torch.inf
        else:
            value = row[columns]
            row[columns] = torch.where(value > 0, value / change, value * change)
