"""The benchmarks on a tiny model: what is timed is what the label says; and their arithmetic on times made up."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import save_tiny, tiny_model

from nanokit.engine.load import LoadedEngine, load
from nanokit.errors import ParameterError
from nanokit.lab import lock
from nanokit.lab.bench import batch, decode, limit, prefill, verify_cost, workload
from nanokit.lab.bench.limit import BenchError, reader, share_of_limit
from nanokit.lab.bench.timing import WARM
from nanokit.lab.bench.workload import Session, prompt_ids
from nanokit.lab.lock import BusyError
from nanokit.lab.result import is_timing
from nanokit.model.batch import Batch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bench") / "tiny", tiny_model("llama"))


@pytest.fixture(scope="module")
def shared(tiny: Path) -> LoadedEngine:
    return load(tiny, ctx=512, prefix_cache=False, max_seqs=16, activations="fp32")


@pytest.fixture
def engine(shared: LoadedEngine) -> Iterator[LoadedEngine]:
    """Whatever a benchmark does, it leaves nothing running and no block taken."""
    yield shared
    assert not shared.has_work
    assert shared.pool.available == shared.config.num_blocks
    shared.check_integrity()


@pytest.fixture
def batches(engine: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Every batch that the model was given."""
    seen: list[Batch] = []
    forward = engine.model.forward

    def watched(batch, pages):
        seen.append(batch)
        return forward(batch, pages)

    monkeypatch.setattr(engine.model, "forward", watched)
    return seen


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


# -- what is timed ----------------------------------------------------------------------------------------------------


def test_the_timed_steps_have_their_middle_at_the_context_length(engine: LoadedEngine, batches: list[Batch]) -> None:
    """A request that just goes on drifts away from its label: `ctx 64` would be 150 in the last round."""
    session = Session(engine, 100)
    for _ in range(3):
        with session.filled(20):
            batches.clear()
            for _ in range(20):
                session.step()
        lengths = [batch.kv_lens[0] for batch in batches]
        assert lengths == list(range(lengths[0], lengths[0] + 20))
        assert abs(sum(lengths) / 20 - 100) <= 1


def test_the_forward_alone_is_the_next_step_and_changes_nothing(engine: LoadedEngine, batches: list[Batch]) -> None:
    """c_step is a part of the step: the same batch, with nothing committed in between."""
    alone = Session(engine, 64)
    with alone.filled(4):
        batches.clear()
        for action in (alone.forward, alone.forward, alone.step, alone.forward, alone.step):
            action()
    assert batches[0] == batches[1] == batches[2]
    assert batches[3] == batches[4] != batches[2]


def test_decoding_alternates_with_the_other_sampling_in_one_request(engine: LoadedEngine, batches: list[Batch]) -> None:
    """Both kinds of step see the same contexts; every sample is there; the times are positive."""
    p = decode.DecodeParams(preset="smoke", ctx=[64, 128], steps=6, temperature=0.7, top_p=0.9)
    result = decode.decode(p, engine=engine)
    counts = {name: len(values) for name, values in result.samples.items()}
    assert counts == {
        "step_ms_at_64": 12, "c_step_ms_at_64": 12, "stream_gb_s": 12, "sampled_ms_at_64": 12,
        "step_ms_at_128": 12, "c_step_ms_at_128": 12,
    }  # fmt: skip
    assert min(min(values) for values in result.samples.values()) > 0
    assert all(batch.query_lens == [1] or batch.kv_lens == batch.query_lens for batch in batches)


def test_a_prompt_is_computed_in_full_every_time(engine: LoadedEngine, batches: list[Batch]) -> None:
    """A prompt that a cache holds looks many times as fast as it is."""
    result = prefill.prefill(prefill.PrefillParams(preset="smoke", tokens=[96, 200], repeats=3), engine=engine)
    lengths = [batch.query_lens for batch in batches]
    assert lengths.count([200]) == 3
    assert lengths.count([96]) == 3
    assert {name: len(values) for name, values in result.samples.items()} == {
        "prefill_ms_at_96": 3,
        "prefill_ms_at_200": 3,
    }


def test_as_many_sequences_decode_as_the_label_says(engine: LoadedEngine, batches: list[Batch]) -> None:
    p = batch.BatchParams(preset="smoke", sequences=[1, 3, 16], ctx=64, steps=4)
    batch.batch(p, engine=engine)
    decoding = [len(b.query_lens) for b in batches if set(b.query_lens) == {1}]
    assert {n: decoding.count(n) for n in (1, 3)} == {1: 2 * (4 + WARM), 3: 2 * (4 + WARM)}
    assert decoding.count(16) >= 2 * 4
    timed = [b for b in batches if b.query_lens == [1] * 16]
    assert all(abs(length - 64) <= 16 for b in timed for length in b.kv_lens)


