"""How much memory a model would take, compared with what is free, before any of it is allocated.

An allocation that the machine cannot back is not refused by the operating system: it is killed later, or swaps.
So the kit does the sum first and refuses with the numbers and the option to change.
"""

import re
from pathlib import Path

import psutil
import torch

from nanokit.errors import MemoryBudgetError, ParameterError

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9,
         "K": 2**10, "M": 2**20, "G": 2**30}  # fmt: skip
CGROUP = Path("/sys/fs/cgroup")


def free_gpu_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a GPU: what is free, and what torch keeps of tensors that are gone, as those of a
    model that was loaded before."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def free_memory() -> int:
    """Bytes that can be allocated without swapping: what the system reports, or less if a container limits it."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    if limit == "max":
        return free
    # The container is charged for cached files too, the model's own first of all; that memory is given back.
    used -= int(counts.get("inactive_file", 0))
    return max(0, min(free, int(limit) - used))


def parse_bytes(value: int | str) -> int:
    """Bytes from 536870912, "512MiB", "2G" (binary) or "2GB" (decimal). Raises ParameterError."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(value))
    if match is None or match[2].upper() not in UNITS:
        raise ParameterError(
            "not a memory size",
            found=repr(value),
            needed="bytes, or a number with KiB, MiB, GiB, KB, MB or GB",
            do="write 512MiB or 2GiB, for instance",
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def human(nbytes: float) -> str:
    """12,345,678 bytes as "11.8 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def check_budget(weight_bytes: int, kv_bytes: int, what: str, kv_advice: str, free: int | None = None) -> None:
    """Raises MemoryBudgetError if weights + KV pages exceed `free` (now, if None).

    kv_advice: how the KV pages could be smaller, as the error's advice.
    """
    free = free_memory() if free is None else free
    advice = kv_advice
    if weight_bytes > free:
        advice = "use a smaller or more strongly quantized model, or free memory: the weights alone do not fit"
    needed = f"{human(weight_bytes)} for weights + {human(kv_bytes)} for KV pages"
    check_room(weight_bytes + kv_bytes, what, needed, advice, free)


def check_room(nbytes: int, what: str, needed: str, advice: str, free: int | None = None) -> None:
    """Raises MemoryBudgetError if so many bytes exceed `free` (now, if None). needed: the bytes in words."""
    free = free_memory() if free is None else free
    if nbytes > free:
        raise MemoryBudgetError(
            f"{what} does not fit into memory", found=f"{human(free)} free", needed=needed, do=advice
        )
