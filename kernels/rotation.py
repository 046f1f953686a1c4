"""cos and sin of every position so far: what both packing backends rotate queries and keys by."""

import math

import torch
from torch import Tensor

ROWS = 1024  # positions by which the tables grow


class Rotation:
    """Tables fp32 [positions, head_dim / 2] on a device, computed on the CPU so that every backend has the same bits;
    grown by a new one when a step needs it."""

    def __init__(self, inverse_frequencies: Tensor, positions: int = 0, device: torch.device | str = "cpu") -> None:
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies
        self._inverse_frequencies, self._length = inverse_frequencies, positions
        self.cos, self.sin = (table.contiguous().to(device) for table in (angles.cos(), angles.sin()))
        self.addresses = self.cos.data_ptr(), self.sin.data_ptr()

    def reaching(self, positions: int) -> "Rotation":
        """Tables of at least so many positions: these, if they are long enough."""
        if positions <= self._length:
            return self
        return Rotation(self._inverse_frequencies, math.ceil(positions / ROWS) * ROWS, self.cos.device)
