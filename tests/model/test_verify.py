"""Every fault that a file can have is caught by the check that is about it, and a sound file by none."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from converted import CAUGHT, changed, converted_llama, found
from handmade_gguf import gguf_bytes, pair, text
from phi3 import save_tiny_phi3

from nanokit.cli import main
from nanokit.errors import ModelFileError
from nanokit.gguf.faults import inject
from nanokit.gguf.header import ValueKind
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Entry, Key, rewrite
from nanokit.model.verify.meaning import meaning
from nanokit.model.verify.numbers import numbers
from nanokit.model.verify.report import Check, merged
from nanokit.model.verify.run import verify


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return converted_llama(tmp_path_factory.mktemp("models"))


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


def test_a_phi3_file_is_not_taken_for_a_fused_llama(tmp_path: Path) -> None:
    """phi3 files have gate and up in one matrix by right."""
    report = verify(save_tiny_phi3(tmp_path / "phi3.gguf"))
    assert not report.failed
    assert found(report, "gate, up and down").verdict == "ok"
    assert found(report, "architecture").verdict == "not checked"


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


@pytest.mark.parametrize("more", [17, 100])
def test_bytes_behind_the_last_tensor_are_said(more: int, files: Mapping[str, Path], tmp_path: Path) -> None:
    """A file that was appended to, or that belongs to a header with fewer tensors."""
    path = tmp_path / "long.gguf"
    path.write_bytes(files["gguf"].read_bytes() + b"\0" * more)
    check = found(verify(path), "file size")
    assert check.verdict == "warning"
    assert "bytes follow the last tensor" in check.said


def test_a_report_does_not_take_the_place_of_a_model(
    files: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--json with the name of a file that is looked at, or of any other that is no report."""
    model = tmp_path / "model.gguf"
    model.write_bytes(files["gguf"].read_bytes())
    for action in ("verify", "smoke", "info"):
        assert main(["model", action, str(model), "--json", str(model)]) == 2
        assert "is there already, and is no report" in capsys.readouterr().err
    assert main(["model", "verify", str(files["gguf"]), "--json", str(model)]) == 2
    assert model.read_bytes() == files["gguf"].read_bytes()
    for _ in range(2):  # an earlier report is replaced
        assert main(["model", "info", str(model), "--json", str(tmp_path / "report.json")]) == 0


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
