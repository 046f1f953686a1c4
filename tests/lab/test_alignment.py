"""The alignment notebook: its arithmetic, that moved data stay the same, and what its verdicts follow from."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import compiled_model, save_tiny_gguf

from nanokit.errors import ParameterError
from nanokit.kernels.cpu.ops import Linear
from nanokit.kernels.cpu.pack import Arena, pack
from nanokit.kv.pages import DTYPES
from nanokit.lab import lock, plots
from nanokit.lab.experiments import padding as padding_module
from nanokit.lab.experiments.alignment_params import AlignmentParams, straddling
from nanokit.lab.experiments.header_remedy import header_remedy
from nanokit.lab.experiments.kernel_params import opened
from nanokit.lab.experiments.loads import LoadParams, LoadsResult, load, loads
from nanokit.lab.experiments.padding import BLOCKS, begins_of, blockwise, contiguous, padding, parts_of, sectors
from nanokit.lab.experiments.shifted import MovedPages, ShiftedResult, moved, shifted
from nanokit.lab.repeat import comparable
from nanokit.lab.result import together
from nanokit.quant.formats import FORMATS
from nanokit.quant.weight_format import weight_format


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("alignment")
    yield str(save_tiny_gguf(folder / "tiny.gguf", compiled_model("llama"), types="Q4_1"))
    opened.cache_clear()


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


def params(tiny: str = "", **changes: object) -> AlignmentParams:
    small: dict[str, object] = {
        "preset": "smoke", "model": tiny, "offsets": [0, 4, 64], "widths": [16], "sets": ["L1", "memory"],
        "memory_mib": 16, "ctx": 64,
    }  # fmt: skip
    return AlignmentParams.from_mapping(small | changes)


@given(st.sampled_from([16, 32, 64]), st.integers(0, 200))
def test_straddling_is_what_a_walk_counts(width: int, offset: int) -> None:
    """Byte by byte: a load straddles if its first and last byte lie in different lines."""
    starts = [offset + width * i for i in range(256)]
    assert straddling(width, offset) == sum(at // 64 != (at + width - 1) // 64 for at in starts) / 256


@given(st.integers(0, 500), st.sampled_from([16, 17, 18, 20]))
def test_sectors_are_what_a_walk_counts(first: int, stride: int) -> None:
    """Every byte of every load, by the sector that it lies in."""
    starts = [first + stride * i for i in range(32)]
    assert sectors(starts) == len({byte // 32 for at in starts for byte in range(at, at + 16)})


def test_a_warp_that_reads_one_run_needs_one_sector_more_and_not_twice_as_many() -> None:
    """The claim's second transaction is a load's; of a warp's neighbours, one's second is the next one's first."""
    assert sectors(contiguous(0)) == 16
    assert sectors(contiguous(4)) == 17
    assert sum(sectors([at]) for at in contiguous(4)) == 48
    assert blockwise("Q4_0")[:2] == [2, 20]
    assert blockwise("Q4_1")[:2] == [4, 24]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_example_has_the_sizes_of_the_library(name: str) -> None:
    """The table's bytes are files' bytes."""
    kind = gguf.GGMLQuantizationType[name]
    assert FORMATS[name].nbytes((1024, 1024)) == 1024 * gguf.quants.quant_shape_to_byte_shape((1, 1024), kind)[1]


