"""Verdicts on Q14 to Q16, Q21, T4 and T5, computed from what became of the broken copies.

Each claim says more than one thing, and may be right in its mechanism and wrong in its figures. Where a fault was not
put in, there is no verdict.
"""

from nanokit.lab.experiments.smoke import T4_MS, T5_TOKENS
from nanokit.lab.experiments.trap_detectors import CIRCLE, SLOW, rule, times_ms
from nanokit.lab.experiments.trap_params import FEED_FORWARD_FAULTS, GOOD, HALF_SCALE, PARTS, WRONG_BASE
from nanokit.lab.experiments.trap_result import TrapsResult
from nanokit.model.verify.meaning import ROPE_BASE, ROPE_SCALING
from nanokit.model.verify.report import listed

FINE, RUINED = 1.1, 2.0  # times the good file's perplexity: hardly to be noticed, and useless
CLAIMED_TOKENS = 2000  # after which a text is said to break, Q14


def _missing(result: TrapsResult, *faults: str) -> str:
    """Why there is no verdict, "" where there is one."""
    lacking = [each for each in faults if each not in result.files]
    return f"not measured: {', '.join(lacking)} was not among the faults" if lacking else ""


def verdict_q14(result: TrapsResult) -> str:
    """Of the claim that a wrong base ruins long text and leaves short text alone, and that half a scale gives NaN."""
    if said := _missing(result, WRONG_BASE, HALF_SCALE):
        return said
    early, late = (result.times(WRONG_BASE, part) for part in (0, PARTS - 1))
    half_early, half_late = (result.times(HALF_SCALE, part) for part in (0, PARTS - 1))
    nans = result.metrics[f"not_finite_{HALF_SCALE}"]
    ruins, numbers = early < FINE and late >= RUINED, nans > 0
    verdict = "holds here" if ruins and numbers else "holds here in part" if ruins or numbers else "does not hold here"
    tokens = result.settings["text_tokens"]
    reach = (
        "" if tokens > CLAIMED_TOKENS else f"; {CLAIMED_TOKENS:,} tokens, where it is said to break, were not reached"
    )
    scale = f"{nans:.0f} tokens without a number" if nans else "no NaN"
    return (
        f"{verdict}: base 10,000 in place of {result.settings['rope_base']:,.0f} makes perplexity {early:.2f} times "
        f"the good file's over the first quarter of {tokens:,} tokens and {late:.2f} over the last; "
        f"half the scale gives {scale}, and {half_early:.2f} to {half_late:.2f} times the perplexity{reach}"
    )


def verdict_q15(result: TrapsResult) -> str:
    """Of the claim that gate and up, merged or swapped, are 37 % of faults: what can be measured of it."""
    if said := _missing(result, *FEED_FORWARD_FAULTS):
        return said
    parts, missed = [], 0
    for name in FEED_FORWARD_FAULTS:
        file = result.files[name]
        cost = "refused" if file.losses is None else f"{result.times(name):.3g} times the perplexity"
        failed = file.failed() or file.failed(beside=True)
        missed += not failed
        how = " (beside the good file)" if failed and not file.failed() else ""
        parts.append(f"{name}: {cost}, caught by {listed(each.name for each in failed) or 'nothing'}{how}")
    caught = f"{len(parts) - missed} of {len(parts)} are caught"
    return f"how often it happens cannot be measured here; {caught}. {'; '.join(parts)}"


def verdict_q16(result: TrapsResult) -> str:
    """Of the claim that wrong rope parameters can be detected, and have to be refused."""
    if said := _missing(result, WRONG_BASE, HALF_SCALE):
        return said
    named = [
        name
        for name, check in ((WRONG_BASE, ROPE_BASE), (HALF_SCALE, ROPE_SCALING))
        if any(each.name == check and ".rope." in each.said for each in result.files[name].failed(beside=True))
    ]
    alone = [name for name in (WRONG_BASE, HALF_SCALE) if result.files[name].failed()]
    refuses = f"convert refuses ({result.override})" if result.override else "convert takes another base in silence"
    verdict = "holds" if result.override and len(named) == 2 else "does not hold"
    rest = f"from the file alone {', '.join(alone) or 'neither'} can be told by what its keys say"
    keys = f"verify names the key of {' and '.join(named) or 'neither'}"
    return f"{verdict}, with the source at hand: {refuses}; {keys}; {rest}"


def verdict_q21(result: TrapsResult) -> str:
    """Of the remedy that writes the head count as 32 and the rope base as a string."""
    remedy = ("head-count-32", "rope-base-text")
    if said := _missing(result, *remedy):
        return said
    opening = [name for name in remedy if not result.files[name].refused]
    said = "; ".join(f"{name}: {result.files[name].refused}" for name in remedy if name not in opening)
    return f"does not hold: {said}" if not opening else f"may hold: {', '.join(opening)} loads"


def verdict_t4(result: TrapsResult) -> str:
    """Of the rule that a late first token means wrong rope parameters."""
    found = rule(result, SLOW)
    asked = len(found.hits) + len(found.misses)
    if not asked:
        return "not measured: no file with a wrong rope runs"
    soonest, latest = times_ms(result)
    verdict = "holds here" if not found.misses and not found.false_alarms else "does not hold here"
    return (
        f"{verdict}: {len(found.hits)} of {asked} files with a wrong rope that run are later than {T4_MS:.0f} ms, "
        f"{len(found.false_alarms)} of the others; all first tokens come after {soonest:.0f} to {latest:.0f} ms"
    )


def verdict_t5(result: TrapsResult) -> str:
    """Of the rule that early repetition means wrongly split feed-forward weights."""
    found = rule(result, CIRCLE)
    asked = len(found.hits) + len(found.misses)
    if not asked:
        return "not measured: no file with wrongly split feed-forward weights runs"
    others = len(found.false_alarms) + len(found.silent)
    good = ", the good file among them" if GOOD in found.false_alarms else ""
    right = not found.misses and not found.false_alarms
    verdict = "holds here" if right else "does not hold here"
    return (
        f"{verdict}: {len(found.hits)} of {asked} files with wrongly split weights that run go in circles within "
        f"{T5_TOKENS} tokens, and {len(found.false_alarms)} of {others} others{good}"
    )
