"""Files of random weights: they must load everywhere, compute something sane, and leave nothing half-written."""

import errno
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from nanokit.cli import main
from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.sampling import Sampling
from nanokit.errors import NanokitError, ParameterError
from nanokit.gguf.reader import GGUFFile
from nanokit.kv.pages import PagedKV
from nanokit.model import synth
from nanokit.model.batch import Batch
from nanokit.model.config import ModelConfig
from nanokit.model.rope import Rope
from nanokit.model.synth import HALVES, SHAPES, synthesize
from nanokit.quant.formats import FORMATS


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied Qwen 2 and untied Llama of two layers; pieces that cut their matrices."""
    for name, architecture, tied in (("small-qwen", "qwen2", True), ("small-llama", "llama", False)):
        shape = ModelConfig(
            architecture=architecture, vocab_size=400, hidden_size=256, intermediate_size=512, num_layers=2,
            num_heads=16, num_kv_heads=4, head_dim=16, max_context=256, rms_eps=2.0**-17, rope=Rope(1e5),
            tied_head=tied,
        )  # fmt: skip
        monkeypatch.setitem(synth.SHAPES, name, shape)
    monkeypatch.setattr(synth, "PIECE", 10_000)


def logits_of(engine: LoadedEngine, ids: list[int]) -> torch.Tensor:
    pages = PagedKV(engine.model.config, 1)
    return engine.model.head.logits(engine.model.forward(Batch(ids, [len(ids)], [len(ids)], [[0]]), pages))


@pytest.mark.parametrize("like", ["small-qwen", "small-llama"])
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_a_file_loads_and_computes(tmp_path: Path, like: str, name: str) -> None:
    """A shape, key, bias or norm that is missing or too many is refused by the loader; scales too large or small
    make logits that are infinite, all alike, or the same for every token."""
    engine = load(synthesize(like, name, tmp_path / "m.gguf"), kv_memory="16MiB")
    assert engine.model.config == SHAPES[like]
    logits = logits_of(engine, [5, 77, 300, 42, 5, 399])
    assert logits.isfinite().all()
    assert (logits.std(1) > 0.5).all()
    assert (logits.std(1) < 2).all()
    assert torch.corrcoef(logits).fill_diagonal_(0).abs().max() < 0.9
    ids = engine.tokenizer.encode("héllo\n")
    assert engine.tokenizer.decode(ids) == "héllo\n"
    assert len(engine.generate([[1, 2, 3]], Sampling(max_tokens=4))[0].token_ids) == 4


@pytest.mark.parametrize("name", HALVES)
def test_weights_of_every_type_keep_the_size_of_what_they_multiply(tmp_path: Path, name: str) -> None:
    """A minimum that does not cancel the mean of the codes lets activations grow from layer to layer. Read by another
    reader, which also checks sizes and offsets."""
    reader = gguf.GGUFReader(synthesize("small-llama", name, tmp_path / "m.gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert [tensors[f"blk.1.ffn_{part}.weight"].tensor_type.name for part in ("up", "norm")] == [name, "F32"]
    for part in ("ffn_down", "attn_q"):
        tensor = tensors[f"blk.1.{part}.weight"]
        raw = np.ascontiguousarray(tensor.data)
        weights = gguf.quants.dequantize(raw, tensor.tensor_type) * tensor.shape[0] ** 0.5
        assert weights.std() == pytest.approx(1, abs=0.1)
        assert abs(weights.mean()) < 0.05


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    """Figures of two machines are of the same weights."""
    files = [synthesize("small-qwen", "q4_1", tmp_path / f"{i}.gguf", seed=seed) for i, seed in enumerate((7, 7, 8))]
    same, again, other = (path.read_bytes() for path in files)
    assert same == again
    assert same != other


def test_published_shapes_have_the_size_that_their_names_say() -> None:
    """A digit lost in a table of shapes."""
    millions = {"smollm2-135m": 134.5, "qwen2-0.5b": 494.0, "qwen2-1.5b": 1543.7, "qwen2-7b": 7615.6,
                "llama-3.2-1b": 1235.8, "llama-3.1-8b": 8030.3}  # fmt: skip
    for name, expected in millions.items():
        tensors = synth._tensors(SHAPES[name], FORMATS["Q8_0"])
        assert sum(np.prod(tensor.shape) for tensor in tensors) / 1e6 == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"like": "qwen9"}, r"(?s)'qwen9'.*smollm2-135m, qwen2-0.5b"),
        ({"type_name": "iq1_s"}, r"(?s)IQ1_S.*Q4_0, Q4_1"),
        ({"like": "qwen2-0.5b", "type_name": "q4_k"}, r"(?s)896 columns of token_embd.*multiple of 256.*Q4_0"),
        ({"seed": -1}, "seed is out of range"),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_choices(
    tmp_path: Path, asked: dict[str, object], said: str
) -> None:
    with pytest.raises(ParameterError, match=said):
        synthesize(**{"like": "small-qwen", "type_name": "q4_1", "path": tmp_path / "m.gguf"} | asked)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_a_file_is_replaced_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("a year of training")
    with pytest.raises(ParameterError, match=r"(?s)is there already.*--force"):
        synthesize("small-qwen", "q4_1", path)
    assert path.read_text() == "a year of training"
    synthesize("small-qwen", "q4_1", path, force=True)
    assert "token_embd.weight" in GGUFFile.open(path).tensors
    with pytest.raises(ParameterError, match="is there already"):
        synthesize("small-qwen", "q4_1", tmp_path, force=True)


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: _Free(5 << 20))
    with pytest.raises(NanokitError, match=r"(?s)too little.*5\.0 MiB free.*GiB.*another disk"):
        synthesize("qwen2-7b", "q4_1", tmp_path / "m.gguf")
    assert os.listdir(tmp_path) == []


class _Free:
    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, existing: bool
) -> None:
    """Half a model of gigabytes under the name of a whole one, or under a hidden one for ever."""
    path = tmp_path / "m.gguf"
    if existing:
        path.write_text("old")

    def progress(label: str, done: int, total: int) -> None:
        if done > total / 2:
            raise failure

    with pytest.raises((NanokitError, KeyboardInterrupt)) as raised:
        synthesize("small-qwen", "q4_1", path, force=True, progress=progress)
    assert "too little free disk space" in str(raised.value) or isinstance(failure, KeyboardInterrupt)
    assert os.listdir(tmp_path) == ["m.gguf"] * existing
    assert not existing or path.read_text() == "old"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The path alone on standard output, for $(…); what the weights are worth on standard error."""
    monkeypatch.chdir(tmp_path)
    assert main(["model", "synth", "--like", "small-qwen"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "small-qwen-q4_1-random.gguf\n"
    assert "random" in printed.err
    assert (tmp_path / "small-qwen-q4_1-random.gguf").is_file()
    assert main(["model", "synth", "--like", "small-qwen"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["model", "synth", "--like", "small-qwen", str(tmp_path / "none" / "m.gguf")]) == 2
