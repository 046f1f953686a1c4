"""Each broken copy is broken where it says and nowhere else; the gguf library's reader is the witness."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from phi3 import save_tiny_phi3
from tiny import save_tiny_gguf, tiny_model

from nanokit.errors import ModelFileError, ParameterError
from nanokit.gguf.cursor import ALIGNMENT, KEYS, PLACES, SIZE, START, TENSORS, HeaderError
from nanokit.gguf.faults import FAULTS, Injected, inject
from nanokit.gguf.reader import GGUFFile

PARTS = {
    "truncated-magic": START, "truncated-keys": KEYS, "truncated-table": TENSORS, "truncated-first": SIZE,
    "truncated-middle": SIZE, "truncated-last": SIZE, "tensor-misaligned": PLACES, "tensors-overlapping": PLACES,
    "alignment-0": ALIGNMENT, "alignment-13": ALIGNMENT, "alignment-2-31": ALIGNMENT,
}  # fmt: skip
IN_KEYS = [each.name for each in FAULTS.values() if each.place == "keys"]
IN_TENSORS = [each.name for each in FAULTS.values() if each.place == "tensors"]
Contents = tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Models of rope base 50,000: llama, tied, with GQA; qwen2 with biases and a head of its own; llama of Q8_0."""
    folder = tmp_path_factory.mktemp("sound")
    base = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    llama, qwen2 = tiny_model("llama", tied=True, **base), tiny_model("qwen2", heads=6, hidden=60, **base)
    wide = tiny_model("llama", tied=True, heads=4, hidden=64, head_dim=16, **base)
    return {
        "llama": save_tiny_gguf(folder / "llama.gguf", llama),
        "qwen2": save_tiny_gguf(folder / "qwen2.gguf", qwen2),
        "llama Q8_0": save_tiny_gguf(folder / "q8.gguf", wide, types="Q8_0"),
    }


def contents(path: Path) -> Contents:
    """Everything that the library reads in a file."""
    reader = gguf.GGUFReader(path)
    keys = {name: (each.types, each.contents()) for name, each in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {
        t.name: (t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), t.data.tobytes()) for t in reader.tensors
    }
    return keys, tensors


def different(a: Mapping[str, Any], b: Mapping[str, Any]) -> set[str]:
    return {name for name in {*a, *b} if a.get(name) != b.get(name)}


def broken(name: str, source: Path, tmp_path: Path) -> tuple[Injected, Path]:
    return inject(name, source, tmp_path / "broken.gguf"), tmp_path / "broken.gguf"


@pytest.mark.parametrize("model", ["llama", "qwen2", "llama Q8_0"])
@pytest.mark.parametrize("name", [*IN_KEYS, *IN_TENSORS])
def test_a_fault_changes_what_it_names_and_nothing_else(
    sources: Mapping[str, Path], tmp_path: Path, name: str, model: str
) -> None:
    """A second fault in the copy would be what a verifier finds."""
    if name == "k-wrong-heads" and model == "qwen2":
        with pytest.raises(ParameterError, match="qwen2"):
            broken(name, sources[model], tmp_path)
        return
    found, path = broken(name, sources[model], tmp_path)
    (keys, tensors), (own_keys, own_tensors) = contents(path), contents(sources[model])
    assert different(keys, own_keys) == set(found.keys)
    assert different(tensors, own_tensors) == set(found.tensors)
    assert [*tensors] == [each for each in own_tensors if each in tensors], "the order of tensors has changed"
    assert bool(found.keys) == (found.fault.place == "keys")
    assert bool(found.tensors) == (found.fault.place == "tensors")
    assert GGUFFile.open(path).tensors.keys() == tensors.keys()


