"""What only the source can tell of a file, and what it is told apart from."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from converted import CAUGHT, MERGES, changed, converted, converted_llama, found
from tiny import compiled_model, save_tiny, tiny_model

from nanokit.gguf.faults import FAULTS, inject
from nanokit.gguf.header import ValueKind
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Entry, Key, rewrite
from nanokit.model.convert import convert
from nanokit.model.load import open_model
from nanokit.model.quantize import quantize
from nanokit.model.verify.run import verify
from nanokit.model.verify.source_tensors import explained
from nanokit.model.weights import Stored
from nanokit.quant.weight_format import weight_format

# Those that a random model cannot show without its source; test_verify_behaviour.py has some of them without one.
WITH_SOURCE = {
    "rope-base-10000": ("rope base", "llama.rope.freq_base"),
    "frequency-scale-half": ("rope scaling", "llama.rope.scaling.factor"),
    "gate-up-swapped-one": ("gate and up, by layer", "blk.1.ffn_gate.weight"),
    "gate-up-swapped-all": ("gate and up", "blk.0.ffn_gate.weight"),
    "q-k-permuted": ("q and k row order", "blk.0.attn_q.weight"),
    "k-wrong-heads": ("q and k row order", "blk.0.attn_k.weight"),
}

U32, F32, TEXT = ValueKind("UINT32"), ValueKind("FLOAT32"), ValueKind("STRING")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return converted_llama(tmp_path_factory.mktemp("models"))


def test_every_fault_is_one_that_is_tested() -> None:
    """A fault that is added to the list must not go without a check."""
    assert {*CAUGHT, *WITH_SOURCE} == set(FAULTS)
    assert {name for name, each in FAULTS.items() if each.needs_source} <= set(WITH_SOURCE)


@pytest.mark.parametrize("name", WITH_SOURCE)
def test_a_fault_that_only_the_source_shows(name: str, files: Mapping[str, Path], tmp_path: Path) -> None:
    """Plausible values and tensors that have changed places: with the source they are named, without it the report must
    not vouch for them."""
    inject(name, files["gguf"], tmp_path / "bad.gguf")
    check, names = WITH_SOURCE[name]
    report = verify(tmp_path / "bad.gguf", open_model(files["directory"]))
    assert found(report, check).verdict == "failed"
    assert names in found(report, check).said
    beside = {
        "weights as in the source",
        "heads of q and k",
        "predictions on a short text",
        "predictions on a long text",
    }
    assert {each.name for each in report.failed} <= {
        check,
        *beside,
        *(["gate and up, by layer", "gate and up"] if "gate" in name else []),
    }
    alone = found(verify(tmp_path / "bad.gguf"), check)
    assert alone.verdict == "not checked"
    assert "needs --against" in alone.said


def test_a_sound_file_passes_all_checks_against_its_directory(files: Mapping[str, Path]) -> None:
    """A verifier that cries wolf is switched off."""
    report = verify(files["gguf"], open_model(files["directory"]))
    assert {check.verdict for check in report.checks} == {"ok"}, report.verdict
    assert report.verdict == f"ok: all {len(report.checks)} checks passed"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_rows_in_llamas_order_are_seen_in_other_architectures(architecture: str, tmp_path: Path) -> None:
    """A converter that permutes q and k of every model ruins those that have them as they are."""
    made = converted(tmp_path, tiny_model(architecture))
    source = open_model(made["directory"])
    inject("q-k-permuted", made["gguf"], tmp_path / "bad.gguf")
    check = found(verify(tmp_path / "bad.gguf", source), "q and k row order")
    assert check.verdict == "failed"
    assert "blk.0.attn_q.weight" in check.said


def test_a_head_that_was_dropped_is_seen_in_the_source(tmp_path: Path) -> None:
    """An untied model without its output.weight loads as a tied one."""
    made = converted(tmp_path, tiny_model("llama"))
    inject("tied-head-dropped", made["gguf"], tmp_path / "bad.gguf")
    check = found(verify(tmp_path / "bad.gguf", open_model(made["directory"])), "head")
    assert check.verdict == "failed"
    assert "output.weight" in check.said
    assert found(verify(tmp_path / "bad.gguf"), "head").verdict == "not checked"


def test_one_head_of_many_with_other_weights_is_seen(files: Mapping[str, Path], tmp_path: Path) -> None:
    """In a matrix of many heads, a head that is wrong is a small part of the whole."""
    file = GGUFFile.open(files["gguf"])
    rows = file.tensor("blk.1.attn_q.weight")
    noise = torch.Generator().manual_seed(1)
    rows[10:20] += torch.randn(10, 60, generator=noise).numpy() * 0.2 * abs(rows).max()
    entry = Entry("blk.1.attn_q.weight", "F32", rows.shape, lambda: rows)
    rewrite(files["gguf"], tmp_path / "bad.gguf", {entry.name: entry})
    check = found(verify(tmp_path / "bad.gguf", open_model(files["directory"])), "heads of q and k")
    assert check.verdict == "failed"
    assert "blk.1.attn_q.weight, head 1" in check.said


def test_an_unknown_vocabulary_hides_nothing_else(files: Mapping[str, Path], tmp_path: Path) -> None:
    """Keys and tensors need no tokenizer: a wrong rope base in a file of a newer pre-tokenizer is one all the same."""
    changed(
        files, tmp_path, **{"tokenizer.ggml.pre": Key(TEXT, "of-next-year"), "llama.rope.freq_base": Key(F32, 77.0)}
    )
    report = verify(tmp_path / "changed.gguf", open_model(files["directory"]))
    assert "rope base" in [check.name for check in report.failed]
    assert found(report, "weights as in the source").verdict == "ok"
    assert found(verify(tmp_path / "changed.gguf"), "predicts a text").verdict == "not checked"


def test_another_vocabulary_than_the_source_is_seen(files: Mapping[str, Path], tmp_path: Path) -> None:
    """Two tokens that have changed places leave every count right."""
    tokens = GGUFFile.open(files["gguf"]).metadata["tokenizer.ggml.tokens"]
    tokens[65], tokens[66] = tokens[66], tokens[65]
    keys = {"tokenizer.ggml.tokens": Key(ValueKind("ARRAY", "STRING"), tokens)}
    rewrite(files["gguf"], tmp_path / "bad.gguf", {}, keys)
    check = found(
        verify(tmp_path / "bad.gguf", open_model(files["directory"]), long=False), "vocabulary as in the source"
    )
    assert check.verdict == "failed"
    assert "tokenizer.ggml.tokens: 65 is" in check.said


def test_weights_that_are_no_ones_but_fit_are_seen(files: Mapping[str, Path], tmp_path: Path) -> None:
    """Two matrices of other layers in each other's place, and one that is all zero: no scales were folded there."""
    file = GGUFFile.open(files["gguf"])
    mixed = [
        Entry(f"blk.{a}.attn_v.weight", "F32", (20, 60), partial(file.tensor, f"blk.{1 - a}.attn_v.weight"))
        for a in (0, 1)
    ]
    rewrite(files["gguf"], tmp_path / "mixed.gguf", {entry.name: entry for entry in mixed})
    zeros = Entry("blk.1.attn_output.weight", "F32", (60, 60), lambda: np.zeros((60, 60), np.float32))
    rewrite(files["gguf"], tmp_path / "zeros.gguf", {zeros.name: zeros})
    for path, name in (("mixed.gguf", "blk.0.attn_v.weight"), ("zeros.gguf", "blk.1.attn_output.weight")):
        check = found(verify(tmp_path / path, open_model(files["directory"]), long=False), "weights as in the source")
        assert check.verdict == "failed"
        assert name in check.said


