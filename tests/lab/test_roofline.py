"""The roofline's experiments on a tiny model and on made-up times: arithmetic, shapes, and what repeats."""

import statistics
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from tiny import save_tiny, tiny_model

from nanokit.errors import ParameterError
from nanokit.kernels.cpu import NoKernelsError
from nanokit.kernels.cpu.library import library
from nanokit.kernels.cpu.ops import Linear
from nanokit.lab import lock, plots
from nanokit.lab.engines import engine_for
from nanokit.lab.experiments import product as products
from nanokit.lab.experiments import roofline as module
from nanokit.lab.experiments.activation_cost import ActivationResult, activation_cost
from nanokit.lab.experiments.agreement import divergence, kept, logits_of, top1
from nanokit.lab.experiments.ceiling import weights_of
from nanokit.lab.experiments.noise import BLOCK, NoiseResult, comparisons, floor, noise
from nanokit.lab.experiments.roofline import RooflineParams, RooflineResult, figures, roofline
from nanokit.lab.experiments.step_cost import StepParams, step_cost
from nanokit.lab.progress import StoppedError
from nanokit.lab.repeat import comparable
from nanokit.lab.result import Result, together

Results = tuple[NoiseResult, RooflineResult, ActivationResult]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield str(save_tiny(tmp_path_factory.mktemp("roofline") / "tiny", tiny_model("llama")))
    engine_for.cache_clear()


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


def params(tiny: str, **changes: object) -> RooflineParams:
    small: dict[str, object] = {
        "preset": "smoke", "model": tiny, "activations": "fp32", "rows": [1, 3, 5], "ctx": [32, 64],
        "prompt_tokens": 64, "buffers": [1, 2], "same_steps": 60, "modes": ["token", "tensor"], "text_tokens": 48,
        "prompts": 2, "answer_tokens": 6,
    }  # fmt: skip
    return RooflineParams.from_mapping(small | changes)


def run(tiny: str) -> Results:
    p = params(tiny)
    return noise(p), roofline(p), activation_cost(p)


@pytest.fixture(scope="module")
def results(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "lock_path", lambda: tmp_path_factory.mktemp("lock") / "measuring.lock")
        return run(tiny)


# -- how we measure ---------------------------------------------------------------------------------------------------


def test_turns_cancel_a_drift_and_medians_ignore_a_disturbance() -> None:
    """The figure argues for both; a way that did not help would be named as if it did."""
    drifting = [10.0 + 0.1 * step for step in range(6 * BLOCK)]
    ways = {name: floor(ratios) for name, ratios in comparisons(drifting).items()}
    assert ways["ratio_medians_in_turns"] < 0.2 * ways["ratio_medians_in_sequence"]
    disturbed = [10.0] * (6 * BLOCK)
    disturbed[3] = disturbed[BLOCK + 3] = disturbed[4 * BLOCK] = 400.0
    ways = {name: floor(ratios) for name, ratios in comparisons(disturbed).items()}
    assert ways["ratio_means_in_sequence"] > 1
    assert ways["ratio_medians_in_sequence"] == ways["ratio_medians_in_turns"] == 0


def test_each_comparison_has_steps_of_its_own() -> None:
    """Comparisons that share steps are not independent, and their spread looks smaller than it is."""
    series = [float(step + 1) for step in range(2 * BLOCK * 3 + 5)]
    found = comparisons(series)
    assert {len(ratios) for ratios in found.values()} == {3}
    first, second = series[:BLOCK], series[BLOCK : 2 * BLOCK]
    assert found["ratio_means_in_sequence"][0] == pytest.approx(sum(first) / sum(second))


def test_the_floor_is_kept_by_nine_of_ten() -> None:
    ratios = [1 + 0.01 * n for n in range(100)]
    assert sum(abs(ratio - 1) <= floor(ratios) for ratio in ratios) == 90
    assert floor([0.5, 1.2]) == 0.5


def test_the_first_steps_are_those_of_a_fresh_engine(tiny: str) -> None:
    """An engine that has run before is warm: its first timed step is none."""
    before = engine_for(tiny, "fp32", "fp16")
    result = noise(params(tiny))
    assert engine_for(tiny, "fp32", "fp16") is not before
    assert {name: len(values) for name, values in result.samples.items() if name.endswith("_ms")} == {
        "first_ms": 20, "rested_ms": 20, "same_ms": 60,
    }  # fmt: skip


# -- the two limits ---------------------------------------------------------------------------------------------------


def test_weights_are_those_that_a_row_is_multiplied_with(tiny: str) -> None:
    """Counted by transformers: every matrix but the embedding, which is looked up."""
    model = tiny_model("llama")
    matrices = {name: value.numel() for name, value in model.named_parameters() if value.ndim == 2}
    head = matrices.pop("lm_head.weight")
    del matrices["model.embed_tokens.weight"]
    assert weights_of(engine_for(tiny, "fp32", "fp16").model.config) == (sum(matrices.values()), head)


