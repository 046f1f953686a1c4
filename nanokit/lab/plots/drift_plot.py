"""Figures of activation drift: what a healthy model looks like, how far other texts are from it, and what breaks."""

from math import log10
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from nanokit.kernels.activations import PLACES
from nanokit.lab.experiments.drift_damage import STATIC, settings_of
from nanokit.lab.experiments.drift_params import BLOCK
from nanokit.lab.experiments.drift_points import EXACT, FIXED, modes_of
from nanokit.lab.experiments.drift_profile import ABNORMAL, NORMAL, SEEN
from nanokit.lab.plots.house import DASHES, GREY, MARKERS, PALETTE, bars, figure, mark, with_remark

if TYPE_CHECKING:
    from nanokit.lab.experiments.drift_damage import DamageResult
    from nanokit.lab.experiments.drift_mode import ModeResult
    from nanokit.lab.experiments.drift_points import PointsResult
    from nanokit.lab.experiments.drift_profile import ProfileResult

LEAST_KL = 1e-7  # what a logarithmic axis begins with


def _by_layer(fig: go.Figure, series: dict[str, list[float]], right: int = 132) -> None:
    """Lines over layers, each with its name in a legend at the right: ends that lie close would hide names there."""
    for index, (name, values) in enumerate(series.items()):
        fig.add_scatter(
            x=list(range(len(values))), y=[float(f"{value:.5g}") for value in values], name=name, mode="lines+markers",
            line={"color": PALETTE[index % 6], "width": 2, "dash": DASHES[index % len(DASHES)]},
            marker={"symbol": MARKERS[index % len(MARKERS)], "size": 6},
        )  # fmt: skip
    fig.update_layout(
        showlegend=True, margin_r=right,
        legend={"x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top", "bgcolor": "rgba(0,0,0,0)"},
    )  # fmt: skip


def drift_profile(result: "ProfileResult") -> go.Figure:
    """Std by layer and place in a healthy model, beside the absolute rule."""
    m, block = result.metrics, result.layers("std", BLOCK)
    above = sum(value > ABNORMAL for value in block)
    fig = figure(
        f"Healthy, and yet {above} of {len(block)} attention blocks have a std above {ABNORMAL};<br>"
        f"of all {m['places']:.0f} places only {m['profile_places_normal']:.0f} lie within .6 to 1.0",
        x="layer", y="std, position 0 left out", height=430,
    )  # fmt: skip
    fig.add_hrect(y0=NORMAL[0], y1=NORMAL[1], fillcolor=GREY, opacity=0.25, line_width=0)
    fig.add_hline(y=ABNORMAL, line={"color": GREY, "dash": "dash", "width": 1.5})
    # A position on a logarithmic axis is its exponent, and `add_hline` puts its label at the value.
    fig.add_annotation(x=4, y=log10(ABNORMAL), yshift=10, text=f"the account's alarm: {ABNORMAL}")
    _by_layer(fig, {place: result.layers("std", place) for place in SEEN}, right=160)
    fig.update_yaxes(type="log", dtick=1)
    return fig


def drift_first(result: "ProfileResult") -> go.Figure:
    """The largest magnitude by layer, of position 0 and of all others, where the two are farthest apart."""
    place, layer, ratio = _farthest(result)
    fig = figure(
        f"{place}: in layer {layer} position 0 holds {ratio:,.0f} times<br>the largest value of all other positions",
        x="layer", y="largest magnitude", height=400,
    )  # fmt: skip
    _by_layer(fig, {"position 0": result.layers("first_peak", place), "all others": result.layers("peak", place)})
    fig.update_yaxes(type="log", dtick=1)
    return fig


def _farthest(result: "ProfileResult") -> tuple[str, int, float]:
    pairs = [
        (place, layer, first / later)
        for place in PLACES
        for layer, (first, later) in enumerate(
            zip(result.layers("first_peak", place), result.layers("peak", place), strict=True)
        )
    ]
    return max(pairs, key=lambda each: each[2])


def drift_ratios(result: "ProfileResult") -> go.Figure:
    """Std of every place on each text over the profile's, by layer."""
    p, m = result.asked, result.metrics
    alarms = ", ".join(f"{text} {m[f'alarms_{text}']:.0f}" for text in p.texts)
    fig = figure(
        f"Alarms by ratio to the profile, of {m['places']:.0f} places:<br>{alarms}",
        x="layer", y="std over the profile's (ratio)", height=400,
    )  # fmt: skip
    for index, text in enumerate(p.texts):
        values = [
            (layer, value) for place in SEEN for layer, value in enumerate(result.layers("std_ratio", place, text))
        ]
        fig.add_scatter(
            x=[layer + (index - 1) * 0.22 for layer, _ in values], y=[round(value, 4) for _, value in values],
            name=text, mode="markers",
            marker={"color": PALETTE[index], "symbol": MARKERS[index], "size": 6, "opacity": 0.75},
        )  # fmt: skip
    for bound in (p.std_ratio, 1 / p.std_ratio):
        mark(fig, f"alarm: {bound:.2f}", y=bound)
    fig.update_layout(showlegend=True, margin_r=120, legend={"x": 1.01, "xanchor": "left", "bgcolor": "rgba(0,0,0,0)"})
    return fig