def test_scales_that_were_folded_are_told_from_other_weights(files: Mapping[str, Path], tmp_path: Path) -> None:
    """AWQ moves factors from a norm into the columns behind it: the same model in other tensors."""
    file = GGUFFile.open(files["gguf"])
    factors = np.linspace(0.5, 2, 60, dtype=np.float32)
    made = {f"blk.0.attn_{part}.weight": file.tensor(f"blk.0.attn_{part}.weight") * factors for part in "qkv"}
    made["blk.0.attn_norm.weight"] = file.tensor("blk.0.attn_norm.weight") / factors
    entries = {name: Entry(name, "F32", values.shape, partial(np.copy, values)) for name, values in made.items()}
    rewrite(files["gguf"], tmp_path / "folded.gguf", entries)
    report = verify(tmp_path / "folded.gguf", open_model(files["directory"]))
    assert not report.failed
    check = found(report, "weights as in the source")
    assert check.verdict == "warning"
    assert "blk.0.attn_q.weight" in check.said


def test_biases_of_one_side_only_are_seen(tmp_path: Path) -> None:
    """A converter that does not know of biases leaves them out, and nothing else is wrong."""
    made = converted(tmp_path, tiny_model("llama", attention_bias=True))
    names = [name for name in GGUFFile.open(made["gguf"]).tensors if name.endswith(".bias")]
    rewrite(made["gguf"], tmp_path / "bad.gguf", dict.fromkeys(names))
    assert names
    report = verify(tmp_path / "bad.gguf", open_model(made["directory"]), long=False)
    assert "blk.0.attn_q.bias" in found(report, "weights as in the source").said


