"""The head's questions and edits, against transformers and against plain arithmetic over all logits."""

import numpy as np
import pytest
import torch
from dense_head import dense_head
from transformers import RepetitionPenaltyLogitsProcessor

from nanokit.engine.noise import Noise, gumbel_all
from nanokit.model.head import Edit, FullHead

VOCAB = 50


@pytest.fixture
def head() -> FullHead:
    torch.manual_seed(3)
    return dense_head(torch.randn(VOCAB, 8), torch.randn(VOCAB))


def test_the_repetition_penalty_is_that_of_transformers(head: FullHead) -> None:
    """Divided where positive, multiplied where negative, once for an id however often it was seen."""
    hidden, seen = torch.randn(3, 8), [[4, 4, 9], [0, 49, 17], [5, 6, 7]]
    logits = head.logits(hidden)
    assert logits.min() < 0 < logits.max()
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(seen), logits)
    got = head.logits(hidden, edits=[Edit(penalized=tuple(ids), penalty=1.7) for ids in seen])
    assert torch.equal(got, expected)
    assert not torch.equal(got, logits)


def test_edits_touch_their_own_row_only(head: FullHead) -> None:
    hidden = torch.randn(3, 8)
    plain = head.logits(hidden)
    edited = head.logits(hidden, edits=[None, Edit(penalized=(1,), penalty=2.0, masked=(1, 2)), None])
    assert torch.equal(edited[[0, 2]], plain[[0, 2]])
    assert torch.isneginf(edited[1]).nonzero().flatten().tolist() == [1, 2]


def test_edits_for_other_rows_than_there_are_are_an_error(head: FullHead) -> None:
    """A short list would leave the last rows unedited, unseen."""
    with pytest.raises(ValueError, match="shorter"):
        head.argmax(torch.randn(2, 8), edits=[Edit(masked=(1,))])


def test_logits_of_given_ids_are_columns_of_all(head: FullHead) -> None:
    """Order and repeats of the ids kept, edits found by id and not by column."""
    hidden, ids = torch.randn(2, 8), torch.tensor([7, 3, 49, 3])
    edits = [Edit(penalized=(3, 8), penalty=1.5, masked=(49,)), None]
    torch.testing.assert_close(head.logits(hidden, ids, edits), head.logits(hidden, edits=edits)[:, ids])


def test_equal_logits_go_to_the_lowest_id() -> None:
    head = dense_head(torch.ones(VOCAB, 4))
    assert head.argmax(torch.ones(2, 4)).tolist() == [0, 0]
    assert head.argmax(torch.ones(1, 4), edits=[Edit(masked=(0, 1))]).tolist() == [2]


def test_probabilities_against_fp64(head: FullHead) -> None:
    hidden = torch.randn(4, 8) * 5
    edits = [Edit(masked=(3, 4)), None, Edit(penalized=(1,), penalty=3.0), None]
    wide = head.logits(hidden, edits=edits).double()
    torch.testing.assert_close(head.normalizer(hidden, edits).double(), wide.logsumexp(-1), rtol=1e-6, atol=1e-5)
    ids, logprobs = head.logprobs(hidden, 5, edits)
    expected = wide.log_softmax(-1).sort(dim=-1, descending=True)
    assert torch.equal(ids, expected.indices[:, :5])
    torch.testing.assert_close(logprobs.double(), expected.values[:, :5], rtol=1e-5, atol=1e-5)


def test_a_draw_is_the_argmax_with_the_noise_of_its_own_row(head: FullHead) -> None:
    """Noise by row: a draw with a neighbour's seed or position would still look random."""
    hidden, temperatures = torch.randn(4, 8), [0.3, 1.0, 1.0, 7.0]
    edits = [None, Edit(masked=tuple(range(40))), None, Edit(penalized=(1,), penalty=3.0)]
    logits = head.logits(hidden, edits=edits).numpy()
    drawn = set()
    for start in range(50):
        seeds, positions = [start, start, 2**64 - 1 - start, 5], [3, 4, 5, start + 2**33]
        expected = [
            int((row / np.float32(t) + gumbel_all(seed, position, VOCAB)).argmax())
            for row, t, seed, position in zip(logits, temperatures, seeds, positions, strict=True)
        ]
        assert head.gumbel(hidden, temperatures, Noise(seeds, positions), edits).tolist() == expected
        drawn.update(expected)
    assert len(drawn) > 20


def test_a_row_without_a_drawable_token_is_minus_one_and_alone(head: FullHead) -> None:
    """A caller that took any id would draw a token that is masked."""
    edits = [None, Edit(masked=tuple(range(VOCAB)))]
    hidden = torch.randn(2, 8)
    best = int(head.argmax(hidden)[0])
    assert head.argmax(hidden, edits).tolist() == [best, -1]
    assert [int(x) >= 0 for x in head.gumbel(hidden, [1.0, 1.0], Noise([1, 2], [3, 4]), edits)] == [True, False]
