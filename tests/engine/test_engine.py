"""Requests through the whole engine over a scripted model: answers, text, ends, errors, threads."""

import gc
import threading
import time

import numpy as np
import pytest
import torch
from scripted import EOS, VOCAB, LetterDecoder, make_engine, next_logits, run, script, solo, texts

from nanokit.engine.request import FinishReason, Request
from nanokit.engine.sampling import Sampling
from nanokit.engine.scheduler import Scheduler
from nanokit.engine.text import AnswerText
from nanokit.engine.turns import TurnLock
from nanokit.errors import NanokitError, ParameterError, RequestError, TokenizerError

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
        Sampling(temperature=i % 3 * 0.6, top_p=1.0 - 0.2 * (i % 2), seed=i, max_tokens=9)
        for i in range(size)
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
        assert (
            make_engine().generate([prompt + answer[:cut]], WARM)[0].token_ids[: len(answer) - cut]
            == answer[cut:]
        )


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
    completion = make_engine(script([0, 38, 1], 1)).generate([[5]], Sampling(ignore_eos=True, max_tokens=3))[
        0
    ]
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
    completion = make_engine(token_budget=4, max_seqs=2).generate(
        [[1] * 10], Sampling(max_tokens=5, ignore_eos=True)
    )[0]
    timings = completion.timings
    assert len(timings.itl_ms) == 4
    assert 0 <= timings.queue_ms < timings.ttft_ms < timings.total_ms
    assert timings.ttft_ms + sum(timings.itl_ms) <= timings.total_ms
    assert (completion.cached_tokens, completion.preemptions) == (0, 0)


# --- live control ---


def test_settings_change_between_steps_of_a_running_request():
    engine = make_engine(script([0], 1))
    stream = engine.stream([9], Sampling(max_tokens=50))
    assert next(stream).token_ids == (0,)
    assert engine.update(stream.request_id, Sampling(suppress=(0,), max_tokens=50))
    assert next(stream).token_ids == (1,)
    assert engine.update(stream.request_id, Sampling(max_tokens=3))
    assert next(stream).finish_reason is FinishReason.LENGTH
    assert engine.update(stream.request_id, Sampling()) is False
    stream = engine.stream([9], Sampling(max_tokens=50))
    next(stream)
    assert engine.update(stream.request_id, Sampling(max_tokens=50, stop="aa"))
    assert [next(stream).text, next(stream).finish_reason] == ["", FinishReason.STOP]


