"""Drawing: transformers' processors as the oracle for what is kept, chi-square for how often it is drawn."""

import numpy as np
import pytest
import torch
from dense_head import dense_head
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanokit.engine import sampler
from nanokit.engine.sampler import Row, draw
from nanokit.engine.sampling import Sampling
from nanokit.errors import NanokitError
from nanokit.kernels import selection
from nanokit.kernels.selection import largest
from nanokit.model.head import Edit

NEG = -np.inf


def kept(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    return sampler.kept(logits, sampling, selection)


def logits_of(probabilities) -> torch.Tensor:
    with np.errstate(divide="ignore"):
        return torch.tensor(np.log(probabilities), dtype=torch.float32)


def keep(probabilities, **settings) -> list[int]:
    return kept(logits_of(probabilities), Sampling(**{"temperature": 1.0, **settings})).tolist()


def draw_one(logits, sampling: Sampling, *, seed: int = 1, position: int = 3, edit: Edit | None = None):
    """One row through a head whose matrix is the identity, so that hidden states are logits."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return draw(dense_head(torch.eye(len(logits))), logits[None], [Row(sampling, seed, position, edit)])[0]


# --- what is kept ---


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    """transformers #18976: a sum of exactly p; #19839: p = 0 gave NaN."""
    p = [0.5, 0.3, 0.2]
    assert keep(p, top_p=0.8) == [0, 1]
    assert keep(p, top_p=0.8 + 1e-4) == [0, 1, 2]
    assert keep(p, top_p=0.5) == [0]
    assert keep([0.4, 0.3, 0.2, 0.1], top_p=0.4) == [0]  # in fp32 the first comes out a little below .4
    assert keep(p, top_p=0.0) == keep(p, top_p=1e-9) == [0]
    assert keep(p, top_p=1.0) == [0, 1, 2]


def test_top_p_one_keeps_even_what_rounds_to_nothing():
    logits = torch.tensor([0.0, -200.0, -90.0])
    assert kept(logits, Sampling(temperature=1.0)).tolist() == [0, 1, 2]


def test_top_k_keeps_exactly_k_and_the_lowest_of_equals():
    """flashinfer #3774: ties at the edge."""
    assert keep([0.4, 0.3, 0.3, 0.0], top_k=2) == [0, 1]
    assert keep([0.2, 0.4, 0.2, 0.2], top_k=3) == [0, 1, 2]
    assert keep([0.25] * 4, top_k=1) == [0]
    assert keep([0.25] * 4, top_k=9) == [0, 1, 2, 3]


def test_top_p_ties_go_to_the_lowest_id():
    assert keep([0.25] * 4, top_p=0.5) == [0, 1]
    assert keep([1 / 1000] * 1000, top_p=0.25) == list(range(250))


def test_top_p_is_a_share_of_what_top_k_left():
    """mlx-lm #388: with top_k first and the sums not normalised again, everything could be masked."""
    assert keep([0.3, 0.3, 0.2, 0.2], top_k=2, top_p=0.6) == [0, 1]
    assert keep([0.4, 0.2, 0.2, 0.2], top_k=2, top_p=0.6) == [0]


def test_masked_tokens_are_never_kept():
    for filters in ({"top_k": 3}, {"top_p": 0.9999}, {"min_p": 0.0, "top_p": 1.0}, {"min_p": 1e-9}):
        assert keep([0.0, 1.0, 0.0, 0.0], **filters) == [1]


def test_top_p_widens_its_look_until_it_has_enough():
    """A flat distribution needs more candidates than the first look takes."""
    p = np.full(5000, 1 / 5000)
    assert len(keep(p, top_p=0.9)) == 4500
    assert len(keep(p, top_p=0.999)) == 4995


ROW = st.lists(st.integers(-4000, 4000), min_size=1, max_size=300, unique=True)


@settings(deadline=None)
@given(
    ROW,
    st.floats(0.1, 3.0),
    st.integers(0, 320),
    st.sampled_from([0.0, 1e-9, 0.3, 0.8, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_what_is_kept_is_what_transformers_keeps(values, temperature, top_k, top_p, min_p):
    """All logits different, and no edge within rounding of a threshold."""
    logits = torch.tensor(values, dtype=torch.float32) / 250
    scores = TemperatureLogitsWarper(temperature)(None, logits[None].clone())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    probs = np.sort(torch.softmax(scores.double(), -1).numpy()[0])[::-1]
    assume((np.abs(np.cumsum(probs)[:-1] - top_p) > 1e-5).all() or top_p in (0.0, 1.0))
    assume((np.abs(probs / probs[0] - min_p)[1:] > 1e-5).all() or min_p == 0.0)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0.0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    expected = torch.nonzero(scores[0] > NEG).flatten().tolist()
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept(logits, sampling).tolist() == expected


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, -np.inf]), min_size=1, max_size=60), st.integers(1, 70))
def test_largest_is_a_stable_sort(values, count):
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert largest(torch.tensor(values, dtype=torch.float32), count).tolist() == order


