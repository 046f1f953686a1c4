"""Weights read as they are stored: the codes must give the very weights that `dense` gives."""

import sys
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from handmade_gguf import gguf_bytes, info
from tiny import VOCAB, save_tiny, save_tiny_gguf, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from nanokit.errors import ModelFileError
from nanokit.gguf.reader import GGUFFile
from nanokit.model.load import open_model
from nanokit.model.weights import find_weights

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q8_0"]


@pytest.fixture
def quantizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gguf library write each matrix in a type of its own."""

    class Writer(gguf.GGUFWriter):
        def add_tensor(self, name: str, tensor: np.ndarray, *more: object, **how: object) -> None:
            if tensor.ndim == 2:
                kind = GGMLQuantizationType[TYPES[len(self.tensors[0]) % len(TYPES)]]
                tensor, how = quants.quantize(tensor, kind), {"raw_dtype": kind}
            super().add_tensor(name, tensor, *more, **how)

    monkeypatch.setattr(gguf, "GGUFWriter", Writer)


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config])
@pytest.mark.usefixtures("quantizing")
def test_codes_are_the_dense_weights_row_by_row(tmp_path: Path, config: type) -> None:
    """Llama's q and k rows stand permuted in the file: codes, scales or minimums left so would each pair a row with
    another's. `dense` is checked against transformers elsewhere."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(
            vocab_size=VOCAB, hidden_size=160, intermediate_size=96, num_hidden_layers=3, num_attention_heads=16,
            num_key_value_heads=8, head_dim=10, max_position_embeddings=64, initializer_range=0.2, eos_token_id=258,
            bos_token_id=256, pad_token_id=None, tie_word_embeddings=False,
        )
    )  # fmt: skip
    source = open_model(save_tiny_gguf(tmp_path / "m.gguf", model))
    weights = find_weights(source.config, source)
    layers = [x.weight for w in weights.layers for x in (w.q, w.k, w.v, w.o, w.gate, w.up, w.down)]
    assert {matrix.type for matrix in layers} == set(TYPES)
    assert weights.head is not None
    for matrix in (weights.embedding, weights.head.weight, *layers):
        q = matrix.quantized()
        assert q is not None
        assert (q.format, q.shape) == (matrix.type, matrix.shape)
        assert q.codes.flags.c_contiguous
        assert np.array_equal(q.dequantize(), matrix.dense().numpy()), matrix.name
        for first, end in ((0, 1), (7, 31), (20, 40), (19, matrix.shape[0])):
            part = matrix.quantized(first, end)
            assert part is not None
            assert part.shape == (end - first, matrix.shape[1])
            assert np.array_equal(part.dequantize(), q.dequantize()[first:end]), (matrix.name, first, end)
    assert weights.final_norm.quantized() is None


def test_a_checkpoint_of_floats_has_no_codes(tmp_path: Path) -> None:
    source = open_model(save_tiny(tmp_path / "m", tiny_model("llama")))
    matrix = find_weights(source.config, source).layers[0].q.weight
    assert matrix.type == "F32"
    assert matrix.quantized() is None


def one_tensor(path: Path, name: str, blocks: np.ndarray) -> GGUFFile:
    """A file with one matrix [rows, block] of the type, a block a row."""
    kind = GGMLQuantizationType[name]
    data = blocks.tobytes()
    entry = info("w", [gguf.GGML_QUANT_SIZES[kind][0], len(blocks)], kind.value)
    path.write_bytes(gguf_bytes(infos=[entry], data=data + b"\0" * (-len(data) % 32)))
    return GGUFFile.open(path)


@pytest.mark.parametrize("at", [0, 2], ids=["scale", "minimum"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused_with_its_place(tmp_path: Path, at: int, bad: float) -> None:
    """Packed unseen, one damaged scale makes every answer NaN, far from the cause."""
    blocks = np.ones((7, 20), np.uint8)
    blocks[4, at : at + 2] = np.array([bad], "<f2").view(np.uint8)
    with pytest.raises(ModelFileError, match=r"(?s)'w' holds a weight that is not a finite number.*\[4, 0\]"):
        one_tensor(tmp_path / "m.gguf", "Q4_1", blocks).quantized("w")


def test_a_finite_scale_whose_product_overflows(tmp_path: Path) -> None:
    """MXFP4 can hold 2^126 times 12, which is no fp32 number, and 2^126 times 2, which is."""
    blocks = np.full((2, 17), 0x22, np.uint8)  # codes 2: twice the halved scale
    blocks[1, 0] = 254
    q = one_tensor(tmp_path / "finite.gguf", "MXFP4", blocks).quantized("w")
    assert q is not None
    assert q.dequantize()[1, 0] == 2.0**127
    blocks[1, 5] = 0x27
    with pytest.raises(ModelFileError, match="not a finite number"):
        one_tensor(tmp_path / "infinite.gguf", "MXFP4", blocks).quantized("w")


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_damaged_scale_in_the_middle_is_found_where_it_is(tmp_path: Path) -> None:
    """Rows are read in parts: the place that is named must count from the first row of the file."""
    blocks = np.ones((40, 20), np.uint8)
    blocks[33, 0:2] = 0xFF
    file = one_tensor(tmp_path / "m.gguf", "Q4_1", blocks)
    assert file.quantized("w", 0, 32) is not None
    with pytest.raises(ModelFileError, match=r"\[33, 0\]"):
        file.quantized("w", 32, 40)


def test_the_file_does_not_count_beside_what_was_read(tmp_path: Path) -> None:
    """A mapped file that was read stays in the process's memory: a model of 97 MB would take that much twice."""
    path = tmp_path / "m.gguf"
    file = one_tensor(path, "Q4_1", np.zeros((1 << 20, 20), np.uint8))

    def resident() -> int:
        return sum(m.rss for m in psutil.Process().memory_maps() if m.path == str(path))

    assert file.raw("w").sum() == 0
    assert resident() > 19 << 20
    for read in (file.quantized, file.tensor):
        read("w")
        assert resident() < 1 << 20
    middle, around = 10 << 20, 60_000
    assert not file.raw("w")[middle - around : middle + around].any()  # mapped, as the system does by itself at times
    file.quantized("w", middle // 20, middle // 20 + 1)
    assert resident() == 0
