"""Self-distillation: a model learns to say on its quantized weights what it says on its own, from texts of its own.

    texts      drawn by the engine at temperature 1, each from one token drawn at random: no data is needed (Liu et al.
               2023, "LLM-QAT"), and nothing of them was seen by the text that quality is measured on
    target     the model's own distribution after every token; only the hidden states are kept (2.3 kB a token), the
               head multiplies them again where they are compared
    loss       KL(own || quantized), nats a token, over the whole vocabulary
    step       AdamW without decay, gradient clipped to a norm of 1, warm-up over a tenth of the steps, then a cosine

Products are taken in bf16 where this machine is faster in it: the weights that train, their gradients and everything
between products stay fp32. What was trained is measured in fp32 afterwards.

Rejected: training on the calibration text (then one would not know whether it learned the grid or the text), logits
kept from the teacher (200 kB a token), and autograd through the head (its logits, a gradient for each and two softmaxes
would be in memory together).
"""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.sampling import Sampling
from nanokit.lab.experiments.gradient_params import GradientParams
from nanokit.model.trainable import TrainableModel

ROWS = 512  # of logits at a time
CLIP = 1.0
WARM = 0.1  # share of the steps
TOGETHER = 16  # sequences that are drawn at once


@dataclass(frozen=True)
class Lesson:
    """texts: int64 [texts, tokens]; states: the teacher's hidden states for them, fp32 [texts, tokens, hidden_size];
    head: [vocab_size, hidden_size] in the type of the products; products: that type."""

    texts: Tensor
    states: Tensor
    head: Tensor
    products: torch.dtype


@dataclass(frozen=True)
class Step:
    """loss: nats a token, before the step; norm: of the gradient, before it was clipped; ms: the whole step."""

    loss: float
    norm: float
    ms: float


def own_texts(model: str, count: int, length: int, seed: int) -> Tensor:
    """Texts that the model writes, int64 [count, length]; the same for the same arguments."""
    engine = load(model or None, ctx=length, max_seqs=min(TOGETHER, count), prefix_cache=False)
    first = torch.Generator().manual_seed(seed)
    texts: dict[int, list[int]] = {}
    for index in range(count):
        start = [*_beginning(engine), int(torch.randint(engine.tokenizer.vocab_size, (1,), generator=first))]
        sampling = Sampling(temperature=1.0, max_tokens=length - len(start), seed=seed + index, ignore_eos=True)
        texts[engine.add(start, sampling)] = start
    while engine.has_work:
        for chunk in engine.step():
            texts[chunk.request_id].extend(chunk.token_ids)
    return torch.tensor(list(texts.values()))


def _beginning(engine: LoadedEngine) -> list[int]:
    return engine.tokenizer.encode("", add_special=True)


@torch.no_grad()
def lesson_of(teacher: TrainableModel, texts: Tensor, products: torch.dtype, batch: int) -> Lesson:
    """The teacher's states for the texts, computed once."""
    with multiplying(products):
        states = torch.cat([teacher(part) for part in texts.split(batch)])
    return Lesson(texts, states, teacher.head.to(products), products)


@contextmanager
def multiplying(products: torch.dtype) -> Iterator[None]:
    """Products of linear layers in this type, what lies between them in fp32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=products is torch.bfloat16):
        yield


def divergence(states: Tensor, target: Tensor, head: Tensor) -> tuple[float, Tensor]:
    """Mean KL(target || found) of states [tokens, hidden_size] under one head, and its gradient by `states`.

    The gradient of a row is (q - p) head / tokens, p and q being the softmaxes of both: no graph is needed for it.
    """
    total, gradient = 0.0, torch.empty_like(states)
    for first in range(0, len(states), ROWS):
        part = slice(first, first + ROWS)
        p = (target[part].to(head.dtype) @ head.T).float().log_softmax(-1)
        q = (states[part].to(head.dtype) @ head.T).float().log_softmax(-1)
        weights = p.exp()
        total += float((weights * (p - q)).sum())
        gradient[part] = (q.exp_().sub_(weights).to(head.dtype) @ head).float()
    return total / len(states), gradient.div_(len(states))


class Training:
    """A student on its way: `step` by `step`. parameters: what trains, all else is frozen by the caller."""

    def __init__(
        self,
        student: nn.Module,
        parameters: list[nn.Parameter],
        lesson: Lesson,
        p: GradientParams,
        steps: int,
        rate: float,
    ) -> None:
        self._student, self._parameters, self._lesson = student, parameters, lesson
        self._batch, self._steps, self._rate, self._done = p.batch, steps, rate, 0
        self._order = _order(len(lesson.texts), p.seed)
        self._optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self) -> Step:
        """One batch forward, back, and the weights moved."""
        started = time.perf_counter()
        chosen = torch.tensor([next(self._order) for _ in range(self._batch)])
        with multiplying(self._lesson.products):
            states = self._student(self._lesson.texts[chosen]).flatten(0, 1)
        target = self._lesson.states[chosen].flatten(0, 1)
        with torch.no_grad():
            loss, gradient = divergence(states.detach(), target, self._lesson.head)
        states.backward(gradient)
        norm = float(nn.utils.clip_grad_norm_(self._parameters, CLIP))
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * schedule(self._done, self._steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._done += 1
        return Step(loss, norm, 1e3 * (time.perf_counter() - started))


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate: rising over the first tenth, then a cosine; 0 beyond the last step."""
    if step >= steps:
        return 0.0
    warm = max(1, round(WARM * steps))
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _order(count: int, seed: int) -> Iterator[int]:
    """Every text once, in random order, and again in another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def products_of(p: GradientParams) -> torch.dtype:
    """What training multiplies in: as asked, or the faster one here."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}.get(p.products) or faster_products()


@lru_cache(maxsize=1)
def faster_products() -> torch.dtype:
    """bf16 where a product of the size of a layer's takes less than two thirds of its time in fp32 here."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(256, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
        times[dtype] = statistics.median(_seconds(x, w) for _ in range(9))
    return torch.bfloat16 if times[torch.bfloat16] < 0.67 * times[torch.float32] else torch.float32


def _seconds(x: Tensor, w: Tensor) -> float:
    started = time.perf_counter()
    x @ w.T
    return time.perf_counter() - started
