"""Weights rounded with a text in view, layer by layer: awq, gptq and smooth.

What a product is given matters: an error in a weight that is multiplied by much is seen, another is not. So a text runs
through the model, and each matrix is rounded for the inputs that it gets there, from layers that are rounded already:
what the layers before did wrong is part of the input that a layer is rounded for. Second moments of one input at a time
are held, and one layer in fp32. Moments grow with the square of the columns: what the largest take is compared with
free memory before the first layer.

    +search   the best scale for each group; looks at no text
    +awq      columns of inputs that are large are made smaller, their weights larger (quant/awq.py); then a search for
              scales that counts a column's error by its input
    +gptq     columns rounded one after another, each correcting for those before (quant/gptq.py); scales as for awq
    +smooth   columns of inputs with large peaks are made smaller, their weights larger (quant/smooth.py), so that
              activations can be rounded to a common scale; then to nearest

The factors of awq and smooth are folded into what makes an input, where everything that reads it is rounded too: the
norm before q, k and v, or gate and up; the rows of up before down; and, for awq, the rows of v before o, one factor for
all query heads that read a value head. Before rounding, the model stays the same function. Where readers ask for
different folds, the first's is taken. Where a reader is kept as it is stored, or has its scale in common with other
matrices, there is no fold, and the search alone (for smooth, the nearest) serves. There is none before the head either:
an embedding that is the head is read without a norm before it.

Position 0 is a token like others here, although its activations are often hundreds of times larger: the model's
attention rests on them. For smooth all turns on it. Static scales are as large as position 0 asks for, and most of what
they lose on the default model is lost before down. So the fold into up, which the paper does not have and which costs
nothing when the model runs, repairs more there than both norms together. Peaks without position 0 were tried: factors
then miss just the columns that set the scales, and with the fold into up the model got worse than without any. A fold
into v was tried as well, and made no difference: attention has averaged the outliers away before o.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanokit.kernels.reference import Layer, Resident, rms_norm, silu_gate
from nanokit.model import memory
from nanokit.model.source import ModelSource
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.weights import LayerWeights, Matrix, Weights
from nanokit.model.windows import Windows, attended, read_layer, windows_of
from nanokit.paths import data_dir
from nanokit.quant.awq import column_scales
from nanokit.quant.gptq import PEAK_BYTES, gptq
from nanokit.quant.policy import BY_TEXT, CLASSES, Choice
from nanokit.quant.qtensor import QTensor
from nanokit.quant.rounding import check_searchable, search
from nanokit.quant.smooth import migration
from nanokit.quant.weight_format import WeightFormat

WINDOW = 512
MOST_WINDOWS = 16
TEXT = "texts/calibration.txt"
FOLDING = ("awq", "smooth")
# Of methods that look at second moments: held at most for each pair of columns. awq: fp32 moments before and after a
# fold, and the factors' products.
HELD_BYTES = {"awq": 12, "gptq": PEAK_BYTES}

Progress = Callable[[int, int, str], None]  # done, in all, of what; may raise to end the work


@dataclass(frozen=True)
class Calibrated:
    """matrices: those rounded with the text, or of weights that a fold changed; vectors: norms and biases that it
    changed; by their names in the file."""

    matrices: dict[str, QTensor]
    vectors: dict[str, Tensor]


def default_calibration(tokenizer: Tokenizer) -> list[list[int]]:
    """Windows of a text of the kit's own, which no quality is measured on: technical prose."""
    return windows_in(tokenizer, (data_dir() / TEXT).read_text("utf-8"))


