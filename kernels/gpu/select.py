"""Questions about rows of fp32 logits that lie on the device: same ids as kernels/selection.py.

Greedy draws and draws by noise alone are kernels; what filters ask first (the largest few, the mass) are torch's
operations on the device, with sums in fp64. Each answer is one copy to the host, which waits for it: a draw ends there
anyway. Ties go to the lowest id: the largest few come from a stable sort, which for one vocabulary takes some tens of
microseconds. Rejected: torch.topk, which picks any of several equal ones at the edge.
"""

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.device import select as device

ARGMAX_BLOCK, DRAW_BLOCK = 1024, 512  # ids of a program
FEW = 15  # candidates that come back in the first copy; nearly always there is one


def argmax_rows(logits: Tensor) -> Tensor:
    """The id of each row's largest logit, int64 [n] on the device: the lowest among equals, -1 for a row that cannot be
    drawn from. logits: fp32 [n, V], ids side by side, rows any distance apart. Raises ParameterError for others."""
    rows, size = checked_logits(logits, 2).shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    blocks = triton.cdiv(size, ARGMAX_BLOCK)
    tops = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    runtime.launch(device.argmax_blocks, (blocks, rows), logits, tops, ids, size, logits.stride(0), ARGMAX_BLOCK)
    runtime.launch(device.argmax_fold, (rows,), tops, ids, out, blocks, triton.next_power_of_2(blocks))
    return out


class Selection:
    """See kernels/selection.py for what each answers. logits: fp32 on the device, a row's ids side by side; answers lie
    on the CPU. Raises ParameterError for logits that the kernels cannot take."""

    def argmax(self, logits: Tensor) -> int:
        """See kernels/selection.py."""
        return int(argmax_rows(checked_logits(logits, 1)[None])[0])

    def values(self, logits: Tensor, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See kernels/selection.py."""
        return _numpy(logits[torch.from_numpy(ids).to(logits.device)])

    def largest(self, logits: Tensor, count: int) -> NDArray[np.int64]:
        """See kernels/selection.py."""
        return _numpy(_largest(logits, count))

    def look(self, logits: Tensor, count: int, temperature: float) -> tuple[NDArray[np.int64], float]:
        """See kernels/selection.py."""
        both = _numpy(torch.cat([_mass(logits, temperature).view(1).view(torch.int64), _largest(logits, count)]))
        mass = float(both[:1].view(np.float64)[0])
        return both[1:1] if np.isnan(mass) else both[1:], mass

    def mass(self, logits: Tensor, temperature: float) -> float:
        """See kernels/selection.py."""
        return float(_mass(logits, temperature))

    def normalizer(self, logits: Tensor) -> Tensor:
        """See kernels/selection.py."""
        tops = logits.amax(dim=-1)
        return torch.where(tops.isfinite(), logits.double().logsumexp(dim=-1), torch.nan).float().cpu()

    def gumbel_candidates(
        self,
        logits: Tensor,
        temperature: float,
        seed: int,
        position: int,
        stream: int,
        ids: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """See kernels/selection.py; nearly always one."""
        row = checked_logits(logits, 1)
        size = len(row) if ids is None else len(ids)
        if size == 0:
            return np.empty(0, np.int64)
        among = row if ids is None else torch.from_numpy(ids).to(row.device)
        blocks = triton.cdiv(size, DRAW_BLOCK)
        scores, bests = (torch.empty(n, dtype=torch.float32, device=row.device) for n in (size, blocks))
        found = torch.empty(1 + size, dtype=torch.int32, device=row.device)
        key = [_signed(word) for word in (seed, seed >> 32, position, position >> 32, stream)]
        asked = (ids is not None, DRAW_BLOCK)
        runtime.launch(
            device.draw_blocks, (blocks,), row, among, scores, bests, found, size, float(temperature), *key, *asked
        )
        most = triton.next_power_of_2(blocks)
        runtime.launch(device.draw_candidates, (blocks,), scores, bests, among, found, size, blocks, *asked, most)
        few = _numpy(found[: 1 + FEW])
        count = int(few[0])
        left = few[1 : 1 + count] if count <= FEW else _numpy(found[1 : 1 + count])
        return np.sort(left).astype(np.int64)


def _largest(logits: Tensor, count: int) -> Tensor:
    """Ids int64. The sum makes both zeros one: a radix sort may tell them apart."""
    return (logits + 0.0).sort(descending=True, stable=True).indices[:count]


def _mass(logits: Tensor, temperature: float) -> Tensor:
    """fp64, one element. NaN is what comes out where the largest is infinite or not a number."""
    wide = logits.double()
    return ((wide - wide.max()) / temperature).exp().sum()


def _numpy(tensor: Tensor) -> NDArray:
    return tensor.cpu().numpy()


def _signed(word: int) -> int:
    """The lowest 32 bits as an int32: kernels are not compiled again for each kind of number."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def checked_logits(logits: Tensor, dimensions: int) -> Tensor:
    """Logits that the kernels may read, who take what lies there."""
    where = runtime.device()
    fits = logits.ndim == dimensions and logits.dtype is torch.float32 and logits.device.type == where.type
    if not fits or not 0 < logits.shape[-1] < 2**31 - 2**16 or logits.stride(-1) != 1:
        raise ParameterError(
            "logits do not fit the kernel",
            found=f"{logits.dtype} {list(logits.shape)}, strides {list(logits.stride())}, on {logits.device}",
            needed=f"fp32 of {dimensions} dimensions, ids side by side, on {where}",
        )
    return logits
