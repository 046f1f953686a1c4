"""Activations as exported static INT8 models have them: one calibrated scale and zero point for a whole tensor.

As ONNX defines QuantizeLinear on unsigned bytes, over the least and the largest value that calibration saw, zero
included so that it stays exact:

    low = min(0, least)         high = max(0, largest)
    scale = (high - low) / 255  zero = rint(-low / scale)
    code = clamp(rint(x / scale) + zero, 0, 255)          x ~ (code - zero) * scale

This is a simulation in floats, in front of the Linear layers of a torch module. The kit's own `static` mode is
symmetric: an offset would need the sums of every matrix' rows in the products, for at most a factor of two in the step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

import torch
from torch import Tensor, nn

from nanokit.errors import ParameterError
from nanokit.quant.layers import FakeQuantLinear, QuantLinear

LAST = 255  # the largest code


class AffineRanges:
    """Least and largest value by place, and tensors rounded to them."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[float, float]] = {}

    def observe(self, place: str, x: Tensor) -> Tensor:
        """Widen the range of a place by what x holds; x itself is returned. Raises ParameterError for what is not a
        number, which no range can hold."""
        low, high = (float(end) for end in x.detach().aminmax())
        if not isfinite(high - low):
            raise ParameterError(
                f"what {place} sees cannot be scaled", found=f"{low} to {high}", needed="numbers",
                do="find the layer before it that gives them",
            )  # fmt: skip
        before = self._ends.get(place, (0.0, 0.0))
        self._ends[place] = min(before[0], low), max(before[1], high)
        return x

    def grid(self, place: str) -> tuple[float, int]:
        """Scale and zero point of a place; where nothing but zeros was seen, 1 and 0. Raises ParameterError for a place
        that was never observed."""
        if place not in self._ends:
            raise ParameterError(
                f"{place} has no range", needed="one from calibration", do="run a text inside `observing` first"
            )
        low, high = self._ends[place]
        scale = (high - low) / LAST
        return (scale, round(-low / scale)) if scale else (1.0, 0)

    def rounded(self, place: str, x: Tensor) -> Tensor:
        """x on the grid of its place, what lies beyond clipped; fp32, in the shape of x."""
        scale, zero = self.grid(place)
        return torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, 0, LAST)

    @contextmanager
    def observing(self, module: nn.Module) -> Iterator[None]:
        """Note the input of every Linear layer under the layer's name."""
        with _before_linears(module, self.observe):
            yield

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Round the input of every Linear layer to the grid of its name."""
        with _before_linears(module, self.rounded):
            yield


@contextmanager
def _before_linears(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    kinds = nn.Linear | QuantLinear | FakeQuantLinear
    linears = [(name, part) for name, part in module.named_modules() if isinstance(part, kinds)]
    if not linears:
        raise ParameterError("no layer of this module has inputs to round", needed="Linear layers, quantized or not")
    handles = [
        part.register_forward_pre_hook(lambda _, inputs, name=name: (change(name, inputs[0]),))
        for name, part in linears
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
