"""Configurations of products tried on the device: a handful for each kind of weights and bucket of rows.

The matrix is a large one of the 7B shape: others differ in how many programs there are, which configurations hardly
see. Every candidate has to give the bits of the default; one that does not is a fault, not a matter of speed. One that
the device cannot take (registers, shared memory) is left out, and said.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanokit.kernels.gpu import configs, runtime
from nanokit.kernels.gpu.activations import quantize
from nanokit.kernels.gpu.checks.material import packed_copies
from nanokit.kernels.gpu.checks.shapes import SHAPES, TINY
from nanokit.kernels.gpu.checks.speed import MODE, Bench
from nanokit.kernels.gpu.checks.work import FAULTS, fault_of
from nanokit.kernels.gpu.configs import DEFAULTS, MANY, ProductConfig
from nanokit.kernels.gpu.pack import Packed
from nanokit.kernels.gpu.product import multiply

FORMATS = ("int4-sym-g32", "int8-sym-g32", "fp4-g16")  # one of each kind that products are quick with
ROWS = {8: 1, 16: 16, 32: 32, MANY: 128}  # measured for a bucket


def candidates(bucket: int, tiny: bool) -> list[ProductConfig]:
    """The default first."""
    default = DEFAULTS[bucket]
    others = [(64, 4, 3), (64, 4, 6), (32, 2, 4), (128, 4, 4), (128, 8, 4)]
    found = [default, *(ProductConfig(default.block_m, *other) for other in others)]
    return list(dict.fromkeys(found))[: 2 if tiny else None]


def tune(bench: Bench) -> Iterator[dict[str, Any]]:
    """One record for each kind and bucket: the best, its milliseconds and the default's, whether all candidates gave
    the same bits, and what became of each. The best is in use from then on."""
    outputs, columns = next(iter((TINY if bench.tiny else SHAPES).values())).matrices["gate"]
    for name in FORMATS:
        size = packed_copies(name, outputs, columns, 1)[0].nbytes
        packed = packed_copies(name, outputs, columns, bench.copies(size))
        for bucket in DEFAULTS:
            yield _best(bench, name, packed, bucket)


def _best(bench: Bench, name: str, packed: list[Packed], bucket: int) -> dict[str, Any]:
    assert bench.timer is not None
    rows = min(ROWS[bucket], 34) if bench.tiny else ROWS[bucket]
    x = quantize(torch.randn(rows, packed[0].shape[1], device=runtime.device()), MODE)
    key, first = (packed[0].kind, bucket), None
    tried: list[dict[str, Any]] = []
    for config in candidates(bucket, bench.tiny):
        configs.in_use()[key] = config
        try:
            out: Tensor = multiply(packed[0], x)
            timing = bench.timer([partial(multiply, each, x) for each in packed])
        except FAULTS as error:
            tried.append({"config": list(config), "ms": None, "equal": None, "fault": fault_of(error)})
            continue
        first = out if first is None else first
        tried.append({"config": list(config), "ms": timing.median, "equal": torch.equal(out, first), "fault": ""})
    ran = [each for each in tried if each["ms"] is not None]
    right = [each for each in ran if each["equal"]]
    best = min(right, key=lambda each: each["ms"]) if right else tried[0]
    configs.in_use()[key] = ProductConfig(*best["config"])
    return {
        "format": name, "kind": key[0], "rows": bucket, "config": best["config"], "ms": best["ms"],
        "default_ms": tried[0]["ms"], "equal": bool(ran) and all(each["equal"] for each in ran), "tried": tried,
    }  # fmt: skip
