"""Do file and source predict the same? Logits of both on a short and a long text, in fp32, and their KL by position.

Rounding the weights costs something, in proportion to the power of the noise that it adds. What is beyond that has
another cause, and a rope that is wrong grows with position, which is why a long text is looked at.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nanokit.model.calibrate import Progress
from nanokit.model.config import ModelConfig
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.verify.behaviour import TEXT, text_ids
from nanokit.model.verify.report import Check, Found
from nanokit.model.verify.variants import AS_IS, Head, final_states
from nanokit.model.weights import Weights

PART = "source"
LONG_TEXT = "texts/evaluation.txt"
SHORT, LONG = 64, 1024  # tokens
# nats of KL that a noise of power 1 beside the weights may cost: some times what a small model, which suffers most,
# loses to rounding (`nanokit quality` measures that), and never less than LITTLE: one weight far beyond all others can
# make more of it. Below FLOOR is fp32's own rounding, which is all that equal weights may show; beyond MOST little is
# left of a model, however honestly it was rounded.
PER_NOISE, FLOOR, LITTLE, MOST = 100.0, 1e-5, 0.02, 1.0
EQUAL = 1e-12  # noise of weights that are the same numbers
PREDICTIONS = "predictions on a {} text"


Model = tuple[ModelConfig, Weights]


def divergence(
    tokenizer: Tokenizer,
    file: Model,
    source: Model,
    noise: float,
    *,
    long: bool = True,
    progress: Progress | None = None,
) -> list[Check]:
    """The checks. tokenizer: of the texts; noise: of the weights, `source_tensors.noise`; long: whether the long text
    is run too."""
    texts = {"short": (TEXT, SHORT), **({"long": (LONG_TEXT, LONG)} if long else {})}
    room = min(config.max_context for config, _ in (file, source))
    heads = Head(file[1]), Head(source[1])
    checks = []
    for name, (text, tokens) in texts.items():
        ids = text_ids(tokenizer, text, min(tokens, room))
        if len(ids) < 2:
            found: Found = ("not checked", f"{len(ids)} tokens of text")
        else:
            states = [final_states(*each, ids, progress=progress)[AS_IS] for each in (file, source)]
            bound = FLOOR if noise < EQUAL else max(LITTLE, PER_NOISE * noise)
            found = _verdict(*kl(*heads, *states), bound)
        checks.append(Check(PART, PREDICTIONS.format(name), *found))
    return checks


def kl(ours: Head, theirs: Head, states: Tensor, their_states: Tensor) -> tuple[Tensor, Tensor]:
    """KL(source || file) after every token, nats, fp64 [tokens], and whether the best token is the same, bool."""
    found, same = [], []
    for q, p in zip(ours.log_probabilities(states), theirs.log_probabilities(their_states), strict=True):
        found.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(found), torch.cat(same)


def by_position(found: Tensor, buckets: int = 4) -> Sequence[tuple[int, int, float]]:
    """Mean KL of equal stretches of positions: first, last (included), nats."""
    edges = torch.linspace(0, len(found), min(buckets, len(found)) + 1).long().tolist()
    return [(a, b - 1, float(found[a:b].mean())) for a, b in pairwise(edges)]


def _verdict(found: Tensor, same: Tensor, bound: float) -> Found:
    mean = float(found.mean())
    if not found.isfinite().all():
        return "failed", "the probabilities of the file are no numbers where those of the source are"
    places = ", ".join(f"{value:.2g} at {a}-{b}" for a, b, value in by_position(found))
    said = f"KL {mean:.2g} nats ({places}), best token the same at {100 * float(same.double().mean()):.1f} %"
    if mean > bound:
        return "failed", f"{said}: more than rounding its weights explains ({bound:.2g})"
    if mean > MOST:
        return "warning", f"{said}: rounding as rough as its weights' explains up to {bound:.2g}, and leaves little"
    return "ok", f"{said}; rounding explains up to {bound:.2g}"
