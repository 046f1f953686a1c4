"""The screened head: no logit above its bound, and the answer of a full head, whatever was left out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from nanokit.engine.load import LoadedEngine
from nanokit.engine.noise import gumbel_all
from nanokit.errors import ParameterError
from nanokit.kernels import selection
from nanokit.kernels.activations import quantize
from nanokit.kernels.screen import FIRST, as_planes, screened_argmax
from nanokit.model.batch import Batch
from nanokit.model.source import GGUFSource
from nanokit.model.weights import find_weights
from nanokit.quant.qtensor import QTensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities on purpose


def matrix(rows: int, columns: int, group: int = 32, *, minimums: bool = False, seed: int = 0) -> QTensor:
    """Codes over the whole range, the lowest and the highest among them."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(-128, 128, (rows, columns)).astype(np.int8)
    codes[:, :2] = -128, 127
    scales = generator.uniform(0.5, 2.0, (rows, columns // group)).astype(np.float32) / 128
    added = generator.normal(size=scales.shape).astype(np.float32) if minimums else None
    return QTensor("Q8", (rows, columns), codes, scales, added, group, None, (-128, 127))


def dense(q: QTensor) -> Tensor:
    return torch.from_numpy(q.dequantize())


def one_by_one(x: np.ndarray, q: QTensor) -> np.ndarray:
    """A poor product: fp32, one addition after the other, cut off at 24 bits and below the smallest normal number."""
    weights = q.dequantize().astype(np.float64)
    total = np.zeros(len(weights), np.float32)
    for column in range(x.size):
        exact = total + np.float64(x[column]) * weights[:, column]
        near = exact.astype(np.float32)
        near = np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)
        total = np.where(np.abs(near) < 2.0**-126, np.float32(0), near)
    return total


def at_once(x: np.ndarray, q: QTensor) -> np.ndarray:
    """A good product: rounded once."""
    return (q.dequantize().astype(np.float64) @ x).astype(np.float32)


@pytest.mark.parametrize(("group", "minimums"), [(32, False), (16, False), (64, True)])
def test_planes_are_the_upper_nibbles(group: int, minimums: bool) -> None:
    """What is missing of a weight is its scale times the lower nibble, less 8."""
    q = matrix(5, 128, group, minimums=minimums)
    upper, _ = as_planes(q)
    assert upper.code_range == (-8, 7)
    assert (upper.codes.min(), upper.codes.max()) == (-8, 7)
    low = (q.codes.view(np.uint8) & 15).astype(np.float64) - 8
    missing = (low.reshape(*q.scales.shape, group) * q.scales[..., None]).reshape(q.shape)
    np.testing.assert_allclose(upper.dequantize() + missing, q.dequantize(), rtol=0, atol=1e-6)


def test_scales_that_fp16_holds_stay_so() -> None:
    """Or the proxy reads two bytes more for each group."""
    q = matrix(3, 64)
    q.scales[:] = q.scales.astype(np.float16)
    upper, _ = as_planes(q)
    for part in (upper.scales, upper.minimums):
        assert part is not None
        assert (part.astype(np.float16) == part).all()


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32), columns=st.sampled_from([64, 192]), minimums=st.booleans(), positive=st.booleans(),
    size=st.sampled_from([0.0, 1e-42, 1e-36, 1.0, 1e30]), shift=st.sampled_from([0.0, 1.0, 100.0]), known=st.booleans(),
    products=st.sampled_from([(at_once, one_by_one), (one_by_one, at_once), (one_by_one, one_by_one)]),
)  # fmt: skip
def test_no_logit_exceeds_its_bound(
    seed: int, columns: int, minimums: bool, positive: bool, size: float, shift: float, known: bool, products: Any
) -> None:
    """With a poor product on either side: states around a large mean, of all magnitudes, along one row's residual,
    where the inequality is an equality, and nowhere in particular; weights of one sign: the largest partial sums."""
    q = matrix(6, columns, minimums=minimums and not positive, seed=seed)
    if positive:
        q.codes[:] &= 127
    generator = torch.Generator().manual_seed(seed)
    states = size * (shift + torch.randn(20, columns, generator=generator) * torch.rand(columns, generator=generator))
    upper, screen = as_planes(q, states if known else None)
    along = (dense(q) - dense(upper))[0] / screen.factor.square()
    x = torch.stack([states[0], screen.centre, screen.centre + size * along, screen.centre - along])
    nearly, exactly = products
    for row, reach in zip(x, screen.reach(x), strict=True):
        middle, above = screen.upper(torch.from_numpy(nearly(row.numpy(), upper)), reach)
        logits = torch.from_numpy(exactly(row.numpy(), q))
        assert bool((logits <= above).all())
        assert bool((2 * middle - above <= logits).all())


