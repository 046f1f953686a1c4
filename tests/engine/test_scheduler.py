"""Scheduling over a small pool: prefix hits, duplicates, preemption, fairness, random workloads."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import make_engine, run, solo

from nanokit.engine.request import FinishReason
from nanokit.engine.sampling import Sampling
from nanokit.kv.prefix import chained_hash

GREEDY = Sampling(max_tokens=12, ignore_eos=True)


def constant_hash(parent, tokens):
    return 0


@pytest.mark.parametrize("length", [8, 9, 15, 16, 17, 32])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(length):
    """nano-vllm #144/#211: a query of length zero."""
    engine = make_engine(block_size=8)
    prompt = [i % 30 for i in range(length)]
    first, second = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    assert first.token_ids == second.token_ids == solo(prompt, GREEDY)
    assert (first.cached_tokens, second.cached_tokens) == (0, (length - 1) // 8 * 8)


def test_a_hit_saves_computing_what_it_covers():
    engine = make_engine()
    engine.generate([[1] * 20], GREEDY)
    before = engine.model.computed
    completion = engine.generate([[1] * 20], GREEDY)[0]
    assert completion.cached_tokens == 16
    assert engine.model.computed - before == 20 - 16 + 11


def test_an_answer_is_a_prefix_of_the_next_turn():
    """Blocks filled while decoding are found by a conversation that goes on."""
    engine = make_engine()
    prompt = [1, 2, 3]
    answer = engine.generate([prompt], GREEDY)[0].token_ids
    turn = engine.generate([[*prompt, *answer, 9]], GREEDY)[0]
    assert turn.cached_tokens == 12
    assert turn.token_ids == solo([*prompt, *answer, 9], GREEDY)


@pytest.mark.parametrize("prefix_hash", [chained_hash, constant_hash])
def test_duplicates_in_one_batch_then_a_third_on_the_freed_blocks(prefix_hash):
    """mini-sglang #142: duplicate pages freed while a page table still pointed at them."""
    engine = make_engine(num_blocks=14, max_seqs=3, prefix_hash=prefix_hash)
    prompt, other = [i % 30 for i in range(13)], [29 - i for i in range(13)]
    first, second = engine.add(prompt, GREEDY), engine.add(prompt, Sampling(max_tokens=4, ignore_eos=True))
    engine.step()
    tables = [r.blocks for r in engine.scheduler.running]
    assert not set(tables[0]) & set(tables[1]), "blocks computed in one step are private"
    third = engine.add(other, GREEDY)
    done = run(engine)
    assert done[first].token_ids == solo(prompt, GREEDY)
    assert done[second].token_ids == solo(prompt, GREEDY)[:4]
    assert done[third].token_ids == solo(other, GREEDY)
    assert engine.pool.held == 0


@pytest.mark.parametrize("prefix_hash", [chained_hash, constant_hash])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_a_pool_so_small_that_preemption_happens_gives_the_same_answers(prefix_hash, prefix_cache, same):
    """nano-vllm #144, #233: a preempted sequence met its own orphan blocks on the way back. Room for 3 of
    8."""
    engine = make_engine(num_blocks=12, block_size=4, max_seqs=8, prefix_cache=prefix_cache, prefix_hash=prefix_hash)
    prompts = [[(0 if same else i) + j for j in range(8)] for i in range(8)]
    samplings = [Sampling(temperature=0.8, seed=i, max_tokens=10, ignore_eos=True) for i in range(8)]
    got = engine.generate(prompts, samplings)
    assert [c.token_ids for c in got] == [solo(p, s) for p, s in zip(prompts, samplings, strict=True)]
    assert sum(c.preemptions for c in got) > 0
    assert got[0].preemptions == 0, "the oldest is never preempted"


def test_a_preempted_request_comes_back_through_its_own_cached_blocks():
    engine = make_engine(num_blocks=8, max_seqs=2)
    first, second = engine.add([1] * 9, GREEDY), engine.add([2] * 9, GREEDY)
    computed = {}
    while engine.has_work:
        for chunk in engine.step():
            if chunk.completion:
                computed[chunk.request_id] = chunk.completion
    assert computed[second].preemptions >= 1
    assert computed[first].token_ids == solo([1] * 9, GREEDY)
    assert computed[second].token_ids == solo([2] * 9, GREEDY)
    # Without a hit on the way back it would have computed 9 prompt tokens and its answer all over again.
    assert engine.model.computed < 2 * (9 + 11) + 9


def test_decoding_goes_on_while_a_long_prompt_is_computed_in_chunks():
    """A long prompt must not stall running answers: every step of its prefill also decodes."""
    engine = make_engine(token_budget=6, max_seqs=3)
    quick = engine.add([1], Sampling(max_tokens=12, ignore_eos=True))
    engine.step()
    engine.add([2] * 40, GREEDY)
    for _ in range(7):
        chunks = engine.step()
        assert quick in [chunk.request_id for chunk in chunks]
        assert len(engine.model.batches[-1].token_ids) <= 6
    assert engine.model.batches[-1].query_lens == [1, 5]


def test_requests_are_served_in_the_order_of_arrival():
    """A long prompt that waits for room is not overtaken by shorter ones, which would starve it."""
    engine = make_engine(num_blocks=10, max_seqs=4)
    holder = engine.add([1] * 12, Sampling(max_tokens=12, ignore_eos=True))
    engine.step()
    long, short = engine.add([2] * 30, Sampling(max_tokens=2)), engine.add([3], Sampling(max_tokens=2))
    started = []
    while engine.has_work:
        started += [r.id for r in engine.scheduler.running if r.id not in started]
        engine.step()
    assert started == [holder, long, short]
    assert len(engine.model.batches) > 12, "the long prompt had to wait for the holder"


def test_max_seqs_is_the_most_that_run_at_once():
    engine = make_engine(max_seqs=3)
    engine.generate([[i] for i in range(10)], GREEDY)
    assert max(len(batch.query_lens) for batch in engine.model.batches) == 3


def test_the_integrity_check_sees_a_leaked_block():
    engine = make_engine()
    engine.add([1] * 9, GREEDY)
    engine.step()
    engine.scheduler.running[0].blocks.pop()
    with pytest.raises(AssertionError, match="held by tables"):
        engine.check_integrity()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(9, 24),
    budget=st.integers(4, 20),
    prefix_hash=st.sampled_from([chained_hash, constant_hash]),
)
def test_random_arrivals_and_aborts_match_solo_runs(seed, num_blocks, budget, prefix_hash):
    """Integrity is checked after every step; every request that was not aborted answers as if it were
    alone."""
    rng = random.Random(seed)
    engine = make_engine(num_blocks=num_blocks, block_size=4, max_seqs=4, token_budget=budget, prefix_hash=prefix_hash)
    asked, aborted, done = {}, set(), {}
    for _ in range(60):
        event = rng.random()
        if event < 0.3 and len(asked) < 12:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
            sampling = Sampling(
                temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(99), max_tokens=rng.randrange(1, 12)
            )
            asked[engine.add(prompt, sampling)] = prompt, sampling
        elif event < 0.36 and asked:
            victim = rng.choice(list(asked))
            if engine.abort(victim):
                aborted.add(victim)
            engine.check_integrity()
        else:
            for chunk in engine.step():
                if chunk.completion:
                    done[chunk.request_id] = chunk.completion
    done |= run(engine)
    assert set(done) == set(asked)
    assert engine.pool.held == 0
    for request, completion in done.items():
        expected = solo(*asked[request])
        if request in aborted:
            assert completion.finish_reason is FinishReason.ABORT
            assert completion.token_ids == expected[: len(completion.token_ids)]
        else:
            assert completion.token_ids == expected
