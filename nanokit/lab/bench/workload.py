"""An engine kept at a context length: fill it, then time single steps; and the texts that fill it.

The context is real text, because a model that reads random ids is unsure of everything and would make a sampler that
filters look slow. Contexts run from a little below the length asked for to a little above it, so that their median is
the length itself: a step costs what its context costs, linearly. A new request is begun at each visit, with the same
text: there is no prefix cache, so it is computed again. Rejected: rewinding a request (its state belongs to the
scheduler), and one long request whose context drifts away from its label.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from nanokit.engine.engine import Engine
from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError
from nanokit.lab.bench.timing import WARM, milliseconds
from nanokit.paths import data_dir

TEXT = "lighthouse.txt"
GREEDY = Sampling(ignore_eos=True)
ROOM = 64  # tokens of context beyond what is timed: while later prompts are computed, earlier sequences go on


def prompt_ids(engine: Engine, length: int, which: int = 0) -> list[int]:
    """`length` ids of a text that goes on from its start again. which: another number begins at another place."""
    text = engine.tokenizer.encode((data_dir() / "texts" / TEXT).read_text("utf-8"), add_special=False)
    start = which * 37 % len(text)
    text = text[start:] + text[:start]
    return (text * (length // len(text) + 1))[:length]


def start_of(ctx: int, steps: int) -> int:
    """Length of the prompt after which `WARM` untimed and `steps` timed steps have their middle at ctx."""
    return max(1, ctx - WARM - steps // 2)


def context_for(ctx: int, steps: int) -> int:
    """The longest context that a session at ctx reaches with so many steps a visit."""
    return ctx + steps + WARM + ROOM


def load_for(
    source: str, *, ctx: int, max_seqs: int, activations: str, kv_format: str, policy: str = ""
) -> LoadedEngine:
    """An engine with room for max_seqs sequences of ctx tokens and without a prefix cache: every prompt is
    computed. activations, kv_format, policy: "" is what `nanokit.load` takes by itself."""
    return load(
        source or None,
        ctx=ctx,
        max_seqs=max_seqs,
        token_budget=max(512, max_seqs),
        prefix_cache=False,
        activations=activations or None,
        kv_format=kv_format or None,
        policy=policy or None,
    )


def check_engine(engine: Engine, *, ctx: int, max_seqs: int) -> None:
    """Raise ParameterError when an engine is too small, would run its sequences after each other, or skip work."""
    sizes = engine.config
    blocks = max_seqs * -(-ctx // sizes.block_size)
    if sizes.prefix_cache or sizes.max_context < ctx or sizes.max_seqs < max_seqs or sizes.num_blocks < blocks:
        raise ParameterError(
            "the engine does not suit this benchmark",
            found=f"context {sizes.max_context}, {sizes.max_seqs} sequences, {sizes.num_blocks} KV blocks, "
            f"prefix cache {'on' if sizes.prefix_cache else 'off'}",
            needed=f"context {ctx}, {max_seqs} sequences, {blocks} KV blocks, no prefix cache (a prompt that is found "
            "in it is not computed)",
            do="ask for fewer sequences or a shorter context, or load with a larger kv_memory or a smaller kv_format",
        )


@dataclass
class Session:
    """Sequences of one engine at a context length: `with session.filled(steps):` and then as many `step`s."""

    engine: Engine
    ctx: int
    sequences: int = 1
    requests: tuple[int, ...] = ()

    @contextmanager
    def filled(self, steps: int) -> Iterator[None]:
        """Fill the contexts (see `start_of`) and warm up; give the blocks back at the end, whatever happens.

        Raises ParameterError when filling takes so many steps that the first sequences would end before the last
        ones are timed: fewer would decode than the label says.
        """
        start = start_of(self.ctx, steps)
        sampling = replace(GREEDY, max_tokens=steps + WARM + ROOM)
        try:
            for index in range(self.sequences):
                self.requests += (self.engine.add(prompt_ids(self.engine, start, index), sampling),)
            pending, drift = set(self.requests), 0  # drift: tokens that the first sequence is ahead of the last
            while pending:  # the step that ends a prompt also draws its first token
                drift += len(pending) < self.sequences
                pending -= {chunk.request_id for chunk in self.engine.step()}
            if drift >= ROOM:
                raise ParameterError(
                    "the sequences cannot be brought to one context length",
                    found=f"{self.sequences} prompts of {start} tokens take {drift} steps more than the first",
                    needed=f"fewer than {ROOM}",
                    do="ask for fewer sequences or a shorter context, or load with a larger token_budget",
                )
            for _ in range(WARM):
                self.engine.step()
            yield
        finally:
            for request in self.requests:
                self.engine.abort(request)
            self.requests = ()
            self.engine.step()  # takes the last chunks out

    def step(self) -> float:
        """Milliseconds of one `engine.step()`: scheduler, forward, head, sampler, text."""
        return milliseconds(self.engine.step)

    def use(self, sampling: Sampling) -> None:
        """How the next tokens are drawn; lengths and seeds stay."""
        for request in self.requests:
            self.engine.update(request, replace(sampling, max_tokens=self.engine.config.max_context, ignore_eos=True))

    def forward(self) -> float:
        """Milliseconds of what `step` would compute next, without the engine around it: the forward and the head's
        argmax. Nothing is committed, the step can be repeated."""
        step = self.engine.scheduler.schedule()
        batch = step.batch()

        def compute() -> None:
            with torch.inference_mode():
                self.engine.model.head.argmax(self.engine.model.forward(batch, self.engine.kv))

        return milliseconds(compute)
