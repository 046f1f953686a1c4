"""Norms, gates, and rotation with the write into pages.

Bounds are those of gpu/rows.py. A code may differ from the reference's where a number lies beside a tie, so what is
held against the exact numbers is half a code, and what their relative error moves the largest code by; sums are those
of the codes that are there, and exact.
"""

from functools import partial

import torch
from torch import Tensor

from nanokit.kernels import reference
from nanokit.kernels.activations import GROUPS, LIMIT, LIMIT_A16, MODES
from nanokit.kernels.gpu.activations import Activations
from nanokit.kernels.gpu.checks.material import BLOCK_SIZE, activations, empty_pages, on_device, there
from nanokit.kernels.gpu.checks.product_cases import PEAK, ROUNDING
from nanokit.kernels.gpu.checks.work import Case, Judgement, Work, equal, within, worst
from nanokit.kernels.gpu.rope import rotate_and_store
from nanokit.kernels.gpu.rows import rms_norm, silu_gate
from nanokit.kernels.paged import LayerPages, write_kv

EPS = 1e-5
NORM = 24  # roundings, see gpu/rows.py
HEADS = [("fp32", 4, 2, 80), ("fp16", 28, 4, 128), ("int8", 14, 2, 64), ("int4", 9, 3, 96), ("int4", 16, 8, 128)]
TINY_HEADS = [("fp32", 3, 1, 48), ("fp16", 4, 2, 32), ("int8", 2, 2, 16), ("int4", 3, 1, 48)]


def cases(tiny: bool) -> list[Case]:
    """Every mode of norm and gate, with and without the residual; pages of every format; norms of heads."""
    rows, columns = (2, 96) if tiny else (5, 3584)
    found = [
        Case("rms_norm", f"{mode}{', residual added' if delta else ''}", partial(_norm, mode, rows, columns, delta))
        for mode in MODES
        for delta in ((False, True) if mode in ("fp32", "a8g32") else (True,))
    ]
    if not tiny:
        found += [Case("rms_norm", f"a8g32, {n} columns", partial(_norm, "a8g32", 2, n, True)) for n in (1024, 5120)]
    found += [Case("silu_gate", mode, partial(_gate, mode, rows, columns)) for mode in MODES]
    tokens = 5 if tiny else 70
    for kv_format, heads, kv_heads, dim in TINY_HEADS if tiny else HEADS:
        name = f"{kv_format} pages, {heads}/{kv_heads} heads of {dim}"
        found.append(Case("rope", name, partial(_rotate, kv_format, heads, kv_heads, dim, tokens)))
    found.append(Case("rope", "norms of heads", partial(_rotate_normed, 4, 2, 16 if tiny else 128, tokens)))
    return found


def _peak(mode: str) -> Tensor | None:
    return there(torch.tensor([PEAK])) if mode == "static" else None


def _norm(mode: str, rows: int, columns: int, delta: bool) -> Work:
    hidden, added = activations(rows, columns, 1), activations(rows, columns, 2)
    weight = torch.rand(columns, generator=torch.Generator().manual_seed(3)) + 0.5
    total = hidden + added if delta else hidden

    def launch() -> tuple[Activations, Tensor]:
        changed = there(hidden).clone()
        made = rms_norm(changed, there(weight), EPS, mode, _peak(mode), there(added) if delta else None)
        return made, changed

    def judge(found: tuple[Activations, Tensor]) -> Judgement:
        exact = reference.rms_norm(total.double(), weight.double(), EPS)
        return worst(equal((found[1], total)), judge_near(found[0], exact, mode, NORM * ROUNDING))

    return Work(launch, judge)


def _gate(mode: str, rows: int, columns: int) -> Work:
    gate, up = activations(rows, columns, 4).clamp(-80, 80), activations(rows, columns, 5)

    def judge(made: Activations) -> Judgement:
        exact = reference.silu_gate(gate.double(), up.double())
        return judge_near(made, exact, mode, (8 + 2 * float(gate.abs().max())) * ROUNDING)

    return Work(lambda: silu_gate(there(gate), there(up), mode, _peak(mode)), judge)


