"""What a model's behaviour says about its file when no source is at hand.

Perplexity by position and the entropy of predictions on a fixed text; where a greedy answer begins to go in circles;
how long the first token takes, beside the limit that memory sets. And, sharper than all of these, what the text says of
the rope: the model is run with other bases and scales as well, side by side, and one that predicts the same tokens
better than the file's own by more than chance points at the key that is wrong (nanokit.model.verify.variants). The
usual bases of published models are tried; a base that is wrong by less than about twice stays unseen.

A first token later than 800 ms is said to mean wrong rope parameters (T4), and repetition after about 50 tokens wrongly
split feed-forward weights (T5). Both are shown and accuse no file: notebook 15 says how often they are right.
"""

import math
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.sampling import Sampling
from nanokit.errors import ModelFileError, ParameterError
from nanokit.lab.bench.limit import reader
from nanokit.lab.lock import measuring
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.quality.texts import text_names, text_path
from nanokit.lab.result import Result
from nanokit.lab.table import Table
from nanokit.model.fetch import fetch_default_model
from nanokit.model.load import open_model
from nanokit.model.rope import Rope
from nanokit.model.source import GGUFSource, ModelSource
from nanokit.model.verify.behaviour import behaviour
from nanokit.model.verify.divergence import by_position
from nanokit.model.verify.report import Check
from nanokit.model.verify.variants import AS_IS, Gain, Head, Variant, final_states, gain
from nanokit.model.weights import Weights, find_weights

BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)  # of published models
NEAR = 2.0  # times: a base within it makes the same text nearly as likely
SCALES = {"frequencies halved": 2.0, "frequencies doubled": 0.5}  # -> factor to positions' divisor
T4_MS, T5_TOKENS = 800.0, 60  # a first token later, a circle entered before
LONGEST_PERIOD, LEAST_TURNS = 40, 3
PROMPT_TOKENS, LEAST_ANSWER = 48, 16


@experiment_params
class SmokeParams(Params):
    """Which file, and how long the texts are."""

    model: str = knob("", "GGUF file; empty is the default model")
    text: str = knob("evaluation", "name of a text in data/texts that is predicted")
    tokens: int = knob(
        0, "of the text", unit="tokens", low=32, high=8192, by_preset={"smoke": 96, "quick": 512, "full": 1024}
    )
    answer: int = knob(
        0, "greedy tokens in which circles are looked for", unit="tokens", low=16, high=1024,
        by_preset={"smoke": 64, "quick": 160, "full": 256},
    )  # fmt: skip
    repeats: int = knob(0, "first tokens timed", low=1, high=50, by_preset={"smoke": 2, "quick": 5, "full": 15})

    def check(self) -> None:
        if self.text not in text_names():
            raise ParameterError("unknown text", found=repr(self.text), needed="one of " + ", ".join(text_names()))


@dataclass(frozen=True)
class SmokeResult(Result):
    """Metrics: `ppl`, `ppl_<first>_<last>` by position, `entropy` (nats), `first_token_ms`, `first_token_limit_ms`,
    `circle_from` (tokens before it; absent where there is none), `gain_<variant>` and `error_<variant>` (nats a token).
    gains: of the ropes that were tried; checks: verify's own of behaviour, of a GGUF file."""

    gains: dict[str, Gain] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    positions: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def found(self) -> list[str]:
        """What the text says against the file, a sentence each; empty where it says nothing. A rope is blamed only
        where nothing else is wrong: beside a greater fault, any rope may happen to do less badly."""
        found = [f"{check.name}: {check.said}" for check in self.checks if check.verdict in ("failed", "warning")]
        return found or [
            f"{name}: the text gets likelier by {each.mean:.3g} ± {each.error:.2g} nats a token"
            for name, each in self.gains.items()
            if each.certain
        ]

    def table(self) -> Table:
        """A figure a row."""
        m = self.metrics
        places = ", ".join(f"{math.exp(min(loss, 700)):.4g} at {first}-{last}" for first, last, loss in self.positions)
        circle = f"from token {m['circle_from']:.0f} on" if "circle_from" in m else f"none in {m['answer_tokens']:.0f}"
        best = max(self.gains, key=lambda name: self.gains[name].mean, default=None)
        rope = "nothing tried"
        if best is not None:
            how = f"{self.gains[best].mean:+.3f} ± {self.gains[best].error:.3f} nats a token"
            rope = f"{best}: {how}" if self.gains[best].certain else f"none for certain; {best} comes nearest: {how}"
        least = f"{m['prompt_tokens']:.0f} tokens; memory allows {m['first_token_limit_ms']:.1f} ms"
        rows = [
            ("perplexity", f"{m['ppl']:.4g} ({places})"),
            ("entropy of predictions", f"{m['entropy']:.2f} nats, of {m['entropy_of_chance']:.2f} by chance"),
            ("greedy answer goes in a circle", circle),
            ("first token", f"{m['first_token_ms']:.0f} ms ({least})"),
            ("likelier under another rope", rope),
            *((check.name, f"{check.verdict}: {check.said}") for check in self.checks),
        ]
        return Table(("looked at", "found"), rows)