def test_an_update_cannot_smuggle_in_what_add_would_refuse():
    engine = make_engine(num_blocks=3)
    request = engine.add([1, 2], Sampling(max_tokens=5, seed=4))
    for sampling in (Sampling(max_tokens=50), Sampling(suppress=(VOCAB,)), Sampling(seed=5), {"top_k": 3}):
        with pytest.raises(RequestError):
            engine.update(request, sampling)
    assert engine.update(request, Sampling(max_tokens=6, seed=4))
    with pytest.raises(RequestError, match="no such request"):
        engine.update(99, Sampling())


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 7], ids=["waiting", "chunk", "chunk", "chunk", "decoding"])
def test_an_abort_at_any_stage_gives_every_block_back(steps):
    """vLLM #46283, SGLang #20182: KV leaked on abort."""
    engine = make_engine(token_budget=4, max_seqs=2)
    request = engine.add([2] * 14, Sampling(max_tokens=30, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    assert engine.abort(request)
    engine.check_integrity()
    assert engine.pool.held == 0
    chunks = engine.step()
    assert [chunk.finish_reason for chunk in chunks] == [FinishReason.ABORT]
    assert not engine.has_work
    assert engine.abort(request) is False


def test_a_stream_that_is_left_early_aborts_its_request():
    engine = make_engine()
    for chunk in engine.stream([1, 2, 3], Sampling(max_tokens=50, ignore_eos=True)):
        assert chunk.text
        break
    gc.collect()
    with engine.stream([1, 2, 3], Sampling(max_tokens=50, ignore_eos=True)) as stream:
        next(stream)
    unstarted = engine.stream([1], Sampling(max_tokens=50))
    unstarted.close()
    assert list(unstarted) == list(stream) == []
    engine.stream([1])  # dropped at once, never started
    gc.collect()
    assert engine.step() == []
    assert not engine.has_work
    assert engine.pool.held == 0
    assert engine._inboxes == {}


def test_an_abort_from_outside_ends_a_stream_with_what_was_drawn():
    """A stop button: the reader of the stream gets its last chunk, not a hang."""
    engine = make_engine(script([0], 1))
    stream = engine.stream([9], Sampling(max_tokens=50))
    next(stream)
    assert engine.abort(stream.request_id)
    last = next(stream)
    assert (last.finish_reason, last.completion.text) == (FinishReason.ABORT, "a")
    assert list(stream) == []


def test_an_abort_from_another_thread_ends_generate():
    engine = make_engine(script([0], 1), max_context=5000, num_blocks=2000)
    forward = engine.model.forward

    def aborting(batch, kv):
        if len(engine.model.batches) == 3:
            thread = threading.Thread(target=engine.abort, args=(0,))  # blocks until this step is over
            thread.start()
            threads.append(thread)
        return forward(batch, kv)

    threads: list[threading.Thread] = []
    engine.model.forward = aborting
    completion = engine.generate([[9]], Sampling(max_tokens=4000))[0]
    assert completion.finish_reason is FinishReason.ABORT
    assert 3 <= len(completion.token_ids) < 4000
    threads[0].join(timeout=30)


def test_a_thread_that_waits_gets_the_next_turn():
    """With a plain lock the stepping loop wins it back many times before a slider's update gets in."""
    lock, order = TurnLock(), []
    entered, waiting = threading.Event(), threading.Event()

    def wait_for_turn() -> None:
        entered.wait()
        waiting.set()
        with lock:
            order.append("waited")

    thread = threading.Thread(target=wait_for_turn)
    thread.start()
    with lock, lock:  # re-entrant
        entered.set()
        waiting.wait()
        time.sleep(0.05)  # until it stands at the lock
    for _ in range(100):
        with lock:
            order.append("looped")
    thread.join(timeout=30)
    assert order[0] == "waited"


# --- refusals ---


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"), ([], "empty"), ([1, VOCAB], "outside the vocabulary"), ([-1], "outside the vocabulary"),
        ([1.5], "something else"), ([True], "something else"), (["a"], "something else"), (None, "text or a list"),
        (b"abc", "text or a list"), (7, "text or a list"), ([1] * 120, "longer than the context"),
        ([1] * 60, "never fit into the KV pool"),
    ],
)  # fmt: skip
def test_one_bad_prompt_leaves_nothing_running(prompt, message):
    engine = make_engine(num_blocks=12)
    with pytest.raises(RequestError, match=message):
        engine.generate(["abc", prompt, "def"], Sampling(max_tokens=5))
    with pytest.raises(RequestError, match=message):
        engine.stream(prompt, Sampling(max_tokens=5))
    assert not engine.has_work
    assert engine.pool.held == 0


def test_refusals_carry_numbers_and_a_way_out():
    with pytest.raises(RequestError) as caught:
        make_engine().generate([[1] * 300])
    assert "300" in str(caught.value)
    assert "119" in str(caught.value)
    assert "ctx" in caught.value.do


def test_a_request_that_fits_exactly_is_served():
    """The last token is drawn but never computed: 12 blocks of 4 hold 48 of 49 tokens."""
    engine = make_engine(num_blocks=12)
    sampling = Sampling(max_tokens=9, ignore_eos=True)
    assert len(engine.generate([[1] * 40], sampling)[0].token_ids) == 9
    with pytest.raises(RequestError, match="never fit"):
        engine.generate([[1] * 41], sampling)


def test_common_slips_in_generate_are_refused():
    """A string is a sequence of one-letter prompts; a list of ids is a list of bad prompts."""
    engine = make_engine()
    with pytest.raises(RequestError, match="list of prompts"):
        engine.generate("hello")
    with pytest.raises(RequestError, match="text or a list"):
        engine.generate([1, 2, 3])
    with pytest.raises(RequestError, match="2 samplings for 1"):
        engine.generate(["a"], [Sampling(), Sampling()])
    with pytest.raises(RequestError, match="all are suppressed"):
        engine.generate(["a"], Sampling(suppress=tuple(range(VOCAB))))
    with pytest.raises(ParameterError):
        Sampling(max_tokens=-1)
    assert not engine.has_work


# --- failures and threads ---


def test_a_row_that_turns_to_nan_fails_its_own_request_only():
    def poisoned(history):
        row = next_logits(history)
        return row * np.nan if history[0] == 13 and len(history) > 5 else row

    engine = make_engine(poisoned)
    good, bad = engine.add([1, 2, 3], WARM), engine.add([13, 2, 3], WARM)
    done = run(engine)
    assert done[good].token_ids == solo([1, 2, 3], WARM)
    assert done[bad].finish_reason is FinishReason.ERROR
    with pytest.raises(NanokitError, match="not a number"):
        engine.generate([[1, 2], [13]], WARM)
    assert engine.pool.held == 0
    assert not engine.has_work


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_forward_leaves_a_usable_engine(exception):
    engine = make_engine()
    other = engine.add([4, 5, 6], WARM)
    forward, calls = engine.model.forward, []

    def failing(batch, kv):
        calls.append(batch)
        if len(calls) == 3:
            raise exception("as scripted")
        return forward(batch, kv)

    engine.model.forward = failing
    with pytest.raises(exception):
        engine.generate([[1, 2, 3]], WARM)
    engine.check_integrity()
    assert run(engine)[other].token_ids == solo([4, 5, 6], WARM)
    assert engine.pool.held == 0


