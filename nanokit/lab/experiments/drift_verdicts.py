"""Verdicts on Q12 and Q13, computed from the three experiments on activation drift.

Q12 says three things: that fixed scales take mathematics away and leave chat alone (a symptom), that the cause is drift
away from the calibration text (a cause), and that a std of .6 to 1.0 is normal and 1.5 an alarm (a rule). Each is put
to the test by itself, for the first can be true with the others wrong.
"""

from dataclasses import dataclass

from nanokit.lab.experiments.drift_damage import DamageResult
from nanokit.lab.experiments.drift_points import EXACT, FIXED, PointsResult
from nanokit.lab.experiments.drift_profile import ProfileResult
from nanokit.lab.table import Table

MATHS, CHAT = "arithmetic", "chat"
DRIFT_PART = 0.5  # of static's KL on another text that must be gone with its own calibration, to call the cause drift
SLOWER = 1.15  # times the time a token: twice the claimed 7 % is no small price


@dataclass(frozen=True)
class Statement:
    """A part of a claim: whether it was found, and in which figures."""

    name: str
    found: bool
    why: str


def statements_q12(seen: ProfileResult, damage: DamageResult, points: PointsResult) -> list[Statement]:
    """Symptom, cause and rule. Mathematics falls by more than chat when the intervals of the two falls are apart."""
    m, p = points.metrics, points.asked
    parts, fell = [], False
    for task in p.tasks:
        low, high = (round(value) for value in points.pair(FIXED, EXACT, task)[1:])
        parts.append(
            f"{task} {m[f'points_{EXACT}_{task}']:.0f} to {m[f'points_{FIXED}_{task}']:.0f} ({low:+d} to {high:+d})"
        )
    if {MATHS, CHAT} <= set(p.tasks):
        fell = points.pair(FIXED, EXACT, MATHS)[2] < min(0.0, points.pair(FIXED, EXACT, CHAT)[1])
    others = p.texts[1:] or p.texts
    fixed, own = ([damage.metrics[f"kl_mean_{name}_{text}"] for text in others] for name in ("static", "static_own"))
    part = 1 - sum(own) / sum(fixed)
    healthy = p.texts[0]
    ill, places = seen.metrics[f"absolute_alarms_{healthy}"], seen.metrics["places"]
    return [
        Statement(
            "symptom: mathematics falls, chat not, or by less", fell, "points of a16 to static: " + ", ".join(parts)
        ),
        Statement(
            "cause: drift away from the calibration text",
            part >= DRIFT_PART,
            f"with scales of the very window, {max(0.0, part):.0%} of static's KL is gone on {', '.join(others)}",
        ),
        Statement(
            "rule: std .6 to 1.0 is normal",
            ill < places / 10,
            f"{ill:.0f} of {places:.0f} places of the healthy model ({healthy}) lie outside; "
            f"{seen.metrics['profile_places_abnormal']:.0f} lie above 1.5",
        ),
    ]


def table_q12(statements: list[Statement]) -> Table:
    """A statement a row."""
    rows = [(each.name, "found" if each.found else "not found", each.why) for each in statements]
    return Table(("statement of Q12", "here", "measured"), rows)


def verdict_q12(statements: list[Statement]) -> str:
    """Of the claim that drift of activations makes mathematics fail while chat looks fine."""
    found = [each.name.partition(":")[0] for each in statements if each.found]
    lacking = [each.name.partition(":")[0] for each in statements if not each.found]
    if not lacking:
        return "holds here"
    if not found:
        return "does not hold here"
    return f"holds here in part: the {' and the '.join(found)}, not the {' or the '.join(lacking)}"


def verdict_q13(points: PointsResult) -> str:
    """Of the claim that a scale for each token repairs it at a small price in speed."""
    m = points.metrics
    low, price = points.pair("token", FIXED, MATHS)[1], points.slowdown
    speed = f"a token takes {price:.2f} times the time"
    said = f"{m[f'points_{FIXED}_{MATHS}']:.1f} to {m[f'points_token_{MATHS}']:.1f} points of arithmetic, {speed}"
    if low <= 0:
        return f"does not hold here: {said}"
    return f"holds here: {said}" if price < SLOWER else f"holds here in part, at another price: {said}"
