"""How far a model's predictions are from the reference's, token by token.

For every scored token, with P the reference's distribution over the vocabulary and Q the one that was found:

    kl     sum of P log(P / Q), nats. It sees the whole distribution, so that a few hundred tokens tell settings apart
           of which a perplexity of that many says nothing
    same   whether both have the same best token
    nll    -log P(t) and -log Q(t) of the token t that the text goes on with

The ratio of perplexities is r = exp(mean d), d = nll found - nll of the reference, token by token. Because d is paired,
the text's own difficulty cancels. Its standard error is propagated through exp: se(r) = r · sd(d) / √n. Neighbouring
tokens are not independent, so the errors are a little too small; settings on one text can be compared all the same.

All of it in fp64, a few rows at a time: 64 rows of logits over 49,152 ids take 25 MB each as fp64, a window's 100.
Logits of both sides are fp32 and rounded independently: `reference_floor` says what that alone amounts to.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nanokit.engine.load import LoadedEngine
from nanokit.errors import NanokitError, ParameterError
from nanokit.lab.quality.intervals import standard_error, wilson
from nanokit.lab.quality.passes import Pass, hidden_states
from nanokit.lab.quality.reference import SMALL_CHUNK, Reference

ROWS = 64

LogitsOf = Callable[[list[int]], Tensor]


@dataclass(frozen=True)
class Divergences:
    """One entry for each scored token, windows in order. kl, nll_reference, nll_found: nats, fp64 [n]. same: bool [n].
    positions: tokens before it in its window, int64 [n]. windows: which window, int64 [n]."""

    kl: np.ndarray
    same: np.ndarray
    nll_reference: np.ndarray
    nll_found: np.ndarray
    positions: np.ndarray
    windows: np.ndarray

    def __len__(self) -> int:
        return len(self.kl)

    def summary(self) -> dict[str, float]:
        """kl_mean with kl_mean_se, kl_median, kl_p99, kl_largest (nats); top1 with its interval top1_low, top1_high;
        ppl_ratio with ppl_ratio_se; ppl (what was found); scored_tokens."""
        delta = self.nll_found - self.nll_reference
        ratio = float(np.exp(delta.mean()))
        low, high = wilson(int(self.same.sum()), len(self))
        return {
            "kl_mean": float(self.kl.mean()),
            "kl_mean_se": standard_error(self.kl),
            "kl_median": float(np.median(self.kl)),
            "kl_p99": float(np.quantile(self.kl, 0.99)),
            "kl_largest": float(self.kl.max()),
            "top1": float(self.same.mean()),
            "top1_low": low,
            "top1_high": high,
            "ppl_ratio": ratio,
            "ppl_ratio_se": ratio * standard_error(delta),
            "ppl": float(np.exp(self.nll_found.mean())),
            "scored_tokens": len(self),
        }

    def between(self, low: int, high: int) -> "Divergences":
        """Only the tokens at positions low … high - 1 of their windows. Raises ParameterError if there are none."""
        chosen = (self.positions >= low) & (self.positions < high)
        if not chosen.any():
            raise ParameterError(
                "no scored token stands there",
                found=f"positions {low} to {high - 1}",
                needed=f"within {self.positions.min()} to {self.positions.max()}",
            )
        parts = (self.kl, self.same, self.nll_reference, self.nll_found, self.positions, self.windows)
        return Divergences(*(part[chosen] for part in parts))

    def by_position(self, buckets: int = 4) -> dict[tuple[int, int], dict[str, float]]:
        """The summary of each of so many equal stretches of positions: {(low, high): summary}, high exclusive. Fewer
        where a stretch would have one token only, whose standard error nobody knows."""
        span = int(self.positions.max() - self.positions.min()) + 1
        shortest = 1 if len(np.unique(self.windows)) > 1 else 2
        buckets = max(1, min(buckets, span // shortest))
        edges = np.linspace(self.positions.min(), self.positions.max() + 1, buckets + 1).astype(int).tolist()
        return {(a, b): self.between(a, b).summary() for a, b in pairwise(edges)}


def compare(logits_of: LogitsOf, ref: Reference) -> Divergences:
    """Any model against the reference. logits_of: from the ids of a window to the logits after each of its tokens,
    [len(ids), vocab_size] of any float type and device; `agreement.logits_of` of an engine, or a torch module's.

    Raises NanokitError for logits that are not numbers, ParameterError for a shape that is not the reference's.
    """
    return _tally(ref, (_second_half(logits_of(list(ids)), ids, ref) for ids in ref.windows))


def _second_half(logits: Tensor, ids: Sequence[int], ref: Reference) -> Iterator[Tensor]:
    expected = (len(ids), ref.head[0].shape[0])
    if tuple(logits.shape) != expected:
        raise ParameterError("logits of another shape than the reference's", found=list(logits.shape), needed=expected)
    yield from logits[ref.first - 1 : -1].split(ROWS)


def compare_engine(
    engine: LoadedEngine, ref: Reference, how: Pass | None = None, cancel: threading.Event | None = None
) -> Divergences:
    """An engine against the reference, with its own pages; its logits are computed a few rows at a time.

    how: batch, chunk and page layout of the windows. Raises ParameterError for an engine of too few pages, NanokitError
    for logits that are not numbers, StoppedError between two windows once `cancel` is set.
    """
    states = _states(engine, ref, ref.windows, how or Pass(), cancel)
    return _tally(ref, (_logits(engine, each) for each in states))


def engine_floor(engine: LoadedEngine, ref: Reference, how: Pass, cancel: threading.Event | None = None) -> float:
    """Mean KL of window 0 from the same window computed by the same engine in other chunks, beside another window or
    alone, over pages laid out otherwise: how far this setting is from itself. 0 where kernels keep every bit (C)."""
    beside = 2 if how.batch == 1 and len(ref.windows) > 1 else 1
    other = Pass(beside, SMALL_CHUNK, "consecutive" if how.layout == "scattered" else "scattered")
    (first, *_), (again, *_) = (_states(engine, ref, ref.windows[: way.batch], way, cancel) for way in (how, other))
    pairs = zip(_logits(engine, first), _logits(engine, again), strict=True)
    rows = [_kl(a.double().log_softmax(-1), b.double().log_softmax(-1)) for a, b in pairs]
    return float(torch.cat(rows).mean())


def _states(
    engine: LoadedEngine, ref: Reference, windows: list[list[int]], how: Pass, cancel: threading.Event | None
) -> Iterator[Tensor]:
    """hidden_states of an engine, its pages given back at the end."""
    wanted = how.blocks(ref.length, engine.config.block_size)
    if wanted > engine.pool.available:
        raise ParameterError(
            "the engine has too few KV pages for these windows",
            found=f"{engine.pool.available} free blocks",
            needed=f"{wanted} for {how.batch} windows of {ref.length} tokens",
            do="load with a larger ctx or max_seqs, or compute fewer windows together",
        )
    blocks = [engine.pool.allocate() for _ in range(wanted)]
    try:
        tables = how.tables(blocks)
        first = ref.first - 1
        yield from hidden_states(lambda b: engine.model.forward(b, engine.kv), windows, first, tables, how, cancel)
    finally:
        engine.pool.release(blocks)


def _logits(engine: LoadedEngine, states: Tensor) -> Iterator[Tensor]:
    """Of the rows that predict a token of the window, a few at a time."""
    for rows in states[:-1].split(ROWS):
        with torch.inference_mode():
            logits = engine.model.head.logits(rows.contiguous())
        yield logits  # out here: a generator that is left alone would leave its caller in inference mode


def reference_floor(ref: Reference) -> float:
    """Mean KL of window 0 from the same window computed by the same model in other chunks: what this measure gives
    where nothing has changed but the order of summation."""
    same = replace(ref, windows=ref.windows[:1], hidden=ref.hidden[:1])
    return float(_tally(same, [(ref.head_of(rows) for rows in ref.again.split(ROWS))]).kl.mean())


def _tally(ref: Reference, windows: Iterable[Iterable[Tensor]]) -> Divergences:
    """windows: of each window the found logits of its scored rows, in pieces."""
    found: list[np.ndarray] = []
    for window, pieces in enumerate(windows):
        at = 0
        targets = torch.tensor(ref.windows[window][ref.first :])
        for piece in pieces:
            rows = slice(at, at + len(piece))
            found.append(_rows(ref.logits(window, rows), piece, targets[rows], window))
            at += len(piece)
    columns = np.concatenate(found, axis=1)
    each = ref.length - ref.first
    count = len(ref.windows)
    positions = np.tile(np.arange(ref.first, ref.length), count)
    which = np.repeat(np.arange(count), each)
    return Divergences(columns[0], columns[1].astype(bool), columns[2], columns[3], positions, which)


def _rows(expected: Tensor, logits: Tensor, targets: Tensor, window: int) -> np.ndarray:
    """kl, same, nll of the reference and nll found of a few rows, fp64 [4, rows]."""
    logits = logits.to("cpu", torch.float64)
    if not logits.isfinite().all():
        raise NanokitError(
            "the model's logits are not numbers",
            found=f"{int((~logits.isfinite()).any(1).sum())} of {len(logits)} rows of window {window} hold NaN or inf",
            needed="finite logits",
            do="a format whose range is too small for its scales does this; try another policy",
        )
    p, q = expected.double().log_softmax(-1), logits.log_softmax(-1)
    same = expected.argmax(-1) == logits.argmax(-1)
    at = targets[:, None]
    columns = (_kl(p, q), same.double(), -p.gather(1, at)[:, 0], -q.gather(1, at)[:, 0])
    return torch.stack(columns).numpy()


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(P || Q) of every row of log probabilities, nats; rounding may put it 1e-15 below 0."""
    return (p.exp() * (p - q)).sum(-1)
