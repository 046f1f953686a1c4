"""What an activation mode costs and what it keeps: time per token, and the same model's output in fp32 activations.

The weights are the same in every mode, bit for bit, so that whatever differs from the reference comes from the
inputs of the products alone; KV pages have one format in all. The modes' engines are in memory together and decode in
turns. Logits are compared on a fixed text of the kit, which is also what `static` was calibrated on: its best case.
The answers of a mode are computed in one batch, which only `tensor` minds: its scale comes from all rows of a step.
"""

import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nanokit.engine.load import LoadedEngine
from nanokit.engine.sampling import Sampling
from nanokit.lab.bench.timing import Rounds, Samples, Visit
from nanokit.lab.bench.workload import Session, context_for, load_for, prompt_ids
from nanokit.lab.engines import engine_for
from nanokit.lab.experiments.agreement import divergence, kept, logits_of, top1
from nanokit.lab.experiments.roofline import BUDGET_S, RooflineParams
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.result import Result, figure
from nanokit.lab.steadiness import remarks
from nanokit.lab.table import Table

QUESTION_TOKENS = 128  # room for a question in the model's chat template
STEPS = 12  # decoded tokens of a mode in each round
QUESTIONS = (
    "Why is the sky blue?",
    "What is 17 times 23? Think step by step.",
    "Write a short poem about the sea.",
    "List five animals that live in Africa.",
    "Translate to French: I am going to the market tomorrow.",
    "Write a Python function that reverses a string.",
    "How do I cook rice?",
    "A train leaves at 9:40 and arrives at 11:25. How long does it travel?",
    "Who wrote Romeo and Juliet, and what happens in it?",
    "Explain photosynthesis to a child.",
    "Give me three reasons to learn a second language.",
    "What is the difference between a lake and a river?",
)


@dataclass(frozen=True)
class ActivationResult(Result):
    """For each mode: `kl_mean_<mode>` (nats), `top1_<mode>`, `answer_tokens_kept_<mode>`, `ms_per_token_<mode>`."""

    @property
    def modes(self) -> list[str]:
        assert isinstance(self.params, RooflineParams)
        return self.params.modes

    def table(self) -> Table:
        """One row a mode; times also as a ratio to the fastest."""
        m = self.metrics
        fastest = min(m[f"ms_per_token_{mode}"] for mode in self.modes)
        columns = ("activations", "KL (nats)", "same best token", "tokens before a difference", "ms per token", "ratio")
        rows = [
            (
                mode,
                f"{m[f'kl_mean_{mode}']:.2g}",
                f"{m[f'top1_{mode}']:.1%}",
                f"{figure(m[f'answer_tokens_kept_{mode}'])} of {self.params.to_dict()['answer_tokens']}",
                f"{m[f'ms_per_token_{mode}']:.2f}",
                f"{m[f'ms_per_token_{mode}'] / fastest:.2f}",
            )
            for mode in self.modes
        ]
        return Table(columns, rows, right=columns[1:])


@dataclass(frozen=True)
class _Output:
    """What an engine says: logits [rows, vocab_size] on the text, and the ids of its answers."""

    logits: Tensor
    answers: list[list[int]]


def activation_cost(
    p: RooflineParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> ActivationResult:
    """Compare the modes with fp32 activations, then time them in turns.

    Raises StoppedError when cancelled, BusyError while something else is measured, and what `nanokit.load` raises.
    """
    progress = progress or Silent()
    with measuring("activation modes"):
        progress.start(len(p.modes) + 1, "fp32")
        expected = _output(_engine(p, "fp32"), p)
        engines: dict[str, LoadedEngine] = {}
        metrics: dict[str, float] = {}
        samples: Samples = {}
        for mode in p.modes:
            stop_if(cancel)
            progress.step(mode)
            engines[mode] = _engine(p, mode)
            found = _output(engines[mode], p)
            kl = divergence(expected.logits, found.logits)
            metrics[f"kl_mean_{mode}"] = float(kl.mean())
            metrics[f"kl_largest_{mode}"] = float(kl.max())
            metrics[f"top1_{mode}"] = top1(expected.logits, found.logits)
            tokens = [kept(a, b) for a, b in zip(expected.answers, found.answers, strict=True)]
            samples[f"answer_tokens_kept_{mode}"] = list(map(float, tokens))
            metrics[f"answer_tokens_kept_{mode}"] = statistics.fmean(tokens)
        visits = {mode: _visit(engine, mode, p.ctx[0]) for mode, engine in engines.items()}
        turns = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress, cancel=cancel).run(visits)
    metrics |= {name: statistics.median(values) for name, values in turns.samples.items()}
    compiled = [mode for mode, engine in engines.items() if engine.model.compiled]
    settings = {"kv_format": p.kv_format, "compiled_modes": compiled, "reference": "fp32 activations"}
    notes = [*turns.remarks, *remarks(turns.samples)]
    return ActivationResult(p, metrics, samples | turns.samples, settings, remarks=notes)


def _engine(p: RooflineParams, mode: str) -> LoadedEngine:
    usual = engine_for(p.model, p.activations, p.kv_format)
    if usual.model.activations == mode:
        return usual
    longest = max(p.text_tokens, context_for(p.ctx[0], STEPS), p.answer_tokens + QUESTION_TOKENS)
    return load_for(p.model, ctx=longest, max_seqs=p.prompts, activations=mode, kv_format=p.kv_format)


def _output(engine: LoadedEngine, p: RooflineParams) -> _Output:
    logits = logits_of(engine, prompt_ids(engine, p.text_tokens))
    greedy = Sampling(max_tokens=p.answer_tokens, ignore_eos=True)
    done = engine.generate([_question(engine, text) for text in QUESTIONS[: p.prompts]], greedy)
    return _Output(logits, [each.token_ids for each in done])


def _question(engine: LoadedEngine, text: str) -> Sequence[int]:
    if engine.tokenizer.chat_template is None:
        return engine.tokenizer.encode(text)
    return engine.tokenizer.chat_ids([{"role": "user", "content": text}])


def _visit(engine: LoadedEngine, mode: str, ctx: int) -> Visit:
    session = Session(engine, ctx)

    def visit() -> Samples:
        with session.filled(STEPS):
            return {f"ms_per_token_{mode}": [session.step() for _ in range(STEPS)]}

    return visit
