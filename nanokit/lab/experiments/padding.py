"""Bytes that carry no weight: padding between tensors, inside rows, and what else makes one nominal width two sizes.

Arithmetic and file headers, no clock. Four questions of the alignment contract:

    one matrix, 1024 x 1024    bytes by format, and what padding rows to 32, 64 or 128 bytes would add
    a warp's loads             32-byte sectors that a GPU moves for 32 threads, of the whole run and of a block each
    a model file               padding between tensors as it is, and with other alignments
    one nominal width          a model in NVFP4, with embedding and head in 4 or 16 bits, in two layouts of its scales

A tensor's start is all that `general.alignment` aligns: blocks of 18, 20 or 34 bytes stand one after the other inside.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from nanokit.kernels.cpu.pack import ALIGNMENT, Arena, Packed, pack
from nanokit.kernels.cpu.structs import Matrix as MatrixStruct
from nanokit.kv.pages import BLOCK_ALIGNMENT, DTYPES, PagedKV
from nanokit.lab.experiments.alignment_params import AlignmentParams, AlignmentResult
from nanokit.lab.experiments.kernel_params import KINDS, coded, matrices, notes, opened
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.table import Table
from nanokit.model.account import Account, account, block_parts
from nanokit.model.fetch import resolve_default
from nanokit.model.synth import SHAPES
from nanokit.quant.formats import FORMATS

SIDE = 1024  # rows and columns of the worked example
BLOCKS = ("Q4_0", "Q4_1", "MXFP4", "NVFP4", "Q8_0")
TO = (32, 64, 128)  # bytes to which is padded
SECTOR, WARP, LOAD = 32, 32, 16  # bytes that a GPU moves at once; threads of a warp; bytes that each of them loads
CLAIMED_PADDING = 4e9  # bytes, Q8
CLAIMED_SIZES = (20, 24)  # GB of one model in one nominal width, Q17
PARTS = ("codes", "scales", "minimums", "padding")
HEADS = (64, 80, 96, 128)  # dimensions of a head, as models have them
TOKENS = {"fp16": 2.0, "int8": 1.0, "int4": 0.5}  # bytes of a number; and what has a fp32 scale for each token
SCALED = ("int8", "int4")


@dataclass(frozen=True)
class PaddingResult(AlignmentResult):
    """Metrics: bytes. `file`: the account of the model's file, None where there is no single one."""

    file: Account | None = None

    # -- one matrix ---------------------------------------------------------------------------------------------------

    def example(self) -> Table:
        """1024 x 1024 weights in each block format."""
        rows = []
        for name in BLOCKS:
            stored = FORMATS[name]
            row = stored.nbytes((1, SIDE))
            padded = [f"{-row % to * SIDE:,}" for to in TO]
            parts = block_parts(stored)
            rows.append((
                name, f"{stored.block_bytes} for {stored.block_size}", f"{parts['codes']}", f"{row}",
                f"{stored.nbytes((SIDE, SIDE)):,}", *padded,
            ))  # fmt: skip
        columns = ("format", "bytes of a block", "of them codes", "of a row", f"of {SIDE} x {SIDE}",
                   *(f"rows padded to {to}: more bytes" for to in TO))  # fmt: skip
        return Table(columns, rows, right=columns[1:])

    def transactions(self) -> Table:
        """Sectors of 32 bytes that 32 threads touch with one load of 16 bytes each."""
        rows = []
        for what, starts in {
            "codes in one run, from 0": contiguous(0),
            "codes in one run, from 4": contiguous(4),
            "codes in one run, from 16": contiguous(16),
            **{f"the codes of a {name} block each": blockwise(name) for name in ("Q4_0", "Q4_1", "MXFP4")},
        }.items():
            touched = sectors(starts)
            alone = sum(sectors([start]) for start in starts)
            needed = WARP * LOAD // SECTOR
            rows.append((what, str(touched), f"{touched / needed - 1:+.0%}", f"{alone / len(starts):.2f}"))
        columns = ("32 threads load 16 bytes each", "sectors", "over the least", "sectors a thread alone")
        return Table(columns, rows, right=columns[1:])

    # -- a file, and packed weights -----------------------------------------------------------------------------------

    def padding(self) -> Table:
        """Bytes between tensors of the model's file: as they are, and by arithmetic with other alignments."""
        m = self.metrics
        rows = [
            ("as the file is", f"{m['file_padding_bytes']:,.0f}", f"{m['file_padding_bytes'] / m['file_bytes']:.6%}")
        ]
        rows += [
            (f"tensors on {to} bytes", f"{m[f'padding_to_{to}_bytes']:,.0f}",
             f"{m[f'padding_to_{to}_bytes'] / m['file_bytes']:.6%}")
            for to in TO
        ]  # fmt: skip
        rows.append(("on 128, at most, in any file of as many tensors", f"{m['padding_bound_bytes']:,.0f}", ""))
        return Table(("padding", "bytes", "of the file"), rows, right=("bytes", "of the file"))

    def packed(self) -> Table:
        """What the C kernels' panels hold of the products looked at, in bits a weight."""
        m, rows = self.metrics, []
        for kind in KINDS[:-1]:
            weights = m[f"packed_weights_{kind}"]
            cells = [f"{8 * m[f'packed_{part}_bytes_{kind}'] / weights:.3f}" for part in PARTS]
            rows.append((kind, self.settings["stored"][kind], *cells))
        return Table(("product", "in the file", *PARTS), rows, right=PARTS)

    @property
    def aligned(self) -> bool:
        """Whether every packed buffer began on 64 bytes, and every slot of the KV pages is a multiple of 128."""
        m = self.metrics
        return m["buffers_aligned"] == m["buffers"] > 0 and m["slots_aligned"] == m["slots"] > 0

    # -- KV -----------------------------------------------------------------------------------------------------------

    def slots(self) -> Table:
        """Keys of one head: a token kept as a piece, with its scale where it has one, and the parts of a page here."""
        rows = []
        for name, numbers in TOKENS.items():
            for dim in HEADS:
                token = int(numbers * dim) + (4 if name in SCALED else 0)
                begins = sorted({at for each in _slots(PagedKV(_Heads(dim), 2, name)) for at in each})
                rows.append((name, str(dim), str(token), _of(token), ", ".join(map(str, begins)), _of(*begins)))
        columns = (
            "keys of a head in",
            "dimensions",
            "bytes a token",
            "on 128?",
            "bytes of a page's parts",
            "all on 128?",
        )
        return Table(columns, rows, right=("dimensions", "bytes a token", "bytes of a page's parts"))

    @property
    def broken_slots(self) -> float:
        """Of tokens in 8 bits or less with their scale beside them: the share of heads' sizes that is no multiple of
        128."""
        low = [int(TOKENS[name] * dim) + 4 for name in ("int8", "int4") for dim in HEADS]
        return sum(each % BLOCK_ALIGNMENT != 0 for each in low) / len(low)

    # -- one nominal width --------------------------------------------------------------------------------------------

    def widths(self) -> Table:
        """GB of known shapes in NVFP4 (4.5 bits), by what stays in 16 bits, and what that adds."""
        rows = []
        for name in SHAPES:
            least, most, tiles = (self.metrics[f"nvfp4_{which}_bytes_{name}"] for which in ("all", "kept", "tiled"))
            cells = (f"{least / 1e9:.2f}", f"{most / 1e9:.2f}", f"{most / least:.2f}", f"{(tiles - least) / 1e6:.2f}")
            rows.append((name, *cells))
        columns = (
            "shapes of",
            "all in NVFP4 (GB)",
            "embedding and head in 16 bits (GB)",
            "ratio",
            "scales in tiles: MB more",
        )
        return Table(columns, rows, right=columns[1:])

    @property
    def verdict_padding(self) -> str:
        """Of the half of Q8 that puts gigabytes down to padding."""
        most = self.metrics["padding_bound_bytes"]
        verdict = "does not hold" if most < CLAIMED_PADDING / 1000 else "may hold"
        share = self.metrics["padding_to_128_bytes"] / self.metrics["file_bytes"]
        return (
            f"{verdict}: tensors on 128 bytes add {share:.4%} to this file, and at most {most / 1e3:.0f} kB to any "
            f"file of as many tensors (claimed {CLAIMED_PADDING / 1e9:.0f} GB)"
        )

    @property
    def verdict_q17(self) -> str:
        """Of the claim that files of one nominal FP4 width take 20 and 24 GB."""
        claimed = CLAIMED_SIZES[1] / CLAIMED_SIZES[0]
        m = self.metrics
        ratios = {name: m[f"nvfp4_kept_bytes_{name}"] / m[f"nvfp4_all_bytes_{name}"] for name in SHAPES}
        reach = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} times"
        if min(ratios.values()) <= claimed <= max(ratios.values()):
            return f"holds: with embedding and head in 16 bits, these models take {reach} (claimed {claimed:.2f})"
        if max(ratios.values()) > claimed:
            return f"holds, and more: with embedding and head in 16 bits, these models take {reach} ({claimed:.2f})"
        return f"does not hold: {reach} (claimed {claimed:.2f})"


