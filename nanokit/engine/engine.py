"""The engine: text or ids in, answers out, one ragged forward per step.

    add ─▶ Scheduler.schedule ─▶ model.forward ─▶ sampler.draw ─▶ Scheduler.commit ─▶ text, stop, finish
             ▲ blocks             a call a mode    one draw a row   prefix cache             │
             └──────────────────────────── next step ◀───────────────────────────────────────┘

One lock serializes everything, held for one step at a time: several threads may call `generate` and `stream`
at once, and whoever holds the lock advances everybody's requests. A widget callback can therefore change the
settings of a running request (`update`) or abort it, and an async server needs one thread that calls `step`.
Nothing is kept outside the object: two engines live side by side.

Rejected: a background thread per engine (a notebook kernel that cannot be interrupted, and errors that nobody
sees).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nanokit.engine.config import EngineConfig
from nanokit.engine.interfaces import CausalModel, TextTokenizer
from nanokit.engine.limits import check_sampling, check_size, own_mode, prompt_ids
from nanokit.engine.request import Chunk, Completion, FinishReason, Request, new_request
from nanokit.engine.sampler import Row, draw
from nanokit.engine.sampling import Sampling
from nanokit.engine.scheduler import Scheduler, Step
from nanokit.engine.stream import Stream
from nanokit.engine.text import AnswerText
from nanokit.engine.turns import TurnLock
from nanokit.errors import NanokitError, RequestError
from nanokit.kv.pool import BlockPool
from nanokit.kv.prefix import HashFunction, PrefixCache, chained_hash

Prompt = str | Sequence[int]


class Engine:
    """Continuous batching over one model, one tokenizer and one KV store.

    kv: the model's KV store with `config.num_blocks` blocks of `config.block_size` tokens; only passed
    through.
    """

    def __init__(
        self,
        model: CausalModel,
        tokenizer: TextTokenizer,
        config: EngineConfig,
        *,
        kv: Any,
        prefix_hash: HashFunction = chained_hash,
    ) -> None:
        self.model, self.tokenizer, self.config, self.kv = model, tokenizer, config, kv
        self.pool = BlockPool(config.num_blocks)
        prefix = PrefixCache(self.pool, config.block_size, prefix_hash) if config.prefix_cache else None
        self.scheduler = Scheduler(
            self.pool,
            prefix,
            block_size=config.block_size,
            max_seqs=config.max_seqs,
            token_budget=config.token_budget,
        )
        self._eos = frozenset(tokenizer.eos_ids)
        self._lock = TurnLock()
        self._next_id = 0
        self._requests: dict[int, Request] = {}
        self._inboxes: dict[int, deque[Chunk]] = {}  # of the requests that have a Stream
        self._unclaimed: list[Chunk] = []  # chunks for the caller of step()
        self._dropped: deque[int] = deque()  # streams that were garbage-collected; see Stream.__del__

    def add(self, prompt: Prompt, sampling: Sampling | None = None) -> int:
        """Queue a request and return its id; `step` delivers its chunks. Raises RequestError, with nothing
        queued."""
        request_args = self._validated(prompt, sampling)
        with self._lock:
            return self._enqueue(*request_args)

    def abort(self, request_id: int) -> bool:
        """End a request at whatever stage; its blocks are free at once. False if it has ended already."""
        with self._lock:
            request = self._find(request_id)
            if request is None:
                return False
            self._finish(request, FinishReason.ABORT)
            return True

    def update(self, request_id: int, sampling: Sampling) -> bool:
        """Replace the settings of a request from its next token on. False if it has ended already.

        The seed stays what it is: noise is keyed by it. Another activation mode holds for what is computed from now
        on, over keys and values that stay as they were computed. Raises RequestError for another seed or a setting
        that could not have been added.
        """
        check_sampling(sampling, self.model.vocab_size)
        mode = own_mode(sampling, self.model)
        with self._lock:
            request = self._find(request_id)
            if request is None:
                return False
            if sampling.seed not in (None, request.seed):
                raise RequestError(
                    "the seed of a running request cannot change",
                    found=sampling.seed,
                    needed=f"{request.seed}, or None to keep it",
                )
            check_size(request.prompt_len, sampling, self.config)
            request.sampling = sampling
            request.answer.stops = sampling.stop
            request.change_mode(mode)
            return True

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """Answers in the order of the prompts, computed together. One Sampling for all, or one for each.

        Raises RequestError before anything is queued when a prompt cannot be served, and the error of a
        request that failed; in either case, and when interrupted, nothing is left running.
        """
        if isinstance(prompts, str):
            raise RequestError(
                "generate takes a list of prompts",
                found="one string",
                needed="a list",
                do="write generate([prompt])",
            )
        if isinstance(sampling, Sampling) or sampling is None:
            sampling = [sampling or Sampling()] * len(prompts)
        if not isinstance(sampling, Sequence) or len(sampling) != len(prompts):
            raise RequestError(
                "sampling is one Sampling for all prompts, or a list with one for each",
                found=f"{len(sampling)} samplings for {len(prompts)} prompts"
                if isinstance(sampling, Sequence)
                else repr(sampling),
                needed=f"a Sampling, or {len(prompts)} of them",
            )
        checked = [self._validated(prompt, each) for prompt, each in zip(prompts, sampling, strict=True)]
        with self._lock:
            streams = [self._open_stream(*args) for args in checked]
        try:
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Stream:
        """An iterator over the answer, a chunk for every token. Raises RequestError at once, not at the first
        chunk. Leaving the loop early, closing or dropping the stream aborts the request."""
        args = self._validated(prompt, sampling)
        with self._lock:
            return self._open_stream(*args)

    def chat(self, messages: Sequence[Mapping[str, str]], sampling: Sampling | None = None) -> Completion:
        """The model's answer to a conversation, through its chat template. messages: dicts of role and
        content."""
        return self.generate([self.tokenizer.chat_ids(messages)], sampling)[0]

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute, or has something to deliver."""
        return self.scheduler.has_work or bool(self._unclaimed)

    def step(self) -> list[Chunk]:
        """Run one step if there is work. Returns the chunks, since the last call, of requests queued with
        `add`."""
        with self._lock:
            self._advance()
            chunks, self._unclaimed = self._unclaimed, []
            return chunks

    def advance_for(self, inbox: deque[Chunk]) -> None:
        """See `stream.Driver`."""
        with self._lock:
            if not inbox:
                self._advance()

    def close_stream(self, request_id: int) -> None:
        """See `stream.Driver`."""
        with self._lock:
            self.abort(request_id)
            self._inboxes.pop(request_id, None)

    def drop_later(self, request_id: int) -> None:
        """See `stream.Driver`."""
        self._dropped.append(request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, scheduler, prefix cache and pool agree."""
        with self._lock:
            self.scheduler.check_integrity()
            known = set(self._requests.values())
            assert known == {*self.scheduler.waiting, *self.scheduler.running}, "a request is lost"
            assert len(known) == len(self.scheduler.waiting) + len(self.scheduler.running), "doubled request"

    def _advance(self) -> None:
        while self._dropped:
            self.close_stream(self._dropped.popleft())
        if not self.scheduler.has_work:
            return
        step = self.scheduler.schedule()
        drawn = [pair for mode, part in step.by_mode().items() for pair in self._compute(mode, part)]
        # Nothing has changed so far: an exception above, an interrupt included, leaves a step that can be repeated.
        # All tokens are taken before any is counted as computed: an interrupt further down (a notebook's, while
        # other threads have requests) must leave no request that seems to have nothing to compute.
        for request, token in drawn:
            if not isinstance(token, NanokitError):
                request.accept(token)
        self.scheduler.commit(step)
        for request, token in drawn:
            if isinstance(token, NanokitError):
                self._finish(request, FinishReason.ERROR, error=token)
            else:
                self._tell(request, token)

    def _compute(self, mode: str | None, part: Step) -> list[tuple[Request, int | NanokitError]]:
        """One forward: the part of a step that has this activation mode, and what its requests have drawn."""
        model = self.model if mode is None else self.model.in_mode(mode)
        requests, rows = part.sampled()
        with torch.inference_mode():
            hidden = model.forward(part.batch(), self.kv)
            if not requests:
                return []
            wanted = [Row(r.sampling, r.seed, position=len(r.tokens), edit=r.edit()) for r in requests]
            tokens = draw(model.head, hidden if len(rows) == len(hidden) else hidden[rows], wanted)
        return list(zip(requests, tokens, strict=True))

    def _tell(self, request: Request, token: int) -> None:
        """Deliver the text of a token that was drawn; decide whether the answer ends here."""
        if token in self._eos and not request.sampling.ignore_eos:
            self._finish(request, FinishReason.STOP, (token,))
            return
        try:
            text = request.answer.push(token)
        except NanokitError as error:  # an id that the tokenizer does not know fails its own request only
            self._finish(request, FinishReason.ERROR, (token,), error=error)
            return
        if request.answer.stopped:
            self._finish(request, FinishReason.STOP, (token,), text)
        elif request.num_generated >= request.sampling.max_tokens or len(request.tokens) >= self.config.max_context:
            self._finish(request, FinishReason.LENGTH, (token,), text)
        else:
            self._deliver(Chunk(request.id, text, (token,)))

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        text: str = "",
        error: NanokitError | None = None,
    ) -> None:
        self.scheduler.remove(request)
        del self._requests[request.id]
        text += request.answer.finish()
        if request.answer.stopped and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP
        self._deliver(Chunk(request.id, text, tokens, reason, request.completion(reason), error))

    def _deliver(self, chunk: Chunk) -> None:
        inbox = self._inboxes.get(chunk.request_id)
        if inbox is None:
            self._unclaimed.append(chunk)
        else:
            inbox.append(chunk)

    def _validated(self, prompt: Prompt, sampling: Sampling | None) -> tuple[list[int], Sampling, str | None]:
        sampling = sampling or Sampling()
        ids = prompt_ids(prompt, self.tokenizer, self.model.vocab_size)
        check_sampling(sampling, self.model.vocab_size)
        check_size(len(ids), sampling, self.config)
        return ids, sampling, own_mode(sampling, self.model)

    def _enqueue(self, ids: list[int], sampling: Sampling, mode: str | None) -> int:
        request_id = self._next_id
        self._next_id += 1
        answer = AnswerText(self.tokenizer.stream(), sampling.stop)
        self._requests[request_id] = request = new_request(request_id, ids, sampling, answer, mode)
        self.scheduler.add(request)
        return request_id

    def _open_stream(self, ids: list[int], sampling: Sampling, mode: str | None) -> Stream:
        request_id = self._enqueue(ids, sampling, mode)
        inbox = self._inboxes[request_id] = deque()
        return Stream(self, request_id, inbox)

    def _find(self, request_id: int) -> Request | None:
        if not 0 <= request_id < self._next_id:
            raise RequestError("no such request", found=request_id, needed="an id that this engine's add() returned")
        return self._requests.get(request_id)