def test_shares_and_ridge_follow_from_made_up_times(tiny: str) -> None:
    """By hand: at the ridge, reading the bytes and the operations of so many rows take equally long."""
    engine = engine_for(tiny, "fp32", "fp16")
    p, size = params(tiny, rows=[1, 4], ctx=[64]), engine.model.bytes_per_token
    layers, head = weights_of(engine.model.config)
    reading_ms = size / 1e6 / 2.0
    samples = {
        "stream_gb_s": [2.0], "step_ms": [2 * reading_ms], "ceiling_gop_per_s": [50.0], "prefill_ms_at_64": [8.0],
        "rows_1_ms_at_64": [3.0], "rows_4_ms_at_64": [4.5], "read_gb_s_of_1_mib": [7.0], "read_gb_s_of_2_mib": [6.0],
    }  # fmt: skip
    m = figures(p, engine, samples)
    assert m["share_of_limit"] == pytest.approx(0.5)
    one_row_ms = 2 * (layers + head) / 50e9 * 1e3
    assert m["ridge_rows_ratio"] * one_row_ms == pytest.approx(reading_ms)
    assert m["prefill_gop_per_s"] == pytest.approx(2 * (64 * layers + head) / 8e-3 / 1e9)
    assert m["v_ratio_of_4_at_64"] == 1.5
    result = RooflineResult(p, m)
    assert result.v == {64: {1: 1.0, 4: 1.5}}
    per_byte, speed = result.points[4]
    assert per_byte * size == pytest.approx(8 * (layers + head))
    assert speed * 4.5e-3 * 1e9 == pytest.approx(8 * (layers + head))


@pytest.mark.parametrize(
    ("decode", "prefill", "verdict"),
    [
        ((0.8, 0.1), (0.02, 0.7), "does not hold here: it is the other way round"),
        ((0.1, 0.8), (0.7, 0.02), "holds here"),
        ((0.8, 0.1), (0.7, 0.02), "holds here for prefill only"),
    ],
)
def test_the_verdict_is_computed(decode: tuple[float, float], prefill: tuple[float, float], verdict: str) -> None:
    names = ("share_of_limit", "decode_arithmetic_share", "prefill_memory_share", "prefill_arithmetic_share")
    result = RooflineResult(RooflineParams(), dict(zip(names, (*decode, *prefill), strict=True)))
    assert result.verdict_p12 == verdict


