"""The check from its first case to its document: what is run in which mode, and for how long.

Time is shared out beforehand: cases may take until `CASES` of it is over, offsets until `OFFSETS`, and speeds the rest.
Whatever does not get its turn is listed. On a GPU most of a minute would go into compiling one kernel after the other;
so all cores do that first, each in a process of its own that never touches the GPU, into Triton's cache on the disk.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from nanokit.kernels.gpu import ahead, runtime
from nanokit.kernels.gpu.ahead import Report
from nanokit.kernels.gpu.checks import attention_cases, model_cases, offsets, product_cases, rows_cases, speed
from nanokit.kernels.gpu.checks.compiled import compile_all
from nanokit.kernels.gpu.checks.speed import Bench, Timed
from nanokit.kernels.gpu.checks.timer import timer
from nanokit.kernels.gpu.checks.tune import tune
from nanokit.kernels.gpu.checks.work import FAULTS, Budget, Case, Outcome, fault_of, outcome_of

CASES, OFFSETS, COMPILING = 0.6, 0.7, 0.4  # shares of the time
MOST_WORKERS = 8
STACK = 64  # bytes of a thread: below it is what calls keep there, above are spilled registers
OPS = (
    "product", "unpack", "quantize", "rms_norm", "silu_gate", "rope", "attention", "select", "screen", "fake_quant",
    "model", "offsets",
)  # fmt: skip

Some = TypeVar("Some", Case, Timed)


@dataclass
class Findings:
    """What comes out, as far as it has."""

    correctness: list[Outcome] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    offsets: list[dict[str, Any]] = field(default_factory=list)
    tuned: list[dict[str, Any]] = field(default_factory=list)
    compiled: list[Report] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def faults(self) -> list[str]:
        """Everything that is wrong, a line each."""
        found = []
        if self.skipped and not (self.correctness or self.offsets or self.speed):
            found.append("nothing was checked: the time was over before the first case")
        for each in self.correctness:
            if not each.ok:
                why = each.fault or f"error {each.error:.3g}, bound {each.bound:.3g}"
                found.append(f"{each.op}: {each.case}: {why}")
        found += [f"offsets: other bits at {each['offset']} bytes" for each in self.offsets if not each["equal"]]
        found += [
            f"tune: {each['format']}, {each['rows']} rows: bits depend on the configuration, or none runs"
            for each in self.tuned
            if not each["equal"]
        ]
        return found + [
            f"compiled: sm_{each.arch} {each.kernel} spills registers: {each.stack} bytes a thread, {each.constants}"
            for each in self.compiled
            if each.stack >= STACK
        ]

    def to_record(self) -> dict[str, Any]:
        """As JSON values."""
        names = ("speed", "offsets", "tuned", "skipped", "remarks", "interrupted")
        record = {name: getattr(self, name) for name in names}
        outcomes, reports = [asdict(each) for each in self.correctness], [asdict(each) for each in self.compiled]
        return {"correctness": outcomes, "compiled": reports, **record, "faults": self.faults}


def all_cases(tiny: bool) -> list[Case]:
    """Of all operations."""
    return [case for part in (product_cases, rows_cases, attention_cases, model_cases) for case in part.cases(tiny)]


def chosen(everything: Sequence[Some], only: Sequence[str], first: int | None) -> list[Some]:
    """Those of the operations in `only`, all if it is empty; of each operation the first few."""
    taken: dict[str, int] = {}
    found = []
    for each in everything:
        taken[each.op] = taken.get(each.op, 0) + 1
        if (not only or each.op in only) and (first is None or taken[each.op] <= first):
            found.append(each)
    return found


def check(budget: Budget, only: Sequence[str], first: int | None, say: Callable[[str], None]) -> Findings:
    """Cases, offsets and speeds, on the device or in the interpreter."""
    found = Findings()
    try:
        _check(budget, only, first, say, found)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _check(budget: Budget, only: Sequence[str], first: int | None, say: Callable[[str], None], found: Findings) -> None:
    tiny = runtime.INTERPRETED
    cases, tasks = chosen(all_cases(tiny), only, first), chosen(speed.tasks(tiny), only, first)
    if not tiny:
        say("compiling")
        found.remarks += _compile_ahead(budget, only, first)
    say(f"{len(cases)} cases")
    for case in cases:
        if budget.spent(CASES):
            found.skipped.append(f"{case.op}: {case.name}")
        else:
            found.correctness.append(outcome_of(case))
    bench = Bench(timer(), tiny)
    if budget.spent():
        found.skipped += ["copy", *(f"offset {n}" for n in offsets.OFFSETS if not only or "offsets" in only)]
        found.skipped += [f"speed of {task.op}: {task.name}" for task in tasks]
        return
    try:  # a GPU that a case has left in an error refuses everything from then on
        found.speed.append(bench.measure_copy())
    except FAULTS as error:
        found.correctness.append(Outcome("copy", "timing torch's copy", None, None, False, fault_of(error)))
    if not only or "offsets" in only:
        say("offsets")
        _sweep(bench, budget, found)
    say(f"{len(tasks)} speeds")
    for task in tasks:
        if budget.spent():
            found.skipped.append(f"speed of {task.op}: {task.name}")
            continue
        try:
            found.speed.append(task.measure(bench))
        except FAULTS as error:
            found.correctness.append(Outcome(task.op, f"timing {task.name}", None, None, False, fault_of(error)))
    found.speed += bench.bf16_records()
    if any(each.get("gaps") for each in found.speed):
        found.remarks.append("where gaps are noted, the GPU waited for the host: ms say more about the latter")


def _sweep(bench: Bench, budget: Budget, found: Findings) -> None:
    try:
        for record in offsets.sweep(bench):
            found.offsets.append(record)
            if budget.spent(OFFSETS):
                break
    except FAULTS as error:
        found.correctness.append(Outcome("offsets", "sweep", None, None, False, fault_of(error)))
        return
    found.skipped += [f"offset {n}" for n in offsets.OFFSETS[len(found.offsets) :]]


def compiled(archs: Sequence[int], only: Sequence[str], first: int | None, part: tuple[int, int] = (0, 1)) -> Findings:
    """Everything that a GPU would run, compiled for these architectures. part: index and number of equal shares."""
    found, (index, parts) = Findings(), part
    cases = chosen(all_cases(False), only, first)[index::parts]
    tasks = chosen(speed.tasks(False), only, first)[index::parts]
    for arch in archs:
        reports, faults = compile_all(arch, cases, tasks, shifted=index == 0 and (not only or "offsets" in only))
        found.compiled += reports
        found.correctness += faults
    return found


def tuned(say: Callable[[str], None]) -> Findings:
    """The best configurations of the device; the file that keeps them is the caller's affair."""
    found = Findings()
    for record in tune(Bench(timer(), runtime.INTERPRETED)):
        found.tuned.append(record)
        say(f"{record['format']}, up to {record['rows']} rows: {record['config']}")
    return found


def architecture() -> int:
    """That of the device: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(runtime.device())
    return 10 * major + minor


def _compile_ahead(budget: Budget, only: Sequence[str], first: int | None) -> list[str]:
    """Fill Triton's cache; remarks where that did not work out, for then kernels are compiled as they come."""
    arch = architecture()
    if arch not in ahead.SHARED_KIB:
        return [f"sm_{arch} is not known to ahead.py: kernels were compiled one after the other"]
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    command = [sys.executable, "-m", "nanokit.kernels.gpu.check", "--arch", str(arch)]
    command += ["--only", *only] if only else []
    command += ["--first", str(first)] if first is not None else []
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*command, "--part", f"{i}/{workers}"], env=environment, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL)
        for i in range(workers)
    ]  # fmt: skip
    while any(each.poll() is None for each in running) and not budget.spent(COMPILING):
        time.sleep(0.1)
    late = [each for each in running if each.poll() is None]
    for each in late:
        each.terminate()
    for each in running:
        each.wait()
    broken = [each.returncode for each in running if each not in late and each.returncode not in (0, 1)]
    remarks = [f"{len(late)} of {workers} processes that compile took too long"] if late else []
    return remarks + ([f"processes that compile ended with {broken}"] if broken else [])
