"""The gradient contract's experiments on a tiny model and a small layer: arithmetic, what is learned, what repeats."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch
from tiny import save_tiny, tiny_model

from nanokit import quant
from nanokit.engine.load import LoadedEngine
from nanokit.errors import ParameterError
from nanokit.lab import lock, plots
from nanokit.lab.experiments import qat_points
from nanokit.lab.experiments.adapters import AdaptersResult, adapters
from nanokit.lab.experiments.agreement import logits_of
from nanokit.lab.experiments.distil import divergence, own_texts, schedule
from nanokit.lab.experiments.gradient_params import GradientParams
from nanokit.lab.experiments.one_grid import five_numbers, one_grid, passing
from nanokit.lab.experiments.qat import QatResult, fresh, policy_of, qat
from nanokit.lab.experiments.small_layer import ESTIMATORS, SmallLayerParams, small_layer
from nanokit.lab.quality import reference as references
from nanokit.lab.quality.tasks import TaskScore
from nanokit.lab.repeat import comparable
from nanokit.lab.result import together


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    shape = {"hidden": 64, "heads": 4, "head_dim": 16, "intermediate": 96}
    yield str(save_tiny(tmp_path_factory.mktemp("gradient") / "tiny", tiny_model("llama", **shape)))
    references.forget()


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


@pytest.fixture(autouse=True)
def given_points(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A tiny model's context has no room for the tasks. Returned: logits of a text, of every model that was scored."""
    seen: list[torch.Tensor] = []

    def score(engine: LoadedEngine, task: str, limit: int) -> TaskScore:
        seen.append(logits_of(engine, list(range(20))))
        return TaskScore(task, {str(i): i <= (len(seen) - 1) % 4 for i in range(8)}, {})

    monkeypatch.setattr(qat_points, "score", score)
    return seen


def params(tiny: str, **changes: object) -> GradientParams:
    small: dict[str, object] = {
        "preset": "smoke", "model": tiny, "weights": "int4-sym-g32", "formats": ["int4-sym-g32", "nvfp4"], "texts": 24,
        "text_tokens": 64, "batch": 8, "steps": 30, "learning_rate": 1e-3, "lora_steps": 20, "lora_rank": 4,
        "lora_learning_rate": 3e-3, "products": "fp32", "layers": 2, "windows": 1, "window_tokens": 64,
    }  # fmt: skip
    return GradientParams.from_mapping(small | changes)


def test_the_gradient_of_the_loss_is_autograds() -> None:
    """It is written out by hand, so that no logits are kept; chunks of 512 rows join where a sign would not."""
    generator = torch.Generator().manual_seed(0)
    states, target = (torch.randn(700, 16, generator=generator) for _ in range(2))
    head = torch.randn(40, 16, generator=generator)
    loss, gradient = divergence(states, target, head)
    leaf = states.double().requires_grad_()
    p, q = (target.double() @ head.double().T).log_softmax(-1), (leaf @ head.double().T).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient, leaf.grad.float(), rtol=1e-4, atol=1e-7)


def test_the_rate_rises_and_falls_and_stays_at_zero() -> None:
    """Beyond the last step it is 0: steps are timed there, and may not move a weight."""
    rates = [schedule(step, 40) for step in range(60)]
    assert rates[0] == pytest.approx(0.25, rel=0.01)
    assert max(rates) == rates[3]
    assert all(a > b for a, b in pairwise(rates[3:40]))
    assert rates[40:] == [0.0] * 20


def test_texts_are_the_models_own_and_repeat(tiny: str) -> None:
    texts = own_texts(tiny, 3, 12, 5)
    assert texts.shape == (3, 12)
    assert torch.equal(texts, own_texts(tiny, 3, 12, 5))
    assert not torch.equal(texts, own_texts(tiny, 3, 12, 6))
    assert len({tuple(text) for text in texts.tolist()}) == 3


def test_training_learns_the_grid(tiny: str) -> None:
    """Damage goes down, on a text that was not trained on; times are taken without moving a weight; all of it repeats,
    and is drawn."""
    p = params(tiny)
    result = qat(p)
    losses = result.samples["loss"]
    assert len(losses) == 30
    assert losses[-1] < 0.7 * losses[0]
    assert result.kl["qat"] < result.kl["plain"]
    assert result.metrics["recovered_rate"] == pytest.approx(1 - result.kl["qat"] / result.kl["plain"])
    assert {"recovered", "KL (nats)"} <= set(result.table().columns)
    for draw in (plots.qat, plots.training):
        assert isinstance(draw(result), go.Figure)
    assert comparable(qat(p).to_record()) == comparable(result.to_record())
    searched = qat(replace(p, scales="searched", steps=4))
    assert searched.kl["search"] == result.kl["search"]
    assert policy_of(replace(p, layers=1), True) == "int4-sym-g32+search;1-1=keep"


