"""The engine on the C kernels: when it takes them, what it says when it cannot, and that nothing the scheduler does
changes a bit of a row.

As in test_against_full_forward.py a watcher compares every row with one full forward over its history, here for
equality: chunks, batches, prefix hits and recomputation are invisible in C.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import compiled_model, save_tiny, save_tiny_gguf, tiny_model
from watched import Watcher

from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError
from nanokit.kernels.activations import MODES
from nanokit.kernels.cpu.bound import KV_FORMATS
from nanokit.kv.pages import PagedKV
from nanokit.model.transformer import DEFAULT_ACTIVATIONS

ONE = Sampling(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tmp_path_factory.mktemp("compiled") / "tiny.gguf", compiled_model("llama"), types="Q4_1")


def same(engine: LoadedEngine, mode: str, kv_format: str, compiled: bool) -> bool:
    return (engine.model.activations, engine.kv.kv_format, engine.model.compiled) == (mode, kv_format, compiled)


def silently(source: Path, **options: Any) -> LoadedEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(source, **options)


# -- which kernels ----------------------------------------------------------------------------------------------------


def test_a_file_of_codes_runs_compiled_unless_told_otherwise(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word: nothing is wrong."""
    assert same(silently(file), DEFAULT_ACTIVATIONS, "fp16", True)
    for mode in MODES:
        assert same(silently(file, activations=mode), mode, "fp32" if mode == "fp32" else "fp16", mode != "fp32")
    assert same(silently(file, kv_format="int8"), DEFAULT_ACTIVATIONS, "int8", True)
    monkeypatch.setenv("NANOKIT_CPU_KERNELS", "portable")
    assert same(silently(file), DEFAULT_ACTIVATIONS, "fp16", True)


def test_kernels_that_are_switched_off_need_no_comment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOKIT_CPU_KERNELS", "none")
    assert same(silently(file), "fp32", "fp32", False)
    assert same(silently(file, activations="a16"), "a16", "fp16", False)
    monkeypatch.setenv("NANOKIT_CPU_KERNELS", "avx1024")
    with pytest.raises(ParameterError, match="avx1024"):
        load(file)


def test_without_a_compiler_the_reference_answers_and_it_is_said_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person whose machine lacks a compiler gets answers, and learns why they are slow, and what to do."""
    expected = silently(file, activations="fp32").generate([[1, 2, 3]], ONE)[0].token_ids
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.warns(
        UserWarning, match=r"tiny\.gguf runs on the slower torch kernels \(CC is not a C compiler"
    ) as said:
        engine = load(file)
    assert len(said) == 1
    assert same(engine, "fp32", "fp32", False)
    assert engine.generate([[1, 2, 3]], ONE)[0].token_ids == expected
    assert same(silently(file, activations="fp32"), "fp32", "fp32", False)  # who asked for it is not told


def _safetensors(folder: Path) -> Path:
    return save_tiny(folder / "floats", compiled_model("llama"))


def _odd_heads(folder: Path) -> Path:
    model = tiny_model("llama", hidden=64, heads=4, kv_heads=2, head_dim=8)
    return save_tiny_gguf(folder / "heads.gguf", model, types="Q4_0")


@pytest.mark.parametrize(
    ("write", "why"),
    [(_safetensors, r"weights of the type F32 \(model\.layers\.0\.self_attn\.q_proj\.weight\); use a file in"),
     (_odd_heads, "heads of 8 dimensions, which are no multiple of 16")],
)  # fmt: skip
def test_what_the_kernels_cannot_take_runs_on_the_reference_and_is_named(
    tmp_path: Path, write: Callable[[Path], Path], why: str
) -> None:
    path = write(tmp_path)
    with pytest.warns(UserWarning, match=f"(?s)slower torch kernels.*{why}") as said:
        engine = load(path)
    assert len(said) == 1
    assert same(engine, "fp32", "fp32", False)
    with pytest.warns(UserWarning, match=why):  # a mode is kept, whoever computes it
        assert same(load(path, activations="token"), "token", "fp16", False)


@pytest.mark.model
def test_the_default_model_runs_compiled(default_model: Path) -> None:
    assert same(silently(default_model, kv_memory="64MiB"), "a8g32", "fp16", True)


# -- what the scheduler does is invisible -----------------------------------------------------------------------------


def watched(path: Path, **options: Any) -> LoadedEngine:
    engine = load(path, ctx=400, **options)
    engine.model = Watcher(engine.model, engine.kv.kv_format)  # type: ignore[assignment]
    return engine


def prompts(count: int) -> list[list[int]]:
    """Lengths around the block size, and every third beginning alike for more than a block."""
    noise = torch.Generator().manual_seed(count)
    common = torch.randint(0, 331, (130,), generator=noise).tolist()
    lengths = [1, 63, 64, 65, 128, 129, 17, 200]
    own = [torch.randint(0, 331, (lengths[i % 8],), generator=noise).tolist() for i in range(count)]
    return [common + ids if i % 3 == 2 else ids for i, ids in enumerate(own)]


def alone(path: Path, asked: list[list[int]], sampling: Sampling, **options: Any) -> list[list[int]]:
    """Each by itself in one chunk, nothing cached."""
    engine = load(path, ctx=400, prefix_cache=False, **options)
    return [engine.generate([ids], sampling)[0].token_ids for ids in asked]


@pytest.mark.parametrize(
    ("mode", "kv_format"), [*(("a8g32", each) for each in KV_FORMATS), ("a16", "fp16"), ("a16", "kivi4")]
)
def test_chunks_batches_and_prefix_hits_change_no_bit(file: Path, mode: str, kv_format: str) -> None:
    """Greedy and drawn text alike: the draw sees the same logits and the same noise."""
    options = {"activations": mode, "kv_format": kv_format}
    engine = watched(file, token_budget=48, **options)
    for sampling in (ONE, Sampling(max_tokens=6, ignore_eos=True, temperature=0.9, top_p=0.9, seed=3)):
        expected = alone(file, prompts(9), sampling, **options)
        for _ in range(2):
            done = engine.generate(prompts(9), sampling)
            assert [c.token_ids for c in done] == expected
        assert any(c.cached_tokens for c in done)
        engine.check_integrity()


@pytest.mark.parametrize("kv_format", ["fp16", "kivi4"])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix", "no prefix"])
def test_preemption_changes_no_bit(file: Path, prefix_cache: bool, kv_format: str) -> None:
    """Seven blocks for eight sequences that need two each: what is computed again is what it was. A block that is used
    again must not be read as it was sealed before."""
    sizes = PagedKV.pool_bytes(load(file).model.config, kv_format, max_seqs=16, token_budget=64)
    options = {"prefix_cache": prefix_cache, "kv_format": kv_format}
    engine = watched(file, kv_memory=sizes.of(7), token_budget=64, **options)
    assert engine.pool.num_blocks == 7
    asked, sampling = [ids[:60] for ids in prompts(8)], Sampling(max_tokens=24, ignore_eos=True)
    done = engine.generate(asked, sampling)
    assert sum(c.preemptions for c in done) > 0
    assert [c.token_ids for c in done] == alone(file, asked, sampling, kv_format=kv_format)
    assert engine.pool.held == 0


def test_static_activations_are_calibrated_by_load(file: Path) -> None:
    """Always on the same text, hence to the same peaks; the pages that it used hold nothing afterwards that shows."""
    first, second = (load(file, activations="static") for _ in range(2))
    assert torch.equal(first.model._bound.peaks, second.model._bound.peaks)
    assert first.generate(prompts(3), ONE)[2].token_ids == alone(file, prompts(3), ONE, activations="static")[2]
