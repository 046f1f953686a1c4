"""`nanokit model verify --fix`: a file becomes sound again where it proves how, and is refused by name elsewhere."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny import save_tiny, tiny_model

from nanokit.cli import main
from nanokit.errors import ModelFileError, NanokitError, ParameterError
from nanokit.gguf.faults import FAULTS, inject
from nanokit.gguf.header import ValueKind
from nanokit.gguf.write import Key, rewrite
from nanokit.model.convert import convert
from nanokit.model.export_keys import model_keys
from nanokit.model.fix import fix
from nanokit.model.load import open_model
from nanokit.model.mend_keys import KINDS, mended_keys

MENDED = ("tensor-misaligned", "tensors-overlapping", "alignment-0", "alignment-13", "alignment-2-31", "rope-base-text")
# Fault -> what the refusal has to name. Those of WITH_SOURCE are no fault that a tiny model's file shows.
REFUSED = {
    "rope-base-missing": "llama.rope.freq_base is missing",
    "gate-up-fused": "blk.0.ffn_up.weight",
    "head-count-32": "llama.attention.head_count is 32",
    "truncated-magic": "the version",
    "truncated-keys": "tokenizer.ggml.",
    "truncated-table": "blk.",
    "truncated-first": "token_embd.weight",
    "truncated-middle": "blk.",
    "truncated-last": "output_norm.weight",
    "tied-head-dropped": "token_embd.weight is not there",
    "nan-scale": "blk.",
}
WITH_SOURCE = {
    "rope-base-10000": "rope base",
    "frequency-scale-half": "rope scaling",
    "gate-up-swapped-one": "gate and up, by layer",
    "gate-up-swapped-all": "bad.gguf",
    "q-k-permuted": "bad.gguf",
    "k-wrong-heads": "bad.gguf",
}
MERGES = ("h e", "l l", "he ll")
F32, F64, TEXT = ValueKind("FLOAT32"), ValueKind("FLOAT64"), ValueKind("STRING")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied llama in Q8_0 with a rope base of 50,000."""
    folder = tmp_path_factory.mktemp("models")
    rope = {"rope_type": "default", "rope_theta": 5e4}
    model = tiny_model("llama", tied=True, heads=4, hidden=64, head_dim=16, rope_parameters=rope)
    return convert(save_tiny(folder / "source", model, MERGES), folder / "good.gguf", "q8_0").path


