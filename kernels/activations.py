"""Activations as whole numbers: the contract that every backend's integer products follow.

A row x of `cols` fp32 numbers becomes codes and scales, x ~ code * scale, a scale for each group of columns:

    mode     group       codes             error of a code, and what it needs
    a16      32          -32512 … 32512    1/65024 of the group's peak; two int8 planes, 256 * high + low
    a8g32    32          -127 … 127        1/254 of the group's peak
    a8g16    16          -127 … 127        the same, of half as many columns
    token    the row     -127 … 127        1/254 of the row's peak: one large column coarsens all others
    tensor   the step    -127 … 127        1/254 of the step's peak: a row's result depends on its batch mates
    static   the row     -127 … 127        1/254 of a calibrated peak; what lies beyond is clipped

    peak = max |x|    scale = peak / limit    inverse = limit / peak    code = clamp(rint(x * inverse), ±limit)

in fp32, every operation rounded once, `rint` to even: so torch and C agree in every bit of codes and scales. A peak
below `TINY` counts as zero (scale and codes 0), for its inverse would overflow; one that is not a number stays so in
the scale, and with it in whatever is computed from the row. `mode` "fp32" means that nothing is quantized.

Rejected: limit 128 or 32768 (the two ends would then round differently), asymmetric codes (the products would need
another sum for half a bit), and stochastic rounding (a row's result would change from run to run).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanokit.errors import ParameterError

if TYPE_CHECKING:
    from nanokit.model.weights import Weights

MODES = ("fp32", "a16", "a8g32", "a8g16", "token", "tensor", "static")
# Columns that share a scale; the other modes have one scale a row. Scale and product steps are cut alike.
GROUPS = {"a16": 32, "a8g32": 32, "a8g16": 16}
LIMIT, LIMIT_A16 = 127, 32512
TINY = 2.0**-100  # far below anything a network computes with, far above where 32512 / peak overflows
PLACES = ("attention input", "attention output", "feed-forward input", "feed-forward middle")


@dataclass(frozen=True)
class Quantized:
    """codes: int8 [rows, cols], or int32 where the mode is a16; scales: fp32 [rows, cols / group]."""

    codes: Tensor
    scales: Tensor
    group: int

    def dequantize(self) -> Tensor:
        """code * scale, fp32 [rows, cols]."""
        grouped = self.codes.float().unflatten(1, (-1, self.group))
        return (grouped * self.scales[:, :, None]).flatten(1)


def quantize(x: Tensor, mode: str, peak: Tensor | float | None = None) -> Quantized:
    """Quantize the rows of x [rows, cols] by a mode other than fp32.

    peak: the largest magnitude that a code can stand for; static only, which needs it. In mode `tensor` the scale
    comes from all rows together, by the mode's nature: the same row has another result in another batch.
    Raises ParameterError when the columns do not divide into the mode's groups.
    """
    group = GROUPS.get(mode, x.shape[1])
    check_columns("a tensor", x.shape[1], mode)
    grouped = x.float().unflatten(1, (-1, group))
    if mode == "static":
        if peak is None:
            raise ValueError("static activations need a peak")
        largest = torch.as_tensor(peak, dtype=torch.float32, device=x.device).expand(x.shape[0], 1)
    elif mode == "tensor":
        largest = grouped.abs().amax().expand(x.shape[0], 1)
    else:
        largest = grouped.abs().amax(dim=-1)
    codes, scales = to_codes(grouped, largest, LIMIT_A16 if mode == "a16" else LIMIT)
    return Quantized(codes.flatten(1).to(torch.int32 if mode == "a16" else torch.int8), scales, group)


def to_codes(grouped: Tensor, largest: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Codes -limit … limit of grouped [..., columns], still fp32, and scales of the shape of largest [...], the peak
    of each group."""
    # A tensor over a tensor: torch computes number / tensor as number * (1 / tensor), which rounds twice.
    ends = torch.tensor(limit, dtype=torch.float32, device=grouped.device)
    vanishing = largest < TINY
    scales = torch.where(vanishing, 0.0, largest / ends)
    inverse = torch.where(vanishing, 0.0, ends / largest)
    codes = (grouped * inverse[..., None]).round().clamp(-ends, ends).nan_to_num(0.0)
    return codes, scales


def planes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """a16 codes as two int8 planes, code = 256 * high + low with both in -128 … 127."""
    high = (codes + 128) >> 8
    return high.to(torch.int8), (codes - 256 * high).to(torch.int8)


def columns_of(weights: "Weights") -> list[tuple[str, int]]:
    """One of the matrices at each place, and how many columns its input has."""
    linears = [x for layer in weights.layers for x in (layer.q, layer.o, layer.gate, layer.down)]
    found = (*(x.weight for x in linears), weights.head.weight if weights.head else weights.embedding)
    return [(matrix.name, matrix.shape[1]) for matrix in found]


def check_mode(mode: str) -> None:
    """Raises ParameterError for a mode that is none of `MODES`."""
    if mode not in MODES:
        raise ParameterError("unknown activation mode", found=repr(mode), needed="one of " + ", ".join(MODES))


def check_columns(name: str, columns: int, mode: str) -> None:
    """Raises ParameterError naming the matrix whose columns do not divide into the mode's groups."""
    group = GROUPS.get(mode, 1)
    if columns % group:
        raise ParameterError(
            f"{name} cannot be multiplied by {mode} activations",
            found=f"{columns} columns",
            needed=f"a multiple of {group}, the columns that share a scale",
            do="use fp32, token or tensor activations with this model",
        )


def place_name(place: int, layers: int) -> str:
    """What place `4 * layer + i` is called in messages; the last, 4 * layers, is the head's input."""
    return "the head's input" if place == 4 * layers else f"layer {place // 4}, {PLACES[place % 4]}"


def no_peaks(layers: int) -> Tensor:
    """Peaks before anything was measured: fp32 zeros, one for each place of a model of so many layers."""
    return torch.zeros(4 * layers + 1, dtype=torch.float32)


def note_peak(peaks: Tensor, place: int, x: Tensor) -> None:
    """Raise peaks[place] to the largest magnitude in x, if it is lower."""
    peaks[place] = torch.maximum(peaks[place], x.abs().amax().to(peaks.device))


def checked_peaks(peaks: Tensor, layers: int, mode: str) -> Tensor:
    """A copy of calibrated peaks for a model in this mode. Raises ParameterError for another mode than static, a wrong
    number of peaks, and one that no calibration gives: not finite, or not above zero."""
    if mode != "static":
        raise ParameterError("only static activations are calibrated", found=mode, needed="static")
    if peaks.shape != (4 * layers + 1,):
        raise ParameterError(
            "the peaks of static activations are not this model's",
            found=f"shape {list(peaks.shape)}",
            needed=f"[{4 * layers + 1}]: four places in each of {layers} layers, and the head's input",
        )
    peaks = peaks.to(torch.float32, copy=True)
    for place, peak in enumerate(peaks.tolist()):
        if not 0 < peak < float("inf"):
            raise ParameterError(
                f"the peak of {place_name(place, layers)} cannot be a scale",
                found=peak,
                needed="a finite number above zero",
                do="calibrate with a text that runs through the whole model",
            )
    return peaks


def not_calibrated() -> ParameterError:
    """The error of static activations without peaks."""
    return ParameterError(
        "static activations have not been calibrated",
        found="no peaks",
        needed="the largest magnitude at each place, from a text",
        do="call engine.calibrate(); without an engine, note them with run(plan, peaks), that of the hidden states "
        "last, then call calibrate(peaks)",
    )
