"""Which sequences advance in the next step, by how many tokens, in which blocks. No tensors.

Every running sequence lacks len(tokens) - num_computed tokens of KV: one when it decodes, many when it is new or was
preempted. A step hands out a token budget by age: first to running requests, then to those that wait. A prompt larger
than what is left of the budget is computed in chunks. Only the youngest running request can be in the middle of its
prompt (nobody is admitted once the budget is spent), so serving by age is also serving decodes first: nobody's answer
stutters because a long prompt arrived.

Blocks are allocated as tokens arrive. When the pool is exhausted, the youngest running request is preempted:
its blocks go back and it waits, to be computed again (its full blocks often are still in the prefix cache).
The oldest is never preempted, and `Engine.add` refuses what could not run alone, so there is always progress.
Draws depend on (seed, position) only: preemption costs time and changes no answer.

A step may hold requests of several activation modes; it is then computed as one batch a mode (`Step.by_mode`). A
request whose mode was changed gets no tokens of two modes in one step.

Rejected: separate prefill and decode phases (two code paths, and decoding stalls), swapping KV to another
memory (the disk store does that, on purpose and by name), letting short requests overtake (starves long
ones).
"""

import time
from collections import deque
from dataclasses import dataclass, field

from nanokit.engine.request import Request
from nanokit.kv.pool import BlockPool
from nanokit.kv.prefix import PrefixCache
from nanokit.model.batch import Batch


@dataclass
class Step:
    """What one forward computes: for every request the number of its next tokens, in the order of the
    batch."""

    lengths: dict[Request, int] = field(default_factory=dict)

    def by_mode(self) -> "dict[str | None, Step]":
        """Its parts by activation mode, each in the order of the step."""
        parts: dict[str | None, Step] = {}
        for request, length in self.lengths.items():
            parts.setdefault(request.current_mode, Step()).lengths[request] = length
        return parts

    def batch(self) -> Batch:
        """The forward's input. Tables are copies: they stay as they are when the sequences grow."""
        token_ids: list[int] = []
        kv_lens, tables = [], []
        for request, length in self.lengths.items():
            end = request.num_computed + length
            token_ids += request.tokens[request.num_computed : end]
            kv_lens.append(end)
            tables.append(list(request.blocks))
        return Batch(token_ids, list(self.lengths.values()), kv_lens, tables)

    def sampled(self) -> tuple[list[Request], list[int]]:
        """Requests that are fully computed after this step, and the rows of the forward that draw their
        tokens."""
        requests, rows, end = [], [], 0
        for request, length in self.lengths.items():
            end += length
            if request.num_computed + length == len(request.tokens):
                requests.append(request)
                rows.append(end - 1)
        return requests, rows


def salt_of(request: Request) -> str:
    """What the KV of a request's beginning depends on besides its tokens: the mode in which it is computed."""
    return request.spans[0][1] or ""


class Scheduler:
    """Requests that wait and run over one pool. Call `schedule`, run the batch, then `commit`."""

    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixCache | None,
        *,
        block_size: int,
        max_seqs: int,
        token_budget: int,
    ) -> None:
        self.pool, self.prefix = pool, prefix
        self.block_size, self.max_seqs, self.token_budget = block_size, max_seqs, token_budget
        # Both oldest first, and everyone who runs is older than everyone who waits.
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, whatever it was doing, and give its blocks back."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> Step:
        """The next step. Allocates its blocks and may preempt; computes and registers nothing."""
        step = Step()
        budget = self.token_budget
        for request in list(self.running):
            if budget == 0:
                break
            if request not in self.running:  # preempted just now, for an older one
                continue
            length = min(request.pending, budget)
            if self._make_room(request, length):
                step.lengths[request] = length
                budget -= length
        while budget and self.waiting and len(self.running) < self.max_seqs:
            if not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            length = min(request.pending, budget)
            self._allocate(request, self._missing(request, length))
            step.lengths[request] = length
            budget -= length
        return step

    def commit(self, step: Step) -> None:
        """The step's KV is in its blocks: advance, and offer the blocks that are full now to the prefix cache."""
        for request, length in step.lengths.items():
            before = request.num_computed // self.block_size
            request.num_computed += length
            request.furthest = max(request.furthest, request.num_computed)
            shared = min(request.num_computed, request.sharable)
            if self.prefix is not None and shared // self.block_size > before:
                request.prefix_tail = self.prefix.register(
                    request.prefix_tail, request.tokens[:shared], request.blocks, salt_of(request)
                )

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def _missing(self, request: Request, length: int) -> int:
        """Blocks to allocate before `length` more tokens can be computed."""
        return max(0, self.blocks_for(request.num_computed + length) - len(request.blocks))

    def _make_room(self, request: Request, length: int) -> bool:
        """Allocate for `length` more tokens, preempting the youngest while blocks lack. False: that was itself."""
        missing = self._missing(request, length)
        while self.pool.available < missing:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        self._allocate(request, missing)
        return True

    def _allocate(self, request: Request, count: int) -> None:
        request.blocks += [self.pool.allocate() for _ in range(count)]

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, request: Request) -> bool:
        """Start a request on its cached prefix, if there are blocks for all its present tokens."""
        # One token more than may be shared: a hit never covers the last.
        known = request.tokens[: request.sharable + 1]
        hits = self.prefix.match(known, salt_of(request)) if self.prefix is not None else []
        revived = sum(self.pool.references(node.block) == 0 for node in hits)
        needed = self.blocks_for(len(request.tokens)) - len(hits) + revived
        if needed > self.pool.available:
            return False
        for node in hits:
            self.pool.hold(node.block)
        request.blocks = [node.block for node in hits]
        request.num_computed = len(hits) * self.block_size
        request.prefix_tail = hits[-1] if hits else None
        if request.scheduled_at is None:
            request.scheduled_at = time.perf_counter()
            request.cached_tokens = request.num_computed
        return True

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed = 0
        request.prefix_tail = None

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is accounted for and every sequence has the blocks it needs."""
        self.pool.check_integrity(request.blocks for request in self.running)
        if self.prefix is not None:
            self.prefix.check_integrity()
        ages = [request.id for request in (*self.running, *self.waiting)]
        assert ages == sorted(set(ages)), f"not in the order of arrival: {ages}"
        assert len(self.running) <= self.max_seqs, f"{len(self.running)} run, allowed {self.max_seqs}"
        for request in self.waiting:
            assert not request.blocks, f"request {request.id} waits with blocks"
            assert request.num_computed == 0, f"request {request.id} waits as if computed"
        for request in self.running:
            assert request.num_computed < len(request.tokens), f"request {request.id} has nothing to compute"
            assert self.blocks_for(request.num_computed) <= len(request.blocks), (
                f"request {request.id} has too few blocks"
            )
