"""Triton's product of few rows against fp64, for every format, mode and layout, and bit for bit against itself.

tests/products.py states the bound: the whole numbers, scales and order of additions are those of the C kernels. One
more addition for each range of columns stays within it.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from products import PEAK, activations, assert_product, layouts
from stored import CODED, INTEGERS, columns_of, random_weights
from torch import Tensor

from nanokit.errors import ModelFileError, ParameterError
from nanokit.kernels.activations import MODES
from nanokit.kernels.gpu import product as product_module
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.activations import Activations, quantize
from nanokit.kernels.gpu.configs import ProductConfig
from nanokit.kernels.gpu.pack import pack
from nanokit.kernels.gpu.product import multiply, rows_of, splits_of
from nanokit.quant.qtensor import QTensor

FORMATS = [*CODED, *INTEGERS, "int4-sym-g16", "nvfp4", "nf4"]


def seen(x: Tensor, mode: str) -> Activations:
    """x as a product reads it on the device."""
    there = x.to(runtime.device())
    return quantize(there, mode, torch.tensor([PEAK], device=there.device) if mode == "static" else None)


@pytest.mark.parametrize("name", FORMATS)
def test_every_mode_and_layout(name: str) -> None:
    """Each format has its own codes, table, groups and minimums; each mode its own step and number of planes. Columns
    that end in the middle of a unit, outputs that fill no panel."""
    number = FORMATS.index(name)
    outputs, columns = 16 * (number % 3) + 5, columns_of(name) * (1 if columns_of(name) == 256 else 3)
    q = random_weights(name, outputs, columns, number)
    bias = np.random.default_rng(number).standard_normal(outputs).astype(np.float32)
    for planes in layouts(q):
        packed = pack(name, q, bias, planes=planes)
        for index, mode in enumerate(MODES):
            x = activations((1, 3)[index % 2], columns, number)
            assert_product(q, bias, x, mode, multiply(packed, seen(x, mode)))


@pytest.mark.parametrize("name", FORMATS)
def test_packing_loses_nothing(name: str) -> None:
    """A nibble, panel or scale in the wrong place; also what an embedding is read from. Rows come in any order and more
    than once."""
    q = random_weights(name, 37, columns_of(name) * (2 if columns_of(name) == 256 else 5), 3)
    ids = torch.tensor([36, 0, 17, 16, 15, 17], device=runtime.device())
    for planes in layouts(q):
        rows = rows_of(pack(name, q, planes=planes), ids)
        assert torch.equal(rows.cpu(), torch.from_numpy(q.dequantize())[ids.cpu()])


@pytest.mark.parametrize("planes", [False, True])
def test_what_is_packed_takes_no_more_than_it_says(planes: bool) -> None:
    """Half a byte for 4-bit codes, a byte for others; scales in two bytes if that loses none, else in four."""
    q4, q8 = random_weights("Q4_1", 32, 128), random_weights("Q8_0", 32, 128)
    assert pack("a", q4).nbytes == 32 * 128 // 2 + 2 * 2 * 32 * 4
    assert pack("a", q8, planes=planes).nbytes == 32 * 128 + 2 * 32 * 4
    q8.scales[3, 1] += 2.0**-30
    assert pack("a", q8, planes=planes).nbytes == 32 * 128 + 4 * 32 * 4


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(FORMATS), mode=st.sampled_from(MODES), outputs=st.integers(1, 40), blocks=st.integers(1, 12),
    rows=st.integers(1, 5), data=st.data(),
)  # fmt: skip
def test_a_row_is_the_same_bits_in_any_company(
    name: str, mode: str, outputs: int, blocks: int, rows: int, data: st.DataObject
) -> None:
    """Another number of rows, other tiles, ranges of columns that one program adds up or several, some outputs or all:
    an order of operations that differed would make speculation and batching change the text."""
    columns = columns_of(name) * (blocks % 2 + 1 if columns_of(name) == 256 else blocks)
    q = random_weights(name, outputs, columns, rows)
    packed = pack(name, q, np.linspace(-1, 1, outputs, dtype=np.float32))
    x = activations(rows, columns, rows)
    whole = multiply(packed, seen(x, mode))
    assert_product(q, np.linspace(-1, 1, outputs, dtype=np.float32), x, mode, whole)
    with pytest.MonkeyPatch.context() as patch:
        config = ProductConfig(data.draw(st.sampled_from([8, 32])), data.draw(st.sampled_from([16, 64])), 4, 3)
        patch.setattr(product_module, "product_config", lambda *_: config)
        patch.setattr(product_module, "ENOUGH", data.draw(st.sampled_from([1, 10**9])))
        few = data.draw(st.integers(1, rows))
        ids = torch.tensor(data.draw(st.lists(st.integers(0, outputs - 1), min_size=1, max_size=20)))
        part = multiply(packed, seen(x[:few], mode if mode != "tensor" else "fp32"), ids.to(runtime.device()))
    if mode != "tensor":
        assert torch.equal(part, whole[:few][:, ids.to(whole.device)])


def test_columns_are_cut_by_the_matrix_alone() -> None:
    """A GPU is filled by few outputs too, and no range is empty or too short to be worth it."""
    for outputs, units in [(1, 1), (576, 9), (1024, 64), (49152, 9), (151936, 16), (64, 200), (3584, 56)]:
        splits = splits_of(outputs, units)
        per_split = -(-units // splits)
        assert splits == 1 or per_split >= 3
        assert (splits - 1) * per_split < units
    assert splits_of(1024, 64) > 8
    assert splits_of(151936, 64) == 1


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "static"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_alone(mode: str, bad: float) -> None:
    """Codes cannot hold it: a scale of zero or a clamped code would make a plausible answer of a diverged row."""
    packed = pack("a", random_weights("Q4_1", 20, 64))
    x = activations(3, 64, 1)
    clean = multiply(packed, seen(x, mode))
    x[1, 40] = bad
    got = multiply(packed, seen(x, mode))
    assert not got[1].isfinite().any()
    if mode != "tensor":  # which is about the whole step
        assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_extreme_codes_do_not_overflow() -> None:
    """All codes at an end, all activations at their peak: the largest whole numbers, of a16 beyond 2^24."""
    for low, high in [(-128, 127), (0, 15), (-8, 7)]:
        for code in (low, high):
            codes = np.full((17, 320), code, np.int8)
            q = QTensor("extreme", codes.shape, codes, np.full((17, 5), 0.25, np.float32), None, 64, None, (low, high))
            x = torch.full((2, 320), PEAK) * torch.tensor([[1.0], [-1.0]])
            for planes in layouts(q):
                for mode in ("a16", "token"):
                    assert_product(q, None, x, mode, multiply(pack("a", q, planes=planes), seen(x, mode)))


def test_nothing_to_do() -> None:
    """No rows, or no ids: no launch of no programs."""
    packed = pack("a", random_weights("Q4_0", 5, 64))
    none, one = torch.empty(0, 64, device=runtime.device()), torch.ones(1, 64, device=runtime.device())
    no_ids = torch.empty(0, dtype=torch.int64, device=runtime.device())
    assert multiply(packed, Activations("fp32", none)).shape == (0, 5)
    assert multiply(packed, Activations("fp32", one), no_ids).shape == (1, 0)
    assert rows_of(packed, no_ids).shape == (0, 64)


@pytest.mark.parametrize(("columns", "group"), [(48, 16), (40, 8), (96, 48), (64, 8), (33, 33), (96, 64)])
def test_columns_that_do_not_fit_are_refused_by_name(columns: int, group: int) -> None:
    """A load beyond a row's end reads the next row's numbers."""
    q = QTensor("a", (4, columns), np.zeros((4, columns), np.int8), np.zeros((4, -(-columns // group)), np.float32),
                None, group, None, (0, 15))  # fmt: skip
    with pytest.raises(ModelFileError, match=rf"(?s)blk.0.*\[4, {columns}\] in groups of {group}.*multiple of 32"):
        pack("blk.0", q)


def test_activations_of_another_matrix_are_refused() -> None:
    """They would be read beyond their end."""
    packed = pack("blk.3.down", random_weights("Q4_0", 5, 64))
    with pytest.raises(ParameterError, match=r"(?s)blk.3.down.*32 columns.*64 columns"):
        multiply(packed, seen(torch.zeros(1, 32), "a8g32"))


def test_ids_with_gaps_are_refused() -> None:
    """A kernel would read what lies between them."""
    packed, x = pack("a", random_weights("Q4_0", 20, 64)), seen(torch.zeros(1, 64), "a8g32")
    for ids in (torch.arange(20)[::2], torch.arange(5, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(ParameterError, match="no ids"):
            rows_of(packed, ids.to(runtime.device()))
        with pytest.raises(ParameterError, match="no ids"):
            multiply(packed, x, ids.to(runtime.device()))
