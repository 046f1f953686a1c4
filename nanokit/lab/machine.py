"""The machine card: what a figure depends on besides the code, and how fast this machine reads memory.

Nothing here is guessed: what the system does not tell is None and shows as "unknown". Versions come from the
installed distributions' metadata, because importing transformers to read its version costs more than a
second. `py-cpuinfo` was rejected: it runs machine code to find features that Linux and macOS list in plain
text.
"""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from nanokit.errors import NanokitError
from nanokit.lab.lock import measuring
from nanokit.lab.table import Table

# What the kernels choose between; Linux spells them so in /proc/cpuinfo ("flags" on x86, "Features" on ARM).
ISA_X86 = {
    "avx2": "avx2",
    "f16c": "f16c",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
}
ISA_ARM = {"asimd": "neon", "asimddp": "neon_dotprod", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve"}
ISA_MACOS = {"FEAT_DotProd": "neon_dotprod", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16", "FEAT_SME": "sme"}
PACKAGES = ("nanokit", "torch", "triton", "transformers", "tokenizers", "numpy", "papermill", "plotly")


@dataclass(frozen=True)
class MachineCard:
    """One machine at one moment. RAM in GiB; load: processes wanting a core, mean of the last minute."""

    cpu: str | None
    cores: int
    cores_physical: int | None
    isa: tuple[str, ...]
    ram_gib: float
    ram_free_gib: float
    gpu: str | None
    os: str
    arch: str
    threads: int
    load: float | None
    versions: dict[str, str]

    def to_record(self) -> dict[str, Any]:
        """The card as JSON, without the versions (a record keeps them beside the machine)."""
        facts = asdict(self)
        del facts["versions"]
        return {**facts, "isa": list(self.isa)}

    def table(self) -> Table:
        """One row a fact."""
        physical = f" ({self.cores_physical} physical)" if self.cores_physical else ""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        rows = [
            ("CPU", self.cpu or "unknown"),
            ("cores", f"{self.cores}{physical}, {self.threads} used by torch"),
            ("instructions", ", ".join(self.isa) or "none of those that matter"),
            ("RAM", f"{self.ram_gib:.1f} GiB, {self.ram_free_gib:.1f} free"),
            ("GPU", self.gpu or "none"),
            ("system", f"{self.os}, {self.arch}"),
            ("load", "unknown" if self.load is None else f"{self.load:.2f}"),
            ("versions", versions),
        ]
        return Table(("this machine", ""), rows)


def machine_card() -> MachineCard:
    """Look at the machine. Imports torch (for its threads and the GPU)."""
    import torch

    memory = psutil.virtual_memory()
    gpu = None
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        gpu = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    elif torch.backends.mps.is_available():
        gpu = "Apple GPU (MPS)"
    return MachineCard(
        cpu=_cpu_name(),
        cores=_usable_cores(),
        cores_physical=psutil.cpu_count(logical=False),
        isa=_instruction_sets(),
        ram_gib=round(memory.total / 2**30, 1),
        ram_free_gib=round(memory.available / 2**30, 1),
        gpu=gpu,
        os=f"{platform.system()} {platform.release()}",
        arch=platform.machine(),
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Python and the installed packages that a figure can depend on; missing ones are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _usable_cores() -> int:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpuinfo(key: str) -> str | None:
    """The first value of key in Linux's /proc/cpuinfo; None elsewhere or when it is not listed."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _sysctl(name: str) -> str | None:
    """One value of macOS's sysctl, None when it does not know the name."""
    answer = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def _cpu_name() -> str | None:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string")
    return _cpuinfo("model name") or platform.processor() or None


def _instruction_sets() -> tuple[str, ...]:
    if sys.platform == "darwin":
        listed = [ours for theirs, ours in ISA_MACOS.items() if _sysctl(f"hw.optional.arm.{theirs}") == "1"]
        return tuple((["neon"] if platform.machine() == "arm64" else []) + listed)
    flags = set((_cpuinfo("flags") or _cpuinfo("Features") or "").split())
    return tuple(ours for theirs, ours in {**ISA_X86, **ISA_ARM}.items() if theirs in flags)


@dataclass(frozen=True)
class Bandwidth:
    """Speed of reading memory in order with all threads. GB/s are 1e9 bytes a second; samples in order."""

    samples_gb_s: tuple[float, ...]
    buffer_bytes: int
    threads: int

    @property
    def median_gb_s(self) -> float:
        """The figure to quote."""
        return statistics.median(self.samples_gb_s)

    def table(self) -> Table:
        """Median and spread."""
        low, high = min(self.samples_gb_s), max(self.samples_gb_s)
        rows = [
            ("streaming read", f"{self.median_gb_s:.1f} GB/s"),
            ("spread", f"{low:.1f} to {high:.1f} GB/s of {len(self.samples_gb_s)}"),
            ("buffer", f"{self.buffer_bytes / 2**20:.0f} MiB, {self.threads} threads"),
        ]
        return Table(("memory", ""), rows)


def measure_bandwidth(*, repeats: int = 7, buffer_bytes: int | None = None) -> Bandwidth:
    """Time reading a buffer much larger than the caches with all of torch's threads; the faster of two
    readers.

    A dot product (of BLAS) and a sum (torch's own) take turns, after one pass each of warm-up; which of them
    keeps up with memory depends on the machine, and the limit is what the better one reaches. The buffer is
    filled with ones: a zeroed one may be a single shared page that never leaves the cache. buffer_bytes:
    default 256 MiB, or four times the last cache if that is larger; pass the size of the weights to see what
    a cache that holds them gives. Raises BusyError when something else is being measured, NanokitError when
    memory is short.
    """
    import torch

    size = buffer_bytes or max(256 * 2**20, 4 * _last_cache_bytes())
    free = psutil.virtual_memory().available
    if size > free // 2:
        raise NanokitError(
            "not enough free memory to measure the streaming bandwidth",
            found=f"{free / 2**20:.0f} MiB free",
            needed=f"{2 * size / 2**20:.0f} MiB",
            do="close other programs, or pass a smaller buffer_bytes (caches may then flatter the figure)",
        )
    with measuring("memory bandwidth"), torch.inference_mode():
        buffer = torch.ones(size // 4, dtype=torch.float32, device="cpu")
        readers: tuple[Callable[[], object], ...] = (lambda: torch.dot(buffer, buffer), buffer.sum)
        samples: list[list[float]] = [[], []]
        for turn in range(repeats + 1):
            for reader, speeds in zip(readers, samples, strict=True):
                start = time.perf_counter()
                reader()
                elapsed = time.perf_counter() - start
                if turn > 0:
                    speeds.append(buffer.nbytes / elapsed / 1e9)
        best = max(samples, key=statistics.median)
        return Bandwidth(tuple(best), buffer.nbytes, torch.get_num_threads())


def _last_cache_bytes() -> int:
    """Size of the last-level cache as Linux lists it, 0 where it does not."""
    return max(cache_bytes().values(), default=0)


def cache_bytes() -> dict[int, int]:
    """Sizes of the first core's caches for data by level, as Linux lists them; {} elsewhere."""
    sizes: dict[int, int] = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if (folder / "type").read_text().strip() != "Instruction" and (folder / "size").exists():
            text = (folder / "size").read_text().strip()
            unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
            sizes[int((folder / "level").read_text())] = int(text.rstrip("KM") or 0) * unit
    return sizes