def windows_in(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """Windows of a text, at most MOST_WINDOWS of WINDOW tokens; what is left over at its end is not looked at, but in a
    text shorter than one window."""
    ids = tokenizer.encode(text, add_special=False)
    prefix = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    fresh = WINDOW - len(prefix)
    count = min(MOST_WINDOWS, max(1, len(ids) // fresh))
    return [prefix + ids[at : at + fresh] for at in range(0, count * fresh, fresh)]


@torch.inference_mode()
def calibrated(
    source: ModelSource,
    weights: Weights,
    choices: Mapping[str, Choice],
    token_ids: list[list[int]],
    progress: Progress | None = None,
) -> Calibrated:
    """Round the matrices that ask for awq, gptq or smooth.

    weights: of the source; choices: for every matrix that is to be quantized, by its name. Raises ParameterError for
    windows that cannot be run and for formats whose scale several matrices share; ModelFileError for weights that are
    not finite; MemoryBudgetError where the second moments would not fit.
    """
    for choice in choices.values():
        if choice.format is not None and choice.method:
            check_searchable(choice.format)
    _check_memory(source, choices)
    walk = _Walk(weights, choices, windows_of(source.config, token_ids))
    count = walk.layers_to_go()
    for index in range(count):
        if progress is not None:
            progress(index, count, f"rounding layer {index}")
        walk.layer(index)
    walk.head()
    if progress is not None:
        progress(count, count, "rounded")
    return Calibrated(walk.matrices, walk.vectors)


def _check_memory(source: ModelSource, choices: Mapping[str, Choice]) -> None:
    """Raise MemoryBudgetError where what is held to round one of the matrices does not fit."""
    asking = {name: choice.method for name, choice in choices.items() if choice.method in HELD_BYTES}
    sizes = {name: source.stored[name].shape[1] ** 2 * HELD_BYTES[method] for name, method in asking.items()}
    if sizes:
        largest = max(sizes, key=sizes.__getitem__)
        memory.check_room(
            sizes[largest],
            f"rounding {largest} by {asking[largest]}",
            f"{memory.human(sizes[largest])} for second moments of {source.stored[largest].shape[1]:,} columns",
            "use +search, which holds none, or free memory",
        )


class _Walk:
    """The windows on their way through the layers."""

    def __init__(self, weights: Weights, choices: Mapping[str, Choice], windows: Windows) -> None:
        self._weights, self._windows, self._config = weights, windows, windows.config
        self._choices = {name: choice for name, choice in choices.items() if _alone(choice)}
        self._hidden = weights.embedding.dense()[windows.token_ids]
        self._changed: set[str] = set()  # by a fold
        self.matrices: dict[str, QTensor] = {}
        self.vectors: dict[str, Tensor] = {}

    def layers_to_go(self) -> int:
        """The layers up to the last that is rounded with the text in view; all of them for the head."""
        layers = enumerate(self._weights.layers)
        asking = [index for index, names in layers if self._asks(names, CLASSES["all"], BY_TEXT)]
        return len(self._weights.layers) if self._head_choice() else max(asking, default=-1) + 1

    def layer(self, index: int) -> None:
        """Round a layer and go through it."""
        layer, names = read_layer(self._weights, index), self._weights.layers[index]
        x, moments = self._normed(layer, names, "attn_norm", ("q", "k", "v"))
        self._round(layer, names, ("q", "k"), moments)
        if self._fold(names, ("o",), "v") == "awq":
            self._fold_rows(layer, names, "v", "o", "awq", attended(layer, x, self._windows))
        self._round(layer, names, ("v",), moments)
        out = attended(layer, x, self._windows)
        self._round(layer, names, ("o",), self._moments_for(names, ("o",), out))
        self._hidden = self._hidden + layer.o(out)

        x, moments = self._normed(layer, names, "ffn_norm", ("gate", "up"))
        self._round(layer, names, ("gate",), moments)
        gate = layer.gate(x)
        if fold := self._fold(names, ("down",), "up"):
            self._fold_rows(layer, names, "up", "down", fold, silu_gate(gate, layer.up(x)))
        self._round(layer, names, ("up",), moments)
        middle = silu_gate(gate, layer.up(x))
        self._round(layer, names, ("down",), self._moments_for(names, ("down",), middle))
        self._hidden = self._hidden + layer.down(middle)

    def head(self) -> None:
        """Round the head, where it asks for a text. (A tied embedding's rows were the windows' first hidden states as
        they are stored.)"""
        choice, matrix = self._head_choice(), self._head()
        if choice is not None:
            hidden = rms_norm(self._hidden, self._weights.final_norm.dense(), self._config.rms_eps)
            self.matrices[matrix.name] = _rounded(matrix, matrix.dense(), choice, _moments(hidden))

    def _head(self) -> Matrix:
        return self._weights.head.weight if self._weights.head else self._weights.embedding

    def _head_choice(self) -> Choice | None:
        """That of a head that is rounded for second moments of its input."""
        choice = self._choices.get(self._head().name)
        return choice if choice is not None and choice.method in HELD_BYTES else None

    def _normed(
        self, layer: Layer, names: LayerWeights, norm: str, readers: tuple[str, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """The input of `readers`, and its second moments if one of them asks for them, after a fold into the norm."""
        x = rms_norm(self._hidden, getattr(layer, norm), self._config.rms_eps)
        moments = self._moments_for(names, readers, x)
        if fold := self._fold(names, readers):
            factors = self._factors(layer, names, readers, fold, x, moments)
            for role in readers:
                self._scale(layer, names, role, columns=factors)
            weight = getattr(layer, norm) / factors
            setattr(layer, norm, weight)
            self.vectors[getattr(names, norm).name] = weight
            x = x / factors
            moments = None if moments is None else moments / (factors[:, None] * factors)
        return x, moments

    def _fold_rows(self, layer: Layer, names: LayerWeights, maker: str, reader: str, fold: str, x: Tensor) -> None:
        """Factors for the columns of `reader`, whose input is x, out of the rows of `maker`."""
        repeat, moments = x.shape[1] // len(getattr(layer, maker).weight), self._moments_for(names, (reader,), x)
        factors = self._factors(layer, names, (reader,), fold, x, moments, repeat)
        self._scale(layer, names, reader, columns=factors)
        if repeat > 1:
            factors = factors.view(self._config.num_kv_heads, repeat, self._config.head_dim)[:, 0].flatten()
        self._scale(layer, names, maker, rows=1 / factors)

    def _factors(
        self,
        layer: Layer,
        names: LayerWeights,
        readers: tuple[str, ...],
        fold: str,
        x: Tensor,
        moments: Tensor | None,
        repeat: int = 1,
    ) -> Tensor:
        """repeat: query heads that read one value head, whose columns have one factor."""
        weights = [getattr(layer, role).weight for role in readers]
        if fold == "smooth":
            return migration(weights, x.abs().amax(dim=0))
        assert moments is not None
        activity = moments.diagonal().sqrt()
        if repeat > 1:
            heads = activity.view(self._config.num_kv_heads, repeat, self._config.head_dim)
            activity = heads.mean(dim=1, keepdim=True).expand_as(heads).flatten()
        formats = [self._format(names, role) for role in readers]
        return column_scales(list(zip(weights, formats, strict=True)), moments, activity)

    def _scale(
        self, layer: Layer, names: LayerWeights, role: str, columns: Tensor | None = None, rows: Tensor | None = None
    ) -> None:
        linear: Resident = getattr(layer, role)
        if columns is not None:
            linear.weight = linear.weight * columns
        if rows is not None:
            linear.weight = linear.weight * rows[:, None]
            if linear.bias is not None:
                linear.bias = linear.bias * rows
                self.vectors[getattr(names, role).bias.name] = linear.bias
        self._changed.add(getattr(names, role).weight.name)

    def _round(self, layer: Layer, names: LayerWeights, roles: tuple[str, ...], moments: Tensor | None) -> None:
        for role in roles:
            matrix: Matrix = getattr(names, role).weight
            choice = self._choices.get(matrix.name)
            if choice is None:
                continue
            q = _rounded(matrix, getattr(layer, role).weight, choice, moments)
            getattr(layer, role).weight = torch.from_numpy(q.dequantize())
            if choice.method in HELD_BYTES or matrix.name in self._changed:
                self.matrices[matrix.name] = q

    def _chosen(self, names: LayerWeights, roles: tuple[str, ...]) -> list[Choice | None]:
        return [self._choices.get(getattr(names, role).weight.name) for role in roles]

    def _asks(self, names: LayerWeights, roles: tuple[str, ...], methods: Container[str]) -> bool:
        """Whether one of them is rounded by one of `methods`."""
        return any(choice is not None and choice.method in methods for choice in self._chosen(names, roles))

    def _moments_for(self, names: LayerWeights, readers: tuple[str, ...], x: Tensor) -> Tensor | None:
        """Second moments of the readers' input, where one of them looks at any."""
        return _moments(x) if self._asks(names, readers, HELD_BYTES) else None

    def _fold(self, names: LayerWeights, readers: tuple[str, ...], *makers: str) -> str:
        """What is folded into what makes the readers' input: "awq", "smooth", or "" where none asks for it, or one of
        the matrices that a fold concerns is not rounded here."""
        found = self._chosen(names, readers)
        if None in found or None in self._chosen(names, makers):
            return ""
        return next((choice.method for choice in found if choice is not None and choice.method in FOLDING), "")

    def _format(self, names: LayerWeights, role: str) -> WeightFormat:
        fmt = self._choices[getattr(names, role).weight.name].format
        assert fmt is not None
        return fmt


def _alone(choice: Choice) -> bool:
    """Whether a matrix is rounded, and can be without looking at others."""
    return choice.format is not None and choice.format.scope not in ("qkv", "global")


def _moments(x: Tensor) -> Tensor:
    """Second moments fp32 [columns, columns] of inputs [rows, columns]."""
    return (x.T @ x).div_(len(x))


def _rounded(matrix: Matrix, weight: Tensor, choice: Choice, moments: Tensor | None) -> QTensor:
    assert choice.format is not None
    values = weight.numpy()
    if choice.method == "gptq" and moments is not None:
        return gptq(values, choice.format, moments, name=matrix.name)
    if choice.method == "awq" and moments is not None:
        return search(values, choice.format, moments.diagonal(), name=matrix.name)
    if choice.method == "search":
        return search(values, choice.format, name=matrix.name)
    return choice.format.quantize(values, matrix.name)
