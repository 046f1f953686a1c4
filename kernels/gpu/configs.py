"""How products are cut and compiled: tiles, warps and pipeline stages. None of it changes a bit of a result.

`DEFAULTS` are what compile reports suggest (no spilled registers, wide loads); nobody has measured them on a GPU.
`python -m nanokit.kernels.gpu.check --tune` measures a handful of others and leaves the best in the cache folder, in
one file for a device and a version of Triton:

    {"schema": "nanokit.gpu-configs/1", "device": ..., "triton": ..., "measured": date,
     "product": [{"kind": of gpu.pack, "rows": bucket, "config": [block_m, block_n, warps, stages], "ms": ...,
                  "default_ms": ...}, ...]}

which is read once, at the first product on that device; the interpreter, and what only compiles, take the defaults.
Rejected: triton.autotune, which measures again in every process, and between two tokens of an answer.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from nanokit.errors import NanokitError
from nanokit.kernels.gpu import runtime
from nanokit.paths import gpu_file

SCHEMA = "nanokit.gpu-configs/1"


class ProductConfig(NamedTuple):
    """block_m rows and block_n outputs of a program; warps that share it; loads in flight (pipeline stages)."""

    block_m: int
    block_n: int
    warps: int
    stages: int


Table = dict[tuple[int, int], ProductConfig]  # by kind of weights and bucket of rows

MANY = 1 << 30  # rows: the last bucket
DEFAULTS = {
    8: ProductConfig(8, 64, 4, 4),
    16: ProductConfig(16, 64, 4, 4),
    32: ProductConfig(32, 64, 4, 3),
    MANY: ProductConfig(32, 128, 8, 3),
}


class ConfigError(NanokitError):
    """The file of measured configurations is not one."""


def bucket_of(rows: int) -> int:
    """The bucket of so many rows: the lowest that is not below."""
    return next(bucket for bucket in DEFAULTS if rows <= bucket)


def product_config(kind: int, rows: int) -> ProductConfig:
    """The configuration for weights of this kind (gpu.pack) and so many rows. Raises ConfigError."""
    bucket = bucket_of(rows)
    return in_use().get((kind, bucket), DEFAULTS[bucket])


def in_use() -> Table:
    """What is taken instead of the defaults; a tuner may change it. Raises ConfigError."""
    return {} if runtime.instead_of_running is not None else _measured()


@cache
def _measured() -> Table:
    return {} if runtime.INTERPRETED else read(torch.cuda.get_device_name(runtime.device()))


def place(device: str) -> Path:
    """Where configurations for a device, by its name, lie."""
    return gpu_file(f"configs-triton-{triton.__version__}", device)


def read(device: str) -> Table:
    """What was measured on a device; empty where nothing was. Raises ConfigError for a file of another kind."""
    path = place(device)
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _unusable(path, str(error)) from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise _unusable(path, "another schema")
    try:
        return {(row["kind"], row["rows"]): _checked(row["config"]) for row in found["product"]}
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(path, f"{type(error).__name__}: {error}") from error


def document(device: str, measured: str, product: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What the file holds."""
    return {
        "schema": SCHEMA, "device": device, "triton": triton.__version__, "measured": measured, "product": product,
    }  # fmt: skip


def _checked(numbers: list[int]) -> ProductConfig:
    config = ProductConfig(*numbers)
    if not all(isinstance(n, int) and n > 0 for n in config) or any(n & (n - 1) for n in config[:3]):
        raise ValueError(f"{numbers} is no configuration")
    return config


def _unusable(path: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{path} is no table of configurations", found=found, needed=SCHEMA, do="delete it, or tune again"
    )
