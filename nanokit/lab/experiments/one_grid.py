"""One grid: what is trained, what is kept and what a kernel multiplies by are the same weights, bit for bit.

A matrix of the model is prepared (rounded in every pass), converted (codes and scales), and packed by the C kernels and
unpacked again; and all of it once more from weights in bf16. Equal means every bit of every weight. And one estimator,
five numbers: where the gradient passes.
"""

import threading
from dataclasses import dataclass

import torch
from torch import nn

from nanokit import quant
from nanokit.kernels.cpu import NoKernelsError
from nanokit.kernels.cpu.ops import Linear
from nanokit.kernels.fake_quant import fake_quantize
from nanokit.lab.experiments.gradient_params import GradientParams, GradientResult
from nanokit.lab.experiments.kernel_params import matrices, opened
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.table import Table
from nanokit.quant.integer import integer_format
from nanokit.quant.layers import FakeQuantLinear, QuantLinear

FIVE = (0.3, 1.75, 1.85, 1.9, -2.5)  # weights under a scale of 1/4: codes 1, 7, 7, 8 and -10 before they are clamped
SCALE = 0.25
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class OneGridResult(GradientResult):
    """Metrics: `<a>_is_<b>_<format>_<type>`: the part of the weights whose bits are equal, 1.0 for all of them."""

    @property
    def all_equal(self) -> bool:
        return all(value == 1.0 for value in self.metrics.values())

    def table(self) -> Table:
        """One row a format; a cell is the part of the weights that are equal."""
        pairs = [pair for pair in ("kept", "packed") if any(name.startswith(f"{pair}_") for name in self.metrics)]
        columns = ("format", *(f"{pair} is trained, {kind}" for kind in TYPES for pair in pairs))
        rows = []
        for name in self.asked.formats:
            values = [self.metrics[f"{pair}_is_trained_{name}_{kind}"] for kind in TYPES for pair in pairs]
            rows.append((name, *(f"{value:.0%}" if value == 1.0 else f"{value:.4%}" for value in values)))
        return Table(columns, rows, right=columns[1:])


def one_grid(
    p: GradientParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> OneGridResult:
    """Compare the first layer's down projection in every format. Raises BusyError, ParameterError for a format that
    does not fit it, and what `nanokit.load` raises."""
    progress = progress or Silent()
    with measuring("one grid"):
        _, weights = opened(p.model)
        dense = matrices(weights, "down", 1)[0].dense()
        progress.start(len(p.formats), "rounding a matrix")
        metrics: dict[str, float] = {}
        for name in p.formats:
            stop_if(cancel)
            for kind, dtype in TYPES.items():
                trained, kept, packed = _states(dense.to(dtype), name)
                metrics[f"kept_is_trained_{name}_{kind}"] = _equal(kept, trained)
                if packed is not None:
                    metrics[f"packed_is_trained_{name}_{kind}"] = _equal(packed, trained)
            progress.step(name)
    return OneGridResult(p, metrics)


def _states(weights: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The matrix as it is trained, kept and packed, fp32; None where there are no C kernels."""
    layer = nn.Linear(weights.shape[1], weights.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weights)
    module = quant.prepare(nn.Sequential(layer), name)
    prepared = module[0]
    assert isinstance(prepared, FakeQuantLinear)
    trained = prepared.rounded().detach()
    converted = quant.convert(module)[0]
    assert isinstance(converted, QuantLinear)
    try:
        packed = Linear(converted.qtensor()).unpack()
    except NoKernelsError:
        packed = None
    return trained, converted.weight, packed


def _equal(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found.view(torch.int32) == expected.view(torch.int32)).float().mean().item()


def passing(weights: list[float], *, scale: float) -> int:
    """How many of these weights let the gradient pass, in int4-sym under a given scale."""
    w = torch.tensor([weights]).requires_grad_()
    value = fake_quantize(w, integer_format("int4-sym-channel"), torch.full((1, 1), scale))
    return int(torch.autograd.grad(value.sum(), w)[0].sum())


def five_numbers() -> Table:
    """The estimator by hand: five weights under a scale of 1/4 in int4-sym, an upstream gradient of 1."""
    fmt = integer_format("int4-sym-channel")
    w = torch.tensor([FIVE]).requires_grad_()
    value = fake_quantize(w, fmt, torch.full((1, 1), SCALE))
    (gradient,) = torch.autograd.grad(value.sum(), w)
    lowest, highest = fmt.code_range
    rows = []
    for weight, out, passed in zip(FIVE, value[0].tolist(), gradient[0].tolist(), strict=True):
        code = round(weight / SCALE)
        where = "inside" if lowest < code < highest else "at the bound" if lowest <= code <= highest else "beyond"
        rows.append((f"{weight:g}", f"{weight / SCALE:g}", f"{code}", where, f"{out:g}", f"{passed:g}"))
    columns = ("weight", "steps", "code before the clamp", "", "value", "gradient")
    return Table(columns, rows, right=("weight", "steps", "code before the clamp", "value", "gradient"))
