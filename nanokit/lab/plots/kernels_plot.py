"""The kernels' figures: errors as a part of their bound, time of a product by rows, and what rounding leaves."""

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from nanokit.lab.plots.house import DASHES, GREY, MARKERS, PALETTE, color, figure, lines, with_remark

if TYPE_CHECKING:
    from nanokit.lab.experiments.backends import BackendsResult
    from nanokit.lab.experiments.gains import GainResult
    from nanokit.lab.experiments.promises import PromiseResult
    from nanokit.lab.experiments.rounding import RoundingResult

LANE = 0.27  # height of a backend's dots beside each other
BELOW_DB = 8.0  # room under the line of no signal for what it is called
LABEL_DB = 4.5  # of an axis of SQNR: so near that names would overlap


def promises(result: "PromiseResult") -> go.Figure:
    """Largest error of each case over its bound, a dot a case: a lane a backend, a row a weight format."""
    m, names = result.metrics, result.settings["backends"]
    formats = result.asked.weights
    worst = max(m[f"error_of_bound_{name}_{form}"] for name in names for form in formats)
    fig = figure(
        f"No output is farther from fp64 than {worst:.1%}<br>of what the contract's bound allows",
        x="largest error of a case, as a part of its bound (%)",
        height=130 + 48 * len(formats),
    )
    for index, name in enumerate(names):
        xs, ys = [], []
        for place, form in enumerate(formats):
            values = result.samples[f"error_of_bound_{name}_{form}"]
            xs += [round(100 * value, 4) for value in values]
            ys += [place + (index - (len(names) - 1) / 2) * LANE] * len(values)
        fig.add_scatter(
            x=xs, y=ys, name=name, mode="markers",
            marker={"color": color(name), "symbol": MARKERS[index], "size": 7, "opacity": 0.7},
        )  # fmt: skip
        # The lanes' names stand once, beside the topmost format.
        fig.add_annotation(
            x=100 * worst * 1.04, y=(index - (len(names) - 1) / 2) * LANE, text=name, font={"color": color(name)},
            xanchor="left",
        )  # fmt: skip
    fig.update_xaxes(range=[0, 118 * worst])
    fig.update_yaxes(
        tickmode="array", tickvals=list(range(len(formats))), ticktext=formats, range=[len(formats) - 0.5, -0.5],
        showgrid=False, showline=False, zeroline=False, tickcolor="rgba(0,0,0,0)",
    )  # fmt: skip
    return fig


def gains(result: "GainResult", kind: str = "") -> go.Figure:
    """Milliseconds of a product over its rows, both logarithmic. kind: which product; empty is the first."""
    kind, rows, names = kind or result.asked.products[0], result.asked.rows, result.timed()
    fast, ends = names[-1], (rows[0], rows[-1])
    ratios = [result.ms("reference", kind, each) / result.ms(fast, kind, each) for each in ends]
    finding = (
        f"{kind}: {fast} is {ratios[0]:.1f} times as fast as the reference at {_rows(ends[0])},<br>"
        f"{ratios[1]:.1f} times at {ends[1]}"
    )
    if fast == "reference":
        growth = result.ms(fast, kind, ends[1]) / result.ms(fast, kind, ends[0])
        finding = f"{kind}: {_rows(ends[1])} take {growth:.1f} times the time of {ends[0]}"
    series = {name: (rows, [result.ms(name, kind, each) for each in rows]) for name in names}
    of_these = [remark for remark in result.remarks if f"_ms_of_{kind}_at_" in remark]
    return lines(
        with_remark(finding, of_these), series, x="rows of the product", y="time of one product (ms)",
        log_x=True, log_y=True,
    )  # fmt: skip


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def rounding(result: "RoundingResult", kind: str = "down") -> go.Figure:
    """SQNR at a product's output by layer, a line a mode."""
    modes = result.modes
    layers = list(range(len(result.layers(kind, modes[0]))))
    lowest = {mode: min(result.layers(kind, mode)) for mode in modes}
    best, worst = max(modes, key=lowest.__getitem__), min(modes, key=lowest.__getitem__)
    at = result.layers(kind, worst).index(lowest[worst])
    fig = figure(
        f"{kind}: {best} keeps at least {lowest[best]:.0f} dB in every layer;<br>"
        f"{worst} falls to {lowest[worst]:.0f} dB in layer {at}",
        x="layer",
        y="signal over noise at the output (dB)",
        height=430,
    )
    for index, mode in enumerate(modes):
        fig.add_scatter(
            x=layers, y=[round(value, 2) for value in result.layers(kind, mode)], name=mode, mode="lines+markers",
            line={"color": PALETTE[index % 6], "width": 2, "dash": DASHES[index % len(DASHES)]},
            marker={"symbol": MARKERS[index % len(MARKERS)], "size": 6},
        )  # fmt: skip
    for mode, height in _apart({mode: result.layers(kind, mode)[-1] for mode in modes}).items():
        fig.add_annotation(
            x=layers[-1], y=height, text=mode, xanchor="left", xshift=10,
            font={"color": PALETTE[modes.index(mode) % 6]},
        )  # fmt: skip
    fig.update_layout(margin_r=72)
    fig.add_hline(
        y=0, line={"color": GREY, "dash": "dot", "width": 1.5}, annotation_text="as much noise as signal",
        annotation_position="bottom left",
    )  # fmt: skip
    highest = max(max(result.layers(kind, mode)) for mode in modes)
    fig.update_yaxes(range=[min(0.0, lowest[worst]) - BELOW_DB, highest + BELOW_DB])
    return fig


def _apart(heights: dict[str, float]) -> dict[str, float]:
    """Where labels stand: at these heights, or so far above the one below that neither covers the other."""
    placed: dict[str, float] = {}
    floor = -float("inf")
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        placed[name] = floor = max(height, floor + LABEL_DB)
    return placed


def backends(result: "BackendsResult") -> go.Figure:
    """Error of each row over its bound, a lane a backend; the title says what a product takes."""
    p, m, names = result.params.to_dict(), result.metrics, result.settings["backends"]
    worst = max(m[f"error_of_bound_{name}"] for name in names)
    times = ", ".join(f"{name} {m[f'{name}_ms']:.3f} ms" for name in names if f"{name}_ms" in m)
    what = f"{p['weights']} x {p['activations']}, {p['outputs']} x {p['columns']}, {_rows(int(str(p['rows'])))}"
    fig = figure(
        with_remark(f"{what}:<br>{worst:.2%} of the bound at most; {times}", result.remarks),
        x="largest error of a row, as a part of its bound (%)",
        height=150 + 46 * len(names),
    )
    for index, name in enumerate(names):
        values = [round(100 * value, 4) for value in result.samples[f"error_of_bound_{name}"]]
        fig.add_scatter(
            x=values, y=[name] * len(values), name=name, mode="markers",
            marker={"color": color(name), "symbol": MARKERS[index], "size": 9, "opacity": 0.75},
        )  # fmt: skip
    fig.update_xaxes(range=[0, 115 * worst or 1.0])
    fig.update_yaxes(range=[len(names) - 0.5, -0.5], showgrid=False, showline=False, tickcolor="rgba(0,0,0,0)")
    return fig
