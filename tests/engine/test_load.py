"""`nanokit.load`: its options, the sizes that follow from them, and the refusal before anything is allocated."""

from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny, save_tiny_gguf, tiny_model

import nanokit
from nanokit.engine.load import DEFAULT_KV_MEMORY, LoadedEngine
from nanokit.engine.sampling import Sampling
from nanokit.errors import MemoryBudgetError, ModelFileError, ParameterError
from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.model import memory, transformer

ONE_BLOCK = 2 * 2 * 2 * 10 * BLOCK_SIZE * 4  # keys and values, layers, KV heads, head_dim, tokens, fp32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("load") / "tiny", tiny_model("llama"))


def load(source: Path, **options: Any) -> LoadedEngine:
    engine = nanokit.load(source, **options)
    assert isinstance(engine, LoadedEngine)
    return engine


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ctx": 0}, "ctx"), ({"ctx": 1}, "ctx"), ({"ctx": -1}, "ctx"), ({"ctx": 513}, "ctx"), ({"ctx": "many"}, "ctx"),
        ({"ctx": 64.5}, "ctx"), ({"kv_memory": 0}, "kv_memory"), ({"kv_memory": ONE_BLOCK - 1}, "kv_memory"),
        ({"kv_memory": -5}, "memory size"), ({"kv_memory": "much"}, "memory size"), ({"kv_memory": 0.5}, "kv_memory"),
        ({"max_seqs": 0}, "max_seqs"), ({"max_seqs": "x"}, "max_seqs"), ({"max_seqs": 513}, "max_seqs"),
        ({"token_budget": 0}, "token_budget"), ({"token_budget": 15}, "token_budget"),
        ({"prefix_cache": "perhaps"}, "prefix_cache"), ({"kv_format": "int3"}, "kv_format"),
        ({"device": "gpu"}, "device"), ({"kv_format": ["fp32"]}, "kv_format"), ({"activations": "int8"}, "activation"),
        ({"rope_freq_base": 1e4}, "--force"),
        ({"rope_freq_scale": 0.5}, "--force"), ({"rope_freq_base": 0, "force": True}, "rope-freq-base"),
        ({"rope_freq_scale": float("nan"), "force": True}, "rope-freq-scale"),
        ({"rope_freq_base": "big", "force": True}, "rope_freq_base"), ({"context": 64}, "context"),
    ],
)  # fmt: skip
def test_an_option_that_is_unknown_or_out_of_range(tiny: Path, options: dict[str, Any], named: str) -> None:
    """One clear error that names it, whatever the type: an option may come from a cell, a widget or a terminal."""
    with pytest.raises(ParameterError, match=named) as caught:
        load(tiny, **options)
    assert caught.value.needed is not None


