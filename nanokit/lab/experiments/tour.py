"""The tour's experiment: a model answers, and the time of a token is taken apart.

Prefill is timed as the first token of a prompt that nothing has cached, decode as the gaps between the tokens that
follow; every repeat takes another random prompt, and in between the weights are read without being computed with, by
the same threads, so that a slow minute hits all three alike. A decoded token reads every weight once, so the time of
that reading is what no better code can go below: the share of that limit is what later notebooks work on.
"""

import math
import random
import statistics
import threading
from dataclasses import dataclass
from itertools import count

from nanokit.engine.load import LoadedEngine
from nanokit.engine.sampling import Sampling
from nanokit.lab.bench.limit import doubts, reader
from nanokit.lab.bench.timing import Rounds, Samples, Turns
from nanokit.lab.engines import engine_for
from nanokit.lab.lock import measuring
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent
from nanokit.lab.result import Result
from nanokit.lab.steadiness import remarks

# Seconds after which no further repeat is begun: a busy machine gets fewer repeats, not a longer wait.
TIMING_S = {"smoke": 6.0, "quick": 35.0, "full": math.inf}
DECODED = 24  # tokens timed after each prompt: enough for a median, few enough to stay in the context
READINGS = 3  # of the weights, after each prompt


@experiment_params
class TourParams(Params):
    """What the model is asked, and how long the prompts are that are timed."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    question: str = knob("What is a language model?", "what the model is asked")
    max_tokens: int = knob(
        0, "longest answer", unit="tokens", low=1, high=512, by_preset={"smoke": 16, "quick": 48, "full": 128}
    )
    temperature: float = knob(0.0, "randomness of the answer, 0 is greedy", low=0.0, high=2.0, step=0.1)
    prompt_tokens: int = knob(
        0, "length of the timed prompts", unit="tokens", low=16, high=2048, step=16,
        by_preset={"smoke": 64, "quick": 256, "full": 512},
    )  # fmt: skip
    repeats: int = knob(0, "timed prompts", unit="runs", low=2, high=50, by_preset={"smoke": 2, "quick": 5, "full": 15})
    seed: int = knob(0, "seed of the random prompts and of sampling", low=0, high=2**31 - 1)


@dataclass(frozen=True)
class TourResult(Result):
    """The answer in `texts`, times and bytes in `metrics`; nothing more is needed to draw it."""

    @property
    def answer(self) -> str:
        """What the model said."""
        return self.texts["answer"]


def tour(p: TourParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> TourResult:
    """Answer the question, then time prefill, decode and streaming in turns.

    Raises StoppedError when cancelled, BusyError while something else is measured, and what `nanokit.load` raises.
    """
    progress = progress or Silent()
    with measuring("the tour"):
        progress.start(2, "loading the model")
        engine = engine_for(p.model)
        model, footprint = engine.model, engine.model.footprint
        progress.step("answering")
        answer = engine.chat(
            [{"role": "user", "content": p.question}],
            Sampling(max_tokens=p.max_tokens, temperature=p.temperature, seed=p.seed),
        )
        turns = _time(engine, p, progress, cancel)
    samples = turns.samples
    notes = [*remarks(samples), *turns.remarks]
    metrics = _metrics(samples, model.bytes_per_token, footprint.per_token_dense)
    notes += doubts(metrics["decode_limit_share"])
    metrics |= {"answer_tokens": answer.generated_tokens, "answer_ttft_ms": answer.timings.ttft_ms or 0.0}
    settings = {
        "model": model.name,
        "kernels": model.kernels,
        "activations": model.activations,
        "kv_format": engine.kv.kv_format,
        "timed_tokens": DECODED,
    }
    texts = {"question": p.question, "answer": answer.text, "finish_reason": str(answer.finish_reason)}
    return TourResult(p, metrics, samples, settings, texts, notes)


def _time(engine: LoadedEngine, p: TourParams, progress: Progress, cancel: threading.Event | None) -> Turns:
    """Prefill, decode and streaming of every repeat; no more of them are begun once `TIMING_S` has passed."""
    read, repeats = reader(engine), count()

    def repeat() -> Samples:
        speed, gaps = _time_once(engine, p, next(repeats))
        return {
            "prefill_tok_per_s": [speed],
            "decode_ms_per_token": gaps,
            "stream_gb_s": [read() for _ in range(READINGS)],
        }

    _time_once(engine, p, -1, tokens=4)  # warm-up: first touches of weights and pages are not what a token costs
    return Rounds(p.repeats, TIMING_S[p.preset], progress=progress, cancel=cancel).run({"timing": repeat})


def _time_once(engine: LoadedEngine, p: TourParams, repeat: int, tokens: int = DECODED) -> tuple[float, list[float]]:
    """Prefill in tokens per second and the milliseconds of each decoded token, for a random prompt."""
    draw = random.Random(f"{p.seed}, {repeat}")  # a text: of integers, -1 and 1 are the same seed
    prompt = [draw.randrange(engine.model.vocab_size) for _ in range(p.prompt_tokens)]
    [done] = engine.generate([prompt], Sampling(max_tokens=tokens + 1, ignore_eos=True))
    assert done.timings.ttft_ms is not None
    return p.prompt_tokens / (done.timings.ttft_ms / 1e3), done.timings.itl_ms


def _metrics(samples: dict[str, list[float]], weight_bytes: int, dense_bytes: int) -> dict[str, float]:
    prefill, decode, stream = (statistics.median(values) for values in samples.values())
    limit = weight_bytes / (stream * 1e9) * 1e3
    return {
        "prefill_tok_per_s": prefill,
        "prefill_ms_per_token": 1e3 / prefill,
        "decode_ms_per_token": decode,
        "decode_tok_per_s": 1e3 / decode,
        "stream_gb_s": stream,
        "bytes_per_token": weight_bytes,
        "fp32_bytes_per_token": dense_bytes,
        "limit_ms_per_token": limit,
        "fp32_limit_ms_per_token": dense_bytes / (stream * 1e9) * 1e3,
        "decode_limit_share": limit / decode,
    }
