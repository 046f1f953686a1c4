"""Bits where they count: `auto:4.25` becomes a policy with a format for each half of each layer.

Measured first: what each half (attention, feed-forward) of each layer costs in each candidate format, alone, everything
else as it is stored. The cost is the divergence KL(as stored || quantized) of the next token's distribution over the
second halves of two short windows of the calibration text; all formats of a layer run through the layers behind it
together. Then bought: from the cheapest formats on, the step that saves most divergence for each bit, while the budget
lasts. Costs are taken to add up. They do so only roughly, but what is chosen depends on their order.

    budget = stored bits / weights, over the matrices of the layers: scales included, head and embedding not

The candidates are one format for each price that the C kernels run. Asymmetric ones are not among them: weights that
come from Q4_1 would make them look better than they are. Steps go along the lower convex hull of a half's costs: a
format that is worse than a mixture of two others is not bought on the way. Everything is deterministic.

Rejected: each matrix by itself (seven measurements a layer for a choice that hardly differs), and a proxy from weights
or second moments (errors of different matrices have no common unit but what the model says in the end).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanokit.errors import ParameterError
from nanokit.kernels.reference import Layer, rms_norm
from nanokit.model.calibrate import Progress
from nanokit.model.source import ModelSource
from nanokit.model.weights import Weights, find_weights
from nanokit.model.windows import Windows, read_layer, run_layer, windows_of
from nanokit.quant.policy import CLASSES, Policy, parse_policy
from nanokit.quant.storage import nominal_bits
from nanokit.quant.weight_format import WeightFormat, weight_format

CANDIDATES = ("int4-sym-channel", "int4-sym-g64", "nvfp4", "int8-sym-g64")
HALVES = ("attn", "ffn")
WINDOWS, WINDOW = 2, 256


@dataclass(frozen=True)
class Cost:
    """One half of a layer in one format. bits: stored, all of its matrices; kl: nats a token, mean."""

    layer: int
    half: str
    format: str
    bits: float
    kl: float


def resolve(
    source: ModelSource, bits: float, token_ids: Sequence[list[int]], progress: Progress | None = None
) -> Policy:
    """The policy that spends at most `bits` stored bits per weight on a model's layers.

    token_ids: of a calibration text. Raises ParameterError for a budget that no candidates fit.
    """
    costs = sensitivities(source, token_ids, progress=progress)
    weights = source.config.num_layers * sum(map(prod, _shapes(source).values()))
    return parse_policy(spelled(allocate(costs, bits * weights, f"auto:{bits:g}", weights)))


@torch.inference_mode()
def sensitivities(
    source: ModelSource,
    token_ids: Sequence[list[int]],
    candidates: Sequence[str] = CANDIDATES,
    progress: Progress | None = None,
) -> list[Cost]:
    """What each half of each layer costs in each candidate that fits its columns, one at a time."""
    weights = find_weights(source.config, source)
    windows = windows_of(source.config, [ids[:WINDOW] for ids in _spread(token_ids)])
    states = _states(weights, windows)
    judge = _Judge(weights, windows, states[-1])
    tried = [(half, fmt, bits) for half in HALVES for fmt, bits in _fitting(source, half, candidates)]
    costs: list[Cost] = []
    count = source.config.num_layers
    for index in range(count):
        if progress is not None:
            progress(index, count, f"measuring layer {index}")
        ends = [run_layer(_with(weights, index, half, fmt), states[index], windows) for half, fmt, _ in tried]
        found = judge.divergences(ends, index + 1)
        costs += [Cost(index, half, fmt.name, bits, kl) for (half, fmt, bits), kl in zip(tried, found, strict=True)]
    if progress is not None:
        progress(count, count, "measured")
    return costs


def allocate(costs: Sequence[Cost], budget: float, name: str = "the budget", weights: int = 1) -> list[Cost]:
    """One cost for each half of each layer, of at most `budget` bits together, that save as much divergence as steps
    along the hulls of the costs can. name, weights: for the message. Raises ParameterError where nothing fits."""
    hulls = [_hull(list(group)) for _, group in groupby(costs, lambda cost: (cost.layer, cost.half))]
    chosen, left = [0] * len(hulls), budget - sum(hull[0].bits for hull in hulls)
    if left < 0:
        raise ParameterError(
            f"{name} is too little for this model",
            found=f"{budget / weights:.4g} bits a weight",
            needed=f"at least {(budget - left) / weights + 5e-5:.4f}",
        )
    while True:
        steps = [
            ((here.kl - there.kl) / (there.bits - here.bits), -at)
            for at, (hull, place) in enumerate(zip(hulls, chosen, strict=True))
            for here, there in zip(hull[place : place + 1], hull[place + 1 : place + 2], strict=False)
            if there.bits - here.bits <= left
        ]
        if not steps:
            return [hull[place] for hull, place in zip(hulls, chosen, strict=True)]
        at = -max(steps)[1]
        left -= hulls[at][chosen[at] + 1].bits - hulls[at][chosen[at]].bits
        chosen[at] += 1


def spelled(chosen: Sequence[Cost]) -> str:
    """The choices as a policy: the most frequent format, then what differs from it, runs of layers together."""
    names = [cost.format for cost in chosen]
    base = max(sorted(set(names)), key=names.count)
    parts = [base]
    for half in HALVES:
        of_half = sorted((cost.layer, cost.format) for cost in chosen if cost.half == half)
        for _, run in groupby(enumerate(of_half), lambda entry: (entry[1][0] - entry[0], entry[1][1])):
            layers = [layer for _, (layer, _) in run]
            found = dict(of_half)[layers[0]]
            if found != base:
                span = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
                parts.append(f"{span}.{half}={found}")
    return ";".join(parts)


class _Judge:
    """How far the model's answers move when a hidden state does. final: hidden states behind the last layer."""

    def __init__(self, weights: Weights, windows: Windows, final: Tensor) -> None:
        self._weights, self._windows = weights, windows
        self._norm = weights.final_norm.dense()
        head = weights.head
        self._head = (head.weight if head else weights.embedding).dense()
        self._bias = None if head is None or head.bias is None else head.bias.dense()
        self._scored = torch.cat([torch.arange((rows.start + rows.stop) // 2, rows.stop) for rows in windows.parts()])
        self._reference = self._log_probabilities(final)

    def divergences(self, states: list[Tensor], first: int) -> list[float]:
        """KL, in nats a token, of each of these hidden states, which enter layer `first`."""
        if not states:
            return []
        windows, rows = self._windows.repeated(len(states)), len(states[0])
        hidden = torch.cat(states)
        for index in range(first, len(self._weights.layers)):
            hidden = run_layer(read_layer(self._weights, index), hidden, windows)
        return [self._divergence(part) for part in hidden.split(rows)]

    def _divergence(self, hidden: Tensor) -> float:
        found = self._log_probabilities(hidden)
        return float((self._reference.exp() * (self._reference - found)).sum(dim=-1).double().mean())

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden[self._scored], self._norm, self._windows.config.rms_eps)
        return linear(normed, self._head, self._bias).log_softmax(dim=-1)


def _states(weights: Weights, windows: Windows) -> list[Tensor]:
    """The hidden states before each layer, and behind the last."""
    states = [weights.embedding.dense()[windows.token_ids]]
    for index in range(len(weights.layers)):
        states.append(run_layer(read_layer(weights, index), states[-1], windows))
    return states


def _with(weights: Weights, index: int, half: str, fmt: WeightFormat) -> Layer:
    """The layer, one half of it quantized."""
    layer = read_layer(weights, index)
    for role in CLASSES[half]:
        linear_ = getattr(layer, role)
        linear_.weight = torch.from_numpy(fmt.quantize(linear_.weight.numpy()).dequantize())
    return layer


def _shapes(source: ModelSource) -> dict[str, tuple[int, ...]]:
    """Shape of each matrix of any layer, by role."""
    c = source.config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return {
        "q": (queries, c.hidden_size), "k": (keys, c.hidden_size), "v": (keys, c.hidden_size),
        "o": (c.hidden_size, queries), "gate": (c.intermediate_size, c.hidden_size),
        "up": (c.intermediate_size, c.hidden_size), "down": (c.hidden_size, c.intermediate_size),
    }  # fmt: skip


def _fitting(source: ModelSource, half: str, candidates: Sequence[str]) -> list[tuple[WeightFormat, float]]:
    """The candidates whose groups divide all columns of a half, and the stored bits of its matrices together. Raises
    ParameterError where there is none."""
    shapes = [shape for role, shape in _shapes(source).items() if role in CLASSES[half]]
    fitting = []
    for fmt in map(weight_format, candidates):
        try:
            fitting.append((fmt, sum(nominal_bits(fmt, shape) * prod(shape) for shape in shapes)))
        except ParameterError as error:
            refused = error
    if not fitting:
        raise refused
    return fitting


def _spread(token_ids: Sequence[list[int]]) -> list[list[int]]:
    """Some windows, from all over the text."""
    step = max(1, len(token_ids) // WINDOWS)
    return list(token_ids[::step][:WINDOWS])


def _hull(costs: list[Cost]) -> list[Cost]:
    """The lower convex hull of divergence over bits, from the cheapest on, falling."""
    hull: list[Cost] = []
    for cost in sorted(costs, key=lambda each: (each.bits, each.kl)):
        if hull and cost.kl >= hull[-1].kl:
            continue
        while hull and cost.bits == hull[-1].bits:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], cost) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(cost)
    return hull


def _slope(first: Cost, second: Cost) -> float:
    return (second.kl - first.kl) / (second.bits - first.bits)