@pytest.fixture(scope="module")
def short(good: Path) -> Path:
    """The same with a context too short to be run on a text, which takes most of a verification."""
    rewrite(good, good.with_name("short.gguf"), {}, {"llama.context_length": Key(ValueKind("UINT32"), 16)})
    return good.with_name("short.gguf")


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything that the gguf library reads."""
    reader = gguf.GGUFReader(path)
    return (
        {name: (each.types, each.contents()) for name, each in reader.fields.items()},
        {each.name: (each.tensor_type, each.shape.tolist(), each.data.tobytes()) for each in reader.tensors},
    )


def test_every_fault_is_one_that_is_tested_here() -> None:
    """A fault that is added to the list is either mended or refused, on purpose."""
    assert sorted((*MENDED, *REFUSED, *WITH_SOURCE)) == sorted(FAULTS)


@pytest.mark.parametrize("name", MENDED)
def test_the_sound_file_comes_back(name: str, short: Path, tmp_path: Path) -> None:
    """Every key, kind and byte of a tensor; what was changed is said by name, and the broken file stays as it is."""
    injected = inject(name, short, tmp_path / "bad.gguf")
    before = (tmp_path / "bad.gguf").read_bytes()
    done = fix(tmp_path / "bad.gguf", tmp_path / "new.gguf")
    assert contents(done.path) == contents(short)
    assert (tmp_path / "bad.gguf").read_bytes() == before
    assert len(done.said) == 1
    assert all(each in done.said[0] for each in (*injected.keys, *injected.tensors))
    assert (done.report.name, done.report.failed, done.left) == ("new.gguf", [], ())


@pytest.mark.parametrize("name", [*REFUSED, *WITH_SOURCE])
def test_everything_else_is_refused_by_name(name: str, good: Path, short: Path, tmp_path: Path) -> None:
    """A file that passes because something usual was put in is the trap itself."""
    inject(name, good if name == "gate-up-swapped-one" else short, tmp_path / "bad.gguf")
    before = (tmp_path / "bad.gguf").read_bytes()
    with pytest.raises(NanokitError) as caught:
        fix(tmp_path / "bad.gguf", tmp_path / "new.gguf")
    assert isinstance(caught.value, ModelFileError if name in REFUSED else ParameterError)
    assert (REFUSED | WITH_SOURCE)[name] in str(caught.value)
    advice = "nothing was written" if name in REFUSED else "verify bad.gguf --against SOURCE"
    assert advice in str(caught.value.do)
    if FAULTS[name].place != "file" and name in REFUSED:
        assert "repair bad.gguf OUT.gguf --from SOURCE" in str(caught.value.do)
        assert "It is left so: " in str(caught.value.found)
    assert (tmp_path / "bad.gguf").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_places_that_hold_no_weights_are_not_believed(good: Path, tmp_path: Path) -> None:
    """Offsets that fit the file are a proof only as long as what lies there are numbers."""
    inject("nan-scale", good, tmp_path / "nan.gguf")
    inject("tensor-misaligned", tmp_path / "nan.gguf", tmp_path / "bad.gguf")
    with pytest.raises(ModelFileError, match="finite weights: blk") as caught:
        fix(tmp_path / "bad.gguf", tmp_path / "new.gguf")
    assert str(caught.value.do) == "convert the model again; nothing was written"
    rewrite(tmp_path / "nan.gguf", tmp_path / "nan.gguf", {}, {"llama.rope.freq_base": Key(TEXT, "5e4")})
    with pytest.raises(ModelFileError, match=r"repair nan\.gguf OUT\.gguf --from SOURCE --inject TENSOR"):
        fix(tmp_path / "nan.gguf", tmp_path / "new.gguf")
    assert not (tmp_path / "new.gguf").exists()


def test_what_is_left_is_said_with_its_reason(short: Path, tmp_path: Path) -> None:
    """A file with two faults, one of which can be mended, is written and still fails."""
    inject("head-count-32", short, tmp_path / "heads.gguf")
    inject("rope-base-text", tmp_path / "heads.gguf", tmp_path / "bad.gguf")
    done = fix(tmp_path / "bad.gguf", tmp_path / "new.gguf")
    assert [check.name for check in done.report.failed] == ["head counts"]
    assert "llama.attention.head_count is 32" in done.left[0]
    assert "more than one pair" in done.left[0]


@pytest.mark.parametrize(
    ("key", "stored", "new"),
    [
        ("rope.freq_base", Key(TEXT, " 5e4 "), 5e4),
        ("rope.freq_base", Key(TEXT, "50000"), 5e4),
        ("rope.freq_base", Key(F64, 5e4), 5e4),
        ("rope.freq_base", Key(ValueKind("UINT32"), 50000), 5e4),
        ("attention.layer_norm_rms_epsilon", Key(TEXT, "1e-6"), 1e-6),
        ("attention.layer_norm_rms_epsilon", Key(F64, 0.001), 0.001),
        ("block_count", Key(ValueKind("INT32"), 2), 2),
        ("block_count", Key(ValueKind("UINT64"), 2), 2),
        ("block_count", Key(TEXT, "2"), 2),
        ("attention.head_count_kv", Key(F32, 2.0), 2),
    ],
)
def test_a_number_gets_its_kind(key: str, stored: Key, new: float) -> None:
    """Its value is the one that is stated."""
    keys = {"general.architecture": Key(TEXT, "llama"), f"llama.{key}": stored}
    changed, said = mended_keys(keys)
    assert changed == {f"llama.{key}": Key(ValueKind("FLOAT32" if isinstance(new, float) else "UINT32"), new)}
    assert len(said) == 1
    assert f"llama.{key}" in said[0]


@pytest.mark.parametrize(
    "stored",
    [
        *(Key(TEXT, each) for each in (
            "", "100.000", "100,000", "1_000", "1e5 (default)", "0x10", "nan", "inf", "1e39", "ten", "١٢"
        )),
        Key(F64, 1e39), Key(F64, float("nan")), Key(ValueKind("BOOL"), True), Key(ValueKind("ARRAY", "FLOAT32"), [5e4]),
    ],
)  # fmt: skip
def test_what_can_be_read_in_two_ways_is_no_number(stored: Key) -> None:
    """A hundred thousand with a point, or a hundred? A base that is guessed reads fine and is wrong."""
    keys = {"general.architecture": Key(TEXT, "llama"), "llama.rope.freq_base": stored}
    assert mended_keys(keys) == ({}, [])


@pytest.mark.parametrize("value", [-1, 2.5, 1 << 32])
def test_no_count_is_bent_into_its_kind(value: float) -> None:
    """What UINT32 cannot hold was never a count."""
    kind = F64 if isinstance(value, float) else ValueKind("INT64")
    keys = {"general.architecture": Key(TEXT, "llama"), "llama.block_count": Key(kind, value)}
    assert mended_keys(keys) == ({}, [])


def test_kinds_are_those_that_are_written(good: Path) -> None:
    """A list that differs from the converter's would mend files that are right."""
    written = model_keys(open_model(good).config, "", alignment=32, file_type=None)
    kinds = {name.removeprefix("llama."): key.kind.type for name, key in written.items() if name.startswith("llama.")}
    scaling = {"rope.scaling.factor", "rope.scale_linear"}
    assert {name: kind for name, kind in KINDS.items() if name not in scaling} == kinds