def test_where_a_product_may_overflow_nothing_is_bounded() -> None:
    """A proxy that overflowed on the way is no number, or small, and says nothing of the logit."""
    _, screen = as_planes(matrix(4, 64))
    x = torch.ones(3, 64) * torch.tensor([[1.0], [1e37], [torch.nan]])
    reach = screen.reach(x)
    assert reach.isfinite().all(dim=1).tolist() == [True, False, False]
    for row in reach[1:]:
        assert screen.upper(torch.tensor([0.0, torch.nan, -torch.inf, torch.inf]), row)[1].tolist() == [torch.inf] * 4


def test_the_bound_is_no_wider_than_it_must_be() -> None:
    """Along a row's residual nothing is given away but the margin; a bound that is too wide is right, and useless."""
    q = matrix(6, 192, seed=3)
    upper, screen = as_planes(q, torch.randn(50, 192, generator=torch.Generator().manual_seed(1)) * 3 + 5)
    residual = (dense(q) - dense(upper))[2]
    x = (screen.centre + 400 * residual / screen.factor.square())[None]
    middle, above = screen.upper(linear(x, dense(upper))[0], screen.reach(x)[0])
    logit = linear(x, dense(q))[0, 2]
    assert logit - middle[2] > 10
    assert above[2] - logit < 1e-3 * (logit - middle[2]) + 1e-3 * logit.abs()


def test_columns_that_stand_out_do_not_widen_the_others() -> None:
    q, generator = matrix(50, 128), torch.Generator().manual_seed(0)
    spread = torch.ones(128)
    spread[5] = 50.0
    states = torch.randn(100, 128, generator=generator) * spread + 3
    slack = []
    for known in (None, states):
        upper, screen = as_planes(q, known)
        middle, above = screen.upper(linear(states[:1], dense(upper))[0], screen.reach(states[:1])[0])
        slack.append(float((above - middle).mean()))
    assert slack[1] < slack[0] / 2


# --- the answer ---


def ask(q: QTensor, x: Tensor, full: Tensor, states: Tensor | None = None, **more: Tensor) -> tuple[list[int], Tensor]:
    """The screened answer where the full product's logits are `full`."""
    upper, screen = as_planes(q, states)
    ids, counts = screened_argmax(screen, x, linear(x, dense(upper)), lambda row, ids: full[row, ids], **more)
    assert ids.dtype == torch.int64
    return ids.tolist(), counts


@settings(max_examples=60, deadline=None)
@example(rows=80, seed=1, size=0.0, equal=2, bad=None)
@given(
    rows=st.sampled_from([1, FIRST, 80, 300]), seed=st.integers(0, 2**32), size=st.sampled_from([1e-3, 1.0, 1e37]),
    equal=st.integers(1, 20), bad=st.sampled_from([None, None, np.nan, np.inf, -np.inf]),
)  # fmt: skip
def test_the_answer_is_that_of_a_full_head(rows: int, seed: int, size: float, equal: int, bad: float | None) -> None:
    """Rows of weights that are equal many times over, rows of states that overflow or are no numbers."""
    q = matrix(rows, 64, seed=seed)
    q.codes[:] = q.codes[np.arange(rows) // equal * equal]
    q.scales[:] = q.scales[np.arange(rows) // equal * equal]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * size
    if bad is not None:
        x[1, 7] = bad
    full = linear(x, dense(q))
    answers, _ = ask(q, x, full)
    assert answers == [selection.argmax(row) for row in full]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), hidden=st.integers(0, 80), sharp=st.sampled_from([0.1, 1.0, 5.0]))
