"""What the real model's behaviour says about its file without a source, and what undoing a fault gains."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import save_tiny_gguf, tiny_model

from nanokit.gguf.faults import inject
from nanokit.model.load import open_model
from nanokit.model.source import GGUFSource, unpermute
from nanokit.model.verify.behaviour import LAYERS, ORDER, PREDICTS, ROW_ORDER, asymmetry, behaviour
from nanokit.model.verify.report import Check
from nanokit.model.verify.run import verify
from nanokit.model.verify.variants import AS_IS, Gain, Head, Variant, final_states, gain, reordered, swapped
from nanokit.model.weights import find_weights

FAULTY = {
    "q-k-permuted": (ROW_ORDER, "blk.*.attn_q.weight and blk.*.attn_k.weight"),
    "k-wrong-heads": (ROW_ORDER, "rows of k taken as those of 8 heads"),
    "gate-up-swapped-all": (ORDER, "blk.*.ffn_gate.weight and blk.*.ffn_up.weight"),
    "gate-up-swapped-one": (LAYERS, "blk.15.ffn_gate.weight and blk.15.ffn_up.weight"),
}


def opened(path: Path) -> GGUFSource:
    source = open_model(path)
    assert isinstance(source, GGUFSource)
    return source


def checks_of(path: Path) -> dict[str, Check]:
    source = opened(path)
    return {check.name: check for check in behaviour(source, find_weights(source.config, source))}


@pytest.mark.model
def test_the_real_file_passes_without_a_warning(default_model: Path) -> None:
    """A good file alone: nothing fails, and what only a source can tell is not called ok."""
    report = verify(default_model)
    assert not report.failed
    assert not report.of("warning")
    assert {check.name for check in report.of("not checked")} == {"rope base", "rope scaling", LAYERS}
    assert all("needs --against" in check.said for check in report.of("not checked"))


@pytest.mark.model
@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_that_leaves_every_shape_right_is_named(fault: str, default_model: Path, tmp_path: Path) -> None:
    """Rows in another order and matrices in each other's place load everywhere; one fault must not be reported as
    another because both make nonsense."""
    inject(fault, default_model, tmp_path / "bad.gguf")
    found = checks_of(tmp_path / "bad.gguf")
    name, words = FAULTY[fault]
    assert [check.name for check in found.values() if check.verdict == "failed"] == [name]
    assert words in found[name].said


def test_random_weights_are_not_vouched_for(tmp_path: Path) -> None:
    """A model that predicts nothing cannot tell one order from another: "ok" would be a guess."""
    found = checks_of(save_tiny_gguf(tmp_path / "random.gguf", tiny_model("llama", tied=True)))
    assert found[PREDICTS].verdict == "warning"
    assert {found[name].verdict for name in (ROW_ORDER, LAYERS)} == {"not checked"}


def test_a_vocabulary_of_few_words_says_nothing(tmp_path: Path) -> None:
    """A context of a few tokens is no text."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 8
    found = checks_of(save_tiny_gguf(tmp_path / "short.gguf", model))
    assert {check.verdict for check in found.values()} == {"not checked"}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_losses_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """The walk over the layers is a second forward: of the file, and of a variant with another rope base."""
    model = tiny_model(architecture)
    source = opened(save_tiny_gguf(tmp_path / "m.gguf", model))
    weights, ids = find_weights(source.config, source), torch.arange(0, 200, 3).tolist()
    other = replace(source.config.rope, base=777.0)
    states = final_states(source.config, weights, ids, {"other": Variant(rope=other)})
    for name, base in ((AS_IS, source.config.rope.base), ("other", 777.0)):
        twin = tiny_model(architecture, rope_parameters={"rope_type": "default", "rope_theta": base})
        with torch.inference_mode():
            expected = torch.nn.functional.cross_entropy(
                twin(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="none"
            )
        found = Head(weights).losses(states[name], ids)
        assert torch.allclose(found, expected.double(), atol=1e-4)


def test_undoing_a_swap_gives_the_sound_model(tmp_path: Path) -> None:
    """A variant that changes more than it says would gain or lose for another reason."""
    good = save_tiny_gguf(tmp_path / "good.gguf", tiny_model("llama"))
    ids = list(range(40))
    source = opened(good)
    wanted = final_states(source.config, find_weights(source.config, source), ids)[AS_IS]
    for fault, variant in (("gate-up-swapped-all", swapped()), ("gate-up-swapped-one", swapped([1]))):
        inject(fault, good, tmp_path / "bad.gguf")
        bad = opened(tmp_path / "bad.gguf")
        states = final_states(bad.config, find_weights(bad.config, bad), ids, {"undone": variant})
        assert torch.equal(states["undone"], wanted)
        assert not torch.equal(states[AS_IS], wanted)


def test_a_variant_leaves_the_layer_that_it_was_made_of(tmp_path: Path) -> None:
    """Layers are read once for all variants: one that wrote into them would change the others."""
    source = opened(save_tiny_gguf(tmp_path / "m.gguf", tiny_model("qwen2")))
    weights, ids = find_weights(source.config, source), list(range(40))
    plain = final_states(source.config, weights, ids)[AS_IS]
    tried = {"a": swapped(), "b": reordered(("q", "k"), lambda rows, part: unpermute(rows, 2))}
    assert torch.equal(final_states(source.config, weights, ids, tried)[AS_IS], plain)


def test_asymmetry_tells_a_side_from_none() -> None:
    """Against hand-made neurons: no side, a shifted mean, a skewed distribution; the first token does not count."""
    draw = torch.Generator().manual_seed(3)
    even = torch.randn(4000, 50, generator=draw)
    assert asymmetry(even) < 0.05
    assert asymmetry(even - 0.5) == pytest.approx(0.5, abs=0.05)
    assert asymmetry(even.exp()) > 2
    huge = even.clone()
    huge[0] = 1e6
    assert asymmetry(huge) == pytest.approx(asymmetry(even))
    assert asymmetry(torch.zeros(5, 4)) == 0


def test_a_gain_is_certain_only_beyond_chance() -> None:
    """Losses that differ by noise alone must not accuse a file."""
    draw = torch.Generator().manual_seed(5)
    losses = torch.rand(400, generator=draw, dtype=torch.float64)
    noise = 0.1 * torch.randn(400, generator=draw, dtype=torch.float64)
    assert not gain(losses, losses + noise).certain
    better = gain(losses, losses - 0.05 + noise)
    assert better.certain
    assert better.mean == pytest.approx(0.05, abs=0.02)
    assert better.error == pytest.approx(0.1 / math.sqrt(400), rel=0.2)
    assert gain(losses, losses + 0.05 + noise).certainly_worse
    assert not Gain(math.nan, math.nan).certain
