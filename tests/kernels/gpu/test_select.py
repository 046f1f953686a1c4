"""Questions about rows of logits on the device, against kernels/selection.py, the published generator and fp64."""

import math

import numpy as np
import pytest
import torch
from dense_head import dense_head
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nanokit.engine.noise import Noise, gumbel_all, philox4x32
from nanokit.engine.sampler import Row, draw
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError
from nanokit.kernels import selection as reference
from nanokit.kernels.gpu.device.noise import NOISE_ERROR, gumbel, words
from nanokit.kernels.gpu.runtime import device, launch
from nanokit.kernels.gpu.select import ARGMAX_BLOCK, DRAW_BLOCK, FEW, Selection, argmax_rows
from nanokit.model.head import Edit, gumbel_argmax

# isort: split
import triton
import triton.language as tl

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: overflow, inf - inf

NEG, NAN = -np.inf, np.nan
ANSWERS = Selection()


def rows(*odd: float) -> st.SearchStrategy[np.ndarray]:
    """Rows shorter than a block, around one and of several, with many equal logits and `odd` ones among them."""
    few = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -3.5, 1e-40, 3e38, -3e38, *odd])
    many = st.floats(-50, 50, width=32)
    sizes = st.sampled_from([1, 5, 70, DRAW_BLOCK, DRAW_BLOCK + 1, ARGMAX_BLOCK - 1, 2 * ARGMAX_BLOCK + 3])
    return st.one_of(arrays(np.float32, sizes, elements=kind) for kind in (few, many))


