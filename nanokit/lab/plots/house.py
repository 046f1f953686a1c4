"""Figures in one house style, and a way to show them that works in every reader of a notebook.

Style: transparent background with mid-grey text and grid, so that one picture can be read in light and dark
themes (mid-grey keeps a contrast of 4:1 on white and on GitHub's dark page); Okabe-Ito colours, which stay
apart for colour-blind eyes, one fixed per method over all notebooks; the title is the finding; axes carry
units; labels stand beside what they name instead of in a legend. Values go in as plain lists: numpy arrays
would be stored as base64, which no diff of a committed notebook can show.

`show(fig)` displays one output that every reader of a notebook can show; see `pictures`. A figure widget
per figure was rejected: each stores megabytes of JavaScript in a saved notebook.
"""

import statistics
from collections.abc import Mapping, Sequence
from textwrap import wrap

import plotly.graph_objects as go

from nanokit.lab import pictures

GREY = "#7f7f7f"
GRID = "rgba(127,127,127,0.25)"
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW = "#56B4E9", "#CC79A7", "#F0E442"
PALETTE = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE, YELLOW)

METHODS = {
    "prefill": BLUE,
    "decode": ORANGE,
    "verification": GREEN,
    "reference": GREY,
    "torch fp32": SKY,
    "C": RED,
    "Triton": PURPLE,
    "limit": GREY,
    "limit as stored": GREY,
}

WIDTH = 660
HEIGHT = 380
LINE, TOP = 21, 16  # of the title: height of a line, and where the first begins, px
MOST_TICKS = 12
DASHES = ("solid", "dash", "dot", "dashdot")
REMARK_WIDTH = 70  # characters that fit beside a legend
MARKERS = ("circle", "square", "diamond", "triangle-up", "x")

_axis = {
    "gridcolor": GRID,
    "zerolinecolor": GRID,
    "linecolor": GREY,
    "tickcolor": GREY,
    "ticks": "outside",
    "ticklen": 4,
    "showline": True,
    "automargin": True,
    "title": {"standoff": 8},
}

HOUSE = go.layout.Template(
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": GREY, "size": 13, "family": "system-ui, Helvetica, Arial, sans-serif"},
        "title": {
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "yref": "container",
            "yanchor": "top",
            "pad": {"l": 12},
            "font": {"size": 16, "weight": 600},
        },
        "colorway": list(PALETTE),
        "xaxis": _axis,
        "yaxis": _axis,
        "showlegend": False,
        "margin": {"l": 64, "r": 24, "t": 60, "b": 56},
        "hoverlabel": {"font": {"size": 12}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": BLUE},
        "annotationdefaults": {"font": {"color": GREY, "size": 12}, "showarrow": False},
    }
)


def color(method: str, index: int = 0) -> str:
    """The colour of a method ("limit: 97 MB" is a limit): fixed for `METHODS`, otherwise by place in a figure."""
    return METHODS.get(method.partition(":")[0], PALETTE[index % len(PALETTE)])


def figure(finding: str, *, x: str = "", y: str = "", summary: str = "", height: int = HEIGHT) -> go.Figure:
    """An empty figure in the house style.

    finding: the title, a sentence that says what the reader should see; `<br>` breaks it. x, y: axis titles
    with units, as in "decode speed (tok/s)". summary: one sentence for screen readers, default the finding.
    height: px.
    """
    fig = go.Figure()
    fig.update_layout(
        template=HOUSE,
        width=WIDTH,
        height=height,
        title={"text": finding, "y": 1 - TOP / height},
        xaxis_title_text=x,
        yaxis_title_text=y,
        meta={"summary": summary or finding.replace("<br>", " ")},
        margin_t=60 + LINE * max(0, finding.count("<br>") - 1),
    )
    return fig


def with_remark(finding: str, remarks: Sequence[str]) -> str:
    """The finding, and beneath it the first remark up to its colon, if there is one: why it is not to be quoted."""
    if not remarks:
        return finding
    lines = wrap(f"{remarks[0].partition(':')[0]}: not to be quoted", REMARK_WIDTH, break_long_words=False)
    return finding + "".join(f"<br><i>{line}</i>" for line in lines)


