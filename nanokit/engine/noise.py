"""Random numbers as a function of (seed, position, token): the one source of noise in the kit.

A generator with a state gives a draw that depends on how many draws came before it, hence on batch mates, on
preemption, on whether a token was drafted or decoded. A counter-based generator has no state: the noise of
token `t` at position `p` of a sequence with seed `s` is the same number whoever asks, in whatever order.
Plain sampling then is argmax(logits / T + gumbel(s, p, t)), and a verifier that draws with the same noise
gives the same tokens.

The generator is Philox4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", SC 2011), checked against the authors' known answers. One block of four 32-bit words serves four
tokens:

    key      seed low word, seed high word
    counter  token // 4, position low word, position high word, stream
    word     token % 4                       u = (word + 1/2) / 2**32, never 0 or 1

`stream` separates uses that must be independent of each other at the same position. Rejected: numpy's own
Philox bit generator, which is 64 bits wide and must be re-seeded, for every (row, position).

This file says what the noise is, to the bit. Kernels that compute it faster and nearly (kernels/cpu/c/draw.c) leave
a few tokens that can win, and ask here for theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAMPLING = 0  # the stream of ordinary draws

_WORD = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox4x32-10. counter: uint64 [4, n], each below 2**32; key: two 32-bit words. Returns uint64 [4,
    n]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (odd >> _HIGH) ^ c1 ^ np.uint64(k0)
        c2 = (even >> _HIGH) ^ c3 ^ np.uint64(k1)
        c1, c3 = odd & _WORD, even & _WORD
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def _blocks(seed: int, position: int, indices: NDArray[np.uint64], stream: int) -> NDArray[np.uint64]:
    counter = np.empty((4, len(indices)), np.uint64)
    counter[0] = indices
    counter[1], counter[2], counter[3] = position & 0xFFFFFFFF, position >> 32, stream
    return philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))


def _gumbel(words: NDArray[np.uint64]) -> NDArray[np.float32]:
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log(u))).astype(np.float32)


def gumbel_all(seed: int, position: int, vocab_size: int, stream: int = SAMPLING) -> NDArray[np.float32]:
    """Standard Gumbel noise of every token, float32 [vocab_size].

    seed: 0 ≤ seed < 2**64; position: absolute index in the sequence of the token being drawn.
    """
    words = _blocks(seed, position, np.arange(-(-vocab_size // 4), dtype=np.uint64), stream)
    return _gumbel(np.ascontiguousarray(words.T).reshape(-1)[:vocab_size])


def gumbel_of(seed: int, position: int, tokens: NDArray[np.int64], stream: int = SAMPLING) -> NDArray[np.float32]:
    """The entries of `gumbel_all` for the given token ids, computed alone: float32 [len(tokens)]."""
    size = int(tokens.max(initial=-1)) + 1
    if 4 * len(tokens) > size:  # most of a vocabulary: a block of four costs as much as one of its tokens
        return gumbel_all(seed, position, size, stream)[tokens]
    ids = tokens.astype(np.uint64)
    words = _blocks(seed, position, ids >> np.uint64(2), stream)
    return _gumbel(words[(ids & np.uint64(3)).astype(np.intp), np.arange(len(ids))])


@dataclass(frozen=True)
class Noise:
    """The noise of a step's rows, as heads and verifiers take it (`nanokit.model.head.Noise`): one (seed, position) a
    row."""

    seeds: Sequence[int]
    positions: Sequence[int]
    stream: int = SAMPLING

    def key(self, row: int) -> tuple[int, int, int]:
        """seed, position and stream of a row."""
        return self.seeds[row], self.positions[row], self.stream

    def of(self, row: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Noise of these tokens in a row, float32 [len(ids)]."""
        return gumbel_of(self.seeds[row], self.positions[row], ids, self.stream)
