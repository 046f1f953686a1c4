"""Ways of telling that a file is wrong, each put to every broken copy and to the good file.

Two rules of thumb (a slow first token, an answer that goes in circles), a bound on perplexity for which the good file
has to be at hand, other ropes tried on the file itself, and verify without and with the good file. An alarm on the good
file is a false one. Silence is told apart: verify says of what a file cannot tell that it was not checked, the others
say nothing.
"""

import math
from dataclasses import dataclass

from nanokit.lab.experiments.smoke import T4_MS, T5_TOKENS
from nanokit.lab.experiments.trap_params import FEED_FORWARD_FAULTS, GOOD, ROPE_FAULTS, TrapFile
from nanokit.lab.experiments.trap_result import TrapsResult
from nanokit.lab.table import Table

LOADS, SLOW, CIRCLE, BOUND = "does it load", "slow first token (T4)", "circles (T5)", "perplexity bound"
ALONE, ROPES, BESIDE = "verify", "other ropes (smoke)", "verify --against"
DETECTORS = (LOADS, SLOW, CIRCLE, BOUND, ALONE, ROPES, BESIDE)
CAUGHT, MISSED, UNSURE, FALSE, QUIET, NOT_RUN = (
    "caught", "missed", "says that it cannot tell", "false alarm", "rightly silent", "not run",
)  # fmt: skip
RULES = {SLOW: ROPE_FAULTS, CIRCLE: FEED_FORWARD_FAULTS}  # -> the faults that a rule of thumb is said to mean


def alarm(result: TrapsResult, detector: str, file: TrapFile) -> bool | None:
    """Whether a detector speaks up; None where it cannot be asked: nothing runs, or (ROPES) the weights have failed
    already."""
    if detector == LOADS:
        return bool(file.refused)
    if detector == ALONE:
        return bool(file.failed())
    if detector == BESIDE:
        return bool(file.failed(beside=True))
    if file.refused or file.losses is None:
        return None
    if detector == SLOW:
        return file.first_token_ms > T4_MS
    if detector == CIRCLE:
        return file.circle_from <= T5_TOKENS
    if detector == BOUND:
        return not result.times(file.name) <= result.asked.bound  # no number is an alarm
    rope = result.rope_of.get(file.name)
    return None if rope is None else any(each.certain for each in result.gains(rope).values())


def outcome(result: TrapsResult, detector: str, file: TrapFile) -> str:
    """CAUGHT, MISSED, UNSURE, FALSE, QUIET or NOT_RUN."""
    found = alarm(result, detector, file)
    if found is None:
        return NOT_RUN
    if file.name == GOOD:
        return FALSE if found else QUIET
    if found:
        return CAUGHT
    wanted = {each.name for each in file.failed(beside=True)}
    unsure = any(each.name in wanted and each.verdict == "not checked" for each in file.alone)
    return UNSURE if detector == ALONE and unsure else MISSED


def outcomes(result: TrapsResult) -> dict[str, dict[str, str]]:
    """By detector, then by file."""
    return {each: {name: outcome(result, each, file) for name, file in result.files.items()} for each in DETECTORS}


def count(result: TrapsResult, detector: str, what: str) -> int:
    """How many files a detector had this outcome with."""
    return sum(outcome(result, detector, file) == what for file in result.files.values())


def detector_table(result: TrapsResult) -> Table:
    """A detector a row."""
    whats = (CAUGHT, MISSED, UNSURE, NOT_RUN)
    rows = []
    for each in DETECTORS:
        good = outcome(result, each, result.files[GOOD])
        rows.append((each, *(str(count(result, each, what)) for what in whats), good))
    return Table(("detector", *whats, "on the good file"), rows, right=whats)


@dataclass(frozen=True)
class Rule:
    """How a rule of thumb did, by file. hits, misses: among the faults that it is said to mean; false_alarms, silent:
    among all others, the good file included; not_run: what it is said to mean and is refused."""

    hits: list[str]
    misses: list[str]
    false_alarms: list[str]
    silent: list[str]
    not_run: list[str]


def rule(result: TrapsResult, detector: str) -> Rule:
    """Of SLOW or CIRCLE."""
    parts: dict[tuple[bool, bool | None], list[str]] = {}
    for name, file in result.files.items():
        meant = name in RULES[detector]
        parts.setdefault((meant, alarm(result, detector, file)), []).append(name)
    keys = ((True, True), (True, False), (False, True), (False, False), (True, None))
    return Rule(*(parts.get(key, []) for key in keys))


def rule_table(result: TrapsResult) -> Table:
    """A rule of thumb a row."""
    rows = []
    for detector in RULES:
        found = rule(result, detector)
        cells = (found.hits, found.misses, found.false_alarms, found.silent, found.not_run)
        rows.append((detector, *(f"{len(each)}: {', '.join(each)}" if each else "0" for each in cells)))
    return Table(("rule", "hits", "misses", "false alarms", "rightly silent", "meant, but refused"), rows)


def times_ms(result: TrapsResult) -> tuple[float, float]:
    """The soonest and the latest first token of all files that run."""
    found = [file.first_token_ms for file in result.files.values() if math.isfinite(file.first_token_ms)]
    return min(found), max(found)