# --- which token is drawn ---


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-9, 1e-6])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_tiny_temperature_is_greedy_without_nan(temperature, filters):
    logits = torch.tensor([3.0, 3.001, -5.0, 80.0, 79.999])
    for seed in range(50):
        assert draw_one(logits, Sampling(temperature=temperature, **filters), seed=seed) == 3


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_small_temperature_on_large_logits_is_finite(filters):
    """Just above the greedy threshold, logits / T reaches ten million in fp32."""
    logits = torch.tensor([100.0, 99.0, -100.0])
    assert draw_one(logits, Sampling(temperature=1.1e-5, **filters)) == 0


def test_greedy_takes_the_lowest_of_equals():
    assert draw_one([1.0, 5.0, 5.0], Sampling()) == 1
    assert draw_one([1.0, 5.0, 5.0], Sampling(temperature=1.0, top_k=1)) == 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5)])
def test_all_but_one_masked_leaves_that_one(sampling):
    edit = Edit(masked=tuple(i for i in range(9) if i != 4))
    assert {draw_one(torch.zeros(9), sampling, seed=s, edit=edit) for s in range(20)} == {4}


def test_no_token_left_is_a_clear_error():
    error = draw_one([NEG] * 3, Sampling(temperature=1.0, top_p=0.5), edit=None)
    assert isinstance(error, NanokitError)
    edit = Edit(masked=(0, 1, 2))
    for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5)):
        error = draw_one([0.0] * 3, sampling, edit=edit)
        assert isinstance(error, NanokitError)
        assert "suppress" in str(error)


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
def test_logits_that_overflow_fail_their_row_alone(sampling):
    """The hidden state is finite, the product is not."""
    head = dense_head(torch.eye(3) * 1e38)
    rows = [Row(Sampling(temperature=1.0, **sampling), 1, 0, None)] * 2
    good, error = draw(head, torch.tensor([[0.0, 1e-30, 0.0], [0.0, 1.0, 10.0]]), rows)
    assert good == 1
    assert isinstance(error, NanokitError)
    assert "not a number" in str(error)


def test_a_step_asks_the_head_once(monkeypatch):
    """Rows of several kinds: the head matrix is a third of what a step reads."""
    head, asked = dense_head(torch.eye(5)), []
    for name in ("logits", "argmax"):
        real = getattr(head._product, name)
        monkeypatch.setattr(head._product, name, lambda *a, name=name, real=real: asked.append(name) or real(*a))
    kinds = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}]
    draw(head, torch.rand(3, 5), [Row(Sampling(**kind), 1, 0, None) for kind in kinds])
    assert asked == ["logits"]
    draw(head, torch.rand(2, 5), [Row(Sampling(), 1, 0, None)] * 2)
    assert asked == ["logits", "argmax", "logits"]  # Dense.argmax itself asks for logits


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(sampling, bad):
    hidden = torch.tensor([[0.0, 9.0, 0.0], [0.0, bad, 1.0]])
    rows = [Row(Sampling(), 1, 0, None), Row(sampling, 1, 0, None)]
    good, error = draw(dense_head(torch.eye(3)), hidden, rows)
    assert good == 1
    assert isinstance(error, NanokitError)
    assert "not a number" in str(error)


