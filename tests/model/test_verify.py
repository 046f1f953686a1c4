"""Every fault that a file can have is caught by the check that is about it, and a sound file by none."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade_gguf import gguf_bytes, pair, text
from phi3 import save_tiny_phi3
from tiny import save_tiny, tiny_model
from transformers import PreTrainedModel

from nanokit.errors import ModelFileError
from nanokit.gguf.faults import FAULTS, inject
from nanokit.gguf.header import ValueKind
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Entry, Key, rewrite
from nanokit.model.convert import convert
from nanokit.model.load import open_model
from nanokit.model.verify.meaning import meaning
from nanokit.model.verify.numbers import numbers
from nanokit.model.verify.report import Check, Report, merged
from nanokit.model.verify.run import verify
from nanokit.model.verify.source_tensors import explained
from nanokit.model.weights import Stored
from nanokit.quant.weight_format import weight_format

MERGES = ("h e", "l l", "he ll")
# Fault -> the check that has to catch it, and a key or tensor that it has to name.
CAUGHT = {
    "rope-base-missing": ("rope base", "llama.rope.freq_base"),
    "rope-base-text": ("rope base", "llama.rope.freq_base"),
    "gate-up-fused": ("gate, up and down", "blk.0.ffn_up.weight"),
    "head-count-32": ("head counts", "llama.attention.head_count"),
    "truncated-magic": ("magic and version", ""),
    "truncated-keys": ("keys and values", "tokenizer.ggml."),
    "truncated-table": ("tensor table", "blk."),
    "truncated-first": ("file size", "token_embd.weight"),
    "truncated-middle": ("file size", "blk."),
    "truncated-last": ("file size", "output_norm.weight"),
    "tensor-misaligned": ("tensor places", "blk."),
    "tensors-overlapping": ("tensor places", "blk."),
    "alignment-0": ("alignment", "general.alignment"),
    "alignment-13": ("alignment", "general.alignment"),
    "alignment-2-31": ("alignment", "general.alignment"),
    "tied-head-dropped": ("head", "token_embd.weight"),
    "nan-scale": ("finite weights", "blk."),
}
# Those that a random model cannot show without its source; test_verify_behaviour.py has some of them without one.
WITH_SOURCE = {
    "rope-base-10000": ("rope base", "llama.rope.freq_base"),
    "frequency-scale-half": ("rope scaling", "llama.rope.scaling.factor"),
    "gate-up-swapped-one": ("gate and up, by layer", "blk.1.ffn_gate.weight"),
    "gate-up-swapped-all": ("gate and up", "blk.0.ffn_gate.weight"),
    "q-k-permuted": ("q and k row order", "blk.0.attn_q.weight"),
    "k-wrong-heads": ("q and k row order", "blk.0.attn_k.weight"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A tied llama with GQA and rope base 50,000 as a directory and, in F32, as a GGUF file."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model("llama", tied=True, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    return converted(folder, model)


def converted(folder: Path, model: PreTrainedModel) -> dict[str, Path]:
    directory = save_tiny(folder / "source", model, MERGES)
    return {"gguf": convert(directory, folder / "good.gguf", "f32").path, "directory": directory}


def found(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def test_every_fault_is_one_that_is_tested_here() -> None:
    """A fault that is added to the list must not go without a check."""
    assert {*CAUGHT, *WITH_SOURCE} == set(FAULTS)
    assert {name for name, each in FAULTS.items() if each.needs_source} <= set(WITH_SOURCE)


@pytest.mark.parametrize("name", CAUGHT)
def test_a_fault_is_caught_without_a_source(name: str, files: Mapping[str, Path], tmp_path: Path) -> None:
    """Loads, and talks nonsense: or is refused somewhere else with words that name nothing."""
    inject(name, files["gguf"], tmp_path / "bad.gguf")
    report = verify(tmp_path / "bad.gguf")
    check, names = CAUGHT[name]
    assert [each.name for each in report.failed] == [check]
    assert names in found(report, check).said
    with pytest.raises(ModelFileError, match="does not pass") as caught:
        report.raise_for("mend it")
    assert names in str(caught.value)


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


def test_a_phi3_file_is_not_taken_for_a_fused_llama(tmp_path: Path) -> None:
    """phi3 files have gate and up in one matrix by right."""
    report = verify(save_tiny_phi3(tmp_path / "phi3.gguf"))
    assert not report.failed
    assert found(report, "gate, up and down").verdict == "ok"
    assert found(report, "architecture").verdict == "not checked"


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


def changed(files: Mapping[str, Path], tmp_path: Path, **keys: Key | None) -> GGUFFile:
    target = tmp_path / "changed.gguf"
    rewrite(files["gguf"], target, {}, {name.replace("__", "."): key for name, key in keys.items()})
    return GGUFFile.open(target)


U32, F32, TEXT = ValueKind("UINT32"), ValueKind("FLOAT32"), ValueKind("STRING")
KEYS = {
    "a required key is missing": ("llama.block_count", None, "required keys", "llama.block_count is missing"),
    "a size is a text": (
        "llama.embedding_length",
        Key(TEXT, "60"),
        "required keys",
        "llama.embedding_length is a STRING",
    ),
    "epsilon is whole": ("llama.attention.layer_norm_rms_epsilon", Key(U32, 1), "required keys", "epsilon is a UINT32"),
    "rope base is 0": ("llama.rope.freq_base", Key(F32, 0.0), "rope base", "is 0.0"),
    "rope base is whole": ("llama.rope.freq_base", Key(U32, 10000), "rope base", "is a UINT32"),
    "scaling a text": ("llama.rope.scaling.factor", Key(TEXT, "2"), "rope scaling", "rope.scaling.factor is a STRING"),
    "width of another model": (
        "llama.feed_forward_length",
        Key(U32, 128),
        "gate, up and down",
        "blk.0.ffn_gate.weight",
    ),
    "a token beyond": ("tokenizer.ggml.eos_token_id", Key(U32, 9999), "special tokens", "eos_token_id is 9999"),
    "vocabulary size": ("llama.vocab_size", Key(U32, 300), "vocabulary", "llama.vocab_size is 300"),
    "template broken": ("tokenizer.chat_template", Key(TEXT, "{% for %}"), "chat template", "tokenizer.chat_template"),
    "no architecture": ("general.architecture", Key(U32, 1), "architecture", "general.architecture is 1"),
}


@pytest.mark.parametrize("case", KEYS)
def test_a_wrong_key_is_named(case: str, files: Mapping[str, Path], tmp_path: Path) -> None:
    """Readers fill in a default, or read a text as a number."""
    key, value, name, words = KEYS[case]
    if key == "general.architecture":
        path = tmp_path / "changed.gguf"
        path.write_bytes(gguf_bytes([pair("general.architecture", 4, b"\x01\0\0\0")]))
        checks, *_ = meaning(GGUFFile.open(path))
    else:
        checks, *_ = meaning(changed(files, tmp_path, **{key: value}))
    failed = {check.name: check.said for check in checks if check.verdict == "failed"}
    assert list(failed) == [name], failed
    assert words in failed[name]


def test_what_the_loader_alone_refuses_is_a_failure(files: Mapping[str, Path], tmp_path: Path) -> None:
    """A fault that no check knows by name must not pass for that."""
    checks, source, weights = meaning(changed(files, tmp_path, **{"llama.attention.value_length": Key(U32, 20)}))
    assert [check.name for check in checks if check.verdict == "failed"] == ["tensors"]
    assert (source, weights) == (None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [("llama.expert_count", Key(U32, 8)), ("llama.attention.sliding_window", Key(U32, 64)),
     ("llama.rope.scaling.type", Key(TEXT, "yarn"))],
)  # fmt: skip
def test_a_model_that_is_not_run_here_is_no_broken_one(
    key: str, value: Key, files: Mapping[str, Path], tmp_path: Path
) -> None:
    """Experts, windows and YaRN are no faults of a file; nothing is known of it, and that is what is said."""
    checks, source, _ = meaning(changed(files, tmp_path, **{key: value}))
    assert not [check for check in checks if check.verdict == "failed"]
    assert checks[-1].verdict == "not checked"
    assert source is None


def test_a_scaling_key_that_nobody_knows_is_said(files: Mapping[str, Path], tmp_path: Path) -> None:
    """A misspelt key is one that every reader ignores."""
    checks, *_ = meaning(changed(files, tmp_path, **{"llama.rope.scaling.alpha": Key(F32, 2.0)}))
    said = {check.name: check for check in checks if check.verdict == "warning"}
    assert "llama.rope.scaling.alpha" in said["rope scaling"].said


def test_a_pre_tokenizer_that_is_unknown_is_no_fault(files: Mapping[str, Path], tmp_path: Path) -> None:
    """Files of models newer than the kit are sound; it just cannot tell."""
    checks, *_ = meaning(changed(files, tmp_path, **{"tokenizer.ggml.pre": Key(TEXT, "of-next-year")}))
    assert not [check for check in checks if check.verdict == "failed"]
    assert "vocabulary" in {check.name for check in checks if check.verdict == "not checked"}


def test_an_unknown_vocabulary_hides_nothing_else(files: Mapping[str, Path], tmp_path: Path) -> None:
    """Keys and tensors need no tokenizer: a wrong rope base in a file of a newer pre-tokenizer is one all the same."""
    changed(
        files, tmp_path, **{"tokenizer.ggml.pre": Key(TEXT, "of-next-year"), "llama.rope.freq_base": Key(F32, 77.0)}
    )
    report = verify(tmp_path / "changed.gguf", open_model(files["directory"]))
    assert "rope base" in [check.name for check in report.failed]
    assert found(report, "weights as in the source").verdict == "ok"
    assert found(verify(tmp_path / "changed.gguf"), "predicts a text").verdict == "not checked"


def test_dead_rows_and_giants_are_said(files: Mapping[str, Path], tmp_path: Path) -> None:
    """A block whose scale lost a bit is a number still, and a thousand times too large."""
    rows = GGUFFile.open(files["gguf"]).tensor("blk.0.ffn_up.weight")
    rows[3], rows[5, 7] = 0, 1e5
    entry = Entry("blk.0.ffn_up.weight", "F32", rows.shape, lambda: rows)
    rewrite(files["gguf"], tmp_path / "odd.gguf", {entry.name: entry})
    checks = {check.name: check for check in numbers(GGUFFile.open(tmp_path / "odd.gguf"))}
    assert checks["dead rows"].verdict == checks["magnitudes"].verdict == "warning"
    assert "blk.0.ffn_up.weight: 1 of 96 rows" in checks["dead rows"].said
    assert "blk.0.ffn_up.weight: 100000 in row 5" in checks["magnitudes"].said


def test_bytes_behind_the_last_tensor_are_said(files: Mapping[str, Path], tmp_path: Path) -> None:
    """A file that was appended to, or that belongs to a header with fewer tensors."""
    path = tmp_path / "long.gguf"
    path.write_bytes(files["gguf"].read_bytes() + b"\0" * 100)
    check = found(verify(path), "file size")
    assert check.verdict == "warning"
    assert "bytes follow the last tensor" in check.said


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


@pytest.mark.parametrize(
    ("keys", "drop", "name"),
    [
        ({"llama.expert_count": Key(U32, 8)}, "ffn_gate", "gate, up and down"),
        ({"llama.attention.head_count_kv": Key(ValueKind("ARRAY", "UINT32"), [2, 1])}, "", "head counts"),
    ],
)
def test_what_is_not_run_here_is_not_accused(
    keys: dict[str, Key], drop: str, name: str, files: Mapping[str, Path], tmp_path: Path
) -> None:
    """Experts instead of gate and up, and other numbers of heads in every layer."""
    dropped = [each for each in GGUFFile.open(files["gguf"]).tensors if drop and drop in each]
    rewrite(files["gguf"], tmp_path / "other.gguf", dict.fromkeys(dropped), keys)
    checks, *_ = meaning(GGUFFile.open(tmp_path / "other.gguf"))
    assert next(check for check in checks if check.name == name).verdict == "not checked"


def test_an_array_is_no_number(files: Mapping[str, Path], tmp_path: Path) -> None:
    """One value a layer is allowed for sizes of layers alone."""
    checks, *_ = meaning(
        changed(files, tmp_path, **{"llama.rope.freq_base": Key(ValueKind("ARRAY", "FLOAT32"), [1e4])})
    )
    failed = {check.name: check.said for check in checks if check.verdict == "failed"}
    assert "is a ARRAY of FLOAT32" in failed["rope base"]


def test_tensors_of_types_that_hold_no_weights(files: Mapping[str, Path], tmp_path: Path) -> None:
    """Whole numbers where a matrix has to be, and a tensor that nothing of the architecture uses."""
    whole = Entry("blk.0.ffn_up.weight", "I32", (96, 60), lambda: np.zeros((96, 60), np.int32))
    rewrite(files["gguf"], tmp_path / "whole.gguf", {whole.name: whole})
    assert "I32" in found(verify(tmp_path / "whole.gguf"), "tensors").said
    extra = Entry("cls.output.weight", "F32", (2, 60), lambda: np.ones((2, 60), np.float32))
    rewrite(files["gguf"], tmp_path / "extra.gguf", {extra.name: extra})
    check = found(verify(tmp_path / "extra.gguf"), "tensors")
    assert check.verdict == "not checked"
    assert "cls.output.weight" in check.said


def test_what_rounding_explains_is_three_times_q4_0() -> None:
    """The bound of a type that is too small refuses honest files, one too large hides other weights."""
    weights = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    error = np.linalg.norm(weight_format("q4_0").quantize(weights).dequantize() - weights) / np.linalg.norm(weights)
    assert explained(Stored((256, 512), 256 * 512 * 9 // 16, "Q4_0")) == pytest.approx(3 * error, rel=0.05)


def test_a_path_that_leads_nowhere_is_an_error_and_no_report(tmp_path: Path) -> None:
    """A table about a file that is not there would look like one about a broken file."""
    with pytest.raises(ModelFileError, match="no such file"):
        verify(tmp_path / "none.gguf")
    (tmp_path / "foreign.gguf").write_bytes(text("not a model"))
    assert [check.name for check in verify(tmp_path / "foreign.gguf").failed] == ["magic and version"]


def test_a_check_that_could_be_made_replaces_one_that_could_not() -> None:
    """The same name twice in one report, once "not checked", would say two things."""
    checks = [
        Check("a", "x", "not checked", ""),
        Check("a", "y", "ok", "1"),
        Check("b", "x", "ok", "2"),
        Check("b", "y", "ok", "3"),
    ]
    assert [(each.name, each.said) for each in merged(checks)] == [("x", "2"), ("y", "1")]


def test_the_report_as_json(files: Mapping[str, Path]) -> None:
    """A script reads the verdicts, and needs to know the schema."""
    made = json.loads(json.dumps(verify(files["gguf"]).to_json()))
    assert made["schema"] == "nanokit.model-verify/1"
    assert {"part", "name", "verdict", "said"} == set(made["checks"][0])
