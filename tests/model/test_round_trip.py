"""Blocks to floats and back: a file is quantized again into the very bytes that it was.

Reader, quantizer and writer can each be right by their own tests and still not fit each other: rows in another order on
one of the ways, a scale rounded once more, a tensor left out. Then a model that goes through floats changes a little
every time.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny import compiled_model, save_tiny_gguf

from nanokit.gguf.reader import GGUFFile
from nanokit.model.quantize import quantize
from nanokit.quant.formats import FORMATS
from nanokit.quant.ggml import GGML_FORMATS, TERNARY_FORMATS


def blocks_alike(before: Path, after: Path) -> int:
    """The blocks in `before`; fails at the first that `after` has otherwise, and at any other tensor."""
    old, new = GGUFFile.open(before), GGUFFile.open(after)
    assert list(old.tensors) == list(new.tensors)
    count = 0
    for name, info in old.tensors.items():
        assert (new.tensors[name].type, new.tensors[name].shape) == (info.type, info.shape), name
        form = FORMATS[info.type]
        ours, theirs = (file.raw(name).reshape(-1, form.block_bytes) for file in (new, old))
        differing = np.flatnonzero((ours != theirs).any(axis=1))
        assert not len(differing), (
            f"{name}: {len(differing)} of {len(theirs)} blocks of {info.type} differ, first block {differing[0]}: "
            f"{ours[differing[0]].tobytes().hex()}, was {theirs[differing[0]].tobytes().hex()}"
        )
        count += len(theirs) if form.block_size > 1 else 0
    return count


@pytest.mark.model
def test_all_blocks_of_the_default_model(default_model: Path, tmp_path: Path) -> None:
    """The floats in between are those that the gguf library reads, so that two faults cannot cancel."""
    plain = quantize(default_model, tmp_path / "f32.gguf", "f32").path
    floats, file = GGUFFile.open(plain), GGUFFile.open(default_model)
    assert {info.type for info in floats.tensors.values()} == {"F32"}
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.attn_k.weight", "blk.17.ffn_down.weight"):
        kind = gguf.GGMLQuantizationType[file.tensors[name].type]
        expected = gguf.quants.dequantize(file.raw(name).reshape(file.tensors[name].shape[0], -1), kind)
        assert np.array_equal(floats.raw(name).view(np.float32).reshape(expected.shape), expected), name
    again = quantize(plain, tmp_path / "again.gguf", "q4_1;head=q8_0").path
    del floats
    plain.unlink()  # half a gigabyte
    assert blocks_alike(default_model, again) == 4_202_496
    assert again.read_bytes() == default_model.read_bytes(), "something beside the tensors differs"


@pytest.mark.parametrize("kind", [*GGML_FORMATS, "mxfp4", *TERNARY_FORMATS])
@pytest.mark.parametrize("tied", [True, False])
def test_every_type_that_the_kit_writes(kind: str, tied: bool, tmp_path: Path) -> None:
    """The default model has two types, and no head of its own."""
    policy = f"mix:all={kind},head={kind}"
    source = save_tiny_gguf(tmp_path / "in.gguf", compiled_model("llama", tied=tied, columns=256))
    once = quantize(source, tmp_path / "once.gguf", policy).path
    plain = quantize(once, tmp_path / "plain.gguf", "f32").path
    twice = quantize(plain, tmp_path / "twice.gguf", policy).path
    weights = sum(np.prod(info.shape) for info in GGUFFile.open(once).tensors.values() if len(info.shape) == 2)
    assert blocks_alike(once, twice) == weights / FORMATS[kind.upper()].block_size
    assert once.read_bytes() == twice.read_bytes()


def test_a_block_that_differs_is_named(tmp_path: Path) -> None:
    """A comparison that cannot fail would make the others worth nothing."""
    path = save_tiny_gguf(tmp_path / "in.gguf", compiled_model("llama", tied=True), types="Q4_1")
    file = GGUFFile.open(path)
    changed = bytearray(path.read_bytes())
    changed[file.tensors["blk.1.ffn_up.weight"].offset + 7 * 20 + 5] ^= 1
    (tmp_path / "changed.gguf").write_bytes(changed)
    with pytest.raises(AssertionError, match=r"blk\.1\.ffn_up\.weight: 1 of 192 blocks of Q4_1 differ, first block 7"):
        blocks_alike(path, tmp_path / "changed.gguf")
