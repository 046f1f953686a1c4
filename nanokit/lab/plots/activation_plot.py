"""The activation modes' figure: what a token costs against how far the output moves."""

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from nanokit.lab.plots.house import MARKERS, figure, with_remark
from nanokit.lab.plots.house import color as paint_of

if TYPE_CHECKING:
    from nanokit.lab.experiments.activation_cost import ActivationResult

CLOSE = 4  # of divergences: so near that names would overlap


def activation_cost(result: "ActivationResult") -> go.Figure:
    """KL to fp32 activations (logarithmic) over milliseconds per token, a point a mode."""
    m, modes = result.metrics, result.modes
    kl = {mode: m[f"kl_mean_{mode}"] for mode in modes}
    ms = {mode: m[f"ms_per_token_{mode}"] for mode in modes}
    closest, farthest, fastest = min(kl, key=kl.__getitem__), max(kl, key=kl.__getitem__), min(ms, key=ms.__getitem__)
    finding = (
        f"{closest} stays closest to fp32 (KL {kl[closest]:.1g}) at {ms[closest] / ms[fastest]:.2f} times the time<br>"
        f"of {fastest}; {farthest} moves farthest (KL {kl[farthest]:.2g})"
    )
    fig = figure(
        with_remark(finding, result.remarks),
        x="time per token (ms)",
        y="mean KL to fp32 activations (nats)",
    )
    for index, mode in enumerate(modes):
        # Of two at nearly one height, the names stand on the outer sides.
        left = any(ms[mode] < ms[other] and 1 / CLOSE < kl[mode] / kl[other] < CLOSE for other in modes)
        fig.add_scatter(
            x=[ms[mode]],
            y=[kl[mode]],
            name=mode,
            mode="markers+text",
            text=[f"{mode}  " if left else f"  {mode}"],
            textposition="middle left" if left else "middle right",
            cliponaxis=False,
            marker={"color": paint_of(mode, index), "symbol": MARKERS[index % len(MARKERS)], "size": 11},
            hovertemplate=f"{mode}: %{{x:.2f}} ms, KL %{{y:.2g}}<extra></extra>",
        )
    fig.update_yaxes(type="log", exponentformat="power", dtick=1)
    fig.update_xaxes(range=[0, 1.25 * max(ms.values())])
    return fig