@pytest.mark.parametrize("name", PARTS)
def test_a_fault_of_the_file_is_refused_with_its_part_and_name(
    sources: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    """Everything else in the file is as it was, and the reader says which part is not."""
    found, path = broken(name, sources["llama"], tmp_path)
    assert found.fault.place == "file"
    with pytest.raises(HeaderError) as caught:
        GGUFFile.open(path)
    assert caught.value.part == PARTS[name]
    assert len(found.keys) + len(found.tensors) == (name != "truncated-magic")
    assert all(each in caught.value.what for each in (*found.keys, *found.tensors)), caught.value
    sound, copy = sources["llama"].read_bytes(), path.read_bytes()
    if name.startswith("truncated"):
        assert sound.startswith(copy)
        assert len(copy) < len(sound)
    elif name.startswith("tensor"):
        assert len(copy) == len(sound)
        assert 0 < sum(a != b for a, b in zip(copy, sound, strict=True)) <= 8
    else:
        assert contents_but_alignment(path, copy) == contents(sources["llama"])


def contents_but_alignment(path: Path, copy: bytes) -> Contents:
    """Of a copy whose alignment is set right again."""
    at = copy.index(b"general.alignment") + len("general.alignment") + 4
    path.write_bytes(copy[:at] + (32).to_bytes(4, "little") + copy[at + 4 :])
    keys, tensors = contents(path)
    assert keys.pop("general.alignment")[1] == 32
    return keys, tensors


def test_cuts_lie_where_their_names_say(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """Six cuts, each later than the one before; the last takes four bytes of data."""
    cuts = [name for name in PARTS if name.startswith("truncated")]
    sizes = [broken(name, sources["llama"], tmp_path)[1].stat().st_size for name in cuts]
    infos = list(GGUFFile.open(sources["llama"]).tensors.values())
    assert sizes == sorted(set(sizes))
    assert 4 < sizes[0] < 24
    assert infos[0].offset < sizes[3] < infos[1].offset
    assert infos[1].offset < sizes[4] < infos[-1].offset
    assert sizes[5] == infos[-1].offset + infos[-1].nbytes - 4


def test_rows_come_in_the_order_that_the_fault_names(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """q and k as transformers has them, k interleaved as if it had other heads, gate and up stacked and swapped."""
    own = contents(sources["llama"])[1]
    base = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    state = tiny_model("llama", tied=True, **base).state_dict()
    permuted = contents(broken("q-k-permuted", sources["llama"], tmp_path)[1])[1]
    for part in "qk":
        assert (
            permuted[f"blk.1.attn_{part}.weight"][2]
            == state[f"model.layers.1.self_attn.{part}_proj.weight"].numpy().tobytes()
        )

    found, path = broken("k-wrong-heads", sources["llama"], tmp_path)
    assert "for 5 heads, in place of 2" in found.said  # 20 rows: six heads would not have pairs
    k = state["model.layers.0.self_attn.k_proj.weight"].numpy()
    expected = np.concatenate([k[4 * head + np.array([0, 2, 1, 3])] for head in range(5)])
    assert contents(path)[1]["blk.0.attn_k.weight"][2] == expected.tobytes()

    fused = contents(broken("gate-up-fused", sources["llama"], tmp_path)[1])[1]
    assert "blk.0.ffn_gate.weight" not in fused
    assert fused["blk.0.ffn_up.weight"][1:] == (
        (192, 60), own["blk.0.ffn_gate.weight"][2] + own["blk.0.ffn_up.weight"][2]
    )  # fmt: skip
    swapped = inject("gate-up-swapped-one", sources["llama"], tmp_path / "broken.gguf", layer=0)
    assert swapped.tensors == ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight")
    assert contents(path)[1]["blk.0.ffn_gate.weight"] == own["blk.0.ffn_up.weight"]


def test_values_of_keys_are_those_that_the_fault_names(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """The rope base as a number, gone, as a text; scaling by 2; another head count."""

    def value(name: str, key: str) -> Any:
        kind, stored = contents(broken(name, sources["llama"], tmp_path)[1])[0].get(f"llama.{key}", (None, None))
        return kind and kind[0].name, stored

    assert value("rope-base-10000", "rope.freq_base") == ("FLOAT32", 10000.0)
    assert value("rope-base-missing", "rope.freq_base") == (None, None)
    assert value("rope-base-text", "rope.freq_base") == ("STRING", "50000.0")
    assert value("frequency-scale-half", "rope.scaling.factor") == ("FLOAT32", 2.0)
    assert value("frequency-scale-half", "rope.scaling.type") == ("STRING", "linear")
    assert value("head-count-32", "attention.head_count") == ("UINT32", 32)


@pytest.mark.parametrize("model", ["llama", "llama Q8_0"])
def test_one_number_is_not_finite(sources: Mapping[str, Path], tmp_path: Path, model: str) -> None:
    """The reader refuses that tensor by name, and reads all others."""
    found, path = broken("nan-scale", sources[model], tmp_path)
    file = GGUFFile.open(path)
    for name in file.tensors:
        if name in found.tensors:
            with pytest.raises(ModelFileError, match=name):
                file.tensor(name)
        else:
            assert np.isfinite(file.tensor(name)).all()


def test_the_same_model_gives_the_same_copy(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """A notebook's figures and a test's finding are of one file."""
    for name in FAULTS:
        digests = {hashlib.sha256(broken(name, sources["llama"], tmp_path)[1].read_bytes()).hexdigest() for _ in "ab"}
        assert len(digests) == 1, name


def test_what_cannot_be_injected_is_refused(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """An unknown name with the list of those that there are; a fault that would change nothing; the source itself."""
    source, target = sources["llama"], tmp_path / "broken.gguf"
    with pytest.raises(ParameterError, match=r"rope-base-10000, .*nan-scale"):
        inject("rope-base", source, target)
    with pytest.raises(ParameterError, match="another file"):
        inject("nan-scale", source, source)
    with pytest.raises(ParameterError, match="0 to 1"):
        inject("gate-up-swapped-one", source, target, layer=2)
    with pytest.raises(ParameterError, match="one layer"):
        inject("nan-scale", source, target, layer=0)
    same = inject("rope-base-10000", source, tmp_path / "other.gguf")
    assert same.fault is FAULTS["rope-base-10000"]
    with pytest.raises(ParameterError, match="rope base 10000"):
        inject("rope-base-10000", tmp_path / "other.gguf", target)
    assert not target.exists()


def test_a_fused_matrix_has_the_shape_that_phi3_gives_it(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """The fault cannot be told by the tensor's name and shape alone: a legitimate phi3 file has such a matrix."""
    fused = contents(broken("gate-up-fused", sources["llama"], tmp_path)[1])
    phi3 = contents(save_tiny_phi3(tmp_path / "phi3.gguf"))
    for (keys, tensors), arch in ((fused, "llama"), (phi3, "phi3")):
        assert tensors["blk.0.ffn_up.weight"][1][0] == 2 * keys[f"{arch}.feed_forward_length"][1]
        assert "blk.0.ffn_gate.weight" not in tensors
    with pytest.raises(ParameterError, match="ffn_gate"):
        inject("gate-up-fused", tmp_path / "phi3.gguf", tmp_path / "broken.gguf")
