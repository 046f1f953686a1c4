"""The forward against transformers: tiny random models of every architecture, both file formats, and the real one."""

from pathlib import Path

import pytest
import torch
from tiny import VOCAB, save_tiny, save_tiny_gguf, tiny_model
from transformers import PreTrainedModel

from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.model.batch import Batch
from nanokit.model.load import open_model
from nanokit.model.transformer import OpenedModel, Transformer

ARCHITECTURES = ["llama", "qwen2", "qwen3"]


def load(path: Path) -> Transformer:
    source = open_model(path)
    return Transformer(OpenedModel(source, source.config, "fp32"))


def all_logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    """Logits at every position from one uncached, unbatched forward."""
    blocks = -(-len(ids) // BLOCK_SIZE)
    pages = PagedKV(model.config, blocks)
    return model.head.logits(model.forward(Batch(ids, [len(ids)], [len(ids)], [list(range(blocks))]), pages))


def oracle(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def assert_same(model: Transformer, reference: PreTrainedModel, ids: list[int], bound: float = 1e-3) -> None:
    ours, theirs = all_logits(model, ids), oracle(reference, ids)
    assert (ours - theirs).abs().max() < bound
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def some_ids(length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_safetensors_logits_equal_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    """Biases, head norms, grouped heads and the tied head, each of which loads without complaint when it is wrong."""
    reference = tiny_model(architecture, tied=tied)
    assert_same(load(save_tiny(tmp_path / "m", reference)), reference, some_ids(150), 1e-4)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gguf_logits_equal_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    """Llama's q and k rows are permuted in GGUF, k by its own head count; qwen's are not."""
    reference = tiny_model(architecture, tied=tied)
    assert_same(load(save_tiny_gguf(tmp_path / "m.gguf", reference)), reference, some_ids(150), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_and_shards(tmp_path: Path, dtype: torch.dtype) -> None:
    """Half-precision weights are widened, not computed in half; shards are joined through their index."""
    reference = tiny_model("llama")
    path = save_tiny(tmp_path / "m", tiny_model("llama").to(dtype), max_shard_size="100KB")
    assert (path / "model.safetensors.index.json").is_file()
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(dtype).float()
    assert_same(load(path), reference, some_ids(60), 1e-4)


@pytest.mark.parametrize("scaling", ["llama3", "linear"])
def test_rope_scaling_end_to_end(tmp_path: Path, scaling: str) -> None:
    rope = {"rope_type": scaling, "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    if scaling == "linear":
        rope = {k: rope[k] for k in ("rope_type", "rope_theta", "factor")}
    reference = tiny_model("llama", rope_parameters=rope)
    assert_same(load(save_tiny(tmp_path / "m", reference)), reference, some_ids(300), 1e-4)


def test_llama3_scaling_as_a_tensor_end_to_end(tmp_path: Path) -> None:
    """llama.cpp writes the rule's divisors into rope_freqs.weight, and no key that names them: ignored, the model reads
    fluently and loses its long context."""
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    reference = tiny_model("llama", rope_parameters=rope)
    plain = 1e4 ** (-torch.arange(0, 10, 2) / 10)
    divisors = plain / reference.model.rotary_emb.inv_freq
    assert divisors.max() > 3
    path = save_tiny_gguf(tmp_path / "m.gguf", reference, {"rope_freqs.weight": divisors})
    assert_same(load(path), reference, some_ids(300), 1e-4)


def test_zero_length_queries_take_no_part(tmp_path: Path) -> None:
    """A fully cached or waiting sequence in the batch must neither add rows nor disturb its neighbours."""
    model = load(save_tiny(tmp_path / "m", tiny_model("llama")))
    a, b = some_ids(70), some_ids(33)
    pages = PagedKV(model.config, 6)
    hidden = model.forward(Batch(a + b, [70, 0, 33, 0], [70, 0, 33, 5], [[0, 1], [], [2], [3]]), pages)
    torch.testing.assert_close(model.head.logits(hidden[:70]), all_logits(model, a), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.head.logits(hidden[70:]), all_logits(model, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunks", [[1] * 30, [7, 64, 1, 65, 13], [149, 1]], ids=["one by one", "ragged", "last"])
@pytest.mark.parametrize("neighbours", [0, 1, 2, 15])
def test_cached_equals_uncached_at_every_position(tmp_path: Path, chunks: list[int], neighbours: int) -> None:
    """Paged, chunked and batched against one full forward, at every position: catches positions off by one, wrong
    slots, pages of another sequence, and masks that see too much or too little."""
    model = load(save_tiny(tmp_path / "m", tiny_model("qwen3")))
    total = sum(chunks)
    rows = [torch.tensor(some_ids(total)).roll(shift).tolist() for shift in range(neighbours + 1)]
    per_row = -(-total // BLOCK_SIZE)
    pages = PagedKV(model.config, per_row * len(rows))
    order = torch.randperm(pages.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [order[i * per_row : (i + 1) * per_row] for i in range(len(rows))]
    seen: list[list[torch.Tensor]] = [[] for _ in rows]
    done = 0
    for chunk in chunks:
        new = [row[done : done + chunk] for row in rows]
        done += chunk
        batch = Batch([t for ids in new for t in ids], [chunk] * len(rows), [done] * len(rows), tables)
        logits = model.head.logits(model.forward(batch, pages))
        for i, piece in enumerate(logits.split(chunk)):
            seen[i].append(piece)
    for row, pieces in zip(rows, seen, strict=True):
        torch.testing.assert_close(torch.cat(pieces), all_logits(model, row), rtol=1e-4, atol=1e-4)


def test_fp16_pages_are_what_rows_attend_to(tmp_path: Path) -> None:
    """Rows attend to keys and values as stored, in the step that writes them too: one forward over all tokens and
    the same tokens one by one must agree far below the error that fp16 itself makes."""
    model = load(save_tiny(tmp_path / "m", tiny_model("llama")))
    ids = some_ids(40)
    whole, stepped = PagedKV(model.config, 1, "fp16"), PagedKV(model.config, 1, "fp16")
    at_once = model.head.logits(model.forward(Batch(ids, [40], [40], [[0]]), whole))
    one_by_one = torch.cat(
        [model.head.logits(model.forward(Batch([t], [1], [i + 1], [[0]]), stepped)) for i, t in enumerate(ids)]
    )
    rounding = (at_once - all_logits(model, ids)).abs().max()
    assert rounding > 1e-4
    assert (at_once - one_by_one).abs().max() < rounding / 2


def test_layers_left_in_their_file_give_the_same_logits(tmp_path: Path) -> None:
    """A model larger than memory is slower, not different."""
    source = open_model(save_tiny_gguf(tmp_path / "m.gguf", tiny_model("qwen2")))
    mapped = Transformer(OpenedModel(source, source.config, "fp32", resident=False))
    assert torch.equal(all_logits(mapped, some_ids(40)), all_logits(load(tmp_path / "m.gguf"), some_ids(40)))


def test_a_batch_that_would_write_elsewhere_is_refused(tmp_path: Path) -> None:
    """Torch would wrap a negative block around to the last page of somebody else."""
    model = load(save_tiny(tmp_path / "m", tiny_model("llama")))
    pages = PagedKV(model.config, 2)
    for batch in (Batch([1], [1], [1], [[-1]]), Batch([1], [1], [65], [[0]]), Batch([VOCAB], [1], [1], [[0]])):
        with pytest.raises(ValueError, match=r"block|id"):
            model.forward(batch, pages)
