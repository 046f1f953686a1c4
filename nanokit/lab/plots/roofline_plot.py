"""The roofline's figures: streaming by size, forwards under the two roofs, and what several rows cost."""

import math
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from nanokit.lab.plots.house import BLUE, GREEN, GREY, MARKERS, ORANGE, figure, lines, mark, with_remark

if TYPE_CHECKING:
    from nanokit.lab.experiments.roofline import RooflineResult

TICKS = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]  # of a logarithmic axis


def streaming(result: "RooflineResult") -> go.Figure:
    """GB/s of reading a buffer again and again, by its size; the engine's own weights as a mark."""
    p, m = result.params.to_dict(), result.metrics
    sizes: Any = p["buffers"]
    speeds = [m[f"read_gb_s_of_{size}_mib"] for size in sizes]
    fig = lines(
        f"The same {sizes[0]} MiB can be read again and again at {speeds[0]:.0f} GB/s,<br>"
        f"the same {sizes[-1]} MiB at {speeds[-1]:.0f} GB/s",
        {"": (sizes, speeds)},
        x="size of what is read (MiB)",
        y="reading speed (GB/s)",
        log_x=True,
    )
    weights = m["bytes_per_token"] / 2**20
    mark(fig, f"this model's weights: {weights:.0f} MiB, {m['stream_gb_s']:.1f} GB/s", y=m["stream_gb_s"])
    fig.update_layout(margin_r=40)
    return fig


def roofline(result: "RooflineResult") -> go.Figure:
    """Operations a second over operations per byte, both logarithmic, under memory's and arithmetic's roof."""
    p, m = result.params.to_dict(), result.metrics
    stream, ceiling = m["stream_gb_s"], m["ceiling_gop_per_s"]
    finding = (
        f"Decoding runs at {m['share_of_limit']:.0%} of memory's roof;<br>"
        f"a prompt of {p['prompt_tokens']} tokens at {m['prefill_arithmetic_share']:.0%} of arithmetic's"
    )
    fig = figure(
        with_remark(finding, result.remarks),
        x="operations per byte of weights read (rows of the forward)",
        y="operations (1e9 per second)",
    )
    several, tokens = result.points, int(str(p["prompt_tokens"]))
    per_row = 2 * m["weights_per_token"] / m["bytes_per_token"]
    prompt = per_row * _rows(result)
    first, last, ridge = per_row / 3, prompt * 2.2, ceiling / stream
    roof = {"color": GREY, "width": 2, "dash": "dash"}
    ends = [(first, first * stream), (ridge, ceiling), (max(last, ridge), ceiling)]
    fig.add_scatter(
        x=[x for x, _ in ends], y=[y for _, y in ends], mode="lines", line=roof, name="roofs", hoverinfo="skip"
    )
    decode = 2 * m["weights_per_token"] / m["ms_per_token"] / 1e6  # the tokens that stand in the title
    groups: dict[str, tuple[str, dict[int, tuple[float, float]]]] = {
        "decode": (ORANGE, {1: (per_row, decode)}),
        "several rows": (GREEN, {rows: point for rows, point in several.items() if rows > 1}),
        "prefill": (BLUE, {tokens: (prompt, m["prefill_gop_per_s"])}),
    }
    for index, (name, (paint, points)) in enumerate(groups.items()):
        fig.add_scatter(
            x=[point[0] for point in points.values()],
            y=[point[1] for point in points.values()],
            text=[str(rows) for rows in points],
            name=name,
            mode="markers+text",
            textposition="bottom right",
            marker={"color": paint, "symbol": MARKERS[index], "size": 9},
            hovertemplate="%{text} rows: %{y:.0f} e9 operations/s<extra></extra>",
        )
    # Both above the flat part, where no forward can be; on a logarithmic axis, notes stand at the logarithm.
    for x, text, side in (
        (first, f" slope: memory, {stream:.1f} GB/s", "left"),
        (last, f"flat: arithmetic, {ceiling:.0f}e9 per second", "right"),
    ):
        fig.add_annotation(x=math.log10(x), y=math.log10(ceiling), text=text, xanchor=side, yanchor="bottom")
    lowest = min([first * stream, *(speed for _, speed in several.values())])
    fig.update_xaxes(type="log", dtick=1, range=[math.log10(first / 1.02), math.log10(max(last, ridge) * 1.02)])
    fig.update_yaxes(type="log", tickvals=TICKS, range=[math.log10(lowest / 2), math.log10(2 * ceiling)])
    return fig


def _rows(result: "RooflineResult") -> float:
    """Rows of the prefill: those of the layers, since the head sees one."""
    m, p = result.metrics, result.params.to_dict()
    operations = m["prefill_gop_per_s"] * 1e9 * float(str(p["prompt_tokens"])) / m["prefill_tok_per_s"]
    return operations / (2 * m["weights_per_token"])


def verification(result: "RooflineResult") -> go.Figure:
    """Time of a forward of n rows over that of one, by context length; what n separate forwards would cost, dotted."""
    v = result.v
    ctx, rows = next(iter(v)), max(next(iter(v.values())))
    finding = (
        f"{rows} rows in one forward cost {v[ctx][rows]:.1f} forwards of one row,<br>"
        f"not {rows}: after {ctx} tokens of context"
    )
    fig = lines(
        with_remark(finding, result.remarks),
        {f"ctx {length}": (list(per_rows), list(per_rows.values())) for length, per_rows in v.items()},
        x="rows of the forward (tokens)",
        y="time over that of one row (ratio)",
    )
    top = 1.15 * max(value for per_rows in v.values() for value in per_rows.values())
    fig.add_scatter(
        x=[1, top], y=[1, top], mode="lines", line={"color": GREY, "dash": "dot", "width": 1.5}, name="one by one"
    )
    fig.add_annotation(x=top, y=top, text="one by one", xanchor="left", yanchor="top", xshift=4)
    fig.update_yaxes(range=[0, top])
    return fig
