"""The noise's figures: the times of one and the same step, and how far comparisons of it with itself are from 1."""

import plotly.graph_objects as go

from nanokit.lab.plots.house import BLUE, GREY, MARKERS, ORANGE, PALETTE, figure
from nanokit.lab.result import Result

SHOWN = 120  # steps of the long series that are drawn; more would be a band
WAYS = {
    "ratio_means_in_sequence": "means, A then B",
    "ratio_medians_in_sequence": "medians, A then B",
    "ratio_medians_in_turns": "medians, in turns",
}


def warmup(result: Result) -> go.Figure:
    """Milliseconds of each step in the order of time: the first of a fresh engine, after pauses, at once."""
    m, s = result.metrics, result.samples
    fig = figure(
        f"The first step took {m['first_step_vs_usual']:.1f} times the usual one,<br>"
        f"a step after a pause {m['rested_step_vs_usual']:.1f} times",
        x=f"step, in the order of time (dashed: the median at once, {m['same_step_ms']:.2f} ms)",
        y="time of the same step (ms)",
    )
    at = 0
    series = {"first": s["first_ms"], "after pauses": s["rested_ms"], "at once": s["same_ms"][:SHOWN]}
    for (label, values), paint, symbol in zip(series.items(), (ORANGE, PALETTE[2], BLUE), MARKERS, strict=False):
        fig.add_scatter(
            x=list(range(at, at + len(values))),
            y=[round(value, 3) for value in values],
            name=label,
            mode="markers",
            marker={"color": paint, "symbol": symbol, "size": 6},
        )
        fig.add_annotation(
            x=at + len(values) / 2, y=1.0, yref="paper", text=label, font={"color": paint}, yanchor="bottom"
        )
        at += len(values)
    fig.update_yaxes(rangemode="tozero")
    fig.update_layout(margin_t=82)
    fig.add_hline(y=m["same_step_ms"], line={"color": GREY, "dash": "dash", "width": 1.5})
    return fig


def noise(result: Result) -> go.Figure:
    """Ratios of a step to itself, a dot a comparison, by three ways of measuring."""
    m = result.metrics
    means, turns = m["floor_ratio_means_in_sequence"], m["floor_ratio_medians_in_turns"]
    fig = figure(
        f"A step compared with itself: nine of ten ratios are within {turns:.1%}<br>"
        f"of 1 by medians in turns, within {means:.1%} by means one after the other",
        x="time of A over time of B, both the same step (ratio)",
        height=300,
    )
    for index, (name, label) in enumerate(WAYS.items()):
        values = result.samples[name]
        fig.add_scatter(
            x=[round(value, 4) for value in values],
            y=[label] * len(values),
            mode="markers",
            name=label,
            marker={"color": PALETTE[index], "symbol": MARKERS[index], "size": 8, "opacity": 0.65},
        )
    fig.add_vline(x=1, line={"color": GREY, "dash": "dash", "width": 1.5})
    fig.update_yaxes(range=[len(WAYS) - 0.5, -0.5], showgrid=False, showline=False, tickcolor="rgba(0,0,0,0)")
    return fig
