"""Attention over pages, whole and split; selection from logits, and from a screened head.

A step of all kinds of rows: decoded ones of short and long contexts, at the edges of blocks and chunks, drafted ones, a
chunk of a prompt. The bound is that of gpu/attention.py.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanokit.kernels import reference, selection
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.activations import quantize
from nanokit.kernels.gpu.attention import attention, tile_rows
from nanokit.kernels.gpu.checks.material import BLOCK_SIZE, Batch, empty_pages, on_device, there, weights
from nanokit.kernels.gpu.checks.work import Case, Judgement, Work, equal, within, worst
from nanokit.kernels.gpu.pack import pack
from nanokit.kernels.gpu.product import multiply
from nanokit.kernels.gpu.screen import screened_argmax
from nanokit.kernels.gpu.select import Selection, argmax_rows
from nanokit.kernels.gpu.step import Step, make_step
from nanokit.kernels.paged import LayerPages, read_kv, write_kv
from nanokit.kernels.screen import as_planes, score

HEADS = [("fp16", 28, 4, 128), ("int8", 14, 2, 64), ("int4", 40, 8, 128), ("fp32", 4, 4, 80), ("int4", 9, 3, 96),
         ("fp16", 2, 1, 256), ("int8", 32, 1, 48)]  # fmt: skip
TINY_HEADS = [("fp16", 3, 1, 16), ("int8", 4, 2, 16), ("int4", 2, 2, 48), ("fp32", 2, 1, 32)]
# New tokens and tokens in context of each sequence.
STEP = [(1, 1), (1, 64), (1, 257), (5, 700), (40, 104), (1, 1500)]
TINY_STEP = [(1, 1), (2, 258)]


def cases(tiny: bool) -> list[Case]:
    """Pages of every format, shared and own KV heads, dimensions that are no power of two; then draws."""
    found = []
    for kv_format, heads, kv_heads, dim in TINY_HEADS if tiny else HEADS:
        shape = kv_format, heads, kv_heads, dim
        name = f"{kv_format} pages, {heads}/{kv_heads} heads of {dim}"
        found.append(Case("attention", name, partial(_attend, *shape, TINY_STEP if tiny else STEP)))
    for kv_format in ("fp16",) if tiny else ("fp16", "int4"):
        shape = (kv_format, 2, 1, 16) if tiny else (kv_format, 28, 4, 128)
        step = [(2, 5), (1, 258)] if tiny else STEP
        found.append(Case("attention", f"{kv_format}: rows alone as in a step", partial(_alone, *shape, step)))
    vocabulary = 2100 if tiny else 151_936
    found += [
        Case("select", "argmax", partial(_argmax, vocabulary)),
        Case("select", "draw", partial(_draw, vocabulary)),
    ]
    size = (1100, 64) if tiny else (20_000, 1024)
    found += [
        Case("screen", "greedy", partial(_screened, *size, False)),
        Case("screen", "with noise", partial(_screened, *size, True)),
    ]
    return found


def _texts(
    kv_format: str, heads: int, kv_heads: int, dim: int, lengths: list[tuple[int, int]]
) -> tuple[Tensor, LayerPages, list[list[int]]]:
    """Queries of the step's rows, pages with all tokens on the CPU, and the sequences' blocks, in no order. Slots that
    no sequence uses hold what an earlier one may have left."""
    noise = torch.Generator().manual_seed(1)
    counts = [-(-kv_len // BLOCK_SIZE) for _, kv_len in lengths]
    order = torch.randperm(sum(counts) + 1, generator=noise).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    pages = empty_pages(kv_format, sum(counts) + 1, kv_heads, dim)
    for tensor in pages:
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 77)
    for (_, kv_len), table in zip(lengths, tables, strict=True):
        k, v = torch.randn(2, kv_len, kv_heads, dim, generator=noise)
        write_kv(
            pages, torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(kv_len)]), k, v
        )
    q = 2 * torch.randn(sum(new for new, _ in lengths), heads, dim, generator=noise)
    return q, pages, tables


def _step(lengths: list[tuple[int, int]], tables: list[list[int]], heads: int, kv_heads: int) -> Step:
    new, kv_lens = [n for n, _ in lengths], [n for _, n in lengths]
    batch = Batch([0] * sum(new), new, kv_lens, tables)
    return make_step(batch, BLOCK_SIZE, tile_rows(heads, kv_heads), runtime.device())


def _attend(kv_format: str, heads: int, kv_heads: int, dim: int, lengths: list[tuple[int, int]]) -> Work:
    """Both ways of cutting a context give the same bits, which are near the exact result."""
    q, pages, tables = _texts(kv_format, heads, kv_heads, dim, lengths)
    step, scale = _step(lengths, tables, heads, kv_heads), dim**-0.5

    def launch() -> tuple[Tensor, Tensor]:
        arguments = there(q), on_device(pages), step
        return attention(*arguments, scale=scale, split=False), attention(*arguments, scale=scale, split=True)

    def judge(found: tuple[Tensor, Tensor]) -> Judgement:
        parts, first = [], 0
        for (new, kv_len), table in zip(lengths, tables, strict=True):
            rows = slice(first, first + new)
            k, v = (x.double() for x in read_kv(pages, torch.tensor(table), kv_len))
            visible = torch.arange(kv_len - new, kv_len) + 1
            wanted = reference.attention(q[rows].double(), k, v, visible)
            weighed = reference.attention(q[rows].double(), k, v.abs(), visible)
            grouped = q[rows].double().abs().unflatten(1, (kv_heads, -1))
            scores = torch.einsum("rhgd,htd->rhgt", grouped, k.abs()) * scale
            seen = torch.arange(kv_len) < visible[:, None, None, None]
            largest = torch.where(seen, scores, 0.0).amax(dim=3).flatten(1)[:, :, None]
            size = (3 + 2 * largest) * weighed
            parts.append((found[0][rows], wanted, size))
            first += new
        got, wanted, size = (torch.cat([part[i].cpu() for part in parts]) for i in range(3))
        return worst(equal(found), within(got, wanted, size, 2.0**-21 if runtime.INTERPRETED else 2.0**-18))

    return Work(launch, judge)


def _alone(kv_format: str, heads: int, kv_heads: int, dim: int, lengths: list[tuple[int, int]]) -> Work:
    """The last row of each sequence in a step of its own."""
    q, pages, tables = _texts(kv_format, heads, kv_heads, dim, lengths)
    last = np.cumsum([new for new, _ in lengths]) - 1

    def launch() -> tuple[Tensor, Tensor]:
        pages_there, q_there, scale = on_device(pages), there(q), dim**-0.5

        def attend(rows: Tensor, some: list[tuple[int, int]], blocks: list[list[int]]) -> Tensor:
            return attention(rows, pages_there, _step(some, blocks, heads, kv_heads), scale=scale)

        together = attend(q_there, lengths, tables)
        apart = [
            attend(q_there[row : row + 1].clone(), [(1, kv_len)], [table])
            for row, (_, kv_len), table in zip(last, lengths, tables, strict=True)
        ]
        return together[torch.from_numpy(last).to(together.device)], torch.cat(apart)

    return Work(launch, lambda pair: equal(pair))


def _argmax(vocabulary: int) -> Work:
    """Ties, a NaN, infinities, and a row of nothing."""
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(2))
    logits[0, [5, vocabulary // 2, vocabulary - 1]] = 9.0
    logits[1, 70], logits[2, -1], logits[4, 3] = float("nan"), 50.0, float("inf")
    logits[3] = -float("inf")
    wanted = torch.tensor([selection.argmax(row) for row in logits])
    return Work(lambda: argmax_rows(there(logits)), lambda ids: equal((ids, wanted)))


def _draw(vocabulary: int) -> Work:
    """The winners of draws are among the candidates, ascending, and these are few of the contract's."""
    logits = 3 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(3))
    keys = [(0.7, 11, 5, 0), (1.0, 2**63 + 9, 2**33, 1), (1.3, 3, 0, 0)]

    def launch() -> list[np.ndarray]:
        return [Selection().gumbel_candidates(row, *key) for row, key in zip(there(logits), keys, strict=True)]

    def judge(found: list[np.ndarray]) -> Judgement:
        from nanokit.engine.noise import gumbel_all

        wrong = 0
        for row, (temperature, seed, position, stream), ids in zip(logits, keys, found, strict=True):
            noise = gumbel_all(seed, position, vocabulary, stream)
            winner = int((row.numpy() / np.float32(temperature) + noise).argmax())
            allowed = selection.gumbel_candidates(row, temperature, seed, position, stream)
            wrong += not (winner in ids and np.isin(ids, allowed).all() and (np.diff(ids) > 0).all() and len(ids) < 9)
        return Judgement(float(wrong), 0.0)

    return Work(launch, judge)


