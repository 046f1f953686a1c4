"""A case of the check: what is launched, and how far its result may lie from the reference.

Launching and judging are two functions, because a process that only compiles (ahead.py) launches the same cases, and
there results are whatever lay in memory. A case is prepared when its turn comes: large inputs do not lie side by side.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.errors import TritonError

from nanokit.errors import NanokitError

# What a kernel or its host code can raise on a GPU that nobody has tried: reported for the case, and the check goes on.
FAULTS = (
    NanokitError, TritonError, RuntimeError, ValueError, TypeError, LookupError, AssertionError, ArithmeticError,
    NotImplementedError, OSError,
)  # fmt: skip


class Judgement(NamedTuple):
    """How far off a result is, and how far it may be; not a number is never right."""

    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Work:
    """A prepared case. launch: runs kernels, returns what they made. judge: of that."""

    launch: Callable[[], Any]
    judge: Callable[[Any], Judgement]


@dataclass(frozen=True)
class Case:
    """op: the operation, as --only names it. name: what is special about this case."""

    op: str
    name: str
    prepare: Callable[[], Work]


@dataclass(frozen=True)
class Outcome:
    """What became of a case. error, bound: None where it did not get that far; fault: why not, one line."""

    op: str
    case: str
    error: float | None
    bound: float | None
    ok: bool
    fault: str = ""


class Budget:
    """A number of seconds that began with the process' work."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._started = seconds, time.monotonic()

    def spent(self, share: float = 1.0) -> bool:
        """Whether so much of it is over."""
        return time.monotonic() - self._started > share * self._seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started


def outcome_of(case: Case) -> Outcome:
    """Prepare, launch and judge."""
    try:
        work = case.prepare()
        judged = work.judge(work.launch())
    except FAULTS as error:
        return Outcome(case.op, case.name, None, None, False, fault_of(error))
    return Outcome(case.op, case.name, judged.error, judged.bound, judged.ok)


def fault_of(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, NanokitError):
        return error.what if error.found is None else f"{error.what}: {error.found}"
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def equal(*pairs: tuple[Tensor | np.ndarray, Tensor | np.ndarray]) -> Judgement:
    """Bit for bit, NaN being NaN; the error is the number of elements that differ, everything where shapes do."""
    differing = 0
    for got, wanted in pairs:
        ours, theirs = (x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x) for x in (got, wanted))
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return Judgement(float("inf"), 0.0)
        same = ours == theirs
        if ours.dtype.kind == "f":
            same |= np.isnan(ours) & np.isnan(theirs)
        differing += int(np.count_nonzero(~same))
    return Judgement(float(differing), 0.0)


def within(got: Tensor, wanted: Tensor, size: Tensor, bound: float) -> Judgement:
    """Largest |got - wanted| / size, in fp64. A size of zero allows no error at all."""
    if got.shape != wanted.shape or got.numel() == 0:
        return Judgement(float("inf"), bound)
    difference = (got.detach().cpu().double() - wanted.double()).abs()
    parts = torch.where(difference == 0, 0.0, difference / size.double())
    return Judgement(float("nan") if bool(parts.isnan().any()) else float(parts.max()), bound)


def worst(*judgements: Judgement) -> Judgement:
    """The first that is wrong, else the one nearest to its bound."""
    for judged in judgements:
        if not judged.ok:
            return judged
    return max(judgements, key=lambda judged: judged.error / judged.bound if judged.bound else 0.0)