def there(row: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(row).to(device())


def drawable(row: np.ndarray) -> bool:
    return bool(np.isfinite(row.max()))


# --- the largest ---


@settings(max_examples=40, deadline=None)
@example(row=np.full(2000, NEG, np.float32))
@example(row=np.append(np.full(2000, NEG, np.float32), np.float32(-3e38)))
@given(row=rows(NEG, np.inf, NAN))
def test_argmax_is_the_first_largest_or_none(row: np.ndarray) -> None:
    """A NaN is passed over by comparisons, and by a maximum perhaps: a row that holds one must not look like others."""
    expected = int(row.argmax()) if drawable(row) else -1
    assert ANSWERS.argmax(there(row)) == reference.argmax(torch.from_numpy(row)) == expected


@pytest.mark.parametrize("place", [0, ARGMAX_BLOCK - 1, ARGMAX_BLOCK, 2 * ARGMAX_BLOCK])
def test_of_equals_in_different_blocks_the_lowest_wins(place: int) -> None:
    row = torch.zeros(2 * ARGMAX_BLOCK + 1, device=device())
    row[place:] = 2.0
    assert ANSWERS.argmax(row) == place


def test_each_row_for_itself_wherever_it_lies() -> None:
    """Rows of a wider matrix, as a product with padded outputs leaves them; what lies between must not be read."""
    wide = torch.randn(5, 1100, generator=torch.Generator().manual_seed(0))
    wide[:, 1030:] = 100.0
    wide[1, 7], wide[3] = NAN, NEG
    expected = [reference.argmax(row[:1030]) for row in wide]
    assert argmax_rows(wide.to(device())[:, :1030]).tolist() == expected
    assert argmax_rows(wide.to(device())[::2, :1030]).tolist() == expected[::2]
    assert expected[1] == expected[3] == -1
    assert argmax_rows(wide.to(device())[:0]).tolist() == []


@settings(max_examples=40, deadline=None)
@given(row=rows(NEG), count=st.integers(1, 1200))
def test_largest_is_a_stable_sort(row: np.ndarray, count: int) -> None:
    """Ties at the edge, minus infinity, and both zeros, which are equal."""
    expected = np.argsort(-row, kind="stable")[:count]
    assert ANSWERS.largest(there(row), count).tolist() == expected.tolist()


@settings(max_examples=40, deadline=None)
@given(row=rows(NEG, NAN, np.inf), temperature=st.sampled_from([1.1e-5, 0.7, 1.0, 100.0]), count=st.integers(1, 70))
def test_look_against_fp64(row: np.ndarray, temperature: float, count: int) -> None:
    ids, mass = ANSWERS.look(there(row), count, temperature)
    if not drawable(row):
        assert len(ids) == 0
        assert math.isnan(mass)
        assert math.isnan(ANSWERS.mass(there(row), temperature))
        return
    wide = row.astype(np.float64)
    exact = math.fsum(np.exp((wide - wide.max()) / temperature))
    assert mass == ANSWERS.mass(there(row), temperature) == pytest.approx(exact, rel=1e-9)
    assert ids.tolist() == np.argsort(-row, kind="stable")[:count].tolist()


@settings(max_examples=20, deadline=None)
@given(row=rows(NEG, NAN))
def test_normalizer_against_fp64(row: np.ndarray) -> None:
    two = torch.from_numpy(np.stack([row, np.zeros_like(row)]))
    got = ANSWERS.normalizer(two.to(device()))
    assert got.device.type == "cpu"
    assert torch.equal(got.isnan(), torch.tensor([not drawable(row), False]))
    torch.testing.assert_close(got, reference.normalizer(two), rtol=2e-7, atol=0, equal_nan=True)
    assert got[1].item() == pytest.approx(math.log(len(row)), rel=1e-6, abs=1e-12)


def test_values_are_those_of_the_ids_in_their_order() -> None:
    row = torch.randn(300, generator=torch.Generator().manual_seed(0))
    ids = np.array([7, 299, 0, 7])
    for answers, logits in ((ANSWERS, row.to(device())), (reference, row)):
        got = answers.values(logits, ids)
        assert got.dtype == np.float32
        assert got.tolist() == row[ids].tolist()


# --- the noise ---


@triton.jit
def noise_kernel(tokens_ptr, words_ptr, seed_low, seed_high, position_low, position_high, stream, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = words(tl.load(tokens_ptr + place), seed_low, seed_high, position_low, position_high, stream)
    tl.store(words_ptr + place, key.to(tl.int32, bitcast=True))


@triton.jit
def gumbel_kernel(words_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, gumbel(tl.load(words_ptr + place).to(tl.uint32, bitcast=True)))


def near(word: np.ndarray) -> np.ndarray:
    """The kernels' noise of these words, uint32 [a multiple of the block]."""
    block = min(len(word), 2**16)
    out = torch.empty(len(word), dtype=torch.float32, device=device())
    launch(gumbel_kernel, (len(word) // block,), there(word.view(np.int32)), out, block)
    return out.cpu().numpy()


WORD = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]))


@settings(max_examples=30, deadline=None)
@given(key=st.tuples(WORD, WORD, WORD, WORD, WORD), first=st.integers(0, 2**31 - 64))
def test_words_are_those_of_the_published_generator(key: tuple[int, ...], first: int) -> None:
    """Bit for bit, for tokens anywhere in a block of four and words with every sign."""
    tokens = np.arange(first, first + 64)
    out = torch.empty(64, dtype=torch.int32, device=device())
    signed = np.array(key, np.uint32).view(np.int32).tolist()
    launch(noise_kernel, (1,), there(tokens.astype(np.int32)), out, *signed, 64)
    counter = np.empty((4, 64), np.uint64)
    counter[0], counter[1], counter[2], counter[3] = tokens // 4, key[2], key[3], key[4]
    expected = philox4x32(counter, (key[0], key[1]))[tokens % 4, np.arange(64)]
    assert (out.cpu().numpy().view(np.uint32) == expected).all()


def test_the_near_noise_keeps_its_bound() -> None:
    """Over all exponents of u and of 1 - u: both ends in full, and a stride through the rest. A bound that does not
    hold lets a token win that is not the winner, once in some thousand draws."""
    size = 2**16
    ends = np.arange(size)
    word = np.concatenate([ends, 2**32 - 1 - ends, np.arange(0, 2**32, 2**32 // (6 * size))[: 6 * size]])
    exact = -np.log(-np.log((word + 0.5) / 2**32))
    assert np.abs(near(word.astype(np.uint32)) - exact.astype(np.float32)).max() < NOISE_ERROR.value / 2 < 1e-5


# --- draws ---

KEY = {"seed": st.integers(0, 2**64 - 1), "position": st.integers(0, 2**40), "stream": st.integers(0, 2**32 - 1)}


@settings(max_examples=40, deadline=None)
@given(row=rows(NEG, NAN, np.inf), temperature=st.sampled_from([1.1e-5, 1.5e-38, 0.3, 1.0, 100.0]), **KEY)
def test_the_winner_is_that_of_the_contract(
    row: np.ndarray, temperature: float, seed: int, position: int, stream: int
) -> None:
    """Over the vocabulary and over a part of it; scores that overflow to infinity too."""
    noise = Noise([seed], [position], stream)
    for some in (None, np.flatnonzero(np.arange(len(row)) % 3 == seed % 3)):
        few = ANSWERS.gumbel_candidates(there(row), temperature, seed, position, stream, some)
        wide = reference.gumbel_candidates(torch.from_numpy(row), temperature, seed, position, stream, some)
        assert set(few) <= set(wide)
        assert (np.diff(few) > 0).all()
        assert few.dtype == np.int64
        winner = gumbel_argmax(ANSWERS, there(row), temperature, noise, 0, some)
        assert winner == gumbel_argmax(reference, torch.from_numpy(row), temperature, noise, 0, some)


@pytest.mark.parametrize("size", [0.0, 200.0, -1e4, 1e6])
def test_near_ties_are_left_to_the_exact_noise(size: float) -> None:
    """More scores a rounding apart than come back in the first copy; for large logits a rounding is more than the error
    of the noise."""
    noise = gumbel_all(3, 3, 1300)
    row = np.float32(size) - noise
    few = ANSWERS.gumbel_candidates(there(row), 1.0, 3, 3, 0)
    assert len(few) > FEW
    assert (row + noise).argmax() in few


def test_large_scores_are_compared_with_their_rounding() -> None:
    """Two equal scores near 300, of which the first comes out one rounding lower with the kernels' noise: that is far
    more than the noise is off, and the first is the winner."""
    noise = gumbel_all(3, 3, 1024)
    counter = np.zeros((4, 256), np.uint64)
    counter[0], counter[1] = np.arange(256), 3
    off = near(philox4x32(counter, (3, 0)).T.reshape(-1).astype(np.uint32))
    score = np.float32(300) + noise
    first = np.flatnonzero(np.float32(300) + off < score)[0]
    fitting = score[first] - noise
    ties = (fitting + noise == score[first]) & (fitting + off == score[first])
    second = first + 1 + np.flatnonzero(ties[first + 1 :])[0]
    row = np.zeros(1024, np.float32)
    row[first], row[second] = 300, fitting[second]
    assert (row + noise).argmax() == first
    assert ANSWERS.gumbel_candidates(there(row), 1.0, 3, 3, 0).tolist() == [first, second]


def test_candidates_are_few() -> None:
    """One that hands out everything would be right, and as slow as numpy."""
    logits = torch.randn(1003, generator=torch.Generator().manual_seed(2)).to(device())
    assert sum(len(ANSWERS.gumbel_candidates(logits, 0.7, seed, 5, 0)) for seed in range(50)) < 53


def test_every_token_of_a_flat_row_wins_by_the_published_generator() -> None:
    """The largest word is the largest noise, for positions on both sides of 32 bits."""
    for seed, size in [(3, 64), (2**63 + 5, 1001)]:
        for position in range(2**32 - 5, 2**32 + 5):
            counter = np.zeros((4, -(-size // 4)), np.uint64)
            counter[0] = np.arange(counter.shape[1])
            counter[1], counter[2], counter[3] = position % 2**32, position >> 32, 9
            largest = philox4x32(counter, (seed % 2**32, seed >> 32)).T.reshape(-1)[:size].argmax()
            flat = torch.zeros(size, device=device())
            assert largest in ANSWERS.gumbel_candidates(flat, 1.0, seed, position, 9)


@pytest.mark.parametrize("bad", [NAN, np.inf])
@pytest.mark.parametrize("place", [0, DRAW_BLOCK, 2 * DRAW_BLOCK + 75])
def test_a_row_that_is_not_finite_has_no_candidates(bad: float, place: int) -> None:
    row = np.zeros(2 * DRAW_BLOCK + 76, np.float32)
    row[place] = bad
    assert len(ANSWERS.gumbel_candidates(there(row), 1.0, 1, 2, 0)) == 0
    assert len(ANSWERS.gumbel_candidates(there(row), 1.0, 1, 2, 0, np.arange(len(row)))) == 0
    others = np.delete(np.arange(len(row)), place)
    assert len(ANSWERS.gumbel_candidates(there(row), 1.0, 1, 2, 0, others)) > 0
    assert len(ANSWERS.gumbel_candidates(there(row), 1.0, 1, 2, 0, np.empty(0, np.int64))) == 0


def test_logits_that_a_kernel_cannot_read_are_refused() -> None:
    odd = (torch.zeros(3, dtype=torch.float64), torch.zeros(2, 3), torch.zeros(6)[::2], torch.zeros(0))
    for row in odd:
        with pytest.raises(ParameterError, match="do not fit the kernel"):
            ANSWERS.argmax(row.to(device()))
        with pytest.raises(ParameterError, match="do not fit the kernel"):
            ANSWERS.gumbel_candidates(row.to(device()), 1.0, 1, 2, 0)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.1e-5, 0.2, 1.0, 5.0]),
    top_k=st.sampled_from([0, 0, 1, 7, 100]),
    top_p=st.sampled_from([1.0, 0.0, 0.4, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-7, 0.1]),
)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whole_draws_are_those_of_the_reference(data: st.DataObject) -> None:
    """Token for token, for any mix of rows, edited and not: what the sampler does with logits that lie elsewhere."""
    size = data.draw(st.sampled_from([5, 100, 1003]))
    samplings = data.draw(st.lists(SAMPLINGS, min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    hidden = torch.randn(len(samplings), size, generator=generator) * data.draw(st.sampled_from([0.5, 4.0]))
    edit = data.draw(st.sampled_from([None, Edit(penalized=(1, 3), penalty=1.5, masked=(2, 4))]))
    wanted = [Row(s, 11, i, edit if i % 2 else None) for i, s in enumerate(samplings)]
    expected = draw(dense_head(torch.eye(size)), hidden, wanted)
    head = dense_head(torch.eye(size, device=device()), answers=ANSWERS)
    assert draw(head, hidden.to(device()), wanted) == expected
    ids, logprobs = head.logprobs(hidden.to(device()), 3)
    for got, same in zip((ids, logprobs), dense_head(torch.eye(size)).logprobs(hidden, 3), strict=True):
        torch.testing.assert_close(got, same, rtol=1e-6, atol=1e-6)