@pytest.mark.parametrize("name", ["int4-sym-g32", "int4-asym-g64", "int8-sym-g16", "nvfp4", "mxfp4", "q4_1"])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_packed_buffers_begin_on_64_bytes(name: str, rows: int) -> None:
    """Codes, scales and minimums of every panel, in an arena that holds something else before; and no byte is lost."""
    weights = np.random.default_rng(rows).normal(size=(rows, 192)).astype(np.float32)
    arena = Arena()
    arena.take(100)
    packed = pack("m", weight_format(name).quantize(weights), arena)
    begins = begins_of(packed.struct)
    assert len(begins) == -(-rows // 16) * (2 + bool(packed.struct.minimums))
    assert all(at % 64 == 0 for at in begins)
    parts = parts_of(packed)
    code = rows * 192 // (1 if name.startswith("int8") else 2)
    assert parts["codes"] == code
    assert sum(parts.values()) == packed.arrays[0].nbytes
    assert min(parts.values()) >= 0


def test_scales_that_fp16_does_not_hold_are_counted_with_four_bytes() -> None:
    """Weights of tiny std keep their exponent: the account has to say what that takes."""
    weights = np.random.default_rng(1).normal(size=(32, 192), scale=1e-9).astype(np.float32)
    packed = pack("m", weight_format("int4-sym-g32").quantize(weights), Arena())
    assert not packed.struct.scale16
    assert parts_of(packed) == {"codes": 32 * 96, "scales": 32 * 6 * 4, "minimums": 0, "padding": 0}


def test_a_moved_matrix_and_moved_pages_are_the_same(tiny: str) -> None:
    """A shift that forgets the scales would time another matrix; the offset has to be the one asked for."""
    linear = Linear(weight_format("int4-asym-g32").quantize(np.ones((33, 64), np.float32) * np.arange(64)))
    x = torch.randn(2, 64)
    expected, weights = linear(x, "a8g32"), linear.unpack()
    packed = linear.packed
    for offset in (4, 20):
        linear.packed = moved(packed, offset)
        packed.arrays[0][:] ^= 255  # whoever still reads the old place reads other bytes
        assert linear.packed.struct.codes % 4096 == offset
        assert torch.equal(linear(x, "a8g32"), expected)
        assert torch.equal(linear.unpack(), weights)
        packed.arrays[0][:] ^= 255
    source, _ = opened(tiny)
    pages = MovedPages(source, 2, "int8", 20)
    assert all(each.data_ptr() % 4096 == 20 for each in pages.layer(0) if each is not None)


def test_everything_runs_and_repeats(tiny: str) -> None:
    """What is no time has to be equal in a second run, and the notebook keeps all of it in one record."""
    p = params(tiny)
    results = [loads(p), shifted(p), padding(p)]
    assert results[1].intact
    assert results[2].aligned
    assert results[2].metrics["slots"] >= 2 * (2 * len(DTYPES))
    again = padding(p)
    assert comparable(together(*results).to_record()) == comparable(together(loads(p), shifted(p), again).to_record())
    for result in results:
        assert result.table().rows
    tables = (results[0].summary(), results[0].table("L1"), again.example(), again.transactions(), again.slots())
    assert all(table.rows for table in (*tables, again.padding(), again.packed(), again.widths()))
    assert "noise" in plots.shifted(results[1]).layout.title.text
    assert plots.loads(results[0], "L1").data


def test_a_point_of_the_panel(tiny: str) -> None:
    """The figure's title says which share of loads straddles."""
    result = load(LoadParams(preset="smoke", offset=4, width=16, kib=8))
    assert result.metrics["on_two_lines_rate"] == 0.25
    assert "25%" in plots.load(result).layout.title.text


def test_offset_zero_cannot_be_left_out() -> None:
    """Everything is compared with it."""
    with pytest.raises(ParameterError, match="offset 0"):
        params(offsets=[4, 64])


def made_up(speeds: dict[tuple[str, object], float]) -> LoadsResult:
    from nanokit.lab.experiments.loads import _derived

    p = params(widths=[32], offsets=[0, 4, 64], sets=["L2", "memory"])
    metrics = {f"read_gb_s_{where}_32_{offset}": speed for (where, offset), speed in speeds.items()}
    for where in p.sets:
        metrics |= _derived(metrics, p.offsets, where, 32)
    return LoadsResult(p, metrics | {"stream_gb_s": 10.0}, settings={"widths": [32]})


def test_the_verdict_on_bandwidth_follows_the_figures() -> None:
    """A gain within the noise is none; a gain beyond it in every set is the claim."""
    same = {("L2", 0): 100.0, ("L2", "again"): 101.0, ("L2", 64): 100.0, ("L2", 4): 60.0}
    flat = {("memory", 0): 10.0, ("memory", "again"): 10.4, ("memory", 64): 10.0, ("memory", 4): 9.9}
    slow = {**flat, ("memory", 4): 8.0}
    assert made_up({**same, **flat}).verdict_q8.startswith("holds in part: +67% in L2")
    assert "in memory it is within the noise" in made_up({**same, **flat}).verdict_q8
    assert made_up({**same, **slow}).verdict_q8.startswith("holds:")
    assert made_up({**same, ("L2", 4): 100.0, **flat}).verdict_q8.startswith("does not hold")


def test_the_verdict_on_pages_follows_the_figures() -> None:
    """Slower than the noise at one offset is enough, at a multiple of a line it is noise by definition."""
    p = params(offsets=[0, 4, 64])
    base = {f"attention_{kv}_ms_{at}": 1.0 for kv in ("fp16", "int8") for at in (0, 4, 64, "again")}
    assert ShiftedResult(p, base).verdict_q9.startswith("does not hold")
    assert "offset 4" in ShiftedResult(p, base | {"attention_int8_ms_4": 1.3}).verdict_q9
    assert ShiftedResult(p, base | {"attention_int8_ms_4": 1.3, "attention_int8_ms_64": 1.4}).verdict_q9.startswith(
        "does"
    )


def test_the_verdict_on_sizes_follows_the_figures(tiny: str) -> None:
    """24 over 20 GB lies below, within or above the ratios."""
    result = padding(params(tiny))
    assert result.verdict_padding.startswith("does not hold")
    kept = {name: value for name, value in result.metrics.items() if name.startswith("nvfp4_kept")}

    def times(factor: float) -> str:
        return replace(result, metrics=result.metrics | {k: v * factor for k, v in kept.items()}).verdict_q17

    assert times(1.0).startswith("holds, and more")
    assert times(0.85).startswith("holds:")
    assert times(0.5).startswith("does not hold")
    monkeyed = replace(result, metrics=result.metrics | {"padding_bound_bytes": padding_module.CLAIMED_PADDING})
    assert monkeyed.verdict_padding.startswith("may hold")


def test_a_header_moves_no_tensor_and_is_refused(tiny: str) -> None:
    """The copy without a change has to open: else a fault of the writer would refute the claim."""
    result = header_remedy(params(tiny))
    assert [result.metrics[f"opens_{name}"] for name in result.said] == [1, 0, 0]
    assert result.metrics["moved_as it is"] == result.metrics["moved_head count 32"] == 0, "a header as long as before"
    assert result.metrics["moved_rope base a string"] in (0, result.metrics["tensors"]), "all of them move, or none"
    assert "attn_q" in result.said["head count 32"], "told by shapes where the head size is not in the header"
    assert "freq_base" in result.said["rope base a string"]
    assert result.verdict_q21.startswith("does not hold")
    assert "the loader refuses both files" in result.verdict_q21
    opening = replace(result, metrics={**result.metrics, "opens_head count 32": 1.0})
    assert "head count 32 opens, as another model" in opening.verdict_q21
    assert len(result.table().rows) == 3
