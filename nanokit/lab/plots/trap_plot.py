"""Figures of broken GGUF files: what tells that a file is wrong, and what that says which tells nothing else."""

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from nanokit.lab.experiments.trap_detectors import (
    ALONE,
    BESIDE,
    CAUGHT,
    CIRCLE,
    DETECTORS,
    FALSE,
    MISSED,
    NOT_RUN,
    QUIET,
    ROPES,
    SLOW,
    UNSURE,
    count,
    outcomes,
)
from nanokit.lab.experiments.trap_params import GOOD, HALF_SCALE, ONE_LAYER, ROUNDED, WRONG_BASE
from nanokit.lab.plots.house import BLUE, DASHES, GREEN, GREY, MARKERS, ORANGE, PALETTE, RED, SKY, figure
from nanokit.model.verify.variants import CERTAIN, Gain

if TYPE_CHECKING:
    from nanokit.lab.experiments.trap import TrapResult
    from nanokit.lab.experiments.trap_result import TrapsResult

TITLE = 64  # characters of a line of a title
ROW = 23  # px of a row of marks
HIDDEN = (WRONG_BASE, HALF_SCALE, ONE_LAYER)  # faults that are said to be invisible without a source
LOOKS = {  # of an outcome: colour, symbol, size
    CAUGHT: (GREEN, "circle", 11), MISSED: (RED, "x", 10), UNSURE: (ORANGE, "circle-open", 11),
    FALSE: (RED, "triangle-up", 12), QUIET: (GREEN, "circle-open", 9), NOT_RUN: (GREY, "line-ew-open", 8),
}  # fmt: skip
VERDICTS = {  # of a check: the same
    "ok": (GREEN, "circle-open", 9), "failed": (RED, "x", 10), "warning": (ORANGE, "triangle-up", 11),
    "not checked": (GREY, "line-ew-open", 8),
}  # fmt: skip


def _marks(fig: go.Figure, cells: Sequence[tuple[str, str, str]], looks: dict[str, tuple[str, str, int]]) -> None:
    """A mark for each (column, row, what), one trace for each kind that there is, named in a legend below."""
    for what, (colour, symbol, size) in looks.items():
        here = [(x, y) for x, y, kind in cells if kind == what]
        if here:
            fig.add_scatter(
                x=[x for x, _ in here], y=[y for _, y in here], name=what, mode="markers",
                marker={"color": colour, "symbol": symbol, "size": size, "line": {"color": colour, "width": 2}},
                hovertemplate=f"%{{y}}, %{{x}}: {what}<extra></extra>",
            )  # fmt: skip
    fig.update_yaxes(autorange="reversed", type="category", showgrid=True, tickfont_size=11)
    fig.update_xaxes(type="category", side="top", tickangle=-30, tickfont_size=11, showline=False)


def _legend_below(fig: go.Figure, rows: int) -> None:
    fig.update_layout(
        showlegend=True, margin_b=56,
        legend={"orientation": "h", "x": -0.2, "y": -14 / (ROW * rows), "yanchor": "top", "bgcolor": "rgba(0,0,0,0)"},
    )  # fmt: skip


def trap_detectors(result: "TrapsResult") -> go.Figure:
    """A fault a row, a detector a column."""
    found, names = outcomes(result), list(result.files)
    wrong = [each for each in DETECTORS if found[each][GOOD] == FALSE]
    caught = {each: count(result, each, CAUGHT) for each in DETECTORS}
    alarm = f". The good file is accused by {_and(wrong)}" if wrong else ""
    finding = (
        f"Of {len(names) - 1} faults verify catches {caught[ALONE]} alone and {caught[BESIDE]} beside the good file; "
        f"other ropes {caught[ROPES]}, a slow first token {caught[SLOW]}, circles {caught[CIRCLE]}{alarm}"
    )
    fig = figure(_lines(finding), height=230 + ROW * len(names))
    _marks(fig, [(detector, name, found[detector][name]) for detector in DETECTORS for name in names], LOOKS)
    fig.update_xaxes(categoryorder="array", categoryarray=list(DETECTORS))
    fig.update_yaxes(categoryorder="array", categoryarray=names)
    fig.update_layout(margin_t=170)
    _legend_below(fig, len(names))
    return fig


def trap_undone(result: "TrapsResult") -> go.Figure:
    """What undoing a fault gains, with its certainty, beside the price of rounding to 4 bits."""
    shown = [name for name in HIDDEN if name in result.running]
    gains: dict[str, Gain] = {GOOD: result.undone(GOOD), **{name: result.undone(name) for name in shown}}
    told = [name for name in shown if gains[name].certain]
    cheaper = [name for name in shown if gains[name].mean < result.rounding.mean]
    verb = "costs" if len(cheaper) == 1 else "cost"
    finding = (
        f"The text is certainly likelier with {_and(told) or 'no fault'} undone; {_and(cheaper) or 'no fault'} {verb} "
        f"less than rounding to 4 bits again"
    )
    fig = figure(
        _lines(finding),
        x=f"gain (nats a token), ± {CERTAIN:.0f} standard errors",
        height=150 + 44 * (len(gains) + 1),
    )  # fmt: skip
    rows = {**gains, ROUNDED: result.rounding}
    labels = {GOOD: "good file: best other rope", ROUNDED: f"{ROUNDED}: undone"}
    for name, each in rows.items():
        colour = GREY if name in (GOOD, ROUNDED) else GREEN if each.certain else ORANGE
        fig.add_bar(
            orientation="h", x=[round(each.mean, 4)], y=[labels.get(name, f"{name}: undone")], width=0.55,
            marker={"color": colour},
            error_x={"type": "data", "array": [round(CERTAIN * each.error, 4)], "color": BLUE, "thickness": 2},
            hovertemplate=f"{name}: {each.mean:+.3f} ± {each.error:.3f}<extra></extra>",
        )  # fmt: skip
    fig.add_vline(x=0, line={"color": GREY, "width": 1.5})
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return fig