def test_verification_runs_its_rows_after_an_unchanging_context(engine: LoadedEngine, batches: list[Batch]) -> None:
    p = verify_cost.VerifyCostParams(preset="smoke", rows=[1, 2, 5], ctx=[64, 100], steps=3)
    result = verify_cost.verify_cost(p, engine=engine)
    timed = [b for b in batches if len(b.token_ids) <= 5]
    assert {(b.query_lens[0], b.kv_lens[0] - b.query_lens[0]) for b in timed} == {
        (rows, ctx) for rows in p.rows for ctx in p.ctx
    }
    assert {len(values) for values in result.samples.values()} == {2 * 3}
    assert result.v.keys() == {64, 100}
    assert result.v[64][1] == 1.0


def test_a_failure_gives_the_blocks_back(engine: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture looks: a benchmark that dies must not leave its blocks taken in a notebook's engine."""
    monkeypatch.setattr(engine.model.head, "argmax", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        verify_cost.verify_cost(verify_cost.VerifyCostParams(preset="smoke"), engine=engine)
    with pytest.raises(ZeroDivisionError):
        decode.decode(decode.DecodeParams(preset="smoke"), engine=engine)


def test_text_fills_any_length(engine: LoadedEngine) -> None:
    assert len(prompt_ids(engine, 5000)) == 5000
    assert prompt_ids(engine, 50) == prompt_ids(engine, 5000)[:50]
    assert prompt_ids(engine, 50, 1) != prompt_ids(engine, 50, 0)


def test_an_engine_that_would_skip_work_is_refused(tiny: Path) -> None:
    """With a prefix cache the second prompt costs nothing; with too few blocks sequences run after each other."""
    with pytest.raises(ParameterError, match="does not suit") as error:
        prefill.prefill(
            prefill.PrefillParams(preset="smoke"), engine=load(tiny, ctx=256, max_seqs=1, activations="fp32")
        )
    assert "prefix cache on" in str(error.value)
    crowded = load(tiny, ctx=256, max_seqs=4, kv_memory="64KiB", prefix_cache=False, activations="fp32")
    with pytest.raises(ParameterError, match="KV blocks"):
        batch.batch(batch.BatchParams(preset="smoke"), engine=crowded)


def test_a_second_measurement_is_refused(engine: LoadedEngine) -> None:
    with lock.measuring("something"):
        lock._held_by = -1  # as if another thread held it
        try:
            with pytest.raises(BusyError):
                prefill.prefill(prefill.PrefillParams(preset="smoke"), engine=engine)
        finally:
            lock._held_by = None


# -- the limit --------------------------------------------------------------------------------------------------------


def test_the_weights_are_streamed_and_nothing_else(engine: LoadedEngine, monkeypatch) -> None:
    """The limit is that of the engine's own bytes; every backend has to offer it."""
    assert engine.model.bytes_per_token <= engine.model.footprint.per_token_dense
    assert reader(engine)() > 0
    monkeypatch.setattr(type(engine.model), "bytes_per_token", 5_000_000)
    monkeypatch.setattr(engine.model, "stream", lambda: 0.002)
    assert reader(engine)() == pytest.approx(2.5)


def test_a_share_above_one_ends_the_benchmark() -> None:
    """Reading the weights cannot take longer than decoding with them: a silent 1.1 would be quoted."""
    assert share_of_limit(100.0, 90_000_000, 10.0) == pytest.approx(0.9)
    with pytest.raises(BenchError, match="faster than memory allows") as error:
        share_of_limit(100.0, 110_000_000, 10.0)
    assert error.value.exit_code == 1
    assert "1.10 of the 10 GB/s" in str(error.value)


def test_a_share_above_one_of_a_disturbed_run_is_a_remark() -> None:
    """On a busy machine two medians stand to each other anyhow: the README's commands would fail once in a while. What
    the disturbance does not explain stays an error."""
    p = decode.DecodeParams(ctx=[64])
    step, stream = [9.0, 10.0, 30.0], [8.0, 9.0, 10.0]
    samples = {"step_ms_at_64": step, "c_step_ms_at_64": [9.0, 9.5, 10.0], "stream_gb_s": stream}
    assert decode.figures(p, samples, 100_000_000)["share_of_limit"] == pytest.approx(10 / 9)
    for wrong in ({"step_ms_at_64": [9.0, 10.0, 11.0]}, {"stream_gb_s": [2.0, 2.0, 2.0]}):
        with pytest.raises(BenchError, match="faster than memory allows"):
            decode.figures(p, samples | wrong, 100_000_000)
    assert limit.doubts(0.9, 1.1)
    assert limit.doubts(0.9, 1.0) == []


def test_sequences_that_drift_apart_are_refused(engine: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompts' answers ended while the last prompts were computed: "16 sequences" were fewer."""
    monkeypatch.setattr(workload, "ROOM", 2)
    with pytest.raises(ParameterError, match="one context length"), Session(engine, 400, 4).filled(4):
        pass


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_decode_figures() -> None:
    p = decode.DecodeParams(ctx=[64, 2048], temperature=0.7, neighbours=2)
    samples = {
        "step_ms_at_64": [9.0, 10.0, 14.0],
        "c_step_ms_at_64": [8.0, 7.0, 9.0],
        "step_ms_at_2048": [16.0, 15.0, 90.0],
        "c_step_ms_at_2048": [15.0],
        "stream_gb_s": [19.0, 20.0, 21.0],
        "sampled_ms_at_64": [12.5],
        "disturbed_ms_at_64": [20.0, 20.0, 59.0],
        "peer_transformers_ms_at_64": [50.0],
        "peer_transformers_ms_at_2048": [80.0],
        "peer_llama_cpp_q4_0_ms_at_64": [12.0],
        "beside_llama_cpp_q4_0_ms_at_64": [8.0],
    }
    assert decode.figures(p, samples, 100_000_000) == pytest.approx({
        "tok_per_s": 100.0,
        "ms_per_token": 10.0,
        "c_step_ms": 8.0,
        "c_step_share": 0.8,
        "bytes_per_token": 100_000_000,
        "stream_gb_s": 20.0,
        "share_of_limit": 0.5,
        "c_step_share_of_limit": 0.625,
        "tok_per_s_at_64": 100.0,
        "tok_per_s_at_2048": 62.5,
        "ratio_to_first_at_2048": 0.625,
        "sampled_vs_greedy": 0.8,
        "neighbour_ratio": 0.5,
        "neighbour_mean_ratio": 11 / 33,
        "vs_transformers": 5.0,
        "vs_transformers_at_2048": 5.0,
        "vs_llama_cpp_q4_0": 1.5,
    })  # fmt: skip


def test_prefill_figures() -> None:
    p = prefill.PrefillParams(tokens=[512, 64])
    samples = {
        "prefill_ms_at_512": [256.0, 200.0, 900.0],
        "prefill_ms_at_64": [32.0],
        "peer_llama_cpp_q4_1_ms_at_512": [2048.0],
    }
    assert prefill.figures(p, samples) == {
        "tok_per_s": 2000.0,
        "ttft_ms": 256.0,
        "ms_per_token": 0.5,
        "tok_per_s_at_512": 2000.0,
        "tok_per_s_at_64": 2000.0,
        "vs_llama_cpp_q4_1": 8.0,
    }


def test_batch_figures() -> None:
    p = batch.BatchParams(sequences=[1, 8])
    assert batch.figures(p, {"step_ms_with_1": [10.0, 9.0, 30.0], "step_ms_with_8": [20.0]}) == {
        "tok_per_s": 100.0,
        "tok_per_s_with_1": 100.0,
        "tok_per_s_with_8": 400.0,
        "ratio_to_first_with_8": 4.0,
    }


def test_verify_cost_figures() -> None:
    p = verify_cost.VerifyCostParams(rows=[1, 4], ctx=[64])
    assert verify_cost.figures(p, {"rows_1_ms_at_64": [4.0, 5.0, 6.0], "rows_4_ms_at_64": [7.0]}) == {
        "ms_of_one_row_at_64": 5.0,
        "v_ratio_of_1_at_64": 1.0,
        "v_ratio_of_4_at_64": 1.4,
    }


def test_every_figure_but_the_bytes_is_known_to_depend_on_the_clock(engine: LoadedEngine) -> None:
    """A record that is repeated compares the others bit for bit."""
    p = decode.DecodeParams(preset="smoke", ctx=[64, 80], steps=2, temperature=0.7)
    result = decode.decode(p, engine=engine)
    assert [name for name in result.metrics if not is_timing(name)] == ["bytes_per_token"]
    assert all(is_timing(name) for name in result.samples)
    cost = verify_cost.verify_cost(verify_cost.VerifyCostParams(preset="smoke"), engine=engine)
    assert all(is_timing(name) for name in (*cost.metrics, *cost.samples))


@pytest.mark.parametrize(
    "make",
    [
        lambda: decode.DecodeParams(ctx=[64, 64]),
        lambda: decode.DecodeParams(top_p=0.9),
        lambda: decode.DecodeParams(peer=["vllm"]),
        lambda: prefill.PrefillParams(tokens=[8, 8]),
        lambda: batch.BatchParams(sequences=[2, 2]),
        lambda: verify_cost.VerifyCostParams(rows=[2, 4]),
        lambda: verify_cost.VerifyCostParams(ctx=[4, 4]),
    ],
)
def test_what_cannot_be_meant_is_refused(make) -> None:
    with pytest.raises(ParameterError):
        make()
