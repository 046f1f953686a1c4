"""One request: its tokens, its blocks, where it stands, and what its caller gets back.

A sequence is described by two numbers only: how many tokens it has and for how many of them the KV is
computed. A new prompt, a chunk of one, a decoding sequence, one that was preempted and one that will begin
with KV it did not compute differ in these numbers and in nothing else, so the scheduler needs no phases.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    num_computed: int = 0  # tokens whose KV lies in `blocks`
    blocks: list[int] = field(default_factory=list)
    prefix_tail: Node | None = None  # where the prefix cache goes on from for this sequence
    cached_tokens: int = 0
    preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    scheduled_at: float | None = None
    token_times: list[float] = field(default_factory=list)
    _seen: dict[int, None] = field(default_factory=dict)
    _seen_len: int = 0

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.prompt_len

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


def new_request(request_id: int, tokens: Sequence[int], sampling: Sampling, answer: AnswerText) -> Request:
    """A request that has computed nothing; draws a seed when the sampling has none (32 bits: short enough to
    copy into a cell)."""
    seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
    return Request(request_id, len(tokens), list(tokens), sampling, answer, seed)
