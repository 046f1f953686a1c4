"""Every case, and everything that is timed, compiled for a GPU that is not here (gpu/ahead.py); nothing runs."""

from collections.abc import Sequence

from nanokit.kernels.gpu import ahead
from nanokit.kernels.gpu.ahead import Report
from nanokit.kernels.gpu.checks import offsets
from nanokit.kernels.gpu.checks.speed import Bench, Timed
from nanokit.kernels.gpu.checks.work import FAULTS, Case, Outcome, fault_of


def compile_all(
    arch: int, cases: Sequence[Case], timed: Sequence[Timed], shifted: bool
) -> tuple[list[Report], list[Outcome]]:
    """One report for each distinct kernel, and an outcome for each case that could not be compiled or launched."""
    faults = []
    with ahead.compiling(arch) as reports:
        for case in cases:
            try:
                case.prepare().launch()
            except FAULTS as error:
                faults.append(Outcome(case.op, f"sm_{arch}: {case.name}", None, None, False, fault_of(error)))
        for task in timed:
            try:
                actions, _ = task.prepare(Bench(None))
                actions[0]()
            except FAULTS as error:
                faults.append(Outcome(task.op, f"sm_{arch}: {task.name}", None, None, False, fault_of(error)))
        if shifted:
            offsets.launch_all()
    return list(reports), faults
