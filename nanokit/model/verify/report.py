"""What was looked at in a file, and what was found: a verdict for each check, and never "ok" for what was not seen."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from nanokit.errors import ModelFileError

Verdict = Literal["ok", "warning", "failed", "not checked"]
NEEDS_SOURCE = "needs --against"
Found = tuple[Verdict, str]  # of a check: its verdict, and what was found


@dataclass(frozen=True)
class Check:
    """part: of the report ("structure", "meaning", "numbers", "behaviour"); name: what was looked at; said: what was
    found, by key or tensor where it failed."""

    part: str
    name: str
    verdict: Verdict
    said: str


@dataclass(frozen=True)
class Report:
    """checks: in the order in which they were made, one for each name. name, against: what the file and its source are
    called (None: no source was at hand)."""

    name: str
    against: str | None
    checks: tuple[Check, ...]

    def of(self, verdict: Verdict) -> list[Check]:
        """The checks with this verdict."""
        return [check for check in self.checks if check.verdict == verdict]

    @property
    def failed(self) -> list[Check]:
        return self.of("failed")

    @property
    def verdict(self) -> str:
        """In a sentence."""
        counts = {name: len(self.of(name)) for name in ("failed", "warning", "not checked")}
        if counts["failed"]:
            return f"failed: {counts['failed']} of {len(self.checks)} checks"
        if not counts["warning"] and not counts["not checked"]:
            return f"ok: all {len(self.checks)} checks passed"
        rest = [f"{counts['not checked']} checks could not be made"] if counts["not checked"] else []
        rest += [f"{counts['warning']} warning{'s' * (counts['warning'] > 1)}"] if counts["warning"] else []
        return f"no fault was found, {', '.join(rest)}"

    def raise_for(self, do: str) -> None:
        """Raise ModelFileError, naming what failed, unless nothing did."""
        if self.failed:
            raise ModelFileError(
                f"{self.name} does not pass its checks",
                found="; ".join(f"{check.name}: {check.said}" for check in self.failed),
                needed="a file that says what its model is",
                do=do,
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "nanokit.model-verify/1",
            "file": self.name,
            "against": self.against,
            "verdict": self.verdict,
            "failed": len(self.failed),
            "checks": [vars(check) for check in self.checks],
        }


_WEIGHT: dict[Verdict, int] = {"not checked": 0, "ok": 1, "warning": 2, "failed": 3}


def merged(checks: Iterable[Check]) -> tuple[Check, ...]:
    """One for each name: the gravest of them, and a check that could be made before one that could not."""
    found: dict[str, Check] = {}
    for check in checks:
        if check.name not in found or _WEIGHT[check.verdict] > _WEIGHT[found[check.name].verdict]:
            found[check.name] = check
    return tuple(found.values())


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first few of many, and how many there are."""
    every = list(names)
    rest = len(every) - most
    return ", ".join(every[:most]) + (f" and {rest} more" if rest > 0 else "")
