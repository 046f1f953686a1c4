"""Gumbel noise on the device: the generator of nanokit/engine/noise.py word for word, its logarithms nearly.

    key      seed low word, seed high word
    counter  token // 4, position low word, position high word, stream
    word     token % 4

Every token computes the block of four words that its own lies in: some 60 instructions, fewer than it takes to hand
three words to neighbours, and the same for tokens side by side and for a scattered few. Logarithms are a polynomial
in fp32 and not tl.log: interpreter and GPU then give the same bits, and the distance from the exact noise has a bound
that can be derived (and is tested on all exponents). Rejected: fp64, which consumer GPUs do 64 times slower.
"""

import triton
import triton.language as tl

# Between gumbel() and the exact noise, in fp32. With e = 2^-24, a rounding:
#   u = (word + 1/2) / 2^32      conversion and sum: 2 e, relative
#   E = -log u                   away from u = 1, |log u| > .34: those 2 e, absolute, and 3 e |log u| of polynomial and
#                                sums: 9 e, relative; near 1, -log(1 - v) with v from the inverted word: below 9 e too
#   g = -log E                   9 e from E, 3 e |g| from polynomial and sums
#   the exact noise's rounding   e |g|
# |g| < 22.9, so less than 101 e = 6.1e-6.
NOISE_ERROR: tl.constexpr = tl.constexpr(7e-6)
_SQRT_HALF: tl.constexpr = tl.constexpr(0x3F3504F3)  # as bits


@triton.jit
def words(tokens, seed_low, seed_high, position_low, position_high, stream):
    """The word of each token, uint32; tokens and key: int32, the key's words as their bits."""
    zero = (tokens * 0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        (tokens // 4).to(tl.uint32),
        zero + position_low.to(tl.uint32, bitcast=True),
        zero + position_high.to(tl.uint32, bitcast=True),
        zero + stream.to(tl.uint32, bitcast=True),
        zero + seed_low.to(tl.uint32, bitcast=True),
        zero + seed_high.to(tl.uint32, bitcast=True),
    )
    place = tokens % 4
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def _split(x):
    """r and k of x = 2^k (1 + r), r in sqrt(1/2) - 1 ... sqrt(2) - 1; x normal and above zero."""
    bits = x.to(tl.int32, bitcast=True) - _SQRT_HALF
    fraction = ((bits & 0x7FFFFF) + _SQRT_HALF).to(tl.float32, bitcast=True)
    return fraction - 1.0, bits >> 23


@triton.jit
def _log_sum(r, k):
    """log(1 + r) + k log 2, r as _split leaves it. The coefficients are those of the Cephes library's logf."""
    square = r * r
    p = tl.fma(r, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, r, 1.1676998740e-1)
    p = tl.fma(p, r, -1.2420140846e-1)
    p = tl.fma(p, r, 1.4249322787e-1)
    p = tl.fma(p, r, -1.6668057665e-1)
    p = tl.fma(p, r, 2.0000714765e-1)
    p = tl.fma(p, r, -2.4999993993e-1)
    p = tl.fma(p, r, 3.3333331174e-1)
    y = square * r * p
    y = tl.fma(k, -2.12194440e-4, y)
    y = tl.fma(square, -0.5, y)
    return tl.fma(k, 0.693359375, r + y)


@triton.jit
def gumbel(word):
    """-log(-log(u)) with u = (word + 1/2) / 2^32, fp32, within NOISE_ERROR of the exact one rounded to fp32."""
    r, k = _split(word.to(tl.float32) + 0.5)  # of 2^32 u
    k -= 32
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u, with the digits that u has lost
    r = tl.where(k == 0, -rest, r)
    r, k = _split(-_log_sum(r, k.to(tl.float32)))
    return -_log_sum(r, k.to(tl.float32))
