"""The screened head on the device: the answers of kernels/screen.py, from the same survivors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from nanokit.errors import ParameterError
from nanokit.kernels import screen as contract
from nanokit.kernels.gpu.activations import quantize
from nanokit.kernels.gpu.pack import pack
from nanokit.kernels.gpu.product import multiply
from nanokit.kernels.gpu.runtime import device
from nanokit.kernels.gpu.screen import BLOCK, screened_argmax
from nanokit.kernels.screen import Screen, as_planes, score
from nanokit.kernels.selection import argmax
from nanokit.quant.qtensor import QTensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities on purpose

ROWS = BLOCK + 200


def matrix(rows: int, columns: int = 64, seed: int = 0, equal: int = 1) -> QTensor:
    """Codes over the whole range; `equal` rows after each other are the same."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(-128, 128, (rows, columns)).astype(np.int8)
    scales = generator.uniform(0.5, 2.0, (rows, columns // 32)).astype(np.float16).astype(np.float32) / 128
    of = np.arange(rows) // equal * equal
    return QTensor("Q8", (rows, columns), codes[of], scales[of], None, 32, None, (-128, 127))


def dense(q: QTensor) -> Tensor:
    return torch.from_numpy(q.dequantize())


def both(q: QTensor, x: Tensor, **more: Tensor) -> tuple[list[int], list[int], Tensor]:
    """Answers of the kernels and of the contract, and how many ids survived the kernels' first few."""
    upper, screen = as_planes(q, x if bool(x.isfinite().all()) else None)
    full, proxy = linear(x, dense(q)), linear(x, dense(upper))
    wanted, _ = contract.screened_argmax(screen, x, proxy, lambda row, ids: full[row, ids], **more)
    wide = torch.nn.functional.pad(proxy, (0, 3)).to(device())[:, :-3]  # rows apart from each other
    there, given_there = full.to(device()), {name: part.to(device()) for name, part in more.items()}

    def exact(row: int, ids: Tensor) -> Tensor:
        assert bool((ids.diff() > 0).all())
        return there[row, ids]

    ids, counts = screened_argmax(screen.to(device()), x.to(device()), wide, exact, **given_there)
    assert ids.dtype == counts.dtype == torch.int64
    left = counts.cpu() - -(-len(q.codes) // BLOCK)
    for row in range(len(x)):
        assert left[row] == survivors(screen, x, proxy, full, row, **more)
    return ids.tolist(), wanted.tolist(), left


def survivors(screen: Screen, x: Tensor, proxy: Tensor, full: Tensor, row: int, **more: Tensor) -> int:
    """How many ids the contract's bounds leave beside the best of each block."""
    scale, plus = (more[name][row] if name in more else None for name in ("temperature", "added"))
    middle, upper = screen.upper(proxy[row], screen.reach(x)[row])
    likely = score(middle, scale, plus)
    first = torch.stack([part.argmax() for part in likely.split(BLOCK)]) + torch.arange(0, len(middle), BLOCK)
    left = score(upper, scale, plus) >= score(full[row], scale, plus)[first].max()
    left[first] = False
    return int(left.sum())


@settings(max_examples=25, deadline=None)
@given(
    rows=st.sampled_from([1, 70, ROWS]), seed=st.integers(0, 2**32), size=st.sampled_from([0.0, 1.0, 1e37]),
    equal=st.sampled_from([1, 3, 500]), bad=st.sampled_from([None, None, np.nan, np.inf]),
)  # fmt: skip
def test_the_answer_is_that_of_the_contract(rows: int, seed: int, size: float, equal: int, bad: float | None) -> None:
    """And of a full head: among equals in one block and in several, where logits overflow or are no numbers."""
    q = matrix(rows, seed=seed, equal=equal)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed)) * size
    if bad is not None:
        x[1, 7] = bad
    got, wanted, _ = both(q, x)
    assert got == wanted == [argmax(row) for row in linear(x, dense(q))]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), hidden=st.sampled_from([0, 5, ROWS - 1, ROWS]), sharp=st.sampled_from([0.1, 5.0]))
def test_draws_with_noise_are_those_of_the_contract(seed: int, hidden: int, sharp: float) -> None:
    """Each row with its own temperature and noise; masked ids cannot win, and none may be left."""
    q = matrix(ROWS, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x = sharp * torch.randn(2, 64, generator=generator)
    added = -torch.empty(2, ROWS).exponential_(generator=generator).log()
    added[:, torch.randperm(ROWS, generator=generator)[:hidden]] = -torch.inf
    temperature = torch.tensor([0.3, 2e-38])[torch.randperm(2, generator=generator)]
    got, wanted, _ = both(q, x, temperature=temperature, added=added)
    assert got == wanted
    assert (got == [-1, -1]) == (hidden == ROWS)


def test_little_is_looked_at() -> None:
    """States that point at one row each: no other survives."""
    q = matrix(ROWS, 128)
    chosen = [3, ROWS - 1]
    got, _, left = both(q, dense(q)[chosen] * 4)
    assert got == chosen
    assert left.tolist() == [0, 0]


def test_with_the_products_of_the_device() -> None:
    """One matrix in two planes: the upper one for all rows, whole codes for the few, bit for bit those of the whole
    product."""
    q = matrix(70, 128, equal=2)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    upper, screen = as_planes(q, x)
    seen = quantize(x.to(device()), "a8g32")
    whole, nearby = pack("head", q, planes=True), pack("upper", upper)
    full = multiply(whole, seen)

    def exact(row: int, ids: Tensor) -> Tensor:
        logits = multiply(whole, seen, ids)[row]
        assert torch.equal(logits, full[row, ids])
        return logits

    ids, _ = screened_argmax(screen.to(device()), seen.dequantize(), multiply(nearby, seen), exact)
    assert ids.tolist() == [argmax(row) for row in full.cpu()]


def test_no_rows_and_what_does_not_fit() -> None:
    q = matrix(70)
    _, screen = as_planes(q)
    screen = screen.to(device())
    x, proxy = torch.zeros(2, 64, device=device()), torch.zeros(2, 70, device=device())

    def never(row: int, ids: Tensor) -> Tensor:
        raise AssertionError

    assert [part.tolist() for part in screened_argmax(screen, x[:0], proxy[:0], never)] == [[], []]
    for wrong in ((x[:1], proxy), (x, proxy[:, :69]), (x.double(), proxy), (x, proxy.double())):
        with pytest.raises(ParameterError, match="fit"):
            screened_argmax(screen, *wrong, never)
    for more in ({"temperature": x[0, :1]}, {"added": proxy[:, :69]}):
        with pytest.raises(ParameterError, match="fit"):
            screened_argmax(screen, x, proxy, never, **more)
