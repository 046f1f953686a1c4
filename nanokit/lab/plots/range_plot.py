"""Figures about ranges: a matrix and its levels, error by format, damage by policy and by layer."""

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from nanokit.lab.plots.house import DASHES, GREY, MARKERS, ORANGE, PALETTE, RED, figure

if TYPE_CHECKING:
    from nanokit.lab.experiments.damage import DamageResult
    from nanokit.lab.experiments.one_matrix import MatrixResult
    from nanokit.lab.experiments.spread import SpreadResult

MOST_LEVELS = 40  # more lines than that are a wall
LEAST = 1e-6  # nats: what lies below is drawn there


def one_matrix(result: "MatrixResult") -> go.Figure:
    """Histogram of the weights and of what they are rounded to, with the levels of the group of the largest weight."""
    p, m, name = result.params.to_dict(), result.metrics, result.settings["format"]
    what = "normal random numbers" if p["tensor"] == "normal" else f"{p['tensor']} of layer {p['layer']}"
    against = "" if p["tensor"] == "normal" else " against the file's own"
    sqnr = "nothing is lost" if m["sqnr_db"] >= 150 else f"{m['sqnr_db']:.1f} dB"
    fig = figure(
        f"{what} in {name}, {m['width']:.2f} bits: {m['zero']:.0%} become 0,<br>"
        f"{m['bits']:.1f} bits of the codes are used, {sqnr}{against}",
        x="weight",
        y="share of weights (log)",
        height=400,
    )
    if len(result.levels) <= MOST_LEVELS:
        for level in result.levels:
            fig.add_vline(x=level, line={"color": GREY, "width": 1, "dash": "dot"})
    width = result.centres[1] - result.centres[0]
    for label, shares, paint, opacity in (
        ("as stored", result.before, PALETTE[0], 0.55),
        ("rounded", result.after, ORANGE, 0.75),
    ):
        there = [(x, share) for x, share in zip(result.centres, shares, strict=True) if share > 0]
        fig.add_bar(
            x=[round(x, 5) for x, _ in there], y=[share for _, share in there], name=label,
            width=width * (0.5 if paint == ORANGE else 1), marker={"color": paint, "opacity": opacity},
        )  # fmt: skip
    fig.update_yaxes(type="log", exponentformat="power", dtick=1)
    fig.update_layout(
        barmode="overlay", showlegend=True, legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0.6}
    )
    return fig


def spread(result: "SpreadResult", role: str = "down") -> go.Figure:
    """SQNR by format: of the model's matrices (the median layer) and of normal random numbers."""
    names = sorted(result.asked.formats, key=lambda name: result.metrics[f"normal_sqnr_db_{name}"])
    exact = result.flattered
    finding = f"{role}, against the file's own weights: groups gain what single scales lose"
    if exact:
        finding = (
            f"{' and '.join(exact)} find this file's own levels again;<br>normal random numbers show what they lose"
        )
    fig = figure(finding, x="signal over noise of the weights (dB)", height=120 + 26 * len(names))
    for index, (label, key) in enumerate(
        ((f"{role} of the model", f"sqnr_db_{role}"), ("normal numbers", "normal_sqnr_db"))
    ):
        values = [result.metrics[f"{key}_{name}"] for name in names]
        fig.add_scatter(
            x=[round(min(value, 60.0), 2) for value in values], y=names, name=label, mode="markers",
            marker={"symbol": MARKERS[index], "size": 10, "color": PALETTE[index]},
        )  # fmt: skip
        for name, value in zip(names, values, strict=True):
            if value > 60:
                fig.add_annotation(x=60, y=name, text="exact", xanchor="right", xshift=-8)
    fig.update_layout(showlegend=True, legend={"orientation": "h", "y": 0.02, "yanchor": "bottom", "x": 0.35})
    return fig


def damage(result: "DamageResult") -> go.Figure:
    """KL of every setting, the least first, with its standard error; bits a weight beside the name."""
    m = result.metrics
    names = sorted((name for name in result.asked.settings if name != "keep"), key=lambda name: m[f"kl_{name}"])
    worst = names[-1]
    coded = [name for name in names if m[f"kl_{name}"] > LEAST]
    best = coded[0] if coded else names[0]
    fig = figure(
        f"Against the file's own weights: {worst} costs {m[f'kl_{worst}']:.1f} nats,<br>"
        f"{best} {m[f'kl_{best}']:.2g}; the account's policy stands in red",
        x="KL from the reference (nats, log)",
        height=130 + 26 * len(names),
    )
    for index, name in enumerate(names):
        value = m[f"kl_{name}"]
        fig.add_scatter(
            x=[max(LEAST, value)], y=[f"{name}, {m[f'bits_{name}']:.2f} bits"], mode="markers", name=name,
            error_x={"type": "data", "array": [m[f"kl_se_{name}"]], "color": GREY},
            marker={"size": 10, "color": RED if name.startswith("account") else PALETTE[0]},
        )  # fmt: skip
        if value <= LEAST:
            fig.add_annotation(x=-6, y=index, text="nothing is lost", xanchor="left", xshift=12)
    fig.update_xaxes(type="log", exponentformat="power", dtick=1)
    fig.update_yaxes(autorange="reversed", showgrid=True)
    return fig


def outputs(result: "DamageResult") -> go.Figure:
    """SQNR of what each layer adds to the true state, a line a setting; those that change nothing are left out."""
    series = {name: result.samples[f"output_db_{name}"] for name in result.asked.settings}
    names = [name for name in series if min(series[name]) < 150] or list(series)
    best = max(names, key=lambda name: min(series[name]))
    worst = min(names, key=lambda name: min(series[name]))
    at = series[worst].index(min(series[worst]))
    fig = figure(
        f"Against the file's own weights, each layer on the true state:<br>{worst} falls to "
        f"{min(series[worst]):.0f} dB in layer {at}, {best} keeps {min(series[best]):.0f} dB",
        x="layer",
        y="signal over noise of what it adds (dB)",
        height=430,
    )
    for index, name in enumerate(names):
        fig.add_scatter(
            x=list(range(len(series[name]))), y=[round(value, 2) for value in series[name]], name=name,
            mode="lines+markers", marker={"symbol": MARKERS[index % len(MARKERS)], "size": 5},
            line={"color": PALETTE[index % 6], "width": 1.6, "dash": DASHES[index % len(DASHES)]},
        )  # fmt: skip
    fig.update_layout(showlegend=True, margin_r=120)
    return fig
