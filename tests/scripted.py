"""A scripted model: its answer depends on every token it reads *through the KV blocks*, at the right
position.

`ScriptedKV` stores, for each (block, slot), the token id and position that were written there, as a real KV
store stores keys and values. The model writes the batch's tokens, then reads each row's whole context back
through its block table and derives the logits from it. A wrong block table, a stale or shared block, a wrong
position, a hit on the wrong prefix: each changes the answer, or raises at once. So does a token whose KV was written
in another activation mode: what is stored, and read, is token + VOCAB * the number of the mode.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from dense_head import dense_head
from torch import Tensor

from nanokit.engine.config import EngineConfig
from nanokit.engine.engine import Engine
from nanokit.engine.request import Chunk, Completion
from nanokit.engine.sampling import Sampling
from nanokit.kernels.activations import MODES
from nanokit.kv.prefix import HashFunction, chained_hash
from nanokit.model.batch import Batch

VOCAB = 40
EOS = (38, 39)


class ScriptedKV:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tokens = np.full((num_blocks, block_size), -1)
        self.positions = np.full((num_blocks, block_size), -1)


def next_logits(history: Sequence[int]) -> np.ndarray:
    """Pseudo-random logits of a whole history; end-of-sequence ids are rare."""
    state = 17
    for token in history:
        state = (state * 1_000_003 + token * 7919 + 12345) % (2**61 - 1)
    logits = np.random.default_rng(state).normal(size=VOCAB).astype(np.float32) * 2
    logits[list(EOS)] -= 2
    return logits


class ScriptedModel:
    """Hidden states are the logits themselves; the head is the real one with an identity matrix."""

    activations = MODES[0]

    def __init__(self, logits=next_logits) -> None:
        self.others: dict[str, ScriptedModel] = {}
        self.vocab_size = VOCAB
        self.head = dense_head(torch.eye(VOCAB))
        self.logits = logits
        self.computed = 0  # tokens ever run
        self.batches: list[Batch] = []

    def in_mode(self, mode: str) -> "ScriptedModel":
        if mode not in self.others:
            self.others[mode] = ScriptedModel(self.logits)
            self.others[mode].activations = mode
        return self.others[mode]

    def forward(self, batch: Batch, kv: ScriptedKV) -> Tensor:
        batch.check(vocab_size=VOCAB, num_blocks=kv.num_blocks, block_size=kv.block_size)
        self.batches.append(batch)
        self.computed += len(batch.token_ids)
        start = 0
        for query, kv_len, table in zip(batch.query_lens, batch.kv_lens, batch.block_tables, strict=True):
            for offset in range(query):
                position = kv_len - query + offset
                place = table[position // kv.block_size], position % kv.block_size
                stored = batch.token_ids[start + offset] + VOCAB * MODES.index(self.activations)
                kv.tokens[place], kv.positions[place] = stored, position
            start += query
        rows = []
        for query, kv_len, table in zip(batch.query_lens, batch.kv_lens, batch.block_tables, strict=True):
            history = [kv.tokens[table[p // kv.block_size], p % kv.block_size] for p in range(kv_len)]
            places = [kv.positions[table[p // kv.block_size], p % kv.block_size] for p in range(kv_len)]
            assert places == list(range(kv_len)), f"read positions {places}"
            rows += [self.logits([int(t) for t in history[: kv_len - query + 1 + i]]) for i in range(query)]
        return torch.from_numpy(np.stack(rows))


class LetterDecoder:
    """Whole UTF-8 characters only, byte by byte."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self.pieces, self.pending = pieces, b""

    def push(self, token_id: int) -> str:
        self.pending += self.pieces[token_id]
        for cut in range(len(self.pending), -1, -1):
            try:
                text = self.pending[:cut].decode()
            except UnicodeDecodeError:
                continue
            self.pending = self.pending[cut:]
            return text
        return ""

    def finish(self) -> str:
        text, self.pending = self.pending.decode(errors="replace"), b""
        return text


class LetterTokenizer:
    """One letter a token: a-z are 0…25, A-J 26…35, 36 and 37 are the halves of an emoji, 38 and 39 end a
    sequence."""

    eos_ids = EOS
    chat_template = None

    def __init__(self) -> None:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
        self.ids = {letter: index for index, letter in enumerate(letters)}
        self.pieces = {index: letter.encode() for letter, index in self.ids.items()}
        self.pieces |= {36: "🌙".encode()[:2], 37: "🌙".encode()[2:], 38: b"<eos>", 39: b"<end>"}

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [self.ids[letter] for letter in text]

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(message["role"][0].upper() + message["content"] for message in messages))

    def stream(self) -> LetterDecoder:
        return LetterDecoder(self.pieces)


def make_engine(
    logits=next_logits,
    *,
    model: ScriptedModel | None = None,
    num_blocks: int = 200,
    block_size: int = 4,
    max_context: int = 120,
    prefix_hash: HashFunction = chained_hash,
    **config,
) -> Engine:
    """An engine over the scripted model that checks its integrity after every step."""
    sizes = EngineConfig(
        max_context=max_context,
        num_blocks=num_blocks,
        block_size=block_size,
        **{"token_budget": 64, **config},
    )
    engine = Engine(
        model or ScriptedModel(logits),
        LetterTokenizer(),
        sizes,
        kv=ScriptedKV(num_blocks, block_size),
        prefix_hash=prefix_hash,
    )
    advance = engine._advance

    def checked() -> None:
        advance()
        engine.check_integrity()

    engine._advance = checked
    return engine


def script(answer: Sequence[int], prompt_len: int):
    """Logits whose argmax spells `answer` after a prompt of that length, whatever the tokens are."""

    def logits(history: Sequence[int]) -> np.ndarray:
        row = np.zeros(VOCAB, np.float32)
        row[answer[min(len(history) - prompt_len, len(answer) - 1)] if len(history) >= prompt_len else 0] = 9
        return row

    return logits


def run(engine: Engine, limit: int = 10_000) -> dict[int, Completion]:
    """Step until nothing is left; completions by request id."""
    done = {}
    for _ in range(limit):
        if not engine.has_work:
            return done
        for chunk in engine.step():
            if chunk.completion:
                done[chunk.request_id] = chunk.completion
    raise AssertionError(f"still working after {limit} steps")


def solo(prompt, sampling: Sampling) -> list[int]:
    """Ids of an answer computed alone, without prefix cache, in an engine of its own."""
    return make_engine(prefix_cache=False).generate([prompt], sampling)[0].token_ids


def texts(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)
