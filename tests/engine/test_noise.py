"""Counter-based noise: the published generator, the right distribution, the same number whoever asks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokit.engine.noise import Noise, gumbel_all, gumbel_of, philox4x32

# Random123 1.14, tests/kat_vectors: philox4x32 10: counter, key, expected.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, expected):
    got = philox4x32(np.array(counter, np.uint64)[:, None], (key[0], key[1]))
    assert got[:, 0].tolist() == expected


def test_philox_is_elementwise():
    counters = np.array([counter for counter, _, _ in KNOWN], np.uint64).T
    together = philox4x32(counters, (5, 6))
    for column in range(3):
        alone = philox4x32(counters[:, column : column + 1], (5, 6))
        assert (together[:, column] == alone[:, 0]).all()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 998), min_size=1, max_size=40))
def test_noise_of_a_few_tokens_is_the_noise_of_all(seed, position, tokens):
    """A filtered draw asks for survivors only, a verifier for one token: each must see the same number."""
    ids = np.array(tokens)
    assert (gumbel_of(seed, position, ids) == gumbel_all(seed, position, 999)[ids]).all()
    noise = Noise([5, seed], [6, position])
    assert (noise.of(1, ids) == gumbel_of(*noise.key(1)[:2], ids)).all()
    assert noise.key(1) == (seed, position, 0)


def test_every_part_of_the_key_matters():
    base = gumbel_all(1, 1, 100)
    for seed, position, stream in [(2, 1, 0), (1 + 2**32, 1, 0), (1, 2, 0), (1, 1 + 2**32, 0), (1, 1, 1)]:
        assert (gumbel_all(seed, position, 100, stream) != base).all()


def test_noise_is_finite_and_standard_gumbel():
    """Mean is Euler's constant, variance pi^2/6; over a million draws both to within five standard errors."""
    draws = np.concatenate([gumbel_all(3, position, 50_000) for position in range(20)]).astype(float)
    assert np.isfinite(draws).all()
    assert abs(draws.mean() - np.euler_gamma) < 5 * np.sqrt(np.pi**2 / 6 / len(draws))
    assert abs(draws.var() - np.pi**2 / 6) < 0.02
    assert np.corrcoef(draws[:-1], draws[1:])[0, 1] == pytest.approx(0, abs=0.005)


def test_the_extreme_words_stay_finite():
    """u = 0 or 1 would give infinite noise, which wins or loses against every logit."""
    from nanokit.engine.noise import _gumbel

    edges = _gumbel(np.array([0, 2**32 - 1], np.uint64))
    assert np.isfinite(edges).all()
    assert edges[0] < -3 < 22 < edges[1] < 26
