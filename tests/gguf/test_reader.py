"""The GGUF reader against the library's writer, and against files that are wrong in one place."""

import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from handmade_gguf import array, gguf_bytes, info, pair, small_file, text, u32, u64
from hypothesis import given, settings
from hypothesis import strategies as st

from nanokit import paths
from nanokit.errors import ModelFileError
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.types import TENSOR_TYPES
from nanokit.quant.formats import FORMATS

LATTER = struct.pack("<4f", 1, 2, 3, 4) + b"\0" * 16
TWO_TENSORS = LATTER * 2
ARCHITECTURE = pair("general.architecture", 8, text("llama"))


def opened(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


def refusal(tmp_path: Path, content: bytes) -> str:
    with pytest.raises(ModelFileError) as caught:
        opened(tmp_path, content)
    assert "model.gguf" in str(caught.value), "the error does not name the file"
    assert caught.value.found is not None
    assert caught.value.needed is not None
    return str(caught.value)


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
    assert model.nbytes == sum(p.nbytes for p in packed.values())
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
    assert opened(tmp_path, gguf_bytes([ARCHITECTURE], version=version)).metadata == {
        "general.architecture": "llama"
    }


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
    content = gguf_bytes([], [info("a", [4])], LATTER[:16])
    assert opened(tmp_path, content).tensor("a").tolist() == [1, 2, 3, 4]
    assert opened(tmp_path, content + b"\0" * 48).tensor("a").tolist() == [1, 2, 3, 4]


# ---- files that are wrong in one place

MALFORMED = {
    "bad magic": (gguf_bytes(magic=b"GGML"), "no GGUF file"),
    "swapped magic": (gguf_bytes(magic=b"FUGG"), "swapped"),
    "version 0": (gguf_bytes(version=0), "version"),
    "version 1": (gguf_bytes(version=1), "version"),
    "future version": (gguf_bytes(version=4), "version"),
    "big endian": (gguf_bytes(version=3 << 24), "big-endian"),
    "minus one tensors": (gguf_bytes(n_tensors=(1 << 64) - 1), "number of tensors"),
    "more tensors than fit": (gguf_bytes([ARCHITECTURE], n_tensors=50), "number of tensors"),
    "fewer infos than said": (gguf_bytes([ARCHITECTURE], n_tensors=1), "tensor 1 of 1"),
    "minus one pairs": (gguf_bytes(n_pairs=(1 << 64) - 1), "number of metadata keys"),
    "fewer pairs than said": (gguf_bytes([ARCHITECTURE], n_pairs=2), "key 2 of 2"),
    "key of length -1": (gguf_bytes([u64((1 << 64) - 1) + b"x" * 64]), "key 1 of 1"),
    "empty key": (gguf_bytes([pair("", 4, u32(1))]), "key 1 of 1"),
    "key not UTF-8": (gguf_bytes([pair(b"\xff\xfe", 4, u32(1))]), "UTF-8"),
    "duplicate key": (gguf_bytes([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' is there twice"),
    "unknown value type": (gguf_bytes([pair("k", 13, u32(1))]), "'k' has an unknown type"),
    "value type -1": (gguf_bytes([pair("k", 0xFFFFFFFF, u32(1))]), "'k' has an unknown type"),
    "bool of 2": (gguf_bytes([pair("k", 7, b"\x02")]), "truth value"),
    "bool of 2 in a list": (gguf_bytes([pair("k", 9, array(7, 2, b"\x01\x02"))]), "truth value"),
    "string past the end": (gguf_bytes([pair("k", 8, u64(1 << 40) + b"x")]), "'k'"),
    "string of 2**64-1": (gguf_bytes([pair("k", 8, u64((1 << 64) - 1) + b"x")]), "'k'"),
    "string not UTF-8": (gguf_bytes([pair("k", 8, text(b"ab\xff"))]), "'k' is not UTF-8"),
    "token not UTF-8": (gguf_bytes([pair("k", 9, array(8, 2, text("a") + text(b"\xff")))]), "element 1"),
    "token past the end": (gguf_bytes([pair("k", 9, array(8, 2, text("a") + u64(999)))]), "element 1"),
    "token of 2**64-1": (gguf_bytes([pair("k", 9, array(8, 1, u64((1 << 64) - 1)))]), "element 0"),
    "array past the end": (gguf_bytes([pair("k", 9, array(12, 1 << 61, b"x" * 8))]), "past the end"),
    "strings past the end": (gguf_bytes([pair("k", 9, array(8, 1 << 61, b"x" * 8))]), "past the end"),
    "nested array": (gguf_bytes([pair("k", 9, array(9, 1, array(4, 1, u32(1))))]), "ARRAY"),
    "unknown element type": (gguf_bytes([pair("k", 9, array(77, 1, u32(1)))]), "type 77"),
    "alignment 0": (gguf_bytes([pair("general.alignment", 4, u32(0))]), "general.alignment"),
    "alignment 13": (gguf_bytes([pair("general.alignment", 4, u32(13))]), "general.alignment"),
    "alignment as INT32": (gguf_bytes([pair("general.alignment", 5, u32(32))]), "INT32"),
    "alignment as text": (gguf_bytes([pair("general.alignment", 8, text("32"))]), "STRING"),
    "alignment as list": (gguf_bytes([pair("general.alignment", 9, array(4, 1, u32(32)))]), "ARRAY"),
    "alignment 2**31": (
        gguf_bytes([pair("general.alignment", 4, u32(1 << 31))], [info("a", [4])], LATTER),
        "ends before tensor 'a'",
    ),
    "alignment not kept": (
        gguf_bytes(
            [pair("general.alignment", 4, u32(64))], [info("a", [4]), info("b", [4], 0, 32)], TWO_TENSORS * 4
        ),
        "needed: offset 64",
    ),
    "name too long": (gguf_bytes([], [info("x" * 64, [4])], LATTER), "1 to 63"),
    "empty name": (gguf_bytes([], [info("", [4])], LATTER), "1 to 63"),
    "name not UTF-8": (gguf_bytes([], [info(b"\xff", [4])], LATTER), "UTF-8"),
    "duplicate tensor": (
        gguf_bytes([], [info("a", [4]), info("a", [4], 0, 32)], TWO_TENSORS),
        "'a' is there twice",
    ),
    "no dimensions": (gguf_bytes([], [info("a", [], n_dims=0)], LATTER), "number of dimensions"),
    "five dimensions": (gguf_bytes([], [info("a", [1] * 5)], LATTER), "number of dimensions"),
    "2**32-1 dimensions": (
        gguf_bytes([], [info("a", [4], n_dims=0xFFFFFFFF)], LATTER),
        "number of dimensions",
    ),
    "zero dimension": (gguf_bytes([], [info("a", [4, 0])], LATTER), "dimensions"),
    "dimension -1": (gguf_bytes([], [info("a", [(1 << 64) - 1])], LATTER), "dimensions"),
    "product wraps to 4": (gguf_bytes([], [info("a", [1 << 62, 4, 4, 4])], LATTER), "dimensions"),
    "bytes wrap to 0": (gguf_bytes([], [info("a", [1 << 62])], LATTER), "ends before tensor 'a'"),
    "unknown tensor type": (gguf_bytes([], [info("a", [4], 99)], LATTER), "type 99"),
    "retired tensor type": (gguf_bytes([], [info("a", [32], 31)], LATTER), "Q4_0_4_4"),
    "columns no whole block": (gguf_bytes([], [info("a", [33], 8)], LATTER * 2), "multiple of 32"),
    "first offset not 0": (gguf_bytes([], [info("a", [4], 0, 32)], TWO_TENSORS), "needed: offset 0"),
    "overlap": (gguf_bytes([], [info("a", [4]), info("b", [4], 0, 0)], TWO_TENSORS), "found: offset 0"),
    "misaligned": (gguf_bytes([], [info("a", [4]), info("b", [4], 0, 3)], TWO_TENSORS), "found: offset 3"),
    "gap": (gguf_bytes([], [info("a", [4]), info("b", [4], 0, 64)], TWO_TENSORS * 2), "needed: offset 32"),
    "offset wraps": (gguf_bytes([], [info("a", [4]), info("b", [4], 0, (1 << 64) - 32)], TWO_TENSORS), "'b'"),
    "data one byte short": (gguf_bytes([], [info("a", [4])], LATTER[:15]), "found: 15 of its bytes"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_by_its_fault(tmp_path: Path, name: str) -> None:
    """Each of these has crashed, hung or silently misled some reader."""
    content, fragment = MALFORMED[name]
    assert fragment in refusal(tmp_path, content)


def test_every_cut_of_the_file_is_refused(tmp_path: Path) -> None:
    """A download that stopped anywhere, in the header or inside a tensor, must not load."""
    content = small_file()
    data_begin = opened(tmp_path, content).tensors["norm"].offset
    for length in range(1, len(content)):
        message = refusal(tmp_path, content[:length])
        if length >= data_begin + 64:  # the first tensor is whole
            assert "'head'" in message or "'blk.0.ffn'" in message
    assert f"needed: {40} bytes from byte {data_begin + 160} on" in refusal(tmp_path, content[:-1])


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_mutation_is_refused_or_loads_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random damage ends in a ModelFileError or in a model whose tensors lie in the file."""
    content = bytearray(small_file())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + 1] = data.draw(st.one_of(st.binary(min_size=1, max_size=1), st.binary(max_size=9)))
    content = content[: data.draw(st.integers(len(content) // 2, len(content)))]
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        model = GGUFFile.open(path)
    except ModelFileError:
        return
    for name, entry in model.tensors.items():
        assert model.raw(name).nbytes == entry.nbytes
        try:
            assert np.isfinite(model.tensor(name)).all()
        except ModelFileError:
            assert name in model.tensors


@pytest.mark.parametrize(
    "name", ["minus one tensors", "array past the end", "strings past the end", "bytes wrap to 0"]
)
def test_a_header_that_lies_costs_no_memory(tmp_path: Path, name: str) -> None:
    """A count in the header must not become an allocation before it is compared with the file."""
    tracemalloc.start()
    try:
        refusal(tmp_path, MALFORMED[name][0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


# ---- files that are something else

FOREIGN = {
    "safetensors": (u64(40) + b'{"a":{"dtype":"F32","shape":[1],"data_of' + b"\0" * 64, "safetensors"),
    "zip": (b"PK\x03\x04" + b"\0" * 60, "zip"),
    "web page": (b"\n<!DOCTYPE html><html><body>404</body></html>", "web page"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    "old GGML": (b"tjgg" + b"\0" * 60, "before GGUF"),
    "short": (b"GG", "begins with b'GG'"),
    "noise": (bytes(range(200, 256)), "begins with"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_named(tmp_path: Path, name: str) -> None:
    """What people open by mistake is recognized, and the error says what to do."""
    content, fragment = FOREIGN[name]
    message = refusal(tmp_path, content)
    assert fragment in message
    assert "do: " in message


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Nothing there, a directory, a pipe (which would wait for ever), an empty file, impossible names."""
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    cases = {
        tmp_path / "no.gguf": "no such file",
        tmp_path: "directory",
        tmp_path / "pipe.gguf": "no regular file",
        tmp_path / "empty.gguf": "is empty",
        tmp_path / ("x" * 5000): "cannot be read",
        Path("nul\0.gguf"): "cannot be read",
        tmp_path / "empty.gguf" / "x.gguf": "cannot be read",
    }
    for path, fragment in cases.items():
        with pytest.raises(ModelFileError, match=fragment) as caught:
            GGUFFile.open(path)
        assert caught.value.needed


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
    assert (
        len(model.metadata["tokenizer.ggml.tokens"]) == model.tensors["token_embd.weight"].shape[0] == 49152
    )
    for name in ("blk.0.attn_k.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        entry = model.tensors[name]
        rows = model.raw(name).reshape(*entry.shape[:-1], -1)
        expected = quants.dequantize(rows, gguf.GGMLQuantizationType[entry.type])
        assert np.array_equal(model.tensor(name), expected.reshape(entry.shape))
