"""Verdicts on the claims about ranges, computed from what was measured: one function a claim.

Two settings differ where their KL, taken token by token on the same text, differs by more than two standard errors.
"Accuracy" of the account, which names no task, is taken as the share of tokens at which the rounded model's best token
is the reference's. A verdict says where a setting that it needs was not asked for.
"""

from nanokit.lab.experiments.damage import DamageResult
from nanokit.lab.experiments.scale_cost import CostResult
from nanokit.lab.table import Table

CLAIMED = {"Q3": 1.8, "Q4": 0.7}  # points
CLAIMED_RESHAPE_MS = 1.2
BROKEN = 0.1  # of best tokens kept: a text is garbled
FAILING = 0.5  # on arithmetic


def range_verdicts(done: DamageResult, cost: CostResult) -> Table:
    """All of them but those that look at weights alone (Q2, Q20)."""
    found = {"Q1": q1(done), "Q3": q3(done), "Q4": q4(done, cost), "Q5": q5(done, cost), "Q22": q22(done)}
    return Table(("claim", "verdict"), list(found.items()))


def q1(done: DamageResult) -> str:
    """One scale for the model breaks it at four bits; a captured range does not."""
    if not done.has("global", "g64"):
        return _untested("global", "g64")
    m = done.metrics
    verdict = "holds" if m["top1_global"] < BROKEN < m["top1_g64"] else "does not hold"
    return (
        f"{verdict}: one scale for all INT4 weights keeps {m['top1_global']:.1%} of the best tokens (perplexity "
        f"{m['ppl_factor_global']:.2g} times); a scale for 64 weights keeps {m['top1_g64']:.1%} "
        f"({m['ppl_factor_g64']:.2f} times)"
    )


def q3(done: DamageResult) -> str:
    """Group-wise scales are more accurate than one a matrix, +1.8 %."""
    pairs = [pair for pair in (("g64", "tensor"), ("int8-g64", "int8-tensor")) if done.has(*pair)]
    if not pairs:
        return _untested("g64", "tensor")
    sure = [done.surely(worse, better) for better, worse in pairs]
    said = ", ".join(f"{done.points(*pair):+.1f} points ({pair[0]} over {pair[1]})" for pair in pairs)
    return f"{_verdict(sure)}: {said}; claimed {CLAIMED['Q3']:+.1f} %"


def q4(done: DamageResult, cost: CostResult) -> str:
    """Per-channel scales in attention are more accurate than one a matrix, +.7 %, for 1.2 ms."""
    if not done.has("attn-channel", "attn-tensor"):
        return _untested("attn-channel", "attn-tensor")
    points, sure = done.points("attn-channel", "attn-tensor"), done.surely("attn-tensor", "attn-channel")
    added = cost.added_ms("int4-sym-channel", "int4-sym-tensor", "attn")
    cheap = "" if added > CLAIMED_RESHAPE_MS / 2 else ", and costs less"
    return (
        f"{_verdict([sure])}{cheap}: {points:+.1f} points at INT4 (claimed {CLAIMED['Q4']:+.1f} %), {added:+.3f} ms a "
        f"token of attention's products in C (claimed {CLAIMED_RESHAPE_MS:+.1f} ms, for a reshape that is not needed)"
    )


def q5(done: DamageResult, cost: CostResult) -> str:
    """Attention per channel and feed-forward by groups is the best default."""
    if not done.has("account", "g64"):
        return _untested("account", "g64")
    mean, error = done.more("account", "g64")
    saved = done.metrics["bits_g64"] - done.metrics["bits_account"]
    added = cost.added_ms("int4-sym-g64", "int4-sym-channel", "attn")
    verdict = "does not hold" if mean > 2 * error else "holds" if mean < -2 * error else "not decided here"
    return (
        f"{verdict}: it has {mean:+.3f} ± {error:.3f} nats more KL than groups of 64 everywhere, for {saved:.3f} bits "
        f"a weight; groups in attention take {added:+.3f} ms a token more in C"
    )


def q22(done: DamageResult) -> str:
    """NF4 applied in one go breaks mathematics; of the text, not of a task."""
    if not done.has("nf4"):
        return _untested("nf4")
    m = done.metrics
    prose, arithmetic = m["kl_nf4"], m["arithmetic_kl_nf4"]
    verdict = "holds" if m["arithmetic_top1_nf4"] < FAILING else "does not hold for this text"
    return (
        f"{verdict}: on arithmetic {m['arithmetic_top1_nf4']:.1%} of the best tokens stay (KL {arithmetic:.3f}), on "
        f"prose {m['top1_nf4']:.1%} (KL {prose:.3f}); points of tasks are `nanokit quality`'s to count"
    )


def _verdict(sure: list[bool]) -> str:
    return "holds" if all(sure) else "holds in part" if any(sure) else "does not hold"


def _untested(*settings: str) -> str:
    return f"not tested: needs the settings {' and '.join(settings)}"
