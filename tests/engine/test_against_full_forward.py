"""The whole engine over a real (tiny) transformer, against one full uncached forward at every position.

A watcher stands between engine and model. It notes which token was written to which slot, reads every row's history
back through the block tables, and compares the row's logits with a full forward over that history. Whatever the
scheduler did (chunks, batches, prefix hits, preemption), each row must be what an engine without a cache would get.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, save_tiny, tiny_model

from nanokit.engine.engine import Engine
from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.request import FinishReason
from nanokit.engine.sampling import Sampling
from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.model.batch import Batch


class Watcher:
    """Forwards to the model and checks every row that comes back."""

    def __init__(self, model: Any) -> None:
        self._model, self.vocab_size, self.head, self.config = (
            model,
            model.vocab_size,
            model.head,
            model.config,
        )
        self.activations = model.activations
        self._written: dict[int, int] = {}
        self.rows = 0

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        hidden = self._model.forward(batch, kv)
        start = 0
        for query, length, table in zip(batch.query_lens, batch.kv_lens, batch.block_tables, strict=True):
            slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)]
            self._written.update(zip(slots[length - query :], batch.token_ids[start : start + query], strict=True))
            history = [self._written[slot] for slot in slots]
            pages = PagedKV(self._model.config, len(table))
            full = self._model.forward(Batch(history, [length], [length], [list(range(len(table)))]), pages)
            got, expected = hidden[start : start + query], full[length - query :]
            torch.testing.assert_close(self.head.logits(got), self.head.logits(expected), rtol=1e-4, atol=1e-4)
            start += query
            self.rows += query
        return hidden


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from threads, and waiting ones spin whenever the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = tiny_model("llama")
    return save_tiny(tmp_path_factory.mktemp("tiny"), model), model


def watched(path: Path, **options: Any) -> LoadedEngine:
    engine = load(path, ctx=400, **options)
    engine.model = Watcher(engine.model)  # type: ignore[assignment]
    return engine


def prompts(count: int) -> list[list[int]]:
    """Lengths around the block size, and pairs that begin alike for more than a block."""
    generator = torch.Generator().manual_seed(count)
    common = torch.randint(0, VOCAB, (130,), generator=generator).tolist()
    lengths = [1, 63, 64, 65, 128, 129, 17, 200]
    own = [torch.randint(0, VOCAB, (lengths[i % 8],), generator=generator).tolist() for i in range(count)]
    return [common + ids if i % 3 == 2 else ids for i, ids in enumerate(own)]


def greedy(model: Any, ids: list[int], count: int, **how: Any) -> list[int]:
    """transformers' own greedy decoding; how: passed to its generate."""
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), max_new_tokens=count,
        do_sample=False, eos_token_id=None, pad_token_id=0, **how,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix", "no prefix"])
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_batched_and_cached_equals_uncached(checkpoint: tuple[Path, Any], count: int, prefix_cache: bool) -> None:
    engine = watched(checkpoint[0], prefix_cache=prefix_cache, token_budget=48)
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    first = engine.generate(prompts(count), sampling)
    again = engine.generate(prompts(count), sampling)
    assert [c.token_ids for c in first] == [greedy(checkpoint[1], ids, 6) for ids in prompts(count)]
    assert [c.token_ids for c in again] == [c.token_ids for c in first]
    if count > 2:  # the first two prompts fill no block
        assert any(c.cached_tokens for c in again) == prefix_cache
    engine.check_integrity()


def test_rows_beyond_the_vocabulary_are_drawn_as_no_text(checkpoint: tuple[Path, Any]) -> None:
    """Qwen's embedding has more rows than its tokenizer has tokens: drawing one must not end everybody's step."""
    engine = load(checkpoint[0])
    beyond = list(range(engine.tokenizer.vocab_size, VOCAB))
    assert len(beyond) > 10
    everything_else = tuple(range(engine.tokenizer.vocab_size))
    [done] = engine.generate([[1, 2]], Sampling(max_tokens=4, suppress=everything_else))
    assert set(done.token_ids) <= set(beyond)
    assert done.text == ""


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix", "no prefix"])
def test_a_pool_too_small_preempts_and_answers_the_same(checkpoint: tuple[Path, Any], prefix_cache: bool) -> None:
    """Seven blocks for eight sequences that need two each: recomputed sequences must go on where they were."""
    per_block = PagedKV.bytes_per_block(load(checkpoint[0]).model.config)
    engine = watched(checkpoint[0], kv_memory=7 * per_block, prefix_cache=prefix_cache, token_budget=64)
    asked = [ids[:60] for ids in prompts(8)]
    done = engine.generate(asked, Sampling(max_tokens=24, ignore_eos=True))
    assert sum(c.preemptions for c in done) > 0
    assert [c.token_ids for c in done] == [greedy(checkpoint[1], ids, 24) for ids in asked]
    engine.check_integrity()
    assert engine.pool.held == 0


