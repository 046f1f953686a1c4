"""A model whose matrices are quantized on their way out of its file, as a policy says.

`Requantized` is a source like any other: backends bind it, `nanokit.load(policy=…)` runs it, `nanokit quantize` writes
what it gives. A matrix is read and rounded when a backend asks for it, so that a policy costs no memory; matrices that
were rounded with the help of a text (awq, gptq) exist beforehand, a byte a weight. Everything that can be refused is
refused before the first weight is read: a group that does not divide the columns names the matrices and what would fit.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.packable import matrices
from nanokit.model.source import ModelSource
from nanokit.model.weights import Matrix, Stored, Weights, find_weights
from nanokit.quant.policy import ATTENTION, FEED_FORWARD, Choice, Policy, parse_policy
from nanokit.quant.qtensor import Coding, QTensor
from nanokit.quant.rounding import search
from nanokit.quant.storage import nominal_bits
from nanokit.quant.weight_format import WeightFormat

Progress = Callable[[int, int, str], None]  # done, in all, of what
Span = tuple[float, float]


def requantized(
    source: ModelSource,
    policy: str | Policy,
    *,
    calibration: list[list[int]] | None = None,
    progress: Progress | None = None,
) -> ModelSource:
    """`source` with its matrices as the policy says.

    calibration: token ids of the texts that awq, gptq and auto look at; None: a text of the kit's own. progress: called
    as (done, in all, what) while they do. Raises ParameterError for a policy that is wrong or does not fit the model's
    shapes.
    """
    chosen = parse_policy(policy) if isinstance(policy, str) else policy
    weights = find_weights(source.config, source)
    if chosen.auto_bits is not None or chosen.methods & {"awq", "gptq"}:
        from nanokit.model import allocate, calibrate

        texts = calibration if calibration is not None else calibrate.default_calibration(source.tokenizer)
        if chosen.auto_bits is not None:
            chosen = allocate.resolve(source, chosen.auto_bits, texts, progress)
    choices = choices_of(chosen, source, weights)
    if not chosen.methods & {"awq", "gptq"}:
        return Requantized(source, chosen, choices, {}, {})
    found = calibrate.calibrated(source, weights, choices, texts, progress)
    return Requantized(source, chosen, choices, found.matrices, found.vectors)


def named_roles(weights: Weights) -> dict[str, tuple[str, int | None]]:
    """Role and layer of every matrix, by its name in the file. The embedding of a tied model has the role "head"; one
    that is only an embedding is not listed, and never quantized."""
    roles: dict[str, tuple[str, int | None]] = {}
    for index, layer in enumerate(weights.layers):
        for role in ATTENTION + FEED_FORWARD:
            roles[getattr(layer, role).weight.name] = (role, index)
    roles[weights.head.weight.name if weights.head else weights.embedding.name] = ("head", None)
    return roles


def choices_of(policy: Policy, source: ModelSource, weights: Weights) -> dict[str, Choice]:
    """The choice for every matrix that the policy changes, by its name in the file. Raises ParameterError for layers
    that the model does not have, and for groups that do not divide: with the matrices that they do not fit."""
    policy.check_layers(source.config.num_layers)
    choices = {name: policy.choice(*role) for name, role in named_roles(weights).items()}
    choices = {name: choice for name, choice in choices.items() if choice.format is not None}
    refused: dict[str, list[str]] = {}
    for name, choice in choices.items():
        assert choice.format is not None
        try:
            choice.format.group_of(source.stored[name].shape[1])
        except ParameterError as error:
            refused.setdefault(f"{error.what}: {error.found}, needed {error.needed}", []).append(name)
    if refused:
        names = [name for several in refused.values() for name in several]
        raise ParameterError(
            f"policy {policy.name} does not fit {source.name}",
            found="; ".join(refused),
            needed=f"for {len(names)} matrices: {', '.join(names[:3])}" + (", …" if len(names) > 3 else ""),
            do="choose one of the groups that fit, or except these matrices: …;down=int4-sym-g64",
        )
    return choices


class Requantized:
    """See the module. policy: the resolved one; the other attributes are those of any source."""

    def __init__(
        self,
        base: ModelSource,
        policy: Policy,
        choices: Mapping[str, Choice],
        matrices_: Mapping[str, QTensor],
        vectors: Mapping[str, Tensor],
    ) -> None:
        self.kind, self.config, self.tokenizer = base.kind, base.config, base.tokenizer
        self.name, self.policy = f"{base.name} as {policy.name}", policy
        self._choices, self._made, self._vectors = choices, matrices_, vectors
        self.base = base
        self.stored = {name: self._entry(name, stored) for name, stored in base.stored.items()}
        self._spans: dict[str, Span] = {}
        self._latest: tuple[str, QTensor] | None = None

    def _entry(self, name: str, stored: Stored) -> Stored:
        choice = self._choices.get(name)
        if choice is None or choice.format is None:
            return stored
        rounded, (rows, columns) = choice.format, stored.shape
        coding = Coding(rounded.code_range, rounded.table is not None, rounded.group_of(columns))
        nbytes = round(nominal_bits(rounded, stored.shape) * rows * columns / 8)
        return replace(stored, nbytes=nbytes, type=rounded.name, coding=coding)

    def tensor(self, name: str) -> Tensor:
        if name in self._vectors:
            return self._vectors[name]
        if name not in self._choices:
            return self.base.tensor(name)
        return torch.from_numpy(self.matrix(name).dequantize())

    def quantized(self, name: str, first: int, end: int) -> QTensor | None:
        if name not in self._choices:
            return self.base.quantized(name, first, end)
        return self.matrix(name).rows(first, end)

    def matrix(self, name: str) -> QTensor:
        """A matrix that the policy changes, whole. The latest is kept: backends ask for one some rows at a time."""
        if name in self._made:
            return self._made[name]
        if self._latest is None or self._latest[0] != name:
            self._latest = None  # two of the largest would be one too many
            self._latest = (name, self._rounded(name, self._choices[name]))
        return self._latest[1]

    def _rounded(self, name: str, choice: Choice) -> QTensor:
        assert choice.format is not None
        weights = self.base.tensor(name).numpy()
        if choice.method == "search":
            return search(weights, choice.format, name=name)
        return choice.format.quantize(weights, name, self._span(name, choice.format))

    def _span(self, name: str, rounded: WeightFormat) -> Span | None:
        """The lowest and highest weight of all matrices that share this one's scale."""
        if rounded.scope not in ("qkv", "global"):
            return None
        if name not in self._spans:
            found = find_weights(self.config, self.base)
            for group in sharing(rounded, found, self._choices):
                reaches = [_reach(matrix) for matrix in group]
                span = min(low for low, _ in reaches), max(high for _, high in reaches)
                self._spans |= {matrix.name: span for matrix in group}
        return self._spans[name]


def sharing(rounded: WeightFormat, weights: Weights, choices: Mapping[str, Choice]) -> list[list[Matrix]]:
    """The matrices that have one scale together, of those that this format was chosen for."""
    if rounded.scope == "qkv":
        groups = [[layer.q.weight, layer.k.weight, layer.v.weight] for layer in weights.layers]
        groups += [[matrix] for matrix in matrices(weights) if not any(matrix in group for group in groups)]
    else:
        groups = [matrices(weights)]
    chosen = [
        [matrix for matrix in group if (choice := choices.get(matrix.name)) and choice.format == rounded]
        for group in groups
    ]
    return [group for group in chosen if group]


def _reach(matrix: Matrix) -> Span:
    values = matrix.dense().numpy()
    return float(np.min(values)), float(np.max(values))
