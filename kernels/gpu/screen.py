"""The screened head on the device: what kernels/screen.py answers, by two kernels around the exact logits of a few ids.

    screen_first      the best of each block of the vocabulary by the proxy: the few to begin with
    exact             their logits (the caller's product)
    screen_survivors  every id whose bound reaches the best of those, gathered by a counter a row and then sorted
    exact             theirs

The host waits once, for how many ids are left. Rejected: the very best by the proxy as the first few, which takes a
selection over the vocabulary; the best of each block include its best, and nearly all that come next.
"""

import torch
import triton
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.device import screen as device
from nanokit.kernels.gpu.select import checked_logits
from nanokit.kernels.screen import OF_OFFSET, TINY, Exact, Screen, score

BLOCK = 1024  # ids of a program; one of each is rescored


def screened_argmax(
    screen: Screen,
    x: Tensor,
    proxy: Tensor,
    exact: Exact,
    *,
    temperature: Tensor | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels/screen.py: the same ids, and how many exact logits they took, both int64 [n] on the device, where all
    arguments lie. Rows of proxy and added may be any distance apart. Raises ParameterError for what a kernel cannot
    take."""
    rows, size = checked_logits(proxy, 2).shape
    out = torch.empty(rows, dtype=torch.int64, device=proxy.device)
    counts = torch.zeros(rows, dtype=torch.int32, device=proxy.device)
    if rows == 0:
        return out, counts.long()
    _check(screen, x, rows, size, temperature, added)
    blocks = triton.cdiv(size, BLOCK)
    edits = proxy if temperature is None else temperature, proxy if added is None else added
    added_stride = 0 if added is None else added.stride(0)
    shape = size, proxy.stride(0), added_stride
    flags = temperature is not None, added is not None, BLOCK
    first = torch.empty(rows, blocks, dtype=torch.int64, device=proxy.device)
    runtime.launch(device.screen_first, (blocks, rows), proxy, screen.offset, *edits, first, *shape, *flags)
    scales = [None if temperature is None else temperature[row] for row in range(rows)]
    seen = [exact(row, first[row]) for row in range(rows)]
    best = torch.stack([score(seen[row], scales[row], _of(added, row, first[row])).max() for row in range(rows)])
    left = torch.empty(rows, size, dtype=torch.int32, device=proxy.device)
    runtime.launch(
        device.screen_survivors, (blocks, rows), proxy, screen.offset, screen.radius, screen.margin, screen.reach(x),
        *edits, first, best, counts, left, *shape, OF_OFFSET, TINY, *flags,
    )  # fmt: skip
    for row, count in enumerate(counts.tolist()):
        rest = left[row, :count].sort().values.long()
        ids = torch.cat([first[row], rest])
        logits = torch.cat([seen[row], exact(row, rest)]) if count else seen[row]
        scores = score(logits, scales[row], _of(added, row, ids))
        top = scores.max()
        lowest = torch.where(scores == top, ids, size).min()
        drawable = (logits < torch.inf).all() & (top > -torch.inf)
        out[row] = torch.where(drawable, lowest, -1)
    return out, counts.long() + blocks


def _check(screen: Screen, x: Tensor, rows: int, size: int, temperature: Tensor | None, added: Tensor | None) -> None:
    runtime.checked("the hidden states", x, torch.float32, (rows, len(screen.centre)))
    runtime.checked("the screen", screen.offset, torch.float32, (size,))
    if temperature is not None:
        runtime.checked("the temperatures", temperature, torch.float32, (rows,))
    if added is not None and checked_logits(added, 2).shape != (rows, size):
        raise ParameterError("what is added does not fit", found=list(added.shape), needed=[rows, size])


def _of(added: Tensor | None, row: int, ids: Tensor) -> Tensor | None:
    return None if added is None else added[row, ids]
