"""C products against fp64, for every format and mode, and bit for bit against themselves however they are cut.

tests/products.py states the bound.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from products import PEAK, activations, assert_product, layouts
from stored import CODED, MADE, columns_of, random_weights

from nanokit.errors import ModelFileError, ParameterError
from nanokit.kernels.activations import GROUPS, quantize
from nanokit.kernels.cpu.bound import MODES
from nanokit.kernels.cpu.library import Library
from nanokit.kernels.cpu.ops import Linear
from nanokit.quant.qtensor import QTensor

FORMATS = [*CODED, *MADE]
properties = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", FORMATS)
def test_every_mode_and_layout(kernels: Library, name: str) -> None:
    """Each format has its own codes, table, groups and minimums; each mode its own step and number of planes. Rows:
    single, the odd sizes of the narrow tile, and several wide tiles with a rest."""
    seed = FORMATS.index(name)
    outputs, columns = 16 * (seed % 3) + 5 + seed % 11, columns_of(name) * (2 if columns_of(name) == 256 else 5)
    q = random_weights(name, outputs, columns, seed)
    bias = np.random.default_rng(seed).standard_normal(outputs).astype(np.float32)
    for planes in layouts(q):
        for added in (None, bias):
            linear = Linear(q, added, planes=planes, library=kernels, threads=1)
            for mode in MODES:
                for rows in (1, 3, 29):
                    x = activations(rows, columns, seed + rows)
                    assert_product(q, added, x, mode, linear(x, mode, PEAK if mode == "static" else None))


def test_the_bound_is_narrower_than_one_code() -> None:
    """Else this file would prove nothing of 8-bit codes."""
    for name in ("Q8_0", "Q6_K", "int8-asym-channel"):
        q, x = random_weights(name, 20, 512), activations(1, 512, 3)
        got = Linear(q)(x, "a8g16")
        q.codes[7, int(x.abs().argmax())] ^= 1
        with pytest.raises(AssertionError):
            assert_product(q, None, x, "a8g16", got)


drawn = st.builds(
    lambda name, outputs, blocks, seed: random_weights(
        name, outputs, columns_of(name) * (1 + blocks % 2 if columns_of(name) == 256 else blocks), seed
    ),
    st.sampled_from(FORMATS), st.integers(1, 70), st.integers(1, 14), st.integers(0, 999),
)  # fmt: skip


@given(
    q=drawn, mode=st.sampled_from(list(MODES)), rows=st.integers(1, 40), planes=st.booleans(), seed=st.integers(0, 9)
)
@properties
def test_odd_sizes(kernels: Library, q: QTensor, mode: str, rows: int, planes: bool, seed: int) -> None:
    """Outputs that fill no panel, rows that fill no tile, a single group of columns."""
    x = activations(rows, q.shape[1], seed)
    linear = Linear(q, planes=planes and len(layouts(q)) == 2, library=kernels, threads=1 + seed % 3)
    assert_product(q, None, x, mode, linear(x, mode, PEAK if mode == "static" else None))


counts = st.integers(1, 40)


@given(q=drawn, mode=st.sampled_from(list(MODES)), rows=counts, data=st.data())
@properties
def test_a_row_is_the_same_bits_in_any_company(
    kernels: Library, q: QTensor, mode: str, rows: int, data: st.DataObject
) -> None:
    """A tile of one row and one of six, a panel alone and two at once, either layout of 8-bit codes, any number of
    threads: an order of operations that differed would make speculation and batching change the text."""
    x = activations(rows, q.shape[1], rows)
    peak = {"static": PEAK, "tensor": float(x.abs().max())}.get(mode)
    bias = np.linspace(-1, 1, q.shape[0], dtype=np.float32)
    whole = Linear(q, bias, library=kernels, threads=1)(x, mode, peak)
    other = Linear(q, bias, planes=len(layouts(q)) == 2, library=kernels, threads=data.draw(st.integers(1, 3)))
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=40))
    assert torch.equal(other(x[chosen], mode, peak), whole[chosen])
    for row in range(0, rows, 7):
        assert torch.equal(other(x[row : row + 1], mode, peak)[0], whole[row])


@pytest.mark.parametrize("mode", MODES)
def test_extreme_codes_do_not_overflow(kernels: Library, mode: str) -> None:
    """All codes at an end, all activations at their peak: the largest whole numbers, of a16 beyond 2^24."""
    columns = 320
    for low, high, group in [(-128, 127, 32), (-32, 31, 16), (0, 15, 64), (-8, 7, 320)]:
        for code in (low, high):
            scales = np.full((17, columns // group), 0.25, np.float32)
            codes = np.full((17, columns), code, np.int8)
            q = QTensor("extreme", codes.shape, codes, scales, None, group, None, (low, high))
            x = torch.full((9, columns), PEAK) * torch.tensor([1.0, -1.0] * 4 + [1.0])[:, None]
            for planes in layouts(q):
                assert_product(q, None, x, mode, Linear(q, planes=planes, library=kernels)(x, mode, PEAK))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "static"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_alone(kernels: Library, mode: str, bad: float) -> None:
    """Codes cannot hold it: a scale of zero or a clamped code would make a plausible answer of a diverged row."""
    for name in ("Q4_1", "Q8_0", "Q6_K", "IQ4_NL"):
        q = random_weights(name, 20, 512)
        linear = Linear(q, library=kernels)
        x = activations(20, 512, 1)
        clean = linear(x, mode)
        x[13, 300] = bad
        got = linear(x, mode)
        assert not got[13].isfinite().any()
        if mode != "tensor":  # which is about the whole step
            others = [row for row in range(20) if row != 13]
            assert torch.equal(got[others], clean[others])


def test_nothing_to_do(kernels: Library) -> None:
    """No rows: no division by them, no call for no threads."""
    linear = Linear(random_weights("Q4_0", 5, 64), library=kernels)
    for mode in MODES:
        assert linear(torch.empty(0, 64), mode, 1.0).shape == (0, 5)


@pytest.mark.parametrize("default", [torch.float16, torch.float64])
def test_torchs_default_dtype_changes_nothing(kernels: Library, default: torch.dtype) -> None:
    """Loading a checkpoint sets it to fp16 or bf16 for a while: memory that is made for C by default is then half as
    large as what C writes."""
    linear = Linear(random_weights("Q4_0", 40, 64), library=kernels)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    wanted = linear(x, "a16"), linear.unpack(), quantize(x, "token").dequantize()
    torch.set_default_dtype(default)
    try:
        got = linear(x, "a16"), linear.unpack(), quantize(x, "token").dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(
        ours.dtype == torch.float32 and torch.equal(ours, theirs) for ours, theirs in zip(got, wanted, strict=True)
    )


@pytest.mark.parametrize(("columns", "group"), [(48, 16), (40, 8), (96, 48), (64, 8), (33, 33), (96, 64)])
def test_columns_that_do_not_fit_are_refused_by_name(columns: int, group: int) -> None:
    """A vector load beyond a row's end reads the next row's numbers."""
    q = QTensor("a", (4, columns), np.zeros((4, columns), np.int8), np.zeros((4, -(-columns // group)), np.float32),
                None, group, None, (0, 15))  # fmt: skip
    with pytest.raises(ModelFileError, match=rf"(?s)the matrix.*\[4, {columns}\] in groups of {group}.*multiple of 32"):
        Linear(q)


def test_what_does_not_fit_the_matrix_is_refused() -> None:
    linear = Linear(random_weights("Q4_0", 5, 64))
    for x in (torch.zeros(2, 32), torch.zeros(64), torch.zeros(1, 2, 64)):
        with pytest.raises(ParameterError, match=r"(?s)does not fit.*\[rows, 64\]"):
            linear(x, "a16")
    with pytest.raises(ParameterError, match="fp32"):
        linear(torch.zeros(2, 64), "fp32")
    with pytest.raises(ParameterError, match="static"):
        linear(torch.zeros(2, 64), "static")
    assert set(GROUPS) < set(MODES)