def test_a_sound_file_is_not_written_again(short: Path, tmp_path: Path) -> None:
    """Nor over itself, nor over another file."""
    with pytest.raises(ParameterError, match=r"nothing in short\.gguf is to be mended"):
        fix(short, tmp_path / "new.gguf")
    with pytest.raises(ParameterError, match="a file of the model itself"):
        fix(short, short, force=True)
    (tmp_path / "new.gguf").write_bytes(b"before")
    with pytest.raises(ParameterError, match="exists already"):
        fix(short, tmp_path / "new.gguf")
    assert (tmp_path / "new.gguf").read_bytes() == b"before"


def test_the_command(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Changes on standard error, the report of the new file, and its exit code."""
    bad, new = tmp_path / "bad.gguf", tmp_path / "new.gguf"
    inject("rope-base-text", good, bad)
    assert main(["model", "verify", str(bad), "--fix", str(new)]) == 0
    out, err = capsys.readouterr()
    assert "nanokit: llama.rope.freq_base: '50000.0' is a STRING, and becomes a FLOAT32, 50000.0\n" in err
    assert "new.gguf: no fault was found" in out
    assert contents(new) == contents(good)
    assert main(["model", "verify", str(bad), "--fix", str(new)]) == 2
    assert main(["model", "verify", str(bad), "--fix", str(new), "--force", "--against", str(good)]) == 0
    assert "ok: all" in capsys.readouterr().out
    rewrite(good, bad, {}, {"llama.rope.freq_base": None, "llama.block_count": Key(ValueKind("INT32"), 2)})
    assert main(["model", "verify", str(bad), "--fix", str(new), "--force"]) == 1
    out, err = capsys.readouterr()
    assert "llama.block_count: 2 is a INT32" in err
    assert "rope base: llama.rope.freq_base is missing" in err
    assert "1 of" in out
