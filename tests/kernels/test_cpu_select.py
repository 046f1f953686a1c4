"""Questions about rows of logits in C, in every variant this machine can run, against numpy in fp64."""

import math
from ctypes import c_float, c_int64, c_void_p
from typing import Any

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
from nanokit.kernels.cpu.compiler import VARIANTS, NoKernelsError
from nanokit.kernels.cpu.library import Library, library
from nanokit.kernels.cpu.select import Selection
from nanokit.model.head import gumbel_argmax

NEG, NAN = -np.inf, np.nan


@pytest.fixture(scope="module", params=list(VARIANTS))
def kernels(request: Any) -> Library:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOKIT_CPU_KERNELS", request.param)
        try:
            return library()
        except (NoKernelsError, ParameterError) as error:
            pytest.skip(f"{request.param} does not run here: {error.what}")


@pytest.fixture(scope="module")
def answers(kernels: Library) -> Selection:
    return Selection(kernels)


def rows(*odd: float) -> st.SearchStrategy[np.ndarray]:
    """Rows of any length around vectors, groups and blocks, with many equal logits and `odd` ones among them."""
    few = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -3.5, 1e-40, 3e38, -3e38, *odd])
    many = st.floats(-50, 50, width=32)
    sizes = st.one_of(st.integers(1, 70), st.integers(500, 1100))
    return st.one_of(arrays(np.float32, sizes, elements=kind) for kind in (few, many))


def drawable(row: np.ndarray) -> bool:
    return bool(np.isfinite(row.max()))


@settings(max_examples=60, deadline=None)
@example(row=np.full(40, NEG, np.float32))
@given(row=rows(NEG, np.inf, NAN))
def test_argmax_is_the_first_largest_or_none(answers: Selection, row: np.ndarray) -> None:
    """A NaN is passed over by comparisons: a row that holds one must not look like the others."""
    expected = int(row.argmax()) if drawable(row) else -1
    assert answers.argmax(torch.from_numpy(row)) == reference.argmax(torch.from_numpy(row)) == expected


@settings(max_examples=100, deadline=None)
@given(row=rows(NEG), count=st.one_of(st.integers(1, 70), st.integers(1, 1200)))
def test_largest_is_a_stable_sort(answers: Selection, row: np.ndarray, count: int) -> None:
    """Ties at the edge, minus infinity, both zeros, and a threshold that is one of the values."""
    expected = np.argsort(-row, kind="stable")[:count]
    assert answers.largest(torch.from_numpy(row), count).tolist() == expected.tolist()
    assert reference.largest(torch.from_numpy(row), count).tolist() == expected.tolist()


def test_largest_of_a_whole_vocabulary(answers: Selection) -> None:
    row = torch.randn(49_152, generator=torch.Generator().manual_seed(1)).mul(4).round(decimals=2)
    order = np.argsort(-row.numpy(), kind="stable")
    for count in (1, 64, 512, 4096, 49_151, 49_152):
        assert (answers.largest(row, count) == order[:count]).all()


def test_largest_refuses_nan(answers: Selection) -> None:
    """Unnoticed, it would leave ids unwritten."""
    with pytest.raises(ValueError, match="NaN"):
        answers.largest(torch.tensor([1.0, NAN, 0.0]), 3)