def smoke(p: SmokeParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> SmokeResult:
    """Look at how a file behaves.

    Raises StoppedError when cancelled, BusyError while something else is measured, ModelFileError for a file that does
    not load (`nanokit model verify` says why), and what `nanokit.load` raises.
    """
    progress = progress or Silent()
    with measuring("a smoke test"):
        progress.start(3, "the text")
        source = open_model(p.model or fetch_default_model())
        weights = find_weights(source.config, source)
        _check_context(source)
        result = _on_text(p, source, weights)
        stop_if(cancel)
        progress.step("an answer")
        engine = load(p.model or None, prefix_cache=False)
        answer, metrics = greedy_answer(engine, p.text, p.answer)
        stop_if(cancel)
        progress.step("first tokens")
        metrics |= first_token(engine, p.text, p.repeats)
    settings = {"model": source.name, "kernels": engine.model.kernels, "text": p.text}
    return replace(
        result, metrics={**result.metrics, **metrics}, settings=settings, texts={"answer": answer}, remarks=result.found
    )


def _check_context(source: ModelSource) -> None:
    if source.config.max_context < PROMPT_TOKENS + LEAST_ANSWER:
        raise ModelFileError(
            f"{source.name} has too short a context for a smoke test",
            found=f"{source.config.max_context} tokens",
            needed=f"at least {PROMPT_TOKENS + LEAST_ANSWER}",
            do="look at the file with nanokit model verify",
        )


def _on_text(p: SmokeParams, source: ModelSource, weights: Weights) -> SmokeResult:
    ids = source.tokenizer.encode(text_path(p.text).read_text("utf-8"))[: min(p.tokens, source.config.max_context)]
    tried = other_ropes(source.config.rope)
    checks = behaviour(source, weights) if isinstance(source, GGUFSource) else []
    states = final_states(source.config, weights, ids, tried)
    head = Head(weights)
    losses = {name: head.losses(each, ids) for name, each in states.items()}
    entropy = [-(each.exp() * each).sum(-1) for each in head.log_probabilities(states[AS_IS][:-1])]
    own = losses[AS_IS]
    gains = {name: gain(own, losses[name]) for name in tried}
    positions = list(by_position(own))
    metrics = {
        "ppl": math.exp(min(float(own.mean()), 700)),
        **{f"ppl_{first}_{last}": math.exp(min(loss, 700)) for first, last, loss in positions},
        "entropy": statistics.fmean(float(v) for each in entropy for v in each),
        "entropy_of_chance": math.log(source.config.vocab_size),
        **{f"gain_{name}": each.mean for name, each in gains.items()},
        **{f"error_{name}": each.error for name, each in gains.items()},
    }
    return SmokeResult(p, metrics, gains=gains, checks=checks, positions=positions)


def other_ropes(own: Rope) -> dict[str, Variant]:
    """The ropes that are tried: usual bases that are not near the file's own, other scales, and none."""
    ropes = {f"rope base {base:,.0f}": replace(own, base=base) for base in BASES if not _near(base, own.base)}
    ropes |= {name: replace(own, linear_factor=own.linear_factor * by) for name, by in SCALES.items()}
    if own != (plain := Rope(own.base)) and plain not in ropes.values():
        ropes["no rope scaling"] = plain
    return {name: Variant(rope=rope) for name, rope in ropes.items()}


def _near(a: float, b: float) -> bool:
    return max(a / b, b / a) <= NEAR


def greedy_answer(engine: LoadedEngine, text: str, tokens: int) -> tuple[str, dict[str, float]]:
    """How a text goes on after its first PROMPT_TOKENS tokens, and `answer_tokens` and `circle_from` of that."""
    prompt = engine.tokenizer.encode(text_path(text).read_text("utf-8"))[:PROMPT_TOKENS]
    room = engine.config.max_context - len(prompt)
    [done] = engine.generate([prompt], Sampling(max_tokens=min(tokens, room), ignore_eos=True))
    metrics = {"answer_tokens": float(len(done.token_ids))}
    if (start := circle(done.token_ids)) is not None:
        metrics["circle_from"] = float(start)
    return done.text, metrics


def circle(ids: Sequence[int]) -> int | None:
    """Where a sequence begins to repeat itself until its end: the tokens before it. None where it does not, at least
    LEAST_TURNS times over with a period of at most LONGEST_PERIOD tokens."""
    starts = []
    for period in range(1, LONGEST_PERIOD + 1):
        at = len(ids)
        while at > period and ids[at - 1] == ids[at - 1 - period]:
            at -= 1
        if len(ids) - (at - period) >= LEAST_TURNS * period and at < len(ids):
            starts.append(at - period)
    return min(starts, default=None)


def first_token(engine: LoadedEngine, text: str, repeats: int) -> dict[str, float]:
    """Median time to the first token of a prompt that nothing has cached, and what reading the weights once takes."""
    ids = engine.tokenizer.encode(text_path(text).read_text("utf-8"))
    read = reader(engine)
    times, speeds = [], []
    for at in range(repeats + 1):  # the first is warm-up
        prompt = ids[at : at + PROMPT_TOKENS]
        begun = time.perf_counter()
        engine.generate([prompt], Sampling(max_tokens=1, ignore_eos=True))
        times.append(1e3 * (time.perf_counter() - begun))
        speeds.append(read())
    return {
        "prompt_tokens": float(PROMPT_TOKENS),
        "first_token_ms": statistics.median(times[1:]),
        "first_token_limit_ms": engine.model.bytes_per_token / statistics.median(speeds) / 1e6,
    }
