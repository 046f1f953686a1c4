"""Requests through the whole engine over a scripted model: answers, text and ends."""

import numpy as np
import pytest
from scripted import EOS, VOCAB, make_engine, next_logits, script, solo, texts

from nanokit.engine.request import FinishReason
from nanokit.engine.sampling import Sampling

WARM = Sampling(temperature=1.0, seed=11, max_tokens=20)


# --- answers ---


def test_greedy_follows_the_model_token_by_token():
    """Positions off by one (nano-vllm #67): the model reads its whole history through the blocks."""
    prompt, history = [3, 1, 4, 1, 5], [3, 1, 4, 1, 5]
    while len(history) < 30:
        history.append(int(next_logits(history).argmax()))
    completion = make_engine().generate([prompt], Sampling(max_tokens=25, ignore_eos=True))[0]
    assert completion.token_ids == history[5:]
    assert (completion.prompt_tokens, completion.generated_tokens) == (5, 25)
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_answers_do_not_depend_on_chunk_size_or_prefix_cache(budget, prefix_cache):
    prompt = [i * 7 % 30 for i in range(23)]
    engine = make_engine(token_budget=budget, max_seqs=1, prefix_cache=prefix_cache)
    assert [engine.generate([prompt], WARM)[0].token_ids for _ in range(2)] == [solo(prompt, WARM)] * 2


@pytest.mark.parametrize("size", [2, 3, 16, 21])
def test_answers_do_not_depend_on_batch_mates(size):
    prompts = [[(i * i + j) % 30 for j in range(1 + i % 9)] for i in range(size)]
    samplings = [
        Sampling(temperature=i % 3 * 0.6, top_p=1.0 - 0.2 * (i % 2), seed=i, max_tokens=9) for i in range(size)
    ]
    got = make_engine().generate(prompts, samplings)
    assert [c.token_ids for c in got] == [solo(p, s) for p, s in zip(prompts, samplings, strict=True)]


def test_a_recorded_seed_repeats_the_answer():
    engine = make_engine()
    first = engine.generate(["hello"], Sampling(temperature=1.0, max_tokens=30))[0]
    again = engine.generate(["hello"], Sampling(temperature=1.0, max_tokens=30, seed=first.seed))[0]
    assert again.token_ids == first.token_ids
    assert engine.generate(["hello"], Sampling(temperature=1.0, seed=5))[0].seed == 5


def test_an_answer_cut_anywhere_goes_on_with_the_same_tokens():
    """Noise is keyed by the absolute position: what was drawn or drafted or given before must not matter."""
    prompt = [3, 1, 4]
    answer = make_engine().generate([prompt], WARM)[0].token_ids
    for cut in (1, 2, 7):
        assert make_engine().generate([prompt + answer[:cut]], WARM)[0].token_ids[: len(answer) - cut] == answer[cut:]


def test_sixteen_samples_of_one_prompt_differ_from_the_first_token_on():
    """A shared first token is fixed in nanochat with a test; uniform logits leave 40 choices."""
    engine = make_engine(lambda history: np.zeros(VOCAB, np.float32))
    got = engine.generate([[1, 2, 3]] * 16, Sampling(temperature=1.0, max_tokens=4, ignore_eos=True))
    assert len({c.token_ids[0] for c in got}) > 8
    assert len({tuple(c.token_ids) for c in got}) == 16


def test_chat_goes_through_the_template():
    engine = make_engine()
    messages = [{"role": "bot", "content": "hi"}]
    expected = engine.generate(["Bhi"])[0].token_ids
    assert engine.chat(messages).token_ids == expected


def test_an_empty_list_of_prompts_is_an_empty_list_of_answers():
    assert make_engine().generate([]) == []


# --- ends and text ---