def test_a_limit_that_is_beaten_is_remarked(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding cannot be faster than reading the weights: a share above 1 is a fault of measurement."""
    monkeypatch.setattr(module, "reader", lambda engine: lambda: 1e-9)
    result = roofline(params(tiny))
    assert result.metrics["share_of_limit"] > 1
    assert any("faster than memory allows" in remark for remark in result.remarks)


def test_rows_without_one_are_refused() -> None:
    """v(n) is a ratio to one row."""
    with pytest.raises(ParameterError, match="rows"):
        RooflineParams(rows=[2, 4])


# -- activation modes -------------------------------------------------------------------------------------------------


def test_divergence_is_that_of_torch() -> None:
    noise_ = torch.Generator().manual_seed(3)
    expected, found = (3 * torch.randn(150, 40, generator=noise_) for _ in range(2))
    oracle = torch.nn.functional.kl_div(
        found.double().log_softmax(-1), expected.double().log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(divergence(expected, found), oracle)
    assert divergence(expected, expected).abs().max() == 0


def test_agreement_counts_positions() -> None:
    expected = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert top1(expected, expected.flip(0)) == 0.5
    assert kept([5, 6, 7], [5, 6, 7]) == 3
    assert kept([5, 6, 7], [5, 9, 7]) == 1


def test_logits_of_a_text_give_their_blocks_back(tiny: str) -> None:
    engine = engine_for(tiny, "fp32", "fp16")
    logits = logits_of(engine, list(range(70)))
    assert logits.shape == (70, engine.model.vocab_size)
    assert engine.pool.available == engine.config.num_blocks
    engine.check_integrity()


def test_every_mode_has_its_figures(results: Results) -> None:
    """Rounding moves the output of the tiny model a little, and one token's time is measured in turns."""
    result = results[2]
    for mode in ("token", "tensor"):
        assert 0 < result.metrics[f"kl_mean_{mode}"] <= result.metrics[f"kl_largest_{mode}"] < 1
        assert 0.5 < result.metrics[f"top1_{mode}"] <= 1
        assert len(result.samples[f"answer_tokens_kept_{mode}"]) == 2
        assert len(result.samples[f"ms_per_token_{mode}"]) == 2 * 12
    assert [row[0] for row in result.table().rows] == ["token", "tensor"]
    assert min(float(row[-1]) for row in result.table().rows) == 1.0


# -- panels -----------------------------------------------------------------------------------------------------------


def test_a_step_is_compared_with_one_row_and_with_reading(tiny: str) -> None:
    p = StepParams(preset="smoke", model=tiny, rows=3, ctx=64, activations="fp32", kv_format="int8")
    result = step_cost(p)
    m = result.metrics
    assert m["v_ratio"] == pytest.approx(m["rows_ms"] / m["one_row_ms"])
    assert {len(values) for values in result.samples.values()} == {12}
    engine = engine_for(tiny, "fp32", "int8")
    assert engine.pool.available == engine.config.num_blocks
    assert "3 rows" in plots.step_cost(result).layout.title.text


@pytest.fixture
def kernels() -> None:
    try:
        library()
    except NoKernelsError as error:
        pytest.skip(str(error))


def test_a_product_walks_through_as_many_bytes_as_asked(kernels: None) -> None:
    p = products.ProductParams(preset="smoke", walk=6, rows=2)
    result = products.product(p)
    assert result.metrics["walk_bytes"] == pytest.approx(6 << 20, rel=0.3)
    assert result.settings["copies"] > 1
    speed = result.metrics["rows_gb_s"] / result.metrics["walk_bytes"]  # walks in a nanosecond
    operations = 2 * products.SIDE**2 * result.settings["copies"] * 2
    assert result.metrics["rows_gop_per_s"] == pytest.approx(speed * operations)


def test_without_kernels_the_reference_computes_the_same(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = products.random_weights("int4-asym-g32", 48, 96)
    assert np.array_equal(weights.scales, weights.scales.astype(np.float16))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    for mode in ("a16", "a8g32", "tensor"):
        torch.testing.assert_close(
            products.TorchLinear(weights)(x, mode), Linear(weights)(x, mode), rtol=1e-4, atol=1e-4
        )

    def none() -> None:
        raise NoKernelsError("no compiler was found")

    monkeypatch.setattr(products, "library", none)
    monkeypatch.setattr(products, "SIDE", 256)
    result = products.product(products.ProductParams(preset="smoke", walk=1))
    assert result.settings == {"matrix": [256, 256], "copies": 4, "compiled": False}


# -- records and figures ----------------------------------------------------------------------------------------------


def test_what_does_not_depend_on_time_repeats(tiny: str, results: Results) -> None:
    """A timing under a name that does not say so makes `nanokit run --from-record` fail."""
    first, again = (comparable(together(*three).to_record()) for three in (results, run(tiny)))
    assert first == again
    assert {"metric kl_mean_token", "metric top1_tensor", "metric bytes_per_token"} <= set(first)


def test_results_that_contradict_each_other_are_not_one() -> None:
    p = RooflineParams()
    a, b = Result(p, {"x_ms": 1.0}, settings={"model": "m"}), Result(p, {"y_ms": 2.0}, settings={"model": "m"})
    assert together(a, b).metrics == {"x_ms": 1.0, "y_ms": 2.0}
    for other in (replace(b, metrics={"x_ms": 3.0}), replace(b, settings={"model": "n"})):
        with pytest.raises(ValueError, match="name"):
            together(a, other)
    with pytest.raises(ValueError, match="parameters"):
        together(a, replace(b, params=RooflineParams(repeats=7)))


def test_stop_is_heard(tiny: str) -> None:
    cancel = threading.Event()
    cancel.set()
    for experiment in (noise, roofline, activation_cost):
        with pytest.raises(StoppedError):
            experiment(params(tiny), cancel=cancel)
        engine_for(tiny, "fp32", "fp16").check_integrity()
    assert engine_for(tiny, "fp32", "fp16").pool.available == engine_for(tiny, "fp32", "fp16").config.num_blocks


def figures_of(results: Results) -> dict[str, go.Figure]:
    timed, limits, cost = results
    return {
        "warmup": plots.warmup(timed), "noise": plots.noise(timed), "streaming": plots.streaming(limits),
        "roofline": plots.roofline(limits), "verification": plots.verification(limits),
        "activation_cost": plots.activation_cost(cost),
    }  # fmt: skip


def test_figures_state_what_was_measured(results: Results) -> None:
    """A title typed in, opaque numbers, an axis without a unit."""
    drawn = figures_of(results)
    for name, fig in drawn.items():
        assert "bdata" not in fig.to_json(), name
        assert "(" in fig.layout.xaxis.title.text + fig.layout.yaxis.title.text, name
    limits = results[1].metrics
    assert f"{limits['share_of_limit']:.0%}" in drawn["roofline"].layout.title.text
    assert f"{limits['v_ratio_of_5_at_32']:.1f} forwards" in drawn["verification"].layout.title.text
    usual = statistics.median(results[0].samples["same_ms"])
    assert f"{usual:.2f} ms" in drawn["warmup"].layout.xaxis.title.text
