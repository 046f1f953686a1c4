"""A model whose matrices are quantized on their way out of its file, as a policy says.

`Requantized` is a source like any other: backends bind it, `nanokit.load(policy=…)` runs it, `nanokit quantize` writes
what it gives. A matrix is read and rounded when a backend asks for it, so that a policy costs no memory; matrices that
were rounded with the help of a text (awq, gptq) exist beforehand, a byte a weight. Everything that can be refused is
refused before the first weight is read: a group that does not divide the columns names the matrices and what would fit.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.packable import matrices
from nanokit.model.allocate import resolve
from nanokit.model.calibrate import DATA_METHODS, Progress, calibrated, default_calibration
from nanokit.model.source import ModelSource
from nanokit.model.weights import Matrix, Stored, Weights, find_weights
from nanokit.quant.policy import ATTENTION, FEED_FORWARD, FLOAT_HEAD, Choice, Policy, parse_policy
from nanokit.quant.qtensor import Coding, QTensor
from nanokit.quant.rounding import check_searchable, search
from nanokit.quant.storage import nominal_bits
from nanokit.quant.weight_format import WeightFormat, weight_format

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
    if chosen.auto_bits is not None:
        texts = default_calibration(source.tokenizer) if calibration is None else calibration
        chosen = resolve(source, chosen.auto_bits, texts, progress)
    choices = choices_of(chosen, source, weights)
    if not chosen.methods & set(DATA_METHODS):
        return Requantized(source, chosen, choices, {}, {})
    texts = default_calibration(source.tokenizer) if calibration is None else calibration
    found = calibrated(source, weights, choices, texts, progress)
    return Requantized(source, chosen, choices, found.matrices, found.vectors)


def named_roles(weights: Weights) -> dict[str, tuple[str, int | None]]:
    """Role and layer of every matrix, by its name in the file. An embedding has the role "head", tied or not."""
    roles: dict[str, tuple[str, int | None]] = {}
    for index, layer in enumerate(weights.layers):
        for role in ATTENTION + FEED_FORWARD:
            roles[getattr(layer, role).weight.name] = (role, index)
    for matrix in (weights.embedding, *([weights.head.weight] if weights.head else [])):
        roles[matrix.name] = ("head", None)
    return roles


def choices_of(policy: Policy, source: ModelSource, weights: Weights) -> dict[str, Choice]:
    """The choice for every matrix that the policy changes, by its name in the file. Raises ParameterError for layers
    that the model does not have, and for groups that do not divide: with the matrices that they do not fit."""
    policy.check_layers(source.config.num_layers)
    roles = named_roles(weights)
    choices = {name: policy.choice(*role) for name, role in roles.items()}
    choices = {name: choice for name, choice in choices.items() if choice.format is not None}
    if choices and policy.named("head") is None:
        floats = (name for name, (role, _) in roles.items() if role == "head" and not source.stored[name].coding)
        choices |= {
            name: Choice(weight_format(FLOAT_HEAD)) for name in floats if source.stored[name].shape[1] % 32 == 0
        }
    refused: dict[tuple[str, str], list[str]] = {}
    for name, choice in choices.items():
        assert choice.format is not None
        if choice.method:
            check_searchable(choice.format)
        try:
            choice.format.group_of(source.stored[name].shape[1])
        except ParameterError as error:
            refused.setdefault((f"{choice.format.name} for {error.found}", str(error.needed)), []).append(name)
    if refused:
        raise ParameterError(
            f"policy {policy.name} does not fit {source.name}",
            found="; ".join(f"{what} in {_some(names)}" for (what, _), names in refused.items()),
            needed="; ".join(dict.fromkeys(needed for _, needed in refused)),
            do="choose one of these, or except the matrices: …;down=int4-sym-g64",
        )
    return choices


def _some(names: list[str]) -> str:
    return f"{len(names)} matrices ({', '.join(names[:3])}" + (", …)" if len(names) > 3 else ")")


class Requantized:
    """See the module. policy: the resolved one; choices: of the matrices that it changes; vectors: norms and biases
    that a method replaced. The other attributes are those of any source."""

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
        self.choices, self._made, self.vectors = choices, matrices_, vectors
        self.base = base
        self.stored = {name: self._entry(name, stored) for name, stored in base.stored.items()}
        self._spans: dict[str, Span] = {}
        self._latest: tuple[str, QTensor] | None = None

    def _entry(self, name: str, stored: Stored) -> Stored:
        choice = self.choices.get(name)
        if choice is None or choice.format is None:
            return stored
        rounded, (rows, columns) = choice.format, stored.shape
        coding = Coding(rounded.code_range, rounded.table is not None, rounded.group_of(columns))
        nbytes = round(nominal_bits(rounded, stored.shape) * rows * columns / 8)
        return replace(stored, nbytes=nbytes, type=rounded.name, coding=coding)

    def facts(self) -> dict[str, Any]:
        return self.base.facts()

    def tensor(self, name: str) -> Tensor:
        if name in self.vectors:
            return self.vectors[name]
        if name not in self.choices:
            return self.base.tensor(name)
        return torch.from_numpy(self.matrix(name).dequantize())

    def quantized(self, name: str, first: int, end: int) -> QTensor | None:
        if name not in self.choices:
            return self.base.quantized(name, first, end)
        return self.matrix(name).rows(first, end)

    def matrix(self, name: str) -> QTensor:
        """A matrix that the policy changes, whole. The latest is kept: backends ask for one some rows at a time."""
        if name in self._made:
            return self._made[name]
        if self._latest is None or self._latest[0] != name:
            self._latest = None  # two of the largest would be one too many
            self._latest = (name, self._rounded(name, self.choices[name]))
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
            for group in sharing(rounded, found, self.choices):
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
