"""Claim Q8: 4-bit weights must begin on 32 bytes, or each load takes two memory transactions; +19 % by aligning them.

The codes of one large matrix at every base offset from 0 to 128 bytes, beside a plain copy at the same offsets. `pack`
aligns what it makes, so the product is handed a shifted view. Offset 0 comes twice, first and last: a difference that
is not larger than theirs is none. Off a multiple of 16 the compiler may no longer use loads of 16 bytes: which it used
then is listed by size, as far as the compiler knows the device.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanokit.kernels.gpu import ahead, runtime
from nanokit.kernels.gpu.activations import quantize
from nanokit.kernels.gpu.checks.material import noise_bytes, packed_copies
from nanokit.kernels.gpu.checks.shapes import SHAPES, TINY
from nanokit.kernels.gpu.checks.speed import MODE, Bench
from nanokit.kernels.gpu.pack import Packed
from nanokit.kernels.gpu.product import multiply

OFFSETS = (0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 0)  # bytes
ROOM = 256  # bytes beyond the codes; every copy begins on a multiple of it
FORMAT = "int4-sym-g32"


def shifted(packed: Packed, room: Tensor, offset: int) -> Packed:
    """The same matrix, its codes copied to `offset` bytes into room."""
    there = room[offset : offset + packed.codes.numel()].view(packed.codes.shape)
    return replace(packed, codes=there.copy_(packed.codes))


def sweep(bench: Bench) -> Iterator[dict[str, Any]]:
    """One record an offset: GB/s of the product and of the copy, both relative to offset 0, and whether the result is
    that of offset 0 in every bit."""
    assert bench.timer is not None
    widths = loads() if not bench.tiny else {}
    packed, x, room = _made(bench)
    size = packed[0].codes.numel()
    first: Tensor | None = None
    speeds: tuple[float, float] | None = None
    target = torch.empty(size, dtype=torch.uint8, device=room.device)
    for offset in OFFSETS:
        moved = [shifted(each, row, offset) for each, row in zip(packed, room, strict=True)]
        out = multiply(moved[0], x)
        first = out if first is None else first
        timing = bench.timer([partial(multiply, each, x) for each in moved])
        copying = bench.timer([partial(target.copy_, row[offset : offset + size]) for row in room])
        now = packed[0].nbytes / timing.median / 1e6, 2 * size / copying.median / 1e6
        speeds = now if speeds is None else speeds
        yield {
            "offset": offset, "equal": torch.equal(out, first), "loads": widths.get(offset % runtime.ALIGNMENT == 0),
            "gb_s": now[0], "relative": now[0] / speeds[0], "copy_gb_s": now[1],
            "copy_relative": now[1] / speeds[1], **timing.to_record(),
        }  # fmt: skip


def _made(bench: Bench) -> tuple[list[Packed], Any, Tensor]:
    """Matrices, activations, and room for the codes of each at any offset."""
    outputs, columns = next(iter((TINY if bench.tiny else SHAPES).values())).matrices["gate"]
    size = packed_copies(FORMAT, outputs, columns, 1)[0].nbytes
    packed = packed_copies(FORMAT, outputs, columns, bench.copies(size))
    x = quantize(torch.randn(1, columns, device=runtime.device()), MODE)
    return packed, x, noise_bytes(len(packed), packed[0].codes.numel() + ROOM)


def launch_all() -> None:
    """An aligned and a shifted product: what there is to compile."""
    packed, x, room = _made(Bench(None))
    for offset in (0, 1):
        multiply(shifted(packed[0], room[0], offset), x)


def loads() -> dict[bool, dict[int, int]]:
    """Sizes of the product's loads and how many instructions load so much, with aligned codes and without; nothing for
    a device that `ahead` does not know."""
    major, minor = torch.cuda.get_device_capability(runtime.device())
    arch = 10 * major + minor
    if arch not in ahead.SHARED_KIB:
        return {}
    return {offset == 0: loads_at(offset, arch) for offset in (0, 1)}


def loads_at(offset: int, arch: int) -> dict[int, int]:
    """The same, compiled for an architecture."""
    with ahead.compiling(arch) as reports:
        packed, x, room = _made(Bench(None))
        multiply(shifted(packed[0], room[0], offset), x)
    return next(report.loads for report in reports if report.kernel == "product")
