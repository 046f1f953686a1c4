"""The figures of quality in its scenario: divergence by context length, and by position in the longest windows."""

import math

import plotly.graph_objects as go

from nanokit.lab.experiments.quality_in_context import Cell, ContextResult
from nanokit.lab.plots.house import DASHES, GREY, MARKERS, PALETTE, figure

LABEL = 0.075  # of the axis: labels keep this far apart


def by_context(result: ContextResult) -> go.Figure:
    """KL over context length, a line a setting, both axes logarithmic; the noise floor in grey."""
    apart, turned = result.metrics["pairs_told_apart"], result.metrics["pairs_reversed"]
    lengths = sorted(result.floors)
    finding = (
        f"{lengths[0]:,} to {lengths[-1]:,} tokens: {turned:.0f} of {apart:.0f} pairs of settings change places<br>"
        f"(divergence from the stored weights in fp32)"
    )
    fig = figure(finding, x="tokens of a window, second half scored", y="KL (nats)", height=480)
    ends = {}
    for index, name in enumerate(result.names):
        cells = result.of(name)
        _line(fig, index, name, [c.context for c in cells], [max(c.kl, 1e-9) for c in cells])
        ends[name] = (max(cells[-1].kl, 1e-9), PALETTE[index % len(PALETTE)])
    floors = [max(result.floors[n], 1e-12) for n in lengths]
    fig.add_scatter(x=lengths, y=floors, mode="lines", line={"color": GREY, "dash": "dot"}, name="noise floor")
    ends["noise floor"] = (floors[-1], GREY)
    _labels(fig, lengths[-1], ends)
    fig.update_xaxes(type="log", tickmode="array", tickvals=lengths, ticktext=[f"{n:,}" for n in lengths])
    fig.update_yaxes(type="log", exponentformat="power")
    fig.update_layout(margin_r=150)
    return fig


def by_position(result: ContextResult) -> go.Figure:
    """KL by position in the longest windows, a line a setting."""
    longest = max(cell.context for cell in result.cells)
    cells = [cell for cell in result.cells if cell.context == longest]
    steepest = max(cells, key=lambda cell: abs(math.log(max(_slope(cell), 1e-9))))
    fig = figure(
        f"Within {longest:,} tokens, {steepest.setting} changes most with position: {_slope(steepest):.2f} times<br>"
        "(last quarter of the scored tokens over the first)",
        x="position in the window", y="KL (nats)", height=480,
    )  # fmt: skip
    names = list(cells[0].buckets)
    ends = {}
    for index, cell in enumerate(cells):
        values = [max(value, 1e-9) for value in cell.buckets.values()]
        _line(fig, index, cell.setting, names, values)
        ends[cell.setting] = (values[-1], PALETTE[index % len(PALETTE)])
    _labels(fig, names[-1], ends)
    fig.update_yaxes(type="log", exponentformat="power")
    fig.update_layout(margin_r=150)
    return fig


def _slope(cell: Cell) -> float:
    first, *_, last = cell.buckets.values()
    return last / first if first > 0 else 1.0


def _line(fig: go.Figure, index: int, name: str, xs: list, ys: list[float]) -> None:
    fig.add_scatter(
        x=xs, y=ys, name=name, mode="lines+markers",
        line={"color": PALETTE[index % len(PALETTE)], "width": 2, "dash": DASHES[index % len(DASHES)]},
        marker={"symbol": MARKERS[index % len(MARKERS)], "size": 7},
    )  # fmt: skip


def _labels(fig: go.Figure, x: object, ends: dict[str, tuple[float, str]]) -> None:
    """Names at the right ends of lines on a logarithmic axis, moved apart where they would cover each other."""
    heights = {name: math.log10(value) for name, (value, _) in ends.items()}
    spread = max(max(heights.values()) - min(heights.values()), 1.0) * LABEL
    at = -math.inf
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        at = max(height, at + spread)
        fig.add_annotation(
            x=math.log10(x) if isinstance(x, int) else x, y=at, text=name, xanchor="left", xshift=8,
            font={"color": ends[name][1]},
        )  # fmt: skip
