"""How kernels are cut and compiled: tiles, warps and pipeline stages. None of it changes a bit of a result."""

from typing import NamedTuple


class ProductConfig(NamedTuple):
    """block_m rows and block_n outputs of a program; warps that share it; loads in flight (pipeline stages)."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def product_config(kind: int, rows: int) -> ProductConfig:
    """The configuration for weights of this kind (gpu.pack) and so many rows."""
    if rows <= 16:
        return ProductConfig(8 if rows <= 8 else 16, 64, 4, 4)
    return ProductConfig(32, 64, 4, 3) if rows <= 32 else ProductConfig(32, 128, 8, 3)