def test_rows_of_every_kind_draw_together_what_they_draw_alone():
    """Partitioning must put every token back into its own row."""
    torch.manual_seed(0)
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 2.0, "top_k": 5}]
    rows = [
        Row(Sampling(**kinds[i % 4]), seed=i, position=10 * i, edit=Edit(masked=(i,)) if i % 3 else None)
        for i in range(23)
    ]
    hidden = torch.randn(23, 50)
    head = dense_head(torch.eye(50))
    together = draw(head, hidden, rows)
    alone = [draw(head, hidden[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    assert draw(head, hidden.flip(0), rows[::-1]) == alone[::-1]


def test_a_filter_that_drops_nothing_changes_nothing():
    """The filtered path must use the same noise and the same arithmetic as the pure one."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5))
    for seed in range(40):
        pure = draw_one(logits, Sampling(temperature=0.9), seed=seed)
        assert draw_one(logits, Sampling(temperature=0.9, top_k=300), seed=seed) == pure
        assert draw_one(logits, Sampling(temperature=0.9, min_p=1e-12), seed=seed) == pure


def test_the_repetition_penalty_is_transformers():
    logits = torch.tensor([2.0, -1.0, 1.5, 0.5, 3.0])
    seen = (0, 1, 4)
    expected = RepetitionPenaltyLogitsProcessor(2.5)(torch.tensor([seen]), logits[None].clone())[0]
    got = dense_head(torch.eye(5)).logits(logits[None], edits=[Edit(seen, 2.5)])[0]
    torch.testing.assert_close(got, expected)
    assert draw_one(logits, Sampling(), edit=Edit(seen, 2.5)) == int(expected.argmax()) == 2


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 4},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.15},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", [1, 2**40 + 3])
def test_tokens_are_drawn_as_often_as_the_filtered_distribution_says(case, seed):
    """Chi-square over 4,000 positions with fixed seeds; the bound is exceeded by chance once in 10^5."""
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, 1.1, -3.0, 0.0, 0.9])
    sampling = Sampling(**case)
    survivors = kept(logits, sampling)
    weight = np.exp((logits.numpy().astype(float)[survivors]) / sampling.temperature)
    expected = np.zeros(8)
    expected[survivors] = weight / weight.sum()
    count = 4000
    head = dense_head(torch.eye(8))
    drawn = draw(head, logits.expand(count, 8), [Row(sampling, seed, i, None) for i in range(count)])
    observed = np.bincount(drawn, minlength=8)
    assert observed[expected == 0].sum() == 0
    used = expected > 0
    chi2 = ((observed - count * expected)[used] ** 2 / (count * expected)[used]).sum()
    freedom = used.sum() - 1
    assert chi2 < freedom + 4.5 * np.sqrt(2 * freedom) + 10


@settings(deadline=None, max_examples=50)
@example(seed=0, position=2**33)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**20))
def test_a_draw_is_repeatable(seed, position):
    logits = torch.linspace(0, 1, 100)
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)):
        first = draw_one(logits, sampling, seed=seed, position=position)
        assert draw_one(logits, sampling, seed=seed, position=position) == first


def test_draws_at_different_positions_and_seeds_differ():
    """N samples that share their first token: fixed in nanochat with a test like this."""
    flat = torch.zeros(1000)
    assert len({draw_one(flat, Sampling(temperature=1.0), seed=s) for s in range(16)}) > 12
    assert len({draw_one(flat, Sampling(temperature=1.0), position=p) for p in range(16)}) > 12
