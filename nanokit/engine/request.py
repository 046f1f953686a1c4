"""One request: its tokens, its blocks, where it stands, and what its caller gets back.

A sequence is described by two numbers only: how many tokens it has and for how many of them the KV is
computed. A new prompt, a chunk of one, a decoding sequence, one that was preempted and one that will begin
with KV it did not compute differ in these numbers and in nothing else, so the scheduler needs no phases.

`spans` says in which activation mode each token is computed. When a caller changes the mode of a running request,
KV that lies in its pages stays what it is: the next token to be drawn is the first computed in the new mode, over
KV of the old one. What is computed again after a preemption is computed as it was the first time. Only the first
span is offered to the prefix cache, or looked up there: beyond it the KV is that of no single mode.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from itertools import pairwise

from nanokit.engine.sampling import Sampling
from nanokit.engine.text import AnswerText
from nanokit.errors import NanokitError
from nanokit.kv.prefix import Node
from nanokit.model.head import Edit


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # its logits could not be sampled from; see Chunk.error


@dataclass(frozen=True)
class Timings:
    """Milliseconds. queue_ms: arrival to the first step that worked on the request. ttft_ms: arrival to the
    first token (None without one). itl_ms: between each token and the next. total_ms: arrival to the end."""

    queue_ms: float | None
    ttft_ms: float | None
    itl_ms: list[float]
    total_ms: float


@dataclass(frozen=True)
class Completion:
    """An answer. `token_ids` holds every token drawn, an end-of-sequence token or those of a stop string
    included; `text` does not. cached_tokens: of the prompt, found in the prefix cache instead of computed.
    seed: the one used, drawn or given: the same request with it gives the same answer."""

    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    seed: int
    timings: Timings

    @property
    def generated_tokens(self) -> int:
        """Number of tokens drawn."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Chunk:
    """What one step added to an answer. text may be empty (half a character, or the start of a stop string);
    the last chunk has a finish_reason and the whole completion, and an error if the reason is ERROR."""

    request_id: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    error: NanokitError | None = None


@dataclass(eq=False)
class Request:
    """State of a request while it waits or runs. Compared by identity; changed by scheduler and engine
    only."""

    id: int  # also its age: a larger id is younger
    prompt_len: int
    tokens: list[int]  # prompt, then answer
    sampling: Sampling
    answer: AnswerText
    seed: int
    mode: InitVar[str | None] = None  # activation mode; None is the engine's own
    spans: list[tuple[int, str | None]] = field(init=False)  # (first token, mode), ascending, the first one from 0
    num_computed: int = 0  # tokens whose KV lies in `blocks`
    furthest: int = 0  # tokens that were ever computed, before a preemption as well
    blocks: list[int] = field(default_factory=list)
    prefix_tail: Node | None = None  # where the prefix cache goes on from for this sequence
    cached_tokens: int = 0
    preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    scheduled_at: float | None = None
    token_times: list[float] = field(default_factory=list)
    _seen: dict[int, None] = field(default_factory=dict)
    _seen_len: int = 0

    def __post_init__(self, mode: str | None) -> None:
        self.spans = [(0, mode)]

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def current_mode(self) -> str | None:
        """The mode in which its next token is computed."""
        return [mode for first, mode in self.spans if first <= self.num_computed][-1]

    @property
    def pending(self) -> int:
        """How many tokens come next in one mode."""
        later = [first for first, _ in self.spans if first > self.num_computed]
        return min([len(self.tokens), *later]) - self.num_computed

    @property
    def sharable(self) -> int:
        """Tokens from the first whose KV is that of one mode, `spans[0]`: what the prefix cache may know. None of the
        mode "tensor", whose KV is that of the batch in which it was computed."""
        if self.spans[0][1] == "tensor":
            return 0
        return self.spans[1][0] if len(self.spans) > 1 else len(self.tokens)

    def change_mode(self, mode: str | None) -> None:
        """Compute in this mode whatever was never computed; see the module."""
        first = len(self.tokens) - 1 if self.num_generated else max(self.furthest, self.num_computed)
        kept = [span for span in self.spans if span[0] < first]
        self.spans = kept if kept and kept[-1][1] == mode else [*kept, (first, mode)]

    def accept(self, token: int) -> None:
        """Append a drawn token and note the time."""
        self.tokens.append(token)
        self.token_times.append(time.perf_counter())

    def edit(self) -> Edit | None:
        """The sparse change its sampling makes to the next logits, None when it makes none."""
        sampling = self.sampling
        if sampling.repetition_penalty == 1.0 and not sampling.suppress:
            return None
        penalized: tuple[int, ...] = ()
        if sampling.repetition_penalty != 1.0:
            self._seen.update(dict.fromkeys(self.tokens[self._seen_len :]))
            self._seen_len = len(self.tokens)
            penalized = tuple(self._seen)
        return Edit(penalized=penalized, penalty=sampling.repetition_penalty, masked=sampling.suppress)

    def completion(self, reason: FinishReason) -> Completion:
        """The result as of now."""
        now, times = time.perf_counter(), self.token_times
        return Completion(
            request_id=self.id,
            text=self.answer.text,
            token_ids=self.tokens[self.prompt_len :],
            finish_reason=reason,
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            seed=self.seed,
            timings=Timings(
                queue_ms=None if self.scheduled_at is None else (self.scheduled_at - self.arrived) * 1e3,
                ttft_ms=(times[0] - self.arrived) * 1e3 if times else None,
                itl_ms=[(b - a) * 1e3 for a, b in pairwise(times)],
                total_ms=(now - self.arrived) * 1e3,
            ),
        )


def new_request(
    request_id: int, tokens: Sequence[int], sampling: Sampling, answer: AnswerText, mode: str | None = None
) -> Request:
    """A request that has computed nothing; draws a seed when the sampling has none (32 bits: short enough to
    copy into a cell)."""
    seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
    return Request(request_id, len(tokens), list(tokens), sampling, answer, seed, mode)
