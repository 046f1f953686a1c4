"""Quality against bytes and against speed: two panels of one vertical axis, a point a policy.

Bits per weight and time are different questions (a format may be small and slow), so neither stands for the other; the
divergence is drawn logarithmically, because formats differ by orders of magnitude.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from nanokit.lab.plots.house import GREY, MARKERS, PALETTE, WIDTH, figure, with_remark

if TYPE_CHECKING:
    from nanokit.lab.quality.measure import Measured, QualityResult

GAP = 0.06  # between the panels, of the figure's width
EXACT = 1e-9  # nats; what is drawn for a divergence of nothing, which a logarithm does not have
MARGIN = 0.2  # of the vertical axis, beyond the outermost points, decades
NAME = 0.065  # least distance of two names, of the axis
SIGNS = "●■◆▲✕"  # the house's markers, in their order


def quality_pareto(result: "QualityResult") -> go.Figure:
    """Mean KL (logarithmic, with standard errors) over bits per weight, and over milliseconds per token.

    A line joins the policies that no other one beats in both bits and divergence.
    """
    best = frontier(result)
    fig = figure(
        with_remark(_finding(result, best), [each for each in result.remarks if "worth its bits" not in each]),
        y="mean KL to the reference (nats)",
        height=430,
    )
    low, high = (math.log10(edge) for edge in (min(map(height, result.policies)), max(map(height, result.policies))))
    low, high = low - MARGIN, high + MARGIN
    fig.update_layout(
        width=WIDTH + 120,
        margin_r=180,
        xaxis={"domain": [0, 0.5 - GAP / 2], "title": {"text": "bits per weight, scales included"}},
        xaxis2={"domain": [0.5 + GAP / 2, 1], "title": {"text": "time per token (ms)"}, "anchor": "y"},
        yaxis={"type": "log", "exponentformat": "power", "dtick": 1, "range": [low, high]},
    )
    fig.update_xaxes(rangemode="tozero", selector={"anchor": "y"})
    line = sorted((each.metrics["bits_per_weight"], height(each)) for each in best)
    fig.add_scatter(
        x=[x for x, _ in line], y=[y for _, y in line], mode="lines", line={"color": GREY, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )  # fmt: skip
    places = apart([(math.log10(height(each)) - low) / (high - low) for each in result.policies], NAME)
    for index, (each, place) in enumerate(zip(result.policies, places, strict=True)):
        paint = PALETTE[index % len(PALETTE)]
        for axis, name in (("x", "bits_per_weight"), ("x2", "ms_per_token")):
            _point(fig, each, index, axis, name)
        name = f"<span style='color:{paint}'>{SIGNS[index % len(SIGNS)]}</span> {each.policy}"
        fig.add_annotation(x=1.02, y=place, xref="paper", yref="paper", xanchor="left", text=name)
    return fig


def apart(places: Sequence[float], least: float) -> list[float]:
    """The same places, in the same order from below, moved up until neighbours are `least` apart."""
    moved = [0.0] * len(places)
    below = -math.inf
    for index in sorted(range(len(places)), key=places.__getitem__):
        below = moved[index] = max(places[index], below + least)
    return moved


def frontier(result: "QualityResult") -> list["Measured"]:
    """The policies than which no other one has fewer or equal bits and a smaller divergence."""
    return [
        each
        for each in result.policies
        if not any(
            other.metrics["bits_per_weight"] <= each.metrics["bits_per_weight"]
            and other.metrics["kl_mean"] < each.metrics["kl_mean"]
            for other in result.policies
        )
    ]


def height(each: "Measured") -> float:
    """Where a policy is drawn."""
    return max(each.metrics["kl_mean"], EXACT)


def _finding(result: "QualityResult", best: list["Measured"]) -> str:
    smallest = min(result.policies, key=lambda each: each.metrics["bits_per_weight"])
    closest = min(result.policies, key=lambda each: each.metrics["kl_mean"])
    beaten = len(result.policies) - len(best)
    return (
        f"{smallest.policy}: {smallest.metrics['bits_per_weight']:.2f} bits, KL {smallest.metrics['kl_mean']:.2g}; "
        f"{closest.policy}: {closest.metrics['bits_per_weight']:.2f} bits, KL {closest.metrics['kl_mean']:.2g}<br>"
        f"{beaten} of {len(result.policies)} policies are beaten in both by another one<br>"
        f"against {result.settings['model']}, dequantized"
    )


def _point(fig: go.Figure, each: "Measured", index: int, axis: str, name: str) -> None:
    m, paint = each.metrics, PALETTE[index % len(PALETTE)]
    unit = "bits" if axis == "x" else "ms"
    fig.add_scatter(
        x=[m[name]],
        y=[height(each)],
        xaxis=axis,
        name=each.policy,
        mode="markers",
        cliponaxis=False,
        error_y={"type": "data", "array": [m["kl_mean_se"]], "color": paint, "thickness": 1},
        marker={"color": paint, "symbol": MARKERS[index % len(MARKERS)], "size": 10},
        hovertemplate=f"{each.policy}: %{{x:.2f}} {unit}, KL %{{y:.3g}}<extra></extra>",
    )
