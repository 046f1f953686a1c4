"""Compile-only mode: the Triton kernels made for a named GPU on a machine that has none.

    TRITON_INTERPRET=0 python …

    with ahead.compiling(90) as reports:               # sm_90
        rows.rms_norm(hidden, weight, 1e-5, "a8g32")   # host code as ever, on CPU tensors of the real shapes
    for report in reports:
        print(report)

Inside the block `runtime.launch` compiles in place of running, down to machine code, with exactly the specialization
that the arguments at hand give: alignment of pointers, divisibility by 16, constants, warps, stages. This finds what
the interpreter cannot: types that do not fit, shapes that a dot does not take, shared memory or a grid beyond what the
GPU allows, spilled registers, loads that did not become wide. One report for each distinct kernel, in order of first
launch.

Nothing runs: whatever a kernel was to write is as the host allocated it. Host code that looks at values on the way
sees garbage; give it shapes and inputs with which it does not matter. A process compiles for one architecture at a
time: Triton's current target is the process's.

Rejected: a list of signatures for triton.compile. It repeats by hand what a launch knows, and soon another thing.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from nanokit.errors import NanokitError, ParameterError
from nanokit.kernels.gpu import runtime

# Compute capability, and KiB of shared memory that one program may ask for (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability").
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
GRID_LIMITS = (2**31 - 1, 65535, 65535)


class CannotRunError(NanokitError):
    """A kernel that compiles, and that the GPU would refuse to launch."""


@dataclass(frozen=True)
class Report:
    """A compiled kernel. registers and stack (bytes; spilled registers lie there): of a thread; shared: bytes of a
    program; ptx: characters; loads: bytes that one load of one thread takes from global memory, and in how many places
    of the code; mma: the tensor core instruction used, or none."""

    kernel: str
    arch: int
    constants: dict[str, Any]
    warps: int
    registers: int
    stack: int
    shared: int
    ptx: int
    loads: dict[int, int]
    mma: str | None

    @property
    def widest_load(self) -> int:
        """Bytes; 16 is what one thread can load at once. 0: the kernel loads nothing."""
        return max(self.loads, default=0)


class _Target:
    """What Triton asks of a driver before it compiles. The device is named as its architecture, so that kernels for
    one are not taken for another's."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def compiling(arch: int) -> Iterator[list[Report]]:
    """Compile for an architecture, 80 for sm_80, what is launched inside the block; yields the reports, which grow as
    it goes. Raises ParameterError for an architecture unknown here and in a process that interprets, from the launch
    CannotRunError, and whatever Triton raises for a kernel that does not compile."""
    if arch not in SHARED_KIB:
        raise ParameterError(
            "unknown GPU architecture", found=arch, needed=f"one of {', '.join(map(str, SHARED_KIB))}", do="90: sm_90"
        )
    if runtime.INTERPRETED:
        raise ParameterError(
            "this process interprets Triton's kernels and cannot compile them",
            do="set TRITON_INTERPRET=0 before Python starts",
        )
    if runtime.instead_of_running is not None:
        raise ParameterError("this process is compiling for an architecture already", found=arch)
    reports: dict[str, Report] = {}
    listed: list[Report] = []

    def instead(kernel: Any, grid: Sequence[int], args: Sequence[Any], options: dict[str, Any]) -> None:
        _check_grid(kernel.__name__, grid)
        compiled = kernel.warmup(*args, grid=tuple(grid), **options)
        if compiled.hash not in reports:
            reports[compiled.hash] = _report(compiled, kernel, args, arch)
            listed.append(reports[compiled.hash])

    before = driver._active  # `active` would look for a GPU
    runtime.instead_of_running = instead
    driver.set_active(_Target(arch))
    try:
        yield listed
    finally:
        runtime.instead_of_running = None
        driver.set_active(before)


def _check_grid(name: str, grid: Sequence[int]) -> None:
    if not all(1 <= programs <= limit for programs, limit in zip(grid, GRID_LIMITS, strict=False)) or len(grid) > 3:
        raise CannotRunError(
            f"{name} is launched with a grid that no GPU takes", found=grid, needed=f"1 … {GRID_LIMITS}"
        )


def _report(compiled: Any, kernel: Any, args: Sequence[Any], arch: int) -> Report:
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    limit = SHARED_KIB[arch] * 1024
    if metadata.shared > limit:
        raise CannotRunError(
            f"{kernel.__name__} needs more shared memory than sm_{arch} has",
            found=f"{metadata.shared} bytes",
            needed=f"at most {limit}",
            do="take smaller blocks or fewer stages",
        )
    registers, stack = _resources(compiled.asm["cubin"])
    mma = re.search(r"\b(wgmma|tcgen05\.mma|mma\.sync)\b", ptx)
    return Report(
        kernel=kernel.__name__,
        arch=arch,
        constants={p.name: arg for p, arg in zip(kernel.params, args, strict=False) if p.is_constexpr},
        warps=metadata.num_warps,
        registers=registers,
        stack=stack,
        shared=metadata.shared,
        ptx=len(ptx),
        loads=_loads(ptx),
        mma=mma[1] if mma else None,
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack that a thread takes, as the tool that comes with Triton reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"\bREG:(\d+) STACK:(\d+)", said.stdout)
    if found is None:
        raise NanokitError("cuobjdump says nothing about registers", found=said.stdout)
    return int(found[1]), int(found[2])


def _loads(ptx: str) -> dict[int, int]:
    """Bytes a load, and how many instructions load so many: ld.global, and cp.async into shared memory."""
    loads = Counter[int]()
    for vector, bits in re.findall(r"\bld\.global\b[\w.:]*?(?:\.v(\d))?\.[bsuf](\d+)\b", ptx):
        loads[int(vector or 1) * int(bits) // 8] += 1
    for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global\b[^,]*,[^,]*, (\w+)", ptx):
        loads[int(size, 0)] += 1
    return dict(sorted(loads.items()))