def test_a_head_beside_a_tied_source_has_to_be_the_embedding(files: Mapping[str, Path], tmp_path: Path) -> None:
    """Some converters write the embedding a second time; another matrix there is another model."""
    rows = GGUFFile.open(files["gguf"]).tensor("token_embd.weight")
    for name, values in (("same", rows), ("other", rows[::-1])):
        entry = Entry("output.weight", "F32", values.shape, partial(np.copy, values))
        rewrite(files["gguf"], tmp_path / f"{name}.gguf", {entry.name: entry})
    same, other = (
        verify(tmp_path / f"{name}.gguf", open_model(files["directory"]), long=False) for name in ("same", "other")
    )
    assert not same.failed
    assert found(same, "head").verdict == "warning"
    assert "output.weight" in found(other, "weights as in the source").said


def test_a_beginning_that_no_text_gets_is_no_difference(tmp_path: Path) -> None:
    """Files of Qwen name a beginning of sequence that their directories do not, and no text gets it."""
    made = converted(tmp_path, tiny_model("qwen2"))
    rewrite(made["gguf"], tmp_path / "bos.gguf", {}, {"tokenizer.ggml.bos_token_id": Key(U32, 256)})
    assert not verify(tmp_path / "bos.gguf", open_model(made["directory"]), long=False).failed


def test_what_rounding_explains_is_three_times_q4_0() -> None:
    """The bound of a type that is too small refuses honest files, one too large hides other weights."""
    weights = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    error = np.linalg.norm(weight_format("q4_0").quantize(weights).dequantize() - weights) / np.linalg.norm(weights)
    assert explained(Stored((256, 512), 256 * 512 * 9 // 16, "Q4_0")) == pytest.approx(3 * error, rel=0.05)


def test_predictions_that_rounding_has_ruined_are_said(tmp_path: Path) -> None:
    """Ternary weights of a model that was not trained for them: every tensor is what its type keeps of the source."""
    model = compiled_model("llama", tied=True, columns=256)
    directory = save_tiny(tmp_path / "source", model, MERGES)
    rough = quantize(directory, tmp_path / "rough.gguf", "tq2_0").path
    check = found(verify(rough, open_model(directory)), "predictions on a long text")
    assert check.verdict == "warning"
    assert "leaves little" in check.said


def test_a_matrix_of_another_scale_is_no_rounded_one(tmp_path: Path) -> None:
    """Scales that are 15 % too large are an error no larger than rounding to 4 bits, and all to one side."""
    directory = save_tiny(tmp_path / "source", compiled_model("llama", tied=True), MERGES)
    coarse = convert(directory, tmp_path / "coarse.gguf", "q4_0").path
    rows = 1.15 * GGUFFile.open(coarse).tensor("blk.1.attn_output.weight")
    entry = Entry("blk.1.attn_output.weight", "F32", rows.shape, lambda: rows)
    rewrite(coarse, tmp_path / "bad.gguf", {entry.name: entry})
    check = found(verify(tmp_path / "bad.gguf", open_model(coarse), long=False), "weights as in the source")
    assert check.verdict == "failed"
    assert "blk.1.attn_output.weight" in check.said
    assert "is 1.15 times the source's" in check.said
