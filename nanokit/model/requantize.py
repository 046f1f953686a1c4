"""A model whose matrices are quantized on their way out of its file, as a policy says.

`Requantized` is a source like any other: backends bind it, `nanokit.load(policy=…)` runs it, `nanokit quantize` writes
what it gives. A matrix is read and rounded (to codes, or to a type of floats) when a backend asks for it, so that a
policy costs no memory. Matrices that take a text in view (awq, gptq, smooth) are rounded together, when the first
weight is asked for, and kept, a byte a weight. Everything that can be refused is refused before that: a group that does
not divide the columns names the matrices and what would fit.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ModelFileError, ParameterError
from nanokit.kernels.packable import matrices
from nanokit.model.allocate import resolve
from nanokit.model.calibrate import Calibrated, Progress, calibrated, default_calibration
from nanokit.model.source import FLOATS, ModelSource
from nanokit.model.weights import GLOBAL_NAMES, Matrix, Stored, Weights, find_weights
from nanokit.quant.policy import ATTENTION, BY_TEXT, FEED_FORWARD, FLOAT_HEAD, ROLES, Choice, Policy, parse_policy
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
    float_head: str = FLOAT_HEAD,
    misfit: str = "",
) -> "Requantized":
    """`source` with its matrices as the policy says.

    calibration: token ids of the texts that awq, gptq, smooth and auto look at; None: a text of the kit's own.
    progress: called as (done, in all, what) while they do. float_head: what head and embedding become where they are
    floats and the policy does not name them. misfit: the type of floats for a matrix whose columns no group divides; ""
    refuses it. `auto` measures the model here and now; the others round it when the first
    weight is asked for. Raises ParameterError for a policy that is wrong or does not fit the model's shapes.
    """
    chosen = parse_policy(policy) if isinstance(policy, str) else policy
    weights = find_weights(source.config, source)

    def texts() -> list[list[int]]:
        return default_calibration(source.tokenizer) if calibration is None else calibration

    if chosen.auto_bits is not None:
        chosen = resolve(source, chosen.auto_bits, texts(), progress)
    choices = choices_of(chosen, source, weights, float_head, misfit)
    if not chosen.methods & BY_TEXT:
        return Requantized(source, chosen, choices, None)
    return Requantized(source, chosen, choices, lambda: _by_text(source, weights, choices, texts(), progress))


def _by_text(
    source: ModelSource,
    weights: Weights,
    choices: Mapping[str, Choice],
    texts: list[list[int]],
    progress: Progress | None,
) -> Calibrated:
    """Calibrate, once every weight has been seen to be a number: found in the last layer, it costs the whole run."""
    broken = []
    for name in choices:
        try:
            source.tensor(name)
        except ModelFileError as error:
            broken.append((name, error))
    if broken:
        raise ModelFileError(
            f"{source.name} holds weights that cannot be rounded",
            found=f"{broken[0][1].found}; in {_some([name for name, _ in broken])}",
            needed="finite weights",
            do=broken[0][1].do,
        )
    return calibrated(source, weights, choices, texts, progress)


def named_roles(weights: Weights) -> dict[str, tuple[str, int | None]]:
    """Role and layer of every matrix, by its name in the file. An embedding has the role "head", tied or not."""
    roles: dict[str, tuple[str, int | None]] = {}
    for index, layer in enumerate(weights.layers):
        for role in ATTENTION + FEED_FORWARD:
            roles[getattr(layer, role).weight.name] = (role, index)
    for matrix in (weights.embedding, *([weights.head.weight] if weights.head else [])):
        roles[matrix.name] = ("head", None)
    return roles


def choices_of(
    policy: Policy, source: ModelSource, weights: Weights, float_head: str = FLOAT_HEAD, misfit: str = ""
) -> dict[str, Choice]:
    """The choice for every matrix that the policy changes, by its name in the file. Raises ParameterError for layers
    that the model does not have, and for groups that do not divide: with the matrices that they do not fit.
    (float_head, misfit: see `requantized`.)"""
    policy.check_layers(source.config.num_layers)
    roles = named_roles(weights)
    choices = {name: policy.choice(*role) for name, role in roles.items()}
    choices = {name: choice for name, choice in choices.items() if choice != Choice()}
    if any(choice.format for choice in choices.values()) and policy.named("head") is None:
        floats = (name for name, (role, _) in roles.items() if role == "head" and not source.stored[name].coding)
        choices |= {
            name: Choice(weight_format(float_head)) for name in floats if source.stored[name].shape[1] % 32 == 0
        }
    refused: dict[tuple[str, str], list[str]] = {}
    for name, choice in choices.items():
        if choice.format is None:
            continue
        if choice.method:
            check_searchable(choice.format)
        try:
            choice.format.group_of(source.stored[name].shape[1])
        except ParameterError as error:
            if misfit:
                choices[name] = Choice(floats=misfit, misfit=choice.format.name)
                continue
            refused.setdefault((f"{choice.format.name} for {error.found}", str(error.needed)), []).append(name)
    if refused:
        raise ParameterError(
            f"policy {policy.name} does not fit {source.name}",
            found="; ".join(f"{what} in {_some(names)}" for (what, _), names in refused.items()),
            needed="; ".join(dict.fromkeys(needed for _, needed in refused)),
            do=f"choose what fits all of them, or except those: {policy.name};{_excepting(roles, refused.values())}",
        )
    return choices


def _excepting(roles: Mapping[str, tuple[str, int | None]], refused: Iterable[list[str]]) -> str:
    """Overrides that leave these matrices out."""
    found = {roles[name][0] for names in refused for name in names}
    return ";".join(f"{role}=keep" for role in ROLES if role in found)


def _some(names: list[str]) -> str:
    return f"{len(names)} matrices ({', '.join(names[:3])}" + (", …)" if len(names) > 3 else ")")


class Requantized:
    """See the module. policy: the resolved one; choices: of the matrices that it changes. The other attributes are
    those of any source."""

    def __init__(
        self,
        base: ModelSource,
        policy: Policy,
        choices: Mapping[str, Choice],
        by_text: Callable[[], Calibrated] | None,
    ) -> None:
        """by_text: rounds what asks for a text, called once, when the first weight is needed; None: nothing does."""
        self.kind, self.config, self.tokenizer, self.files = base.kind, base.config, base.tokenizer, base.files
        self.name, self.policy = f"{base.name} as {policy.name}", policy
        self.base, self.choices = base, choices
        self._by_text = by_text
        surplus = GLOBAL_NAMES["head"][base.kind] + ".weight" if base.config.tied_head else ""  # seen to be equal
        self.stored = {name: self._entry(name, stored) for name, stored in base.stored.items() if name != surplus}
        self._spans: dict[str, Span] = {}
        self._latest: tuple[str, QTensor] | None = None

    @cached_property
    def made(self) -> Calibrated:
        """What was rounded with a text in view: matrices, and the norms and biases that this changed."""
        return self._by_text() if self._by_text else Calibrated({}, {})

    def _entry(self, name: str, stored: Stored) -> Stored:
        choice = self.choices.get(name)
        if choice is None:
            return stored
        if choice.format is None:
            kind = choice.floats.upper()
            return replace(stored, nbytes=prod(stored.shape) * FLOATS[kind].itemsize, type=kind, coding=None)
        rounded, (rows, columns) = choice.format, stored.shape
        coding = Coding(rounded.code_range, rounded.table is not None, rounded.group_of(columns))
        nbytes = round(nominal_bits(rounded, stored.shape) * rows * columns / 8)
        return replace(stored, nbytes=nbytes, type=rounded.name, coding=coding)

    def facts(self) -> dict[str, Any]:
        return self.base.facts()

    def tensor(self, name: str) -> Tensor:
        if name in self.made.vectors:
            return self.made.vectors[name]
        if name not in self.choices:
            return self.base.tensor(name)
        if kind := self.choices[name].floats:
            return narrowed(name, self.base.tensor(name), kind)
        return torch.from_numpy(self.matrix(name).dequantize())

    def quantized(self, name: str, first: int, end: int) -> QTensor | None:
        if name not in self.choices:
            return self.base.quantized(name, first, end)
        if self.choices[name].floats:
            return None
        return self.matrix(name).rows(first, end)

    def matrix(self, name: str) -> QTensor:
        """A matrix that the policy gives codes, whole. The latest is kept: backends ask for one some rows at a time."""
        if name in self.made.matrices:
            return self.made.matrices[name]
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


def narrowed(name: str, weights: Tensor, kind: str) -> Tensor:
    """The values, in fp32, that a type of floats keeps of these. Raises ParameterError for one beyond its range."""
    kept = weights.to(FLOATS[kind.upper()]).float()
    if not kept.sum().isfinite() and not kept.isfinite().all():
        raise ParameterError(
            f"{name} holds a weight beyond the range of {kind}",
            found=f"{float(weights.abs().max()):g}",
            needed=f"at most {torch.finfo(FLOATS[kind.upper()]).max:g}",
            do="choose bf16 or f32 for this matrix",
        )
    return kept


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
