"""Divergence from the reference, against transformers' logits and the textbook formulas in fp64."""

import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import compiled_model, save_tiny, save_tiny_gguf
from torch.nn.functional import cross_entropy, kl_div

from nanokit.engine.load import load
from nanokit.errors import NanokitError, ParameterError
from nanokit.lab.experiments.agreement import logits_of
from nanokit.lab.quality.divergence import Divergences, compare, compare_engine, reference_floor
from nanokit.lab.quality.intervals import standard_error, wilson
from nanokit.lab.quality.passes import Pass
from nanokit.lab.quality.reference import KEPT, Reference, forget, reference

LENGTH, WINDOWS = 150, 3  # more rows in a second half than are compared at a time, and no multiple of a page


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    model = compiled_model("llama")
    return save_tiny(tmp_path_factory.mktemp("quality"), model), model


@pytest.fixture(scope="module")
def ref(tiny: tuple[Path, torch.nn.Module]) -> Reference:
    return reference(str(tiny[0]), windows=WINDOWS, text="lighthouse", length=LENGTH)


def oracle(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double()


def noisy(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    logits = oracle(model, ids)
    return logits + 0.3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(len(ids)))


def test_every_figure_is_the_textbooks(tiny: tuple[Path, torch.nn.Module], ref: Reference) -> None:
    """KL the wrong way round, a target off by one, the first half scored, a mean of ratios for a ratio of means."""
    _, model = tiny
    found = compare(lambda ids: noisy(model, ids), ref)
    half = LENGTH // 2
    p = torch.cat([oracle(model, ids)[half - 1 : -1] for ids in ref.windows]).log_softmax(-1)
    q = torch.cat([noisy(model, ids)[half - 1 : -1] for ids in ref.windows]).log_softmax(-1)
    targets = torch.tensor([token for ids in ref.windows for token in ids[half:]])
    kl = kl_div(q, p, log_target=True, reduction="none").sum(-1).numpy()
    before, after = cross_entropy(p, targets, reduction="none"), cross_entropy(q, targets, reduction="none")
    np.testing.assert_allclose(found.kl, kl, atol=2e-6)
    np.testing.assert_allclose(found.nll_reference, before, atol=1e-5)
    np.testing.assert_allclose(found.nll_found, after, atol=1e-9)
    assert found.same.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    assert found.positions.tolist() == [*range(half, LENGTH)] * WINDOWS
    assert found.windows.tolist() == [w for w in range(WINDOWS) for _ in range(half, LENGTH)]
    said = found.summary()
    assert said["kl_mean"] == pytest.approx(kl.mean(), rel=1e-4)
    assert said["kl_p99"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert said["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    ppl = [float(nll.mean().exp()) for nll in (before, after)]
    assert said["ppl_ratio"] == pytest.approx(ppl[1] / ppl[0], rel=1e-5)
    assert said["scored_tokens"] == WINDOWS * (LENGTH - half)


def test_the_standard_error_is_that_of_repeated_draws() -> None:
    """An error left in logarithms, or one that takes the two perplexities for independent."""
    rng = np.random.default_rng(3)
    text = rng.gamma(2, 2, (4000, 300))  # the text's difficulty, which both share
    delta = rng.normal(0.4, 0.3, text.shape)
    ratios = np.exp((text + delta).mean(1)) / np.exp(text.mean(1))
    one = Divergences(np.zeros(300), np.ones(300, bool), text[0], text[0] + delta[0], np.arange(300), np.zeros(300))
    assert one.summary()["ppl_ratio_se"] == pytest.approx(ratios.std(), rel=0.15)


def test_nothing_changed_is_the_floor(tiny: tuple[Path, torch.nn.Module], ref: Reference) -> None:
    """A reference that is not what fp32 activations and pages give would show damage where there is none."""
    exact = load(tiny[0], activations="fp32", kv_memory="8MiB")
    found = compare_engine(exact, ref, Pass(batch=2, chunk=37, layout="scattered"))
    assert abs(found.summary()["kl_mean"]) < 1e-9
    assert found.same.all()
    assert abs(reference_floor(ref)) < 1e-9
    assert exact.pool.held == 0


def test_an_engine_gives_what_its_logits_give(tmp_path: Path) -> None:
    """Batch, chunk and layout are how it is computed: in the C kernels they change no bit, and rows must not mix."""
    file = save_tiny_gguf(tmp_path / "tiny.gguf", compiled_model("llama"), types="Q4_1")
    engine = load(file, kv_memory="8MiB")
    ref = reference(str(file), windows=WINDOWS, text="lighthouse", length=LENGTH)
    whole = compare(lambda ids: logits_of(engine, ids), ref)
    assert whole.summary()["kl_mean"] > 1e-7
    for how in (Pass(), Pass(batch=2, chunk=64), Pass(batch=3, chunk=31, layout="scattered")):
        parts = compare_engine(engine, ref, how)
        if engine.model.compiled:
            assert parts.kl.tolist() == whole.kl.tolist(), how
        else:
            np.testing.assert_allclose(parts.kl, whole.kl, rtol=0.05)


def test_buckets_hold_every_token_once(tiny: tuple[Path, torch.nn.Module], ref: Reference) -> None:
    found = compare(lambda ids: noisy(tiny[1], ids), ref)
    buckets = found.by_position(4)
    assert sum(bucket["scored_tokens"] for bucket in buckets.values()) == len(found)
    assert [low for low, _ in buckets][1:] == [high for _, high in buckets][:-1]
    low, high = next(iter(buckets))
    mine = found.kl[(found.positions >= low) & (found.positions < high)]
    assert buckets[low, high]["kl_mean"] == pytest.approx(mine.mean())
    with pytest.raises(ParameterError, match="no scored token"):
        found.between(0, 10)


def test_no_bucket_of_a_single_token(ref: Reference) -> None:
    """Its standard error would be infinite."""
    for tokens, windows, wanted in ((1, 1, 1), (2, 1, 1), (4, 1, 2), (7, 1, 3), (9, 1, 4), (3, 2, 3), (8, 2, 4)):
        count = tokens * windows
        positions, which = np.tile(np.arange(tokens), windows) + 5, np.repeat(np.arange(windows), tokens)
        values = np.random.default_rng(0).random(count)
        found = Divergences(values, np.ones(count, bool), values, values, positions, which).by_position()
        assert len(found) == wanted
        assert sum(each["scored_tokens"] for each in found.values()) == count
        assert count == 1 or all(np.isfinite(each["kl_mean_se"]) for each in found.values())


def test_a_model_that_was_written_anew_is_another_one(tmp_path: Path) -> None:
    """Overwritten in the same session, a file was compared with what it had been."""
    forget()

    def asked(name: str, length: int = 32) -> Reference:
        return reference(str(tmp_path / name), windows=1, text="lighthouse", length=length)

    model = compiled_model("llama")
    for name, write in (("tiny.gguf", save_tiny_gguf), ("folder", save_tiny)):
        write(tmp_path / name, model)
        first = asked(name)
        assert asked(name) is first
        model.model.embed_tokens.weight.data *= 1.5
        write(tmp_path / name, model)
        again = asked(name)
        assert (again.hidden[0] != first.hidden[0]).any()
        assert asked(name) is again
    for length in range(33, 33 + KEPT):
        asked("folder", length)
    assert asked("folder") is not again  # memory is that of so many


def test_bad_logits_are_refused(tiny: tuple[Path, torch.nn.Module], ref: Reference) -> None:
    """A NaN would make every mean NaN, or, compared away by argmax, none at all."""
    broken = oracle(tiny[1], ref.windows[0]).clone()
    broken[-2, 5] = torch.nan
    with pytest.raises(NanokitError, match="not numbers"):
        compare(lambda ids: broken, ref)
    with pytest.raises(ParameterError, match="another shape"):
        compare(lambda ids: broken[:, :7], ref)


def test_bad_settings_are_refused(tiny: tuple[Path, torch.nn.Module], ref: Reference) -> None:
    small = load(tiny[0], ctx=64, kv_memory="64KiB", activations="fp32")
    with pytest.raises(ParameterError, match="too few KV pages"):
        compare_engine(small, ref, Pass(batch=3))
    with pytest.raises(ParameterError, match="layout"):
        Pass(layout="diagonal")
    with pytest.raises(ParameterError, match="longer than the model's context"):
        reference(str(tiny[0]), windows=1, text="lighthouse", length=513)


def test_intervals_are_the_ones_defined() -> None:
    """Wilson's bounds are the shares from which the one that was found is just 1.96 of *their* deviations away."""
    for hits, of in ((0, 20), (7, 20), (20, 20), (150, 151)):
        low, high = wilson(hits, of)
        for bound in {low, high} - {0.0, 1.0}:
            assert abs(hits / of - bound) == pytest.approx(1.959964 * (bound * (1 - bound) / of) ** 0.5, abs=1e-6)
        assert 0 <= low <= hits / of <= high <= 1
        assert high - low > 0
    values = np.random.default_rng(0).normal(size=50)
    assert standard_error(values) == pytest.approx(statistics.stdev(values.tolist()) / 50**0.5)
    with pytest.raises(ValueError):
        wilson(0, 0)


def test_a_comparison_that_fails_leaves_gradients_on() -> None:
    """A generator that yields inside inference_mode and is then dropped switches gradients off for whatever comes
    next in the process: training failed minutes later, elsewhere."""
    from types import SimpleNamespace

    from nanokit.lab.quality.divergence import _logits

    head = SimpleNamespace(logits=lambda rows: rows @ torch.ones(4, 3))
    pieces = _logits(SimpleNamespace(model=SimpleNamespace(head=head)), torch.ones(200, 4))
    next(pieces)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