def test_a_constant_hash_changes_no_answer(checkpoint: tuple[Path, Any]) -> None:
    """Every block collides with every other: a hit that did not compare tokens and parents would attend to the keys
    and values of another prompt."""
    made = load(checkpoint[0], token_budget=48)
    engine = Engine(
        Watcher(made.model), made.tokenizer, made.config, kv=made.kv, prefix_hash=lambda *_: 7
    )  # fmt: skip
    sampling, asked = Sampling(max_tokens=6, ignore_eos=True), prompts(16)
    for _ in range(2):
        done = engine.generate(asked, sampling)
        assert [c.token_ids for c in done] == [greedy(checkpoint[1], ids, 6) for ids in asked]
        engine.check_integrity()
    assert any(c.cached_tokens for c in done)


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 9], ids=["waiting", "chunk", "chunk", "prompt done", "decoding"])
def test_an_abort_at_any_stage_leaves_neighbours_and_pool_as_they_were(
    checkpoint: tuple[Path, Any], steps: int
) -> None:
    """Blocks given back are reused at once: whoever still read them would answer from another's context."""
    per_block = PagedKV.bytes_per_block(load(checkpoint[0]).model.config)
    engine = watched(checkpoint[0], kv_memory=12 * per_block, token_budget=48, max_seqs=3)
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    asked = prompts(3)[2], prompts(8)[7], prompts(6)[5]  # two or three blocks and more each
    leaving, *staying = [engine.add(ids, sampling) for ids in asked]
    for _ in range(steps):
        engine.step()
    assert engine.abort(leaving)
    late = engine.add(asked[0], sampling)
    done: dict[int, Any] = {}
    while engine.has_work:
        done |= {chunk.request_id: chunk.completion for chunk in engine.step() if chunk.completion}
        engine.check_integrity()
    assert done[leaving].finish_reason is FinishReason.ABORT
    expected = [greedy(checkpoint[1], ids, 12) for ids in (*asked[1:], asked[0])]
    assert [done[i].token_ids for i in (*staying, late)] == expected
    assert engine.pool.held == 0


def test_a_repetition_penalty_answers_as_transformers_does(checkpoint: tuple[Path, Any]) -> None:
    """On prompt and answer, alone and beside rows without one."""
    path, model = checkpoint
    ids, penalties = prompts(3)[2][:40], (1.0, 1.3, 9.0)
    expected = [greedy(model, ids, 20, repetition_penalty=penalty) for penalty in penalties]
    assert expected[0] != expected[-1]
    samplings = [Sampling(max_tokens=20, ignore_eos=True, repetition_penalty=penalty) for penalty in penalties]
    assert [c.token_ids for c in load(path).generate([ids] * 3, samplings)] == expected


def test_two_engines_side_by_side(checkpoint: tuple[Path, Any]) -> None:
    """Nothing is process-wide: stepping two engines in turns gives what each gives alone."""
    a, b = load(checkpoint[0]), load(checkpoint[0], kv_format="fp16")
    sampling = Sampling(max_tokens=10, ignore_eos=True, temperature=0.8, seed=5)
    alone = [e.generate([[1, 2, 3]], sampling)[0].token_ids for e in (a, b)]
    streams = [e.stream([1, 2, 3], sampling) for e in (a, b)]
    mixed: list[list[int]] = [[], []]
    for _ in range(10):
        for tokens, stream in zip(mixed, streams, strict=True):
            tokens.extend(next(stream).token_ids)
    assert mixed == alone
