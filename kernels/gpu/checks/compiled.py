"""Every case, and everything that is timed, compiled for a GPU that is not here (gpu/ahead.py); nothing runs."""

from collections.abc import Callable, Sequence
from functools import partial

from nanokit.kernels.gpu import ahead
from nanokit.kernels.gpu.ahead import Report
from nanokit.kernels.gpu.checks import offsets
from nanokit.kernels.gpu.checks.speed import Bench, Timed
from nanokit.kernels.gpu.checks.work import FAULTS, Case, Outcome, fault_of


def compile_all(
    arch: int, cases: Sequence[Case], timed: Sequence[Timed], shifted: bool
) -> tuple[list[Report], list[Outcome]]:
    """One report for each distinct kernel, and an outcome for each case that could not be compiled or launched."""
    works: list[tuple[str, str, Callable[[], object]]] = []
    works += [(case.op, case.name, partial(_launch, case)) for case in cases]
    works += [(task.op, task.name, partial(_time, task)) for task in timed]
    if shifted:
        works.append(("offsets", "an aligned and a shifted product", offsets.launch_all))
    faults = []
    with ahead.compiling(arch) as reports:
        for op, name, work in works:
            try:
                work()
            except FAULTS as error:
                faults.append(Outcome(op, f"sm_{arch}: {name}", None, None, False, fault_of(error)))
    return list(reports), faults


def _launch(case: Case) -> None:
    case.prepare().launch()


def _time(task: Timed) -> None:
    actions, _ = task.prepare(Bench(None))
    actions[0]()