@settings(max_examples=60, deadline=None)
@example(row=np.full(40, NEG, np.float32), temperature=1.0)
@example(row=np.arange(-4000, 1, dtype=np.float32), temperature=1.0)  # powers of two below those of a double
@given(row=rows(NEG, NAN, np.inf), temperature=st.sampled_from([1.1e-5, 0.01, 0.7, 1.0, 3.0, 100.0]))
def test_mass_against_fp64(answers: Selection, row: np.ndarray, temperature: float) -> None:
    mass = answers.mass(torch.from_numpy(row), temperature)
    if not drawable(row):
        assert math.isnan(mass)
        assert math.isnan(reference.mass(torch.from_numpy(row), temperature))
        return
    wide = row.astype(np.float64)
    exact = math.fsum(np.exp((wide - wide.max()) / temperature))
    assert mass == pytest.approx(exact, rel=1e-9)
    assert reference.mass(torch.from_numpy(row), temperature) == pytest.approx(exact, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(row=rows(NEG, NAN))
def test_normalizer_against_fp64(answers: Selection, row: np.ndarray) -> None:
    two = torch.from_numpy(np.stack([row, np.zeros_like(row)]))
    got = answers.normalizer(two)
    assert torch.equal(got.isnan(), torch.tensor([not drawable(row), False]))
    # A sum near 1 is rounded by parts of 2^-53 in each backend, and so is its logarithm: near 0 that is no small share.
    torch.testing.assert_close(got, reference.normalizer(two), rtol=2e-7, atol=1e-14, equal_nan=True)
    assert got[1].item() == pytest.approx(math.log(len(row)), rel=1e-6, abs=1e-12)
    if drawable(row):
        torch.testing.assert_close(got[0].double(), two[0].double().logsumexp(0), rtol=1e-6, atol=1e-6)


# --- draws ---


def test_the_near_noise_keeps_its_bound(kernels: Library) -> None:
    """Over all exponents of u and of 1 - u: both ends in full, and a stride through the rest. A bound that does not
    hold lets a token win that is not the winner, once in some thousand draws."""
    near = kernels.declare("nk_gumbel_near", c_float, c_void_p, c_int64, c_void_p)
    ends = np.arange(2**18)
    words = np.concatenate([ends, 2**32 - 1 - ends, np.arange(0, 2**32, 4099)])
    words = words[: len(words) // 16 * 16].astype(np.uint32)
    out = np.empty(len(words), np.float32)
    bound = near(words.ctypes.data, len(words), out.ctypes.data)
    exact = -np.log(-np.log((words.astype(np.float64) + 0.5) / 2**32))
    assert np.abs(out - exact.astype(np.float32)).max() < bound / 2 < 1e-5


KEY = {"seed": st.integers(0, 2**64 - 1), "position": st.integers(0, 2**40), "stream": st.integers(0, 2**32 - 1)}


@settings(max_examples=60, deadline=None)
@given(row=rows(NEG), temperature=st.sampled_from([1.1e-5, 0.3, 1.0, 100.0]), **KEY)
def test_the_winner_is_among_the_candidates(
    answers: Selection, row: np.ndarray, temperature: float, seed: int, position: int, stream: int
) -> None:
    """By noise and scores of the whole row, as the contract has them."""
    logits = torch.from_numpy(row)
    with np.errstate(over="ignore"):
        scores = row / np.float32(temperature) + gumbel_all(seed, position, len(row), stream)
    few = answers.gumbel_candidates(logits, temperature, seed, position, stream)
    wide = reference.gumbel_candidates(logits, temperature, seed, position, stream)
    if scores.max() == NEG:
        assert len(few) == len(wide) == 0
        return
    assert scores.argmax() in few
    assert set(few) <= set(wide)
    assert (np.diff(few) > 0).all()
    some = np.flatnonzero(np.arange(len(row)) % 3 == seed % 3)
    if len(some) and scores[some].max() > NEG:
        expected = some[scores[some].argmax()]
        for each in (answers, reference):
            assert expected in each.gumbel_candidates(logits, temperature, seed, position, stream, some)


@pytest.mark.parametrize("size", [0.0, 200.0, 300.0, -1e4, 1e6])
def test_near_ties_are_left_to_the_exact_noise(answers: Selection, size: float) -> None:
    """Thousands of scores a rounding apart, which for large logits is more than the error of the noise."""
    for seed in range(10):
        noise = gumbel_all(seed, 3, 5000)
        row = np.float32(size) - noise
        assert (row + noise).argmax() in answers.gumbel_candidates(torch.from_numpy(row), 1.0, seed, 3, 0)


def test_candidates_are_few(answers: Selection) -> None:
    """One that hands out everything would be right, and as slow as numpy."""
    logits = torch.randn(5003, generator=torch.Generator().manual_seed(2))
    counts = [len(answers.gumbel_candidates(logits, 0.7, seed, 5, 0)) for seed in range(200)]
    assert sum(counts) < 210


def test_every_token_of_a_flat_row_wins_by_the_published_generator(answers: Selection) -> None:
    """Lanes, words of a block and counters in their places: the largest word is the largest noise."""
    for seed, size in [(3, 64), (2**63 + 5, 1001), (7, 129)]:
        for position in range(2**32 - 20, 2**32 + 20):
            counter = np.zeros((4, -(-size // 4)), np.uint64)
            counter[0] = np.arange(counter.shape[1])
            counter[1], counter[2], counter[3] = position % 2**32, position >> 32, 9
            words = philox4x32(counter, (seed % 2**32, seed >> 32)).T.reshape(-1)[:size]
            assert words.argmax() in answers.gumbel_candidates(torch.zeros(size), 1.0, seed, position, 9)


@pytest.mark.parametrize("bad", [NAN, np.inf])
@pytest.mark.parametrize("place", [0, 15, 70, 199])
def test_a_row_that_is_not_finite_has_no_candidates(answers: Selection, bad: float, place: int) -> None:
    row = torch.zeros(200)
    row[place] = bad
    for each in (answers, reference):
        assert len(each.gumbel_candidates(row, 1.0, 1, 2, 0)) == 0
        assert len(each.gumbel_candidates(row, 1.0, 1, 2, 0, np.arange(200))) == 0
        assert gumbel_argmax(each, row, 1.0, Noise([1], [2]), 0) == -1


def test_only_rows_that_c_can_read_are_taken(answers: Selection) -> None:
    for row in (torch.zeros(3, dtype=torch.float64), torch.zeros(2, 3), torch.zeros(6)[::2], torch.zeros(0)):
        with pytest.raises(ValueError, match="a row of"):
            answers.argmax(row)
    assert answers.argmax(torch.eye(3)[:, :2][1]) == 1  # a row of a wider tensor


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.1e-5, 0.2, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 0, 1, 7, 100]),
    top_p=st.sampled_from([1.0, 0.0, 0.4, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-7, 0.1]),
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whole_draws_are_those_of_the_reference(answers: Selection, data: st.DataObject) -> None:
    """Token for token, for any mix of rows."""
    size = data.draw(st.sampled_from([5, 100, 1003]))
    samplings = data.draw(st.lists(SAMPLINGS, min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    hidden = torch.randn(len(samplings), size, generator=generator) * data.draw(st.sampled_from([0.5, 4.0]))
    drawn = [
        draw(dense_head(torch.eye(size), answers=each), hidden, [Row(s, 11, i, None) for i, s in enumerate(samplings)])
        for each in (answers, reference)
    ]
    assert drawn[0] == drawn[1]