def test_draws_with_noise_are_those_of_a_full_head(seed: int, hidden: int, sharp: float) -> None:
    """logit / temperature + noise, each rounded to fp32; ids that are masked cannot win, and none may be left."""
    q = matrix(80, 64, seed=seed)
    x = sharp * torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    full = linear(x, dense(q))
    temperature = torch.tensor([0.3, 1.0, 5.0, 1e-37])
    added = torch.from_numpy(np.stack([gumbel_all(seed, row, 80) for row in range(4)]))
    added[:, torch.randperm(80, generator=torch.Generator().manual_seed(seed))[:hidden]] = -torch.inf
    answers, _ = ask(q, x, full, temperature=temperature, added=added)
    scores = np.where(added > -np.inf, full.numpy() / temperature[:, None].numpy() + added.numpy(), -np.inf)
    assert answers == [int(row.argmax()) if row.max() > -np.inf else -1 for row in scores]


def test_little_is_looked_at() -> None:
    """States that point at one row each: no other survives."""
    q = matrix(400, 128)
    chosen = torch.tensor([3, 399, 77])
    x = dense(q)[chosen] * 4
    answers, counts = ask(q, x, linear(x, dense(q)))
    assert answers == chosen.tolist()
    assert counts.tolist() == [FIRST] * 3


def test_a_logit_that_looks_small_is_found() -> None:
    """The best of all, where the proxy thinks least of it: only its bound brings it back."""
    q = matrix(60, 64, seed=5)
    q.codes[:] = np.where(np.arange(64) % 2, -120, 120)  # alike in the upper nibble
    q.codes[50, ::2], q.codes[50, 1::2] = 127, -128  # which all of these have too: 112 and -128
    q.scales[:] = 1 / 128
    q.scales[50] *= 0.99
    x = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)[None]
    full = linear(x, dense(q))
    upper, _ = as_planes(q)
    assert int(full.argmax()) == 50
    assert int(linear(x, dense(upper)).argmin()) == 50
    assert ask(q, x, full)[0] == [50]


def test_what_has_no_planes_is_refused() -> None:
    q = matrix(3, 64)
    table = QTensor("T", q.shape, q.codes & 15, q.scales, None, 32, np.arange(16, dtype=np.int8), (0, 15))
    unsigned = QTensor("U", q.shape, q.codes, q.scales, None, 32, None, (0, 255))
    for each in (table, unsigned):
        with pytest.raises(ParameterError, match="8-bit codes"):
            as_planes(each)
    for states in (torch.zeros(2, 63), torch.zeros(0, 64), torch.full((2, 64), torch.nan)):
        with pytest.raises(ParameterError, match="states do not fit"):
            as_planes(q, states)


def test_the_default_models_own_head(engine: LoadedEngine, default_model: Path) -> None:
    """A real text, states as the C kernels' integer product sees them: every row's answer is the full head's."""
    ids = engine.tokenizer.encode("The lighthouse keeper wrote down the weather every morning, as he had for years.")
    blocks = [engine.pool.allocate() for _ in range(-(-len(ids) // engine.config.block_size))]
    try:
        hidden = engine.model.forward(Batch(ids, [len(ids)], [len(ids)], [blocks]), engine.kv)
        full = engine.model.head.logits(hidden)
        expected = engine.model.head.argmax(hidden)
    finally:
        engine.pool.release(blocks)
    source = GGUFSource(default_model)
    q = find_weights(source.config, source).embedding.quantized()  # the head's matrix too
    assert q is not None
    answers, counts = ask(q, quantize(hidden, "a8g32").dequantize(), full, states=hidden)
    assert answers == expected.tolist()
    assert counts.double().mean() < q.shape[0] / 4