def _lines(finding: str) -> str:
    """A title in as many lines as it takes."""
    return "<br>".join(wrap(finding, TITLE, break_long_words=False, break_on_hyphens=False))


def _and(names: list[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def trap_gates(result: "TrapsResult") -> go.Figure:
    """Asymmetry of gate and up by layer, in the good file and with one layer swapped."""
    good = result.files[GOOD].asymmetry
    other = result.files[ONE_LAYER].asymmetry if ONE_LAYER in result.files else None
    clear = len(good.clear_layers())
    finding = f"Gate is lopsided and up is not, clearly so in {clear} of {len(good.gate)} layers"
    if other is not None:
        layers = ", ".join(str(at) for at in other.reversed_layers())
        finding += f"; with one layer swapped, {f'layer {layers}' if layers else 'none'} shows it the other way round"
    fig = figure(_lines(finding), x="layer", y="asymmetry on the text")
    series = {"gate": good.gate, "up": good.up}
    if other is not None:
        series |= {"gate, one swapped": other.gate, "up, one swapped": other.up}
    for index, (name, values) in enumerate(series.items()):
        paint = (BLUE, ORANGE, SKY, RED)[index]
        fig.add_scatter(
            x=list(values), y=[round(value, 4) for value in values.values()], name=name,
            mode="lines+markers" if index < 2 else "markers", line={"color": paint, "width": 2, "dash": DASHES[index]},
            marker={"symbol": (*MARKERS[:2], "circle-open", "square-open")[index], "size": 6 if index < 2 else 11,
                    "color": paint, "line": {"width": 2, "color": paint}},
        )  # fmt: skip
    _legend_right(fig)
    fig.update_yaxes(rangemode="tozero")
    return fig


def _legend_right(fig: go.Figure) -> None:
    fig.update_layout(
        showlegend=True, margin_r=170,
        legend={"x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top", "bgcolor": "rgba(0,0,0,0)"},
    )  # fmt: skip


def trap_positions(result: "TrapsResult") -> go.Figure:
    """KL from the good file by position, of files with a wrong rope."""
    growth = [f"{name} {places[0][2]:.2f} to {places[-1][2]:.2f} nats" for name, places in result.kl.items()]
    nans = sum(int(result.metrics[f"not_finite_{name}"]) for name in result.kl if name in result.files)
    finding = (
        f"First to last of {result.settings['text_tokens']:,} tokens: {', '.join(growth)}; {nans or 'no'} "
        f"token{'' if nans == 1 else 's'} without a number"
    )
    fig = figure(_lines(finding), x="position in the text (tokens)", y="KL from the good file (nats)")
    for index, (name, places) in enumerate(result.kl.items()):
        fig.add_scatter(
            x=[(first + last) / 2 for first, last, _ in places], y=[float(f"{value:.4g}") for *_, value in places],
            name=name, mode="lines+markers",
            line={"color": PALETTE[index], "width": 2, "dash": DASHES[index % len(DASHES)]},
            marker={"symbol": MARKERS[index % len(MARKERS)], "size": 7},
        )  # fmt: skip
    _legend_right(fig)
    fig.update_yaxes(rangemode="tozero")
    return fig


def trap(result: "TrapResult") -> go.Figure:
    """The checks of one faulty copy, alone and beside the good file."""
    failed = [name for name, each in result.beside.items() if each.verdict == "failed"]
    alone = [name for name, each in result.alone.items() if each.verdict == "failed"]
    undone = result.undone
    cost = "it is not run" if undone is None else f"it costs {undone.mean:.3g} ± {undone.error:.2g} nats a token"
    more = " and more" if len(failed) > 2 else ""
    finding = (
        f"{result.params.to_dict()['fault']}: {cost}; alone {_and(alone) or 'nothing'} fails, beside the good file "
        f"{_and(failed[:2]) or 'nothing'}{more}"
    )
    fig = figure(_lines(finding), height=200 + ROW * len({*result.alone, *result.beside}))
    names = list(dict.fromkeys([*result.alone, *result.beside]))
    columns = {"verify": result.alone, BESIDE: result.beside}
    cells = [(column, name, each.verdict) for column, every in columns.items() for name, each in every.items()]
    _marks(fig, cells, VERDICTS)
    fig.update_xaxes(tickangle=0, categoryorder="array", categoryarray=list(columns))
    fig.update_yaxes(categoryorder="array", categoryarray=names)
    fig.update_layout(margin_t=120, margin_r=150)
    _legend_below(fig, len(names))
    return fig
