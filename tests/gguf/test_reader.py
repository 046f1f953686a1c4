"""The GGUF reader against the library that writes the files, and against real ones."""

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from handmade_gguf import array, gguf_bytes, info, pair, small_file, text, u32

from nanokit import paths
from nanokit.errors import ModelFileError
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.types import TENSOR_TYPES
from nanokit.quant.formats import FORMATS


def opened(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


# ---- sound files


def test_every_value_type_reads_back_as_written(tmp_path: Path) -> None:
    """A wrong width or sign of one value type shifts everything after it."""
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    expected = {
        "u8": 200, "i8": -9, "u16": 60000, "i16": -30000, "u32": 4_000_000_000, "i32": -2_000_000_000,
        "u64": 1 << 63, "i64": -(1 << 62), "f32": 0.5, "f64": 0.1, "yes": True, "no": False, "text": "é 🙂",
    }  # fmt: skip
    adders = {
        "u8": writer.add_uint8, "i8": writer.add_int8, "u16": writer.add_uint16, "i16": writer.add_int16,
        "u32": writer.add_uint32, "i32": writer.add_int32, "u64": writer.add_uint64, "i64": writer.add_int64,
        "f32": writer.add_float32, "f64": writer.add_float64, "yes": writer.add_bool, "no": writer.add_bool,
        "text": writer.add_string,
    }  # fmt: skip
    for key, value in expected.items():
        adders[key](key, value)
    lists = {
        "ints": [1, -2, 3],
        "floats": [0.5, -1.5],
        "bools": [True, False],
        "words": ["a", "ü", "<|im_end|>"],
    }
    for key, items in lists.items():
        writer.add_array(key, items)
    finish(writer)
    metadata = GGUFFile.open(tmp_path / "v.gguf").metadata
    assert metadata == {"general.architecture": "llama", **expected, **lists}
    assert [type(metadata[k]) for k in expected] == [type(v) for v in expected.values()]
    assert all(type(x) is bool for x in metadata["bools"])


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tensors_of_every_writable_type_equal_the_librarys(tmp_path: Path) -> None:
    """Shape order, offsets, padding and values, of all types in one file, with alignment 64."""
    rng = np.random.default_rng(1)
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    kinds = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
    packed = {}
    for kind in kinds:
        qtype = gguf.GGMLQuantizationType[kind]
        packed[kind] = quants.quantize(rng.standard_normal((2, 3, 256)).astype(np.float32), qtype)
        writer.add_tensor(f"w.{kind}", packed[kind], raw_dtype=qtype)
    finish(writer)
    model = GGUFFile.open(path)
    assert model.alignment == 64
    assert list(model.tensors) == [f"w.{kind}" for kind in kinds]
    assert [t.nbytes for t in model.tensors.values()] == [p.nbytes for p in packed.values()]
    for kind in kinds:
        entry = model.tensors[f"w.{kind}"]
        assert (entry.type, entry.shape, entry.file, entry.offset % 64) == (kind, (2, 3, 256), path, 0)
        assert model.raw(f"w.{kind}").tobytes() == packed[kind].tobytes()
        expected = quants.dequantize(packed[kind], gguf.GGMLQuantizationType[kind]).reshape(2, 3, 256)
        values = model.tensor(f"w.{kind}")
        assert values.dtype == np.float32
        assert values.flags.writeable
        assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_type_numbers_and_block_sizes_are_the_librarys() -> None:
    """A wrong id or block size reads the wrong bytes of every tensor that follows."""
    library = {int(t): (t.name, *size) for t, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {i: (t.name, t.block_size, t.block_bytes) for i, t in TENSOR_TYPES.items()}
    # The library gives Q8_1 blocks, which no file holds, the size from before their sums became f16.
    assert {i: v for i, v in ours.items() if i in library and v[0] != "Q8_1"} == {
        i: v for i, v in library.items() if i in ours and v[0] != "Q8_1"
    }
    assert set(FORMATS) <= {name for name, _, _ in ours.values()}


def test_small_file_is_read_in_full(tmp_path: Path) -> None:
    """The file that the truncation and mutation tests start from is sound; an empty list is no fault."""
    model = opened(tmp_path, small_file())
    assert model.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
    assert model.metadata["a.bools"] == [True, False]
    assert model.metadata["an.empty.list"] == []
    assert model.tensor("norm").tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert model.tensor("head")[1, 5] == 2.5
    assert model.tensor("blk.0.ffn")[0, 16 + 3] == -1.0  # byte 3 has a high half of 0


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_open(tmp_path: Path, version: int) -> None:
    """Version 2 differs from 3 in nothing that a little-endian file shows."""
    assert opened(tmp_path, gguf_bytes([pair("k", 4, u32(7))], version=version)).metadata == {"k": 7}


def test_raw_is_a_read_only_view_that_outlives_the_model(tmp_path: Path) -> None:
    """A packed tensor handed to a kernel must not be freed, copied or written through."""
    model = opened(tmp_path, small_file())
    raw = model.raw("norm")
    assert not raw.flags.owndata
    assert not raw.flags.writeable
    del model
    assert raw.view("<f4").tolist() == list(range(12))


def test_bytes_after_the_last_tensor_are_allowed(tmp_path: Path) -> None:
    """Writers pad the last tensor, and some do not: both must open."""
    content = gguf_bytes([], [info("a", [4])], struct.pack("<4f", 1, 2, 3, 4))
    assert opened(tmp_path, content).tensor("a").tolist() == [1, 2, 3, 4]
    assert opened(tmp_path, content + b"\0" * 48).tensor("a").tolist() == [1, 2, 3, 4]


# ---- tensors that cannot be used


def test_a_missing_tensor_is_named_with_its_likes(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"(?s)'blk.0.fnn' is missing.*blk\.0\.ffn"):
        opened(tmp_path, small_file()).raw("blk.0.fnn")


def test_a_tensor_of_whole_numbers_opens_and_is_no_weight(tmp_path: Path) -> None:
    """A file may carry an index table; only its use as weights is refused, by name."""
    model = opened(tmp_path, gguf_bytes([], [info("map", [4], 26)], struct.pack("<4i", 1, 2, 3, 4)))
    assert model.raw("map").view("<i4").tolist() == [1, 2, 3, 4]
    with pytest.raises(ModelFileError, match=r"(?s)tensor 'map'.*I32"):
        model.tensor("map")


def test_a_scale_that_is_not_finite_is_refused_with_its_place(tmp_path: Path) -> None:
    """Damage inside the data passes every check of the header; it shows in the scales."""
    content = bytearray(small_file())
    at = opened(tmp_path, bytes(content)).tensors["head"].offset + 34
    content[at : at + 2] = struct.pack("<e", float("nan"))
    with pytest.raises(ModelFileError, match=r"(?s)tensor 'head'.*nan at \[1, 0\]"):
        opened(tmp_path, bytes(content)).tensor("head")


# ---- speed


def test_a_vocabulary_of_150_000_entries_opens_within_a_second(tmp_path: Path) -> None:
    """Large vocabularies are where a reader that makes an object per field takes half a minute."""
    n = 150_000
    tokens = b"".join(text(f"token{i}") for i in range(n))
    merges = b"".join(text(f"to ken{i}") for i in range(n))
    pairs = [
        pair("tokenizer.ggml.tokens", 9, array(8, n, tokens)),
        pair("tokenizer.ggml.merges", 9, array(8, n, merges)),
        pair("tokenizer.ggml.token_type", 9, array(5, n, np.ones(n, "<i4").tobytes())),
    ]
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(gguf_bytes(pairs))
    began = time.perf_counter()
    model = GGUFFile.open(path)
    assert time.perf_counter() - began < 1.0
    assert model.metadata["tokenizer.ggml.tokens"][-1] == f"token{n - 1}"
    assert model.metadata["tokenizer.ggml.merges"][-1] == f"to ken{n - 1}"


@pytest.mark.parametrize(("name", "n"), [("gpt-2", 50257), ("phi-3", 32064), ("qwen2", 151936)])
def test_real_vocabularies_open(name: str, n: int) -> None:
    """What converters in use write: all strings are UTF-8, and no limit of ours is too low."""
    folder = os.environ.get("NANOKIT_VOCABS")
    if folder is None:
        pytest.skip("NANOKIT_VOCABS does not name the folder of real vocabularies")
    model = GGUFFile.open(Path(folder) / f"{name}.gguf")
    assert len(model.metadata["tokenizer.ggml.tokens"]) == n == len(model.metadata["tokenizer.ggml.token_type"])
    assert model.tensors == {}


@pytest.mark.model
def test_the_default_model_opens_in_a_third_of_a_second() -> None:
    """And its tensors are what the library makes of the same bytes."""
    path = paths.cache_dir() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip("the default model is not in the cache: run `nanokit model fetch`")
    times = []
    for _ in range(3):
        began = time.perf_counter()
        model = GGUFFile.open(path)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.3
    kinds = [entry.type for entry in model.tensors.values()]
    assert (kinds.count("Q4_1"), kinds.count("F32"), kinds.count("Q8_0")) == (210, 61, 1)
    assert len(model.metadata["tokenizer.ggml.tokens"]) == model.tensors["token_embd.weight"].shape[0] == 49152
    for name in ("blk.0.attn_k.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        entry = model.tensors[name]
        rows = model.raw(name).reshape(*entry.shape[:-1], -1)
        expected = quants.dequantize(rows, gguf.GGMLQuantizationType[entry.type])
        assert np.array_equal(model.tensor(name), expected.reshape(entry.shape))