def drift_vanishing(result: "ProfileResult", text: str = "") -> go.Figure:
    """Share of values whose code is 0 under static scales, by layer and place. text: empty is the second one."""
    text = text or result.asked.texts[min(1, len(result.asked.texts) - 1)]
    series = {place: [100 * value for value in result.layers("vanishing", place, text)] for place in PLACES}
    worst = max(PLACES, key=lambda place: max(series[place]))
    layer = series[worst].index(max(series[worst]))
    fig = figure(
        f"{text}: static scales clip {100 * result.metrics[f'clipped_{text}']:.4f} % of the values<br>"
        f"and have no code but 0 for {max(series[worst]):.1f} % at layer {layer}'s {worst}",
        x="layer", y="values whose code is 0 (%)", height=400,
    )  # fmt: skip
    _by_layer(fig, series, right=160)
    fig.update_yaxes(range=[-2, 104])
    return fig


def drift_damage(result: "DamageResult") -> go.Figure:
    """KL to fp32 activations: a row a setting, a dot a text."""
    p, m = result.asked, result.metrics
    names = settings_of(p)
    other = p.texts[min(1, len(p.texts) - 1)]
    fixed, own = m[f"kl_mean_static_{other}"], m[f"kl_mean_static_own_{other}"]
    fig = figure(
        f"{other}: calibrated on the very text, static is at KL {own:.2f} beside {fixed:.2f};<br>"
        f"a scale a token is at {m[f'kl_mean_token_{other}']:.3f}",
        x="mean KL to fp32 activations, the file's own weights (nats)", height=150 + 34 * len(names),
    )  # fmt: skip
    for index, text in enumerate(p.texts):
        fig.add_scatter(
            x=[max(LEAST_KL, float(f"{m[f'kl_mean_{name}_{text}']:.4g}")) for name in names],
            y=[STATIC.get(name, name) for name in names], name=text, mode="markers",
            marker={"color": PALETTE[index], "symbol": MARKERS[index], "size": 9},
        )  # fmt: skip
    fig.update_xaxes(type="log", exponentformat="power", dtick=1)
    fig.update_yaxes(autorange="reversed")
    fig.update_layout(showlegend=True, margin_r=120, legend={"x": 1.01, "xanchor": "left", "bgcolor": "rgba(0,0,0,0)"})
    return fig


def drift_points(result: "PointsResult") -> go.Figure:
    """Points of each task by mode, with intervals."""
    p, m, modes = result.asked, result.metrics, modes_of(result.asked)
    exact, fixed, token = (m[f"points_{mode}_{p.tasks[0]}"] for mode in (EXACT, FIXED, "token"))
    fig = figure(
        f"{p.tasks[0]}: {exact:.0f} points with exact activations, {fixed:.0f} with<br>static scales, "
        f"{token:.0f} with a scale a token",
        x="points (items right of a hundred, 95 % interval)", height=130 + 40 * len(modes) * len(p.tasks),
    )  # fmt: skip
    for index, each in enumerate(p.tasks):
        values, lows, highs = ([m[f"points_{end}{mode}_{each}"] for mode in modes] for end in ("", "low_", "high_"))
        fig.add_scatter(
            x=[round(value, 2) for value in values], y=[[each] * len(modes), modes], mode="markers", name=each,
            error_x={
                "type": "data", "symmetric": False, "color": GREY, "thickness": 1.5, "width": 5,
                "array": [round(high - value, 2) for high, value in zip(highs, values, strict=True)],
                "arrayminus": [round(value - low, 2) for low, value in zip(lows, values, strict=True)],
            },
            marker={"color": PALETTE[index], "symbol": MARKERS[index], "size": 10},
        )  # fmt: skip
    fig.update_xaxes(range=[-3, 103])
    fig.update_yaxes(autorange="reversed")
    return fig


def drift_speed(result: "PointsResult") -> go.Figure:
    """Time of a decoded token by mode."""
    series = {mode: result.samples[f"ms_per_token_{mode}"] for mode in modes_of(result.asked)}
    finding = f"A scale a token takes {result.slowdown:.2f} times the time of static scales"
    return bars(with_remark(finding, result.remarks), series, unit="decoded token alone (ms)", digits=2)


def drift_mode(result: "ModeResult") -> go.Figure:
    """KL of each scored token along a text."""
    p, m, kl = result.params.to_dict(), result.metrics, result.samples["kl"]
    first = int(str(p["tokens"])) // 2
    how = f", calibrated on {p['calibration']}" if p["activations"] == "static" else ""
    fig = figure(
        f"{p['activations']} on {p['text']}.txt{how}:<br>KL {m['kl_mean']:.2g}, best token the same at {m['top1']:.0%}",
        x="position in the text (tokens)", y="KL to fp32 activations (nats)",
    )  # fmt: skip
    fig.add_scatter(
        x=list(range(first, first + len(kl))), y=[max(LEAST_KL, float(f"{value:.4g}")) for value in kl],
        mode="markers", marker={"color": PALETTE[0], "size": 6}, name="KL",
    )  # fmt: skip
    fig.update_yaxes(type="log", exponentformat="power", dtick=1)
    return fig
