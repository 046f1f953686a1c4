"""The largest logit of each row, and the few ids that can win a draw: each a pass over blocks of the vocabulary, and a
second over what the blocks left.

A NaN takes no part in a maximum: what is not below infinity is looked for by comparing, and a block that holds such
says so by leaving NaN as its best. Candidates leave their block by a counter in whatever order the programs
run; the host sorts them.
"""

import triton
import triton.language as tl

from nanokit.kernels.gpu.device.noise import NOISE_ERROR, gumbel, words

_LARGEST_FLOAT: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def argmax_blocks(x_ptr, tops_ptr, ids_ptr, size, stride, BLOCK: tl.constexpr):
    """The largest of each block of a row and its first id. Programs: blocks, rows."""
    block, row = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * stride + ids, mask=ids < size, other=float("-inf"))
    unsound = tl.max(1 - (x <= _LARGEST_FLOAT).to(tl.int32))
    x = tl.where(x <= _LARGEST_FLOAT, x, float("-inf"))
    top = tl.max(x)
    at = row * tl.num_programs(0) + block
    tl.store(ids_ptr + at, tl.min(tl.where(x == top, ids, size)))
    tl.store(tops_ptr + at, tl.where(unsound > 0, float("nan"), top))


@triton.jit
def argmax_fold(tops_ptr, ids_ptr, out_ptr, blocks, BLOCKS: tl.constexpr):
    """The first id of a row's largest, int64; -1 if it cannot be drawn from. Programs: rows."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    tops = tl.load(tops_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
    ids = tl.load(ids_ptr + row * blocks + block, mask=block < blocks, other=0)
    unsound = tl.max((tops != tops).to(tl.int32))
    tops = tl.where(tops == tops, tops, float("-inf"))
    top = tl.max(tops)
    best = tl.min(tl.where(tops == top, ids, 2147483647))
    best = tl.where((unsound > 0) | (top == float("-inf")), -1, best)
    tl.store(out_ptr + row, best.to(tl.int64))


@triton.jit(do_not_specialize=["seed_low", "seed_high", "position_low", "position_high", "stream"])
def draw_blocks(
    x_ptr, among_ptr, scores_ptr, bests_ptr, found_ptr, size, temperature,
    seed_low, seed_high, position_low, position_high, stream, AMONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logit / temperature + noise of the first `size` ids, or of those in `among`, and the best of each block."""
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    ids = place
    if AMONG:
        ids = tl.load(among_ptr + place, mask=place < size, other=0).to(tl.int32)
    x = tl.load(x_ptr + ids, mask=place < size, other=float("-inf"))
    noise = gumbel(words(ids, seed_low, seed_high, position_low, position_high, stream))
    scores = tl.div_rn(x, temperature) + noise
    unsound = tl.max(1 - (x <= _LARGEST_FLOAT).to(tl.int32))
    best = tl.max(tl.where(x <= _LARGEST_FLOAT, scores, float("-inf")))
    tl.store(scores_ptr + place, scores, mask=place < size)
    tl.store(bests_ptr + block, tl.where(unsound > 0, float("nan"), best))
    if block == 0:
        tl.store(found_ptr, 0)


@triton.jit
def draw_candidates(
    scores_ptr, bests_ptr, among_ptr, found_ptr, size, blocks,
    AMONG: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Ids whose score may be the best once the noise is exact: their number at found[0], ids from found[1], in no
    order."""
    block = tl.arange(0, BLOCKS)
    bests = tl.load(bests_ptr + block, mask=block < blocks, other=float("-inf"))
    unsound = tl.max((bests != bests).to(tl.int32))
    best = tl.max(tl.where(bests == bests, bests, float("-inf")))
    # Noise, and the rounding of each sum, for the winner and for the best of these. Infinite scores are exact.
    least = best - 2.0 * (NOISE_ERROR + tl.abs(best) * 2.384185791015625e-07)  # 2^-22
    least = tl.where(tl.abs(best) <= _LARGEST_FLOAT, least, best)
    mine = tl.load(bests_ptr + tl.program_id(0))
    if (unsound == 0) & (mine >= least) & (best > float("-inf")):
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        scores = tl.load(scores_ptr + place, mask=place < size, other=float("-inf"))
        hits = ((scores >= least) & (scores > float("-inf"))).to(tl.int32)
        ids = place
        if AMONG:
            ids = tl.load(among_ptr + place, mask=place < size, other=0).to(tl.int32)
        start = tl.atomic_add(found_ptr, tl.sum(hits))
        tl.store(found_ptr + start + tl.cumsum(hits), ids, mask=hits > 0)