def test_points_are_those_of_the_weights_that_were_trained(tiny: str, given_points: list[torch.Tensor]) -> None:
    """Of the file as it is stored, then searched, plain and trained weights, through a file and the packed kernels:
    a way that is scored with another's weights, or a file that rounds once more, shows here."""
    p = params(tiny, steps=4, tasks=["arithmetic"])
    result = qat(p)
    prepared = fresh(p)
    expected = [prepared.logits(list(range(20)))]
    for policy in (policy_of(p, True), policy_of(p)):
        expected.append(quant.apply(fresh(p), policy).logits(list(range(20))))
    for found, wanted in zip(given_points[:3], expected, strict=True):
        assert torch.allclose(found, wanted, atol=2e-3 * float(wanted.abs().max()))
    trained = given_points[3]
    assert all((trained - each).abs().max() > 0.01 for each in given_points[:3])
    m = result.metrics
    assert [m[f"points_of_{way}_arithmetic"] for way in ("stored", "search", "plain", "qat")] == [12.5, 25, 37.5, 50]
    assert m["gained_points_arithmetic"] == 12.5
    assert "+12.5 points" in result.gained
    assert [row[-1][:4] for row in result.table().rows] == ["12.5", "37.5", "25.0", "50.0"]


def test_verdict_on_qat_follows_the_figures(tiny: str) -> None:
    p = params(tiny)
    figures = {"kl_mean_of_plain": 0.6, "kl_mean_of_search": 0.4, "beyond_search_rate": 0.5}
    figures |= {"kl_se_of_search_less_qat": 0.01}

    def verdict(kl: float, ratio: float) -> str:
        return QatResult(p, figures | {"kl_mean_of_qat": kl, "rounding_time_ratio": ratio}).verdict_q6

    assert verdict(0.2, 1.5).startswith("holds here: QAT takes 50%")
    assert verdict(0.2, 1.1).startswith("holds here in part")
    assert "+10% (claimed: +47 %)" in verdict(0.2, 1.1)
    assert verdict(0.39, 1.5).startswith("is not shown here")
    assert verdict(0.41, 1.5).startswith("does not hold here")


def test_adapters_merge_without_loss_on_the_grid_alone(tiny: str) -> None:
    result = adapters(params(tiny))
    assert result.kl("on_grid", "merged") == result.kl("on_grid", "unmerged")
    assert result.kl("free", "unmerged") < result.metrics["kl_mean_of_before"]
    assert result.kl("free", "merged") > result.kl("free", "unmerged")
    assert result.lost > 0
    assert not result.diverges("free")
    assert result.verdict_q7.startswith("does not hold here")
    for draw in (plots.adapters, plots.adapter_losses):
        assert isinstance(draw(result), go.Figure)
    rising = AdaptersResult(
        result.params, result.metrics, {**result.samples, "loss_of_free": [1.0, 2.0, 5.0, 9.0, 9.0]}
    )
    assert rising.verdict_q7.startswith("holds here")
    nan = float("nan")
    assert AdaptersResult(result.params, result.metrics, {**result.samples, "loss_of_free": [1.0, nan]}).diverges(
        "free"
    )


def test_one_grid_in_every_bit(tiny: str) -> None:
    p = params(tiny)
    result = one_grid(p)
    assert result.all_equal
    assert [row[0] for row in result.table().rows] == p.formats
    assert together(result, one_grid(p).__class__(p, {}, settings=result.settings)).metrics == result.metrics


def test_five_numbers_and_a_count() -> None:
    """Inside, at and beyond the bound, by hand."""
    rows = five_numbers().rows
    assert [(row[3], row[5]) for row in rows] == [
        ("inside", "1"), ("at the bound", "1"), ("at the bound", "1"), ("beyond", "0"), ("beyond", "0"),
    ]  # fmt: skip
    assert passing([3.4, 3.6, 3.7, 3.75, 3.76, -3.74, -4.0], scale=0.5) == 4


@pytest.mark.parametrize("weights", ["int4-sym-g16", "int4-asym-g16", "int8-sym-g64"])
def test_a_small_layer_and_its_three_derivatives(weights: str) -> None:
    """Rounding's own moves nothing; a mask that dies at the bound leaves every weight there where it was."""
    result = small_layer(SmallLayerParams(preset="smoke", weights=weights))
    m = result.metrics
    assert m["gradient_norm_roundings_own"] == m["moved_rate_roundings_own"] == 0
    assert m["bound_moved_rate_dies_at_the_bound"] == 0
    assert m["bound_moved_rate_passes_at_the_bound"] == 1
    through, dead, flat = (result.errors(each)[-1] for each in ESTIMATORS)
    assert through < 0.2
    assert dead > 1.2 * through
    assert flat == 1.0
    assert isinstance(plots.small_layer(result), go.Figure)
    assert comparable(small_layer(result.asked).to_record()) == comparable(result.to_record())


def test_what_is_refused(tiny: str) -> None:
    with pytest.raises(ParameterError, match="unknown weight format"):
        params(tiny, weights="int3")
    with pytest.raises(ParameterError, match="more texts than there are"):
        params(tiny, batch=25)
    with pytest.raises(ParameterError, match=r"(?s)does not fit.*g16, g32, g64"):
        qat(params(tiny, weights="int4-sym-g128"))
