"""The parameters of the notebook on alignment."""

from dataclasses import dataclass

from nanokit.errors import ParameterError
from nanokit.kernels.cpu.align import WIDTHS
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.result import Result

LINE = 64  # bytes of a cache line, on every processor that the kernels are compiled for
SETS = ("L1", "L2", "memory")
KV_FORMATS = ("fp16", "int8")
BUDGET_S = {"smoke": 1.5, "quick": 9.0, "full": float("inf")}


@experiment_params
class AlignmentParams(Params):
    """Which loads are timed from where, and which products and pages are moved."""

    model: str = knob("", "GGUF file or folder of safetensors; empty is the default model")
    offsets: list[int] = knob(
        [], "where reading begins, after a multiple of 4096", unit="bytes", low=0, high=4096,
        by_preset={"smoke": [0, 4, 32], "quick": [0, 4, 16, 20, 32, 48, 64], "full": [0, 4, 16, 20, 32, 48, 64]},
    )  # fmt: skip
    widths: list[int] = knob(
        [], "bytes of a load; a build without a width leaves it out", choices=WIDTHS,
        by_preset={"smoke": [32, 64], "quick": list(WIDTHS), "full": list(WIDTHS)},
    )  # fmt: skip
    sets: list[str] = knob(
        [], "where the bytes lie; half of that cache is read, or memory_mib", choices=SETS,
        by_preset={"smoke": list(SETS), "quick": list(SETS), "full": list(SETS)},
    )  # fmt: skip
    memory_mib: int = knob(
        0, "bytes that are read from memory", unit="MiB", low=16, high=4096,
        by_preset={"smoke": 64, "quick": 256, "full": 1024},
    )  # fmt: skip
    layers: int = knob(
        0, "layers of the model whose products are moved and whose packed bytes are counted", unit="layers", low=1,
        high=200, by_preset={"smoke": 2, "quick": 30, "full": 200},
    )  # fmt: skip
    ctx: int = knob(
        0, "context over which attention runs on moved pages", unit="tokens", low=64, high=8192,
        by_preset={"smoke": 256, "quick": 2048, "full": 4096},
    )  # fmt: skip
    repeats: int = knob(0, "rounds", low=2, high=100, by_preset={"smoke": 2, "quick": 7, "full": 31})

    def check(self) -> None:
        if 0 not in self.offsets:
            raise ParameterError("offset 0 is what the others are compared with", found=self.offsets, needed="0 in it")


@dataclass(frozen=True)
class AlignmentResult(Result):
    """A Result of AlignmentParams."""

    @property
    def asked(self) -> AlignmentParams:
        assert isinstance(self.params, AlignmentParams)
        return self.params


def straddling(width: int, offset: int, line: int = LINE) -> float:
    """Share of loads of `width` bytes, one after the other from `offset` on, that touch two lines. By arithmetic."""
    starts = range(offset, offset + line * width, width)
    return sum(start % line + width > line for start in starts) / len(starts)
