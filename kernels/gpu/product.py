"""Products with packed weights: what a bound model's layers, and tests of single operations, call.

How a product is cut. Outputs into blocks, rows into tiles, columns into ranges, as many as the matrix' shape asks for:
a matrix of few outputs would leave most of a GPU idle otherwise. A program does one range and `fold` adds them up (few
rows), or it does all ranges one after the other (many rows); both add in the same order, so that neither the number of
rows nor the tile changes a bit of the result.
"""

import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.activations import Activations
from nanokit.kernels.gpu.configs import product_config
from nanokit.kernels.gpu.device import product as device
from nanokit.kernels.gpu.pack import TIMES, Packed

PROGRAMS = 768  # that one tile of rows is cut into if there are columns enough: some for each processor of a large GPU
PER_PROGRAM = 64  # outputs that the number of ranges is reckoned with, whatever a block holds in the end
LEAST_UNITS = 4  # of a range: less work than this is not worth a partial sum
ENOUGH = 512  # programs, from which on each of them adds up all ranges itself
FOLDED, UNPACKED = 256, 8  # outputs of a program of `fold`; units of a program of `unpack`


def splits_of(outputs: int, units: int) -> int:
    """Ranges that a matrix' columns are cut into: by its shape alone, so that every product with it adds alike."""
    wanted = max(1, PROGRAMS * PER_PROGRAM // max(outputs, 1))
    return -(-units // max(LEAST_UNITS, -(-units // wanted)))


def multiply(weights: Packed, x: Activations, ids: Tensor | None = None) -> Tensor:
    """x times the weights, plus their bias: fp32 [rows, outputs], or [rows, len(ids)] for these rows of the weights.

    ids: int64 on the device, each below the number of outputs. Raises ParameterError for activations of other columns,
    and for ids of another type or with gaps between them.
    """
    seen = x.codes if x.codes is not None else x.x
    assert seen is not None
    rows, columns = seen.shape[-2:]
    if columns != weights.shape[1]:
        raise ParameterError(
            f"the activations do not fit {weights.name}",
            found=f"{columns} columns", needed=f"{weights.shape[1]} columns",
        )  # fmt: skip
    outputs = weights.shape[0] if ids is None else len(_checked(ids))
    out = torch.empty(rows, outputs, dtype=torch.float32, device=seen.device)
    if rows == 0 or outputs == 0:
        return out
    config = product_config(weights.kind, rows)
    splits = splits_of(weights.shape[0], weights.units)
    grid = (-(-outputs // config.block_n), -(-rows // config.block_m))
    whole = splits == 1 or grid[0] * grid[1] >= ENOUGH
    parts = out if whole else torch.empty(splits, rows, outputs, dtype=torch.float32, device=seen.device)
    pointers = (
        seen, _or(x.scales, seen), _or(x.sums, seen), weights.codes, weights.scales, _or(weights.minimums, seen),
        _or(weights.table, seen), _or(weights.bias, seen), _or(ids, seen),
    )  # fmt: skip
    flags = (weights.bias is not None, ids is not None, splits)
    runtime.launch(
        device.product, (*grid, 1 if whole else splits), *pointers, parts, rows, outputs, columns, weights.units,
        weights.codes.stride(0), weights.scales.shape[1], -(-weights.units // splits), *_form(weights), x.group or 1,
        0 if x.codes is None else len(x.codes), 2 if 16 in (weights.group, x.group) else 1,
        weights.minimums is not None, *flags, splits if whole else 1, config.block_m, config.block_n,
        warps=config.warps, stages=config.stages,
    )  # fmt: skip
    if not whole:
        fold = (-(-outputs // FOLDED), rows)
        last = (_or(weights.bias, seen), _or(ids, seen), out, rows, outputs, *flags, FOLDED)
        runtime.launch(device.fold, fold, parts, *last)
    return out


def rows_of(weights: Packed, ids: Tensor) -> Tensor:
    """Rows of the weights, fp32 [len(ids), columns], bit for bit as the canonical codes dequantize. ids: int64 on the
    device, each below the number of rows. Raises ParameterError as `multiply`."""
    out = torch.empty(len(_checked(ids)), weights.shape[1], dtype=torch.float32, device=ids.device)
    if len(ids):
        runtime.launch(
            device.unpack, (len(ids), -(-weights.units // UNPACKED)), ids, weights.codes, weights.scales,
            _or(weights.minimums, weights.scales), _or(weights.table, weights.codes), out, weights.shape[1],
            weights.units, weights.codes.stride(0), weights.scales.shape[1], *_form(weights),
            weights.minimums is not None, UNPACKED,
        )  # fmt: skip
    return out


def _checked(ids: Tensor) -> Tensor:
    if ids.dtype is not torch.int64 or ids.ndim != 1 or not ids.is_contiguous():
        raise ParameterError(
            "these are no ids for the kernel",
            found=f"{ids.dtype} {list(ids.shape)}, strides {list(ids.stride())}", needed="int64, one after the other",
        )  # fmt: skip
    return ids


def _form(weights: Packed) -> tuple[int, str | None, int, int, int]:
    """The constants that say how codes are kept."""
    return weights.kind, weights.lookup, TIMES[weights.kind], weights.added, weights.group


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is passed and not followed, where there is no tensor."""
    return other if tensor is None else tensor