def test_an_unknown_activation_mode_costs_no_reading(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for whoever builds the model without `load`."""
    monkeypatch.setattr(transformer, "find_weights", lambda *_: pytest.fail("weights were read"))
    from nanokit.model.load import open_model

    source = open_model(tiny)
    with pytest.raises(ParameterError, match="activation mode"):
        transformer.OpenedModel(source, source.config, "fp31")


def test_sizes_that_follow(tiny: Path) -> None:
    """The model's own context; a KV pool for max_seqs full sequences, or what kv_memory holds."""
    default = load(tiny).config
    assert (default.max_context, default.max_seqs) == (512, 16)
    assert default.num_blocks == 16 * 512 // BLOCK_SIZE
    assert PagedKV.bytes_per_block(load(tiny).model.config) == ONE_BLOCK
    assert load(tiny, max_seqs=1).config.num_blocks == 512 // BLOCK_SIZE
    assert load(tiny, ctx=65, max_seqs=3).config.num_blocks == 3 * 2
    assert load(tiny, kv_memory=3 * ONE_BLOCK + 1).config.num_blocks == 3
    assert load(tiny, kv_memory=3 * ONE_BLOCK, kv_format="fp16").config.num_blocks == 6
    assert load(tiny, ctx=2).generate([[1]])[0].generated_tokens == 1
    assert load(tiny, ctx=4096, force=True).config.max_context == 4096


def test_the_default_pool_ends_at_its_limit_but_holds_one_sequence(tiny: Path) -> None:
    blocks = load(tiny, ctx=10**6, force=True, max_seqs=512).config.num_blocks
    assert blocks == max(DEFAULT_KV_MEMORY // ONE_BLOCK, -(-(10**6) // BLOCK_SIZE))


def test_too_little_memory_is_refused_with_numbers_before_weights_are_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer.OpenedModel, "bind", lambda _: pytest.fail("weights were read"))
    monkeypatch.setattr(memory, "free_memory", lambda: 2 << 20)
    with pytest.raises(MemoryBudgetError) as caught:
        load(tiny, max_seqs=16, ctx=512)
    message = str(caught.value)
    for part in ("tiny does not fit", "2.0 MiB free", "for weights", "2.5 MiB for KV pages"):
        assert part in message
    for option in ("ctx (now 512", "kv_memory", "max_seqs", 'kv_format="fp16"'):
        assert option in caught.value.do
    smaller = {"fp16": "int8", "int8": "int4", "int8-static": "int4", "int4": None}
    for kv_format, advised in smaller.items():
        with pytest.raises(MemoryBudgetError) as caught:
            load(tiny, kv_memory="99GiB", kv_format=kv_format)
        assert ("kv_format" in caught.value.do) == (advised is not None)
        assert not advised or f'kv_format="{advised}"' in caught.value.do
    with pytest.raises(MemoryBudgetError, match=r"99\.00 GiB for KV pages"):
        load(tiny, kv_memory="99GiB")


def test_weights_larger_than_memory_stay_in_their_file(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning that says what it costs; the answers are the same. A pool that does not fit is still refused,
    and so is a person's own `mapped=False`."""
    expected = load(tiny).generate([[1, 2, 3]], Sampling(max_tokens=5))[0].token_ids
    footprint = load(tiny).model.footprint
    assert footprint.mapped < footprint.dense
    monkeypatch.setattr(memory, "free_memory", lambda: footprint.dense - 1)
    with pytest.warns(UserWarning, match="tiny runs from its file: every step reads and widens .* of weights again"):
        engine = load(tiny, kv_memory=2 * ONE_BLOCK)
    assert engine.generate([[1, 2, 3]], Sampling(max_tokens=5))[0].token_ids == expected
    for refused in ({"kv_memory": "1GiB"}, {"kv_memory": 2 * ONE_BLOCK, "mapped": False}):
        with pytest.raises(MemoryBudgetError):
            load(tiny, **refused)


@pytest.mark.parametrize("smaller", [{"ctx": 64}, {"kv_memory": "64KiB"}, {"max_seqs": 1}, {"kv_format": "fp16"}])
def test_each_option_that_the_refusal_names_helps(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, smaller: dict[str, Any]
) -> None:
    weights = load(tiny).model.footprint.dense
    monkeypatch.setattr(memory, "free_memory", lambda: weights + 16 * 8 * ONE_BLOCK - 1)
    with pytest.raises(MemoryBudgetError):
        load(tiny)
    assert load(tiny, **smaller).generate([[1, 2]], Sampling(max_tokens=2))[0].generated_tokens > 0


def test_the_footprint_is_what_the_weights_take(tiny: Path) -> None:
    """The check compares this number with free memory; the tour calls the rest of it bytes read per token."""
    reference = tiny_model("llama")
    footprint = load(tiny).model.footprint
    dense = sum(4 * parameter.numel() for parameter in reference.parameters())
    assert footprint.dense == dense
    assert footprint.per_token_stored == dense - 4 * reference.model.embed_tokens.weight.numel()


def test_a_missing_rope_base_is_supplied_by_force_only(tmp_path: Path) -> None:
    """Old Llama 2 files state none. Guessing 10,000 reads fine and is wrong for others; who knows it may say it."""
    whole = save_tiny_gguf(tmp_path / "whole.gguf", tiny_model("llama"))
    lacking = save_tiny_gguf(tmp_path / "lacking.gguf", tiny_model("llama"), **{"llama.rope.freq_base": None})
    expected = load(whole).generate([[1, 2, 3]], Sampling(max_tokens=8))[0].token_ids
    for options in ({}, {"rope_freq_base": 1e4}):
        with pytest.raises(ModelFileError, match=r"rope\.freq_base is missing"):
            load(lacking, **options)
    base = load(whole).model.config.rope.base
    supplied = load(lacking, rope_freq_base=base, force=True)
    assert supplied.generate([[1, 2, 3]], Sampling(max_tokens=8))[0].token_ids == expected