def _screened(vocabulary: int, columns: int, noisy: bool) -> Work:
    """The ids of a full head, ties included, from a proxy of the upper nibbles and the exact logits of a few."""
    q = weights("int8-sym-g32", vocabulary, columns, 4)
    for array in (q.codes, q.scales):
        array[vocabulary // 2 :] = array[: vocabulary - vocabulary // 2]  # each logit twice
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(5))
    upper, screen = as_planes(q, x)
    exact, proxy = pack("head", q), pack("proxy", upper)
    temperature = torch.tensor([0.7, 1.0, 1.4]) if noisy else None
    added = torch.rand(3, vocabulary, generator=torch.Generator().manual_seed(6)) if noisy else None

    def launch() -> tuple[Tensor, Tensor, Tensor]:
        head, small = quantize(there(x), "a8g32"), [quantize(there(x[i : i + 1].clone()), "a8g32") for i in range(3)]
        ids, counts = screened_argmax(
            screen.to(runtime.device()), head.dequantize(), multiply(proxy, head),
            lambda row, chosen: multiply(exact, small[row], chosen.contiguous())[0],
            temperature=None if temperature is None else there(temperature),
            added=None if added is None or runtime.instead_of_running is not None else there(added),
        )  # fmt: skip
        return ids, counts, multiply(exact, head)

    def judge(found: tuple[Tensor, Tensor, Tensor]) -> Judgement:
        ids, counts, logits = (x.cpu() for x in found)
        wanted = [
            selection.argmax(score(row, *(None if x is None else x[i] for x in (temperature, added))))
            for i, row in enumerate(logits)
        ]
        return worst(equal((ids, torch.tensor(wanted))), Judgement(float(counts.max()), vocabulary))

    return Work(launch, judge)
