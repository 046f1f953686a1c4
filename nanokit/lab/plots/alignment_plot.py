"""Alignment's figures: speed over the base offset, of bare loads and of whole kernels, and one point for the panel."""

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from nanokit.lab.plots.house import DASHES, GRID, MARKERS, PALETTE, bars, figure, with_remark

if TYPE_CHECKING:
    from nanokit.lab.experiments.loads import LoadResult, LoadsResult
    from nanokit.lab.experiments.shifted import ShiftedResult


def loads(result: "LoadsResult", where: str = "L2") -> go.Figure:
    """Speed over the aligned one by offset, a line a width of load; the grey band is the noise floor."""
    offsets, noise = result.asked.offsets, max(result.noise(where, width) for width in result.widths)
    worst = {width: min(result.relative(where, width, offset) for offset in offsets) for width in result.widths}
    lost = {width: 1 - value for width, value in worst.items() if 1 - value > noise}
    if lost:
        said = ", ".join(f"of {width} bytes up to {share:.0%}" for width, share in lost.items())
        finding = f"In {where}, loads that straddle cache lines lose speed:<br>{said}"
    else:
        finding = f"In {where}, no offset costs more than the noise of {noise:.0%}"
    series = {f"{width} bytes": [result.relative(where, width, each) for each in offsets] for width in result.widths}
    return _by_offset(finding, offsets, series, noise)


def shifted(result: "ShiftedResult") -> go.Figure:
    """Speed of the product and of attention over that at offset 0, a line a kernel."""
    offsets, moves = result.asked.offsets, [name.removesuffix("_equal") for name in result.metrics if "_equal" in name]
    noise = max(result.noise(move) for move in moves)
    seen = [move for move in moves if result.slowest(move)[1] > result.noise(move)]
    finding = f"Whole kernels: no offset stands out of the noise,<br>which is up to {noise:.0%} here"
    if seen:
        worst = max(seen, key=lambda move: result.slowest(move)[1])
        offset, loss = result.slowest(worst)
        kernel, _, how = worst.partition("_")
        finding = (
            f"Whole kernels: {kernel} ({how}) takes {loss:.0%} longer<br>at offset {offset}; "
            f"its noise is {result.noise(worst):.0%}"
        )
    series = {move.replace("_", ", "): [result.relative(move, each) for each in offsets] for move in moves}
    return _by_offset(with_remark(finding, result.remarks[-2:-1]), offsets, series, noise)


def _by_offset(finding: str, offsets: list[int], series: dict[str, list[float]], noise: float) -> go.Figure:
    fig = figure(finding, x="base offset (bytes)", y="speed over that at offset 0")
    fig.add_hrect(y0=1 - noise, y1=1 + noise, fillcolor=GRID, line_width=0, layer="below")
    for index, (name, values) in enumerate(series.items()):
        fig.add_scatter(
            x=offsets, y=[round(value, 4) for value in values], name=name, mode="lines+markers",
            line={"color": PALETTE[index % 6], "width": 2, "dash": DASHES[index % len(DASHES)]},
            marker={"symbol": MARKERS[index % len(MARKERS)], "size": 8},
        )  # fmt: skip
    top = max(1 + noise, *(max(values) for values in series.values()))
    fig.update_yaxes(range=[0, 1.08 * top])
    fig.update_xaxes(tickmode="array", tickvals=offsets)
    fig.update_layout(showlegend=True, legend={"orientation": "h", "y": 0.02, "yanchor": "bottom", "x": 0.02})
    return fig


def load(result: "LoadResult") -> go.Figure:
    """One width and size: GB/s at the offset and, twice, at offset 0."""
    p, m = result.params.to_dict(), result.metrics
    change = m["at_offset_gb_s"] / max(m["aligned_gb_s"], m["aligned_again_gb_s"]) - 1
    finding = (
        f"{p['width']}-byte loads of {p['kib']} KiB from offset {p['offset']}: {change:+.0%}<br>"
        f"{m['on_two_lines_rate']:.0%} of them touch two cache lines"
    )
    names = {"at_offset_gb_s": f"offset {p['offset']}", "aligned_gb_s": "offset 0", "aligned_again_gb_s": "0 again"}
    series = {label: result.samples[name] for name, label in names.items()}
    fig = bars(with_remark(finding, result.remarks), series, unit="GB/s")
    return fig