@pytest.mark.parametrize("call", [2, 4, 5, 6])
@pytest.mark.parametrize("place", ["accept", "commit", "push"])
def test_an_interrupt_after_the_forward_leaves_other_requests_right(monkeypatch, place, call):
    """The interrupt of a notebook hits its own request's thread anywhere; a request of another thread that counted as
    computed without its token would draw the next one from a neighbour's row."""
    owner = {"accept": Request, "commit": Scheduler, "push": AnswerText}[place]
    engine = make_engine()
    other = engine.add([4, 5, 6], WARM)
    whole, calls = getattr(owner, place), []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return whole(self, *args)

    monkeypatch.setattr(owner, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3], [7]], WARM)
    engine.check_integrity()
    assert run(engine)[other].token_ids == solo([4, 5, 6], WARM)
    assert engine.pool.held == 0


def test_a_token_that_the_tokenizer_does_not_know_fails_its_own_request_only(monkeypatch):
    """A model with more rows than its tokenizer has tokens may draw one."""

    def unknown(self, token_id):
        if token_id == 5:
            raise TokenizerError("a token id is outside of the vocabulary", found=token_id)
        return "x"

    monkeypatch.setattr(LetterDecoder, "push", unknown)
    engine = make_engine(lambda history: np.eye(VOCAB, dtype=np.float32)[5 if history[0] == 13 else 6])
    good, bad = engine.add([1], Sampling(max_tokens=3)), engine.add([13], Sampling(max_tokens=3))
    chunks = [chunk for _ in range(4) for chunk in engine.step()]
    ends = {chunk.request_id: chunk for chunk in chunks if chunk.completion}
    assert ends[good].completion.text == "xxx"
    assert ends[bad].finish_reason is FinishReason.ERROR
    assert isinstance(ends[bad].error, TokenizerError)
    assert engine.pool.held == 0


def test_threads_share_an_engine_and_each_gets_its_own_answers():
    engine = make_engine()
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    added = engine.add([30, 31], WARM)
    got: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        if index % 2:
            got[index] = engine.generate([prompts[index]], WARM)[0].token_ids
        else:
            got[index] = [token for chunk in engine.stream(prompts[index], WARM) for token in chunk.token_ids]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert got == {index: solo(prompt, WARM) for index, prompt in enumerate(prompts)}
    # Chunks of a request that was added wait for step(), whoever drove the engine meanwhile.
    assert run(engine)[added].token_ids == solo([30, 31], WARM)


def test_a_stream_read_or_closed_by_several_threads_ends_for_each_of_them():
    """Whoever takes the last chunk must not leave the other readers waiting for one more, for ever."""
    engine = make_engine(script([0], 1), max_context=2000, num_blocks=600)
    for close_early in (False, True):
        stream = engine.stream([9], Sampling(max_tokens=300))
        got: list[list[int]] = [[], [], []]

        def read(index: int) -> None:
            for chunk in stream:  # noqa: B023 - the threads end before the next round
                got[index] += chunk.token_ids  # noqa: B023

        threads = [threading.Thread(target=read, args=(index,), daemon=True) for index in range(3)]
        for thread in threads:
            thread.start()
        if close_early:
            stream.close()
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads)
        assert close_early or sum(map(len, got)) == 300
        assert engine.pool.held == 0
        assert engine._inboxes == {}


def test_two_engines_side_by_side_do_not_meet():
    one, two = make_engine(), make_engine(script([0, 1, 38], 2))
    first, second = one.stream([1, 2], WARM), two.stream([1, 2])
    interleaved = [next(first), next(second), next(first), next(second)]
    assert [chunk.token_ids[0] for chunk in interleaved[1::2]] == [0, 1]
    assert [chunk.token_ids[0] for chunk in interleaved[::2]] == solo([1, 2], WARM)[:2]


def test_the_engine_enters_inference_mode_itself():
    engine = make_engine()
    forward, seen = engine.model.forward, []
    engine.model.forward = lambda batch, kv: (
        seen.append(torch.is_inference_mode_enabled()),
        forward(batch, kv),
    )[1]
    thread = threading.Thread(target=lambda: engine.generate(["abc"], Sampling(max_tokens=2)))
    thread.start()
    thread.join(timeout=30)
    assert seen == [True, True]
    assert not torch.is_inference_mode_enabled()
