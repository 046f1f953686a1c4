"""Figures of the gradient contract: estimators on a small layer, QAT against rounding, and adapters."""

from math import log10
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from nanokit.lab.plots.house import BLUE, DASHES, GREEN, GREY, ORANGE, RED, figure, mark

if TYPE_CHECKING:
    from nanokit.lab.experiments.adapters import AdaptersResult
    from nanokit.lab.experiments.qat import QatResult
    from nanokit.lab.experiments.small_layer import SmallLayerResult

LOWEST = 0.01  # of an axis of errors


def small_layer(result: "SmallLayerResult") -> go.Figure:
    """What is left of plain rounding's error after each step, a line an estimator."""
    from nanokit.lab.experiments.small_layer import ESTIMATORS

    left = {each: result.errors(each)[-1] for each in ESTIMATORS}
    through, dead, flat = (left[each] for each in ESTIMATORS)
    finding = f"{result.asked.weights}: training leaves {through:.0%} of rounding's error;<br>"
    finding += f"{dead:.0%} if weights at a bound stand still, {flat:.0%} without an estimator"
    fig = figure(finding, x="training step", y="error (of rounding alone: 1)")
    fig.update_layout(margin_r=110)
    for index, (each, paint) in enumerate(zip(ESTIMATORS, (GREEN, RED, GREY), strict=True)):
        ys = [round(max(value, LOWEST), 5) for value in result.errors(each)]
        fig.add_scatter(
            x=list(range(len(ys))), y=ys, name=each, mode="lines",
            line={"color": paint, "width": 2, "dash": DASHES[index]},
        )  # fmt: skip
        name = each.replace(" the bound", "<br>the bound").replace("own", "own<br>derivative")
        fig.add_annotation(
            x=len(ys) - 1, y=log10(ys[-1]), text=name, xanchor="left", xshift=8, align="left", font={"color": paint},
        )  # fmt: skip
    fig.update_yaxes(type="log", range=[log10(LOWEST), 0.15], dtick=1)
    fig.update_xaxes(range=[0, len(result.errors(ESTIMATORS[0]))])
    return fig


def qat(result: "QatResult") -> go.Figure:
    """KL from the model as it is stored, a bar a way, with twice its standard error."""
    from nanokit.lab.experiments.qat import CALLED, WAYS

    m, p = result.metrics, result.asked
    finding = (
        f"{p.weights}{result.where}: QAT recovers {m['recovered_rate']:.0%} of the damage,<br>a search of scales "
        f"{m['search_recovered_rate']:.0%}; both against the model as it is stored"
    )
    fig = figure(finding, x="KL from the model as it is stored (nats)", height=290)
    for way, paint in zip(WAYS, (GREY, ORANGE, GREEN), strict=True):
        kl, error = round(m[f"kl_mean_of_{way}"], 5), round(2 * m[f"kl_mean_se_of_{way}"], 5)
        fig.add_bar(
            orientation="h", x=[kl], y=[CALLED[way]], width=0.6, marker={"color": paint}, name=CALLED[way],
            error_x={"type": "data", "array": [error], "color": GREY, "thickness": 1.5, "width": 5},
        )  # fmt: skip
        fig.add_annotation(x=kl + error, y=CALLED[way], text=f"{kl:.3f}", xanchor="left", xshift=8)
    fig.update_xaxes(rangemode="tozero")
    fig.update_yaxes(autorange="reversed", showgrid=False, tickcolor="rgba(0,0,0,0)", showline=False)
    return fig


def training(result: "QatResult") -> go.Figure:
    """The loss of every training step, on texts of the model's own."""
    losses = [round(value, 5) for value in result.samples["loss"]]
    finding = f"On its own texts the model comes from {losses[0]:.2f} to {losses[-1]:.2f} nats<br>"
    finding += f"in {len(losses)} steps of {result.asked.batch * result.asked.text_tokens} tokens"
    fig = figure(finding, x="training step", y="KL of a step's texts (nats a token)")
    fig.add_scatter(
        x=list(range(1, len(losses) + 1)), y=losses, mode="lines+markers", line={"color": GREEN, "width": 2},
        marker={"size": 4}, name="QAT",
    )  # fmt: skip
    fig.update_yaxes(rangemode="tozero")
    return fig


def adapters(result: "AdaptersResult") -> go.Figure:
    """KL of both adapters beside the weights and merged into them."""
    from nanokit.lab.experiments.adapters import CALLED, KINDS

    p, before = result.asked, result.metrics["kl_mean_of_before"]
    grid = result.kl("on_grid", "merged")
    finding = (
        f"Merged into {p.weights}, an adapter loses {result.lost:.0%} of what it had won;<br>"
        f"one that was rounded in training keeps all of its {before - grid:.3f} nats"
    )
    if not result.gains:
        finding = "So few steps win no adapter more than the error:<br>what merging loses of it cannot be told"
    fig = figure(finding, x="KL from the model as it is stored (nats)", height=330)
    rows = [("no adapter", before, GREY)]
    for kind, paint in zip(KINDS, (RED, BLUE), strict=True):
        rows += [(f"{CALLED[kind]}, {state}", result.kl(kind, state), paint) for state in ("unmerged", "merged")]
    for name, kl, paint in rows:
        fig.add_bar(orientation="h", x=[round(kl, 5)], y=[name], width=0.6, marker={"color": paint}, name=name)
        fig.add_annotation(x=round(kl, 5), y=name, text=f"{kl:.3f}", xanchor="left", xshift=8)
    fig.update_xaxes(range=[0, 1.15 * max(kl for _, kl, _ in rows)])
    fig.update_yaxes(autorange="reversed", showgrid=False, tickcolor="rgba(0,0,0,0)", showline=False)
    return fig


def adapter_losses(result: "AdaptersResult") -> go.Figure:
    """The loss of both adapters by step."""
    from nanokit.lab.experiments.adapters import CALLED, KINDS

    verb = "diverges" if result.diverges("free") else "does not diverge"
    first, last = result.loss("free")[0], result.loss("free")[-1]
    fig = figure(
        f"An adapter on rounded weights {verb}:<br>from {first:.2f} to {last:.2f} nats without rounding in training",
        x="training step", y="KL of a step's texts (nats a token)",
    )  # fmt: skip
    fig.update_layout(margin_r=110)
    upper = max(KINDS, key=lambda kind: result.loss(kind)[-1])
    for index, (kind, paint) in enumerate(zip(KINDS, (RED, BLUE), strict=True)):
        ys = [round(value, 5) for value in result.loss(kind)]
        fig.add_scatter(
            x=list(range(1, len(ys) + 1)), y=ys, name=CALLED[kind], mode="lines+markers",
            line={"color": paint, "width": 2, "dash": DASHES[index]}, marker={"size": 5},
        )  # fmt: skip
        fig.add_annotation(
            x=len(ys), y=ys[-1], text=CALLED[kind].replace(" ", "<br>", 1), xanchor="left", xshift=8, align="left",
            yshift=18 if kind == upper else -18, font={"color": paint},
        )  # fmt: skip
    mark(fig, "where both begin", y=round(first, 5))
    fig.update_xaxes(range=[0.8, len(result.loss("free")) + 0.1])
    fig.update_yaxes(rangemode="tozero")
    return fig