def judge_near(made: Activations, exact: Tensor, mode: str, relative: float) -> Judgement:
    """Activations of numbers that are within `relative` of the exact ones, fp64 [rows, columns]."""
    if mode == "fp32":
        return within(made.dequantize(), exact, exact.abs(), relative)
    assert made.codes is not None
    assert made.scales is not None
    assert made.sums is not None
    limit = LIMIT_A16 if mode == "a16" else LIMIT
    grouped = exact.unflatten(1, (-1, GROUPS.get(mode, exact.shape[1])))
    peaks = grouped.abs().amax(dim=2)
    if mode == "tensor":
        peaks = peaks.max().expand_as(peaks)
    if mode == "static":
        peaks = torch.full_like(peaks, PEAK)
    scales = peaks / limit
    codes = made.codes.cpu().double()
    values = (codes[-1] + 256 * codes[0] if len(codes) == 2 else codes[0]).view_as(grouped)
    wanted = (grouped / torch.where(scales > 0, scales, 1.0)[:, :, None]).clamp(-limit, limit)
    return worst(
        equal((made.sums, values.flatten(1).unflatten(1, (-1, 16)).sum(-1).float())),
        within(made.scales, scales, scales, relative + 2 * ROUNDING),
        within(values, wanted, torch.ones_like(wanted), 0.5 + limit * 2 * (relative + 2 * ROUNDING)),
    )


def _heads(heads: int, kv_heads: int, dim: int, tokens: int) -> tuple[Tensor, ...]:
    noise = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(tokens, n, dim, generator=noise) for n in (heads, kv_heads, kv_heads))
    angles = torch.rand(tokens, dim // 2, generator=noise) * 6.3
    slots = torch.randperm(3 * BLOCK_SIZE, generator=noise)[:tokens]
    return q, k, v, angles.cos(), angles.sin(), slots


def _rotate(kv_format: str, heads: int, kv_heads: int, dim: int, tokens: int) -> Work:
    """Without norms of heads, queries and pages have the reference's bits."""
    q, k, v, cos, sin, slots = _heads(heads, kv_heads, dim, tokens)
    before = empty_pages(kv_format, 3, kv_heads, dim)

    def launch() -> tuple[Tensor, LayerPages]:
        rotated, pages = there(q).clone(), on_device(before)
        rotate_and_store(rotated, *map(there, (k, v, cos, sin, slots)), pages)
        return rotated, pages

    def judge(found: tuple[Tensor, LayerPages]) -> Judgement:
        write_kv(before, slots, reference.rotate(k, cos, sin), v)
        pairs = [(got, wanted) for got, wanted in zip(found[1], before, strict=True) if wanted is not None]
        return equal((found[0], reference.rotate(q, cos, sin)), *((got, wanted) for got, wanted in pairs))

    return Work(launch, judge)


def _rotate_normed(heads: int, kv_heads: int, dim: int, tokens: int) -> Work:
    q, k, v, cos, sin, slots = _heads(heads, kv_heads, dim, tokens)
    weights = torch.rand(2, dim, generator=torch.Generator().manual_seed(7)) + 0.5
    blank = empty_pages("fp32", 3, kv_heads, dim)

    def launch() -> tuple[Tensor, LayerPages]:
        rotated, pages = there(q).clone(), on_device(blank)
        norms = there(weights[0].clone()), there(weights[1].clone())
        rotate_and_store(rotated, *map(there, (k, v, cos, sin, slots)), pages, *norms, EPS)
        return rotated, pages

    def judge(found: tuple[Tensor, LayerPages]) -> Judgement:
        wide = cos.double(), sin.double()
        judged = []
        for x, weight, got in ((q, weights[0], found[0]), (k, weights[1], _keys_at(found[1], slots))):
            normed = reference.rms_norm(x.double(), weight.double(), EPS)
            size = reference.rotate(normed.abs(), wide[0].abs(), -wide[1].abs())
            size[:, :, dim // 2 :] = reference.rotate(normed.abs(), wide[0].abs(), wide[1].abs())[:, :, dim // 2 :]
            judged.append(within(got, reference.rotate(normed, *wide), size, (NORM + 3) * ROUNDING))
        return worst(*judged)

    return Work(launch, judge)


def _keys_at(pages: LayerPages, slots: Tensor) -> Tensor:
    """Keys [n, Hk, d] that lie in these slots of fp32 pages."""
    keys = pages.keys.cpu()
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    return keys[block, :, offset // 16, :, offset % 16]
