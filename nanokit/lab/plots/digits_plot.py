"""Figure of the digits: what a pruned network reads right when it is rounded, in which way, and after what training."""

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from nanokit.lab.plots.house import BLUE, GREEN, GREY, ORANGE, figure

if TYPE_CHECKING:
    from nanokit.lab.experiments.digits import DigitsResult

PAINTS = {"fp": GREY, "pruned": GREY, "more": GREY, "ptq": ORANGE, "search": ORANGE, "qat": GREEN}


def digits(result: "DigitsResult") -> go.Figure:
    """Points of every stage: a ring a seed, a line at their mean."""
    from nanokit.lab.experiments.digits import CALLED

    p, m = result.asked, result.metrics
    over, own = result.gained("ptq"), result.gained(result.control)
    finding = (
        f"{p.weights}, {m['pruned_rate']:.0%} pruned: QAT is {_lead(over)} over rounding,<br>"
        f"{_lead(own)} over as much training without it"
    )
    fig = figure(finding, x=f"digits read right, of {result.settings['tested_pictures']} (%)", height=400)
    for stage, name in CALLED.items():
        seeds = [round(value, 3) for value in result.samples[f"points_of_{stage}"]]
        paint, middle = PAINTS.get(stage, BLUE), round(m[f"points_of_{stage}"], 3)
        fig.add_scatter(
            x=seeds, y=[name] * len(seeds), mode="markers", name=f"{name}, seeds",
            marker={"symbol": "circle-open", "size": 8, "color": paint},
        )  # fmt: skip
        fig.add_scatter(
            x=[middle], y=[name], mode="markers", name=name,
            marker={"symbol": "line-ns-open", "size": 22, "color": paint, "line": {"width": 3}},
        )  # fmt: skip
        fig.add_annotation(x=max(seeds), y=name, text=f"{middle:.1f}", xanchor="left", xshift=10)
    fig.update_yaxes(autorange="reversed", tickcolor="rgba(0,0,0,0)", showline=False)
    return fig


def _lead(found: tuple[float, float, float]) -> str:
    middle, low, high = found
    return f"{middle:+.1f} points" + (" (within the error)" if low <= 0 <= high else "")