@dataclass(frozen=True)
class _Heads:
    head_dim: int
    num_kv_heads: int = 3
    num_layers: int = 1


def _of(*sizes: int) -> str:
    over = [size % BLOCK_ALIGNMENT for size in sizes if size % BLOCK_ALIGNMENT]
    return f"no, {', '.join(map(str, over))} over" if over else "yes"


def contiguous(offset: int) -> list[int]:
    """Addresses of a warp's loads, one after the other."""
    return [offset + LOAD * thread for thread in range(WARP)]


def blockwise(name: str) -> list[int]:
    """Addresses of the codes of as many blocks, one a thread; codes come last in these blocks."""
    stored = FORMATS[name]
    return [stored.block_bytes * (thread + 1) - block_parts(stored)["codes"] for thread in range(WARP)]


def sectors(starts: Iterable[int], width: int = LOAD, sector: int = SECTOR) -> int:
    """Different sectors that loads of `width` bytes from these addresses touch."""
    return len({each for start in starts for each in range(start // sector, (start + width - 1) // sector + 1)})


def padding(
    p: AlignmentParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> PaddingResult:
    """Count bytes. Packs the products of `p.layers` layers for C.

    Raises StoppedError when cancelled, BusyError, and what `nanokit.load` raises of a model file."""
    progress = progress or Silent()
    with measuring("padding"):
        source, weights = opened(p.model)
        found = account(p.model or resolve_default())
        metrics = _of_file(found) | _of_widths()
        arena, buffers, aligned = Arena(), 0, 0
        progress.start(len(KINDS) - 1, "packing")
        for kind in KINDS[:-1]:
            for matrix in matrices(weights, kind, p.layers):
                stop_if(cancel)
                packed = pack(matrix.name, coded(matrix), arena)
                for part, nbytes in parts_of(packed).items():
                    key = f"packed_{part}_bytes_{kind}"
                    metrics[key] = metrics.get(key, 0) + nbytes
                key = f"packed_weights_{kind}"
                metrics[key] = metrics.get(key, 0) + prod(matrix.shape)
                begins = begins_of(packed.struct)
                buffers, aligned = buffers + len(begins), aligned + sum(at % ALIGNMENT == 0 for at in begins)
            progress.step(kind)
        slots = [at for name in DTYPES for begins in _slots(PagedKV(source.config, 2, name)) for at in begins]
    metrics |= {"buffers": buffers, "buffers_aligned": aligned, "slots": len(slots)}
    metrics["slots_aligned"] = sum(at % BLOCK_ALIGNMENT == 0 for at in slots)
    settings = {
        "model": source.name, "kv_formats": list(DTYPES),
        "stored": {kind: matrices(weights, kind, 1)[0].type for kind in KINDS},
    }  # fmt: skip
    said = notes(each for kind in KINDS for each in matrices(weights, kind, p.layers))
    return PaddingResult(p, metrics, settings=settings, remarks=said, file=found)


def _of_file(found: Account) -> dict[str, float]:
    """Padding as it is, and as it would be; padding_bound: 127 bytes a tensor, whatever their sizes."""
    sizes = [tensor.nbytes - tensor.padding for tensor in found.tensors]
    return {
        "file_bytes": found.nbytes,
        "file_padding_bytes": found.of("padding"),
        **{f"padding_to_{to}_bytes": sum(-size % to for size in sizes) for to in TO},
        "padding_bound_bytes": len(sizes) * (TO[-1] - 1),
    }


def _of_widths() -> dict[str, float]:
    """Bytes of every known shape in NVFP4: a byte of scale for 16 weights, fp32 for each matrix. all: everything; kept:
    embedding and head in 16 bits; tiled: all, its scales in tiles of 128 rows x 4, as block-scaled matrix units of GPUs
    read them."""
    found: dict[str, float] = {}
    for name, c in SHAPES.items():
        q_out, kv_out = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        layer = [(q_out, c.hidden_size), (kv_out, c.hidden_size), (kv_out, c.hidden_size), (c.hidden_size, q_out)]
        layer += [(c.intermediate_size, c.hidden_size)] * 2 + [(c.hidden_size, c.intermediate_size)]
        outer = [(c.vocab_size, c.hidden_size)] * (1 if c.tied_head else 2)
        body = c.num_layers * sum(map(_nvfp4, layer))
        found[f"nvfp4_all_bytes_{name}"] = body + sum(map(_nvfp4, outer))
        found[f"nvfp4_kept_bytes_{name}"] = body + sum(2 * prod(shape) for shape in outer)
        tiles = c.num_layers * sum(_tiled(shape) for shape in layer) + sum(map(_tiled, outer))
        found[f"nvfp4_tiled_bytes_{name}"] = found[f"nvfp4_all_bytes_{name}"] + tiles
    return found


def _nvfp4(shape: tuple[int, int]) -> int:
    return prod(shape) // 2 + prod(shape) // 16 + 4


def _tiled(shape: tuple[int, int]) -> int:
    """What tiles add to the scales."""
    rows, groups = shape[0], shape[1] // 16
    return -(-rows // 128) * 128 * (-(-groups // 4) * 4) - rows * groups


def parts_of(packed: Packed) -> dict[str, int]:
    """Bytes of a packed matrix without its bias: what codes, scales and minimums need, and the rest as padding."""
    struct, total = packed.struct, packed.arrays[0].nbytes
    panels, outputs = packed.arrays[0].shape[0], struct.rows
    scale = outputs * (struct.cols // struct.group) * (2 if struct.scale16 else 4)
    found = {
        "codes": struct.code_bytes * panels * outputs // (panels * 16),
        "scales": scale,
        "minimums": scale if struct.minimums else 0,
    }
    return {**found, "padding": total - sum(found.values())}


def begins_of(struct: MatrixStruct) -> list[int]:
    """Addresses at which the codes, scales and minimums of every panel begin."""
    panels = -(-struct.rows // 16)
    parts = [at for at in (struct.codes, struct.scales, struct.minimums) if at]
    return [at + panel * struct.panel_bytes for panel in range(panels) for at in parts]


def _slots(pages: PagedKV) -> list[tuple[int, int]]:
    """Bytes from one block to the next, and from one head to the next, in every tensor of the first layer."""
    tensors = [each for each in (*pages.layer(0), pages.sealed(0)) if each is not None]
    return [(each.stride(0) * each.itemsize, each.stride(1) * each.itemsize) for each in tensors]