def bars(
    finding: str, samples: Mapping[str, Sequence[float]], *, unit: str, digits: int = 1, summary: str = ""
) -> go.Figure:
    """Horizontal bars at the median, a whisker from minimum to maximum, the median written beside it.

    samples: label -> repeats, all in `unit` (the axis title). An empty series raises ValueError from
    `statistics`.
    """
    fig = figure(finding, x=unit, summary=summary, height=120 + 46 * len(samples) + 20 * finding.count("<br>"))
    for index, (label, values) in enumerate(samples.items()):
        middle, low, high = statistics.median(values), min(values), max(values)
        whisker = {"type": "data", "array": [high - middle], "arrayminus": [middle - low], "color": GREY}
        fig.add_bar(
            orientation="h",
            x=[float(middle)],
            y=[label],
            width=0.62,
            marker={"color": color(label, index)},
            error_x={**whisker, "symmetric": False, "thickness": 1.5, "width": 5, "visible": high > low},
            hovertemplate=f"{label}: median {middle:.{digits}f}, {low:.{digits}f} to {high:.{digits}f}, "
            f"{len(values)} runs<extra></extra>",
        )
        fig.add_annotation(x=float(high), y=label, text=f"{middle:.{digits}f}", xanchor="left", xshift=8)
    largest = max(max(values) for values in samples.values())
    fig.update_xaxes(range=[0, 1.14 * largest or 1.0])
    fig.update_yaxes(autorange="reversed", showgrid=False, tickcolor="rgba(0,0,0,0)", showline=False)
    fig.update_layout(bargap=0.3)
    return fig


def lines(
    finding: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    summary: str = "",
) -> go.Figure:
    """Lines with markers, each named at its right end; dash and marker differ too, so colour is never alone.

    series: label -> (xs, ys). x, y: axis titles with units. Linear y axes start at zero.
    """
    fig = figure(finding, x=x, y=y, summary=summary)
    for index, (label, (xs, ys)) in enumerate(series.items()):
        paint = color(label, index)
        fig.add_scatter(
            x=[float(value) for value in xs],
            y=[float(value) for value in ys],
            name=label,
            mode="lines+markers+text",
            text=[""] * (len(xs) - 1) + [f"  {label}"],
            textposition="middle right",
            cliponaxis=False,
            line={"color": paint, "width": 2, "dash": DASHES[index % len(DASHES)]},
            marker={"symbol": MARKERS[index % len(MARKERS)], "size": 7},
        )
    longest = max((len(label) for label in series), default=0)
    fig.update_layout(margin_r=32 + 8 * longest)
    fig.update_xaxes(type="log" if log_x else "linear")
    counted = sorted({value for xs, _ in series.values() for value in xs})
    if 0 < len(counted) <= MOST_TICKS and all(value == int(value) for value in counted):
        fig.update_xaxes(tickmode="array", tickvals=[int(value) for value in counted])  # no depth of 1.5
    fig.update_yaxes(**({"type": "log"} if log_y else {"rangemode": "tozero"}))
    return fig


def mark(fig: go.Figure, label: str, *, x: float | None = None, y: float | None = None, row: int = 0) -> None:
    """A dashed grey line across the figure at x or at y (a limit, a change), with its label.

    row: for lines at x, how many lines of text the label is moved down, so that neighbours do not overlap.
    """
    style = {"line": {"color": GREY, "dash": "dash", "width": 1.5}, "annotation_text": label}
    if x is not None:
        fig.add_vline(x=x, annotation_position="top right", annotation_yshift=-16 * row, **style)
    if y is not None:
        fig.add_hline(y=y, annotation_position="top left", **style)


def show(fig: go.Figure) -> None:
    """Display the figure in a notebook: live where the reader can, as a picture or its summary elsewhere."""
    from IPython.display import display

    data, metadata = pictures.bundle(fig)
    display(data, metadata=metadata, raw=True)
