"""The parameters of the notebook on kernels, and the real matrices that its experiments share."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from nanokit.errors import ParameterError
from nanokit.kernels.activations import MODES
from nanokit.lab.oracle import FORMATS
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.result import Result
from nanokit.model.load import open_model
from nanokit.model.source import ModelSource
from nanokit.model.weights import Matrix, Weights, find_weights
from nanokit.quant.integer import integer_format
from nanokit.quant.qtensor import QTensor

KINDS = ("q", "k", "v", "o", "gate", "up", "down", "head")  # the products of a model
STAND_IN = "int4-asym-g32"  # what a model of floats is quantized to here
UNIT = 32  # columns that the kernels count in


@experiment_params
class KernelsParams(Params):
    """What is shown by hand, which combinations are checked, and which of a model's products are timed."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    example: str = knob("int4-sym-g32", "weight format of the example by hand", choices=FORMATS[:4])
    weights: list[str] = knob(
        [], "weight formats that are checked", choices=FORMATS,
        by_preset={"smoke": list(FORMATS[:3]), "quick": list(FORMATS), "full": list(FORMATS)},
    )  # fmt: skip
    columns: list[int] = knob(
        [], "columns of the matrices that are checked, in all modes only the first", unit="columns", low=32, high=4096,
        by_preset={"smoke": [192, 576], "quick": [192, 576, 1536], "full": [96, 192, 576, 1536, 4096]},
    )  # fmt: skip
    modes: list[str] = knob(
        [], "activation modes", choices=MODES[1:],
        by_preset={"smoke": ["a16", "a8g32"], "quick": list(MODES[1:]), "full": list(MODES[1:])},
    )  # fmt: skip
    activations: str = knob("a8g32", "activation mode of timed products and of wide matrices", choices=MODES[1:])
    products: list[str] = knob(
        [], "products of the model that are timed, each walked through in all layers", choices=KINDS,
        by_preset={"smoke": ["up"], "quick": ["up", "head"], "full": ["q", "k", "up", "down", "head"]},
    )  # fmt: skip
    layers: int = knob(
        0, "layers of the model that are timed, packed and rounded, at most", unit="layers", low=1, high=200,
        by_preset={"smoke": 3, "quick": 200, "full": 200},
    )  # fmt: skip
    rows: list[int] = knob(
        [], "rows of the timed products", unit="rows", low=1, high=256,
        by_preset={"smoke": [1, 4, 16], "quick": [1, 2, 4, 8, 16, 32, 64],
                   "full": [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]},
    )  # fmt: skip
    text_tokens: int = knob(
        0, "length of the text whose activations are rounded, and of the text before it that static is calibrated on",
        unit="tokens", low=8, high=256, by_preset={"smoke": 16, "quick": 64, "full": 256},
    )  # fmt: skip
    repeats: int = knob(0, "rounds", low=2, high=50, by_preset={"smoke": 2, "quick": 3, "full": 15})

    def check(self) -> None:
        for count in self.columns:
            check_columns(count)


@dataclass(frozen=True)
class KernelsResult(Result):
    """A Result of KernelsParams."""

    @property
    def asked(self) -> KernelsParams:
        assert isinstance(self.params, KernelsParams)
        return self.params


def check_columns(count: int) -> None:
    """Raises ParameterError for columns that are no whole units."""
    if count % UNIT:
        raise ParameterError("the kernels count columns in whole units", found=count, needed=f"a multiple of {UNIT}")


@lru_cache(maxsize=1)
def opened(model: str) -> tuple[ModelSource, Weights]:
    """A model whose weights have been found and not been read. model: empty is the default model. Raises what
    `nanokit.load` raises of a model file."""
    if not model:
        from nanokit.model.fetch import resolve_default

        model = str(resolve_default())
    source = open_model(model)
    return source, find_weights(source.config, source)


def matrices(weights: Weights, kind: str, layers: int) -> list[Matrix]:
    """The matrices of this kind in the first so many layers; of the head one, the embedding where that is the head."""
    if kind == "head":
        return [weights.head.weight if weights.head else weights.embedding]
    return [getattr(layer, kind).weight for layer in weights.layers[:layers]]


def coded(matrix: Matrix) -> QTensor:
    """A matrix as codes and scales: the file's own, or `STAND_IN` made here where the file has none; see `notes`."""
    found = matrix.quantized()
    return found or integer_format(STAND_IN).quantize(matrix.dense().numpy(), matrix.name)


def notes(found: Iterable[Matrix]) -> list[str]:
    """A remark where matrices are stored without codes."""
    if all(matrix.source.stored[matrix.name].type not in ("F32", "F16", "BF16") for matrix in found):
        return []
    return [f"this model's weights are floats: they were quantized to {STAND_IN} for this notebook"]