@pytest.mark.parametrize("eos", EOS)
def test_every_end_of_sequence_id_ends_the_answer_and_stays_out_of_the_text(eos):
    """vLLM #4182, mlx-vlm #309: the second id was not honoured."""
    answer = [0, 1, eos, 2]
    completion = make_engine(script(answer, 2)).generate([[5, 6]])[0]
    assert (completion.text, completion.token_ids) == ("ab", [0, 1, eos])
    assert completion.finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on():
    completion = make_engine(script([0, 38, 1], 1)).generate([[5]], Sampling(ignore_eos=True, max_tokens=3))[0]
    assert completion.token_ids == [0, 38, 1]
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("answer", "reason"), [([0], FinishReason.LENGTH), ([38], FinishReason.STOP)])
def test_one_token_is_one_token(answer, reason):
    engine = make_engine(script(answer, 3))
    completion = engine.generate([[5, 6, 7]], Sampling(max_tokens=1))[0]
    assert completion.token_ids == answer
    assert completion.finish_reason is reason
    assert len(engine.model.batches) == 1
    assert completion.timings.itl_ms == []


def test_the_context_ends_an_answer():
    engine = make_engine(script([0], 3), max_context=8)
    completion = engine.generate([[5, 6, 7]], Sampling(max_tokens=100))[0]
    assert len(completion.token_ids) == 5
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        ("c", "ab", 3),
        ("bcd", "a", 4),  # over three tokens
        ("zz", "abcdef", 6),  # never
        (("efx", "de"), "abc", 5),  # one begins inside the other
        (("cd", "bcd"), "a", 4),  # both complete at once: the earlier start counts
        ("f", "abcde", 6),  # completed by the last token allowed
        ("fg", "abcdef", 6),  # begun, and cut off by max_tokens: it is ordinary text
        ("🌙", "abcdef", 6),
    ],
)
def test_stop_strings(stop, text, count):
    """A stop string over a token boundary, and one that meets max_tokens (vLLM #56101)."""
    engine = make_engine(script([0, 1, 2, 3, 4, 5, 6], 1))
    sampling = Sampling(stop=stop, max_tokens=6)
    completion = engine.generate([[9]], sampling)[0]
    assert (completion.text, len(completion.token_ids)) == (text, count)
    found = text != "abcdef"
    assert completion.finish_reason is (FinishReason.STOP if found else FinishReason.LENGTH)
    chunks = list(engine.stream([9], sampling))
    assert texts(chunks) == text
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * count


def test_a_stream_never_takes_back_what_it_gave_out():
    chunks = list(make_engine(script([0, 1, 0, 1, 2, 38], 1)).stream([9], Sampling(stop="abc")))
    assert [chunk.text for chunk in chunks] == ["", "", "ab", "", ""]
    assert chunks[-1].finish_reason is FinishReason.STOP


def test_a_stream_gives_whole_characters_only():
    """ferrox #124, exo #1691: a 4-byte emoji over two tokens, and a tail that is cut off."""
    chunks = list(make_engine(script([0, 36, 37, 1, 36], 1)).stream([9], Sampling(max_tokens=5)))
    assert [chunk.text for chunk in chunks] == ["a", "", "🌙", "b", "�"]
    assert chunks[-1].completion.text == "a🌙b�"


def test_a_stop_string_that_only_the_end_of_the_answer_completes():
    """Half a character becomes U+FFFD when no more tokens come; a stop string may be waiting for exactly that."""
    completion = make_engine(script([0, 36], 1)).generate([[9]], Sampling(max_tokens=2, stop="�"))[0]
    assert (completion.text, completion.finish_reason) == ("a", FinishReason.STOP)


def test_suppressed_tokens_and_penalties_reach_the_head():
    completion = make_engine(script([0], 1)).generate([[9]], Sampling(suppress=(0, 1), max_tokens=2))[0]
    assert completion.token_ids == [2, 2]
    steep = Sampling(repetition_penalty=100.0, max_tokens=4)

    def falling(history):
        return np.linspace(9, 1, VOCAB).astype(np.float32)

    assert make_engine(falling).generate([[1]], steep)[0].token_ids == [0, 2, 3, 4]


def test_timings_and_counts():
    completion = make_engine(token_budget=4, max_seqs=2).generate([[1] * 10], Sampling(max_tokens=5, ignore_eos=True))[
        0
    ]
    timings = completion.timings
    assert len(timings.itl_ms) == 4
    assert 0 <= timings.queue_ms < timings.ttft_ms < timings.total_ms
    assert timings.ttft_ms + sum(timings.itl_ms) <= timings.total_ms
    assert (completion.cached_tokens, completion.preemptions) == (0, 0)
