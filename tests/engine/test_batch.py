"""The check of a batch: each thing that would let a kernel touch foreign memory or a foreign page is
refused."""

import dataclasses

import pytest

from nanokit.model.batch import Batch

GOOD = Batch([5, 6, 7, 8], [3, 1, 0], [3, 5, 4], [[4], [0, 1], [0]])


def test_a_good_batch_passes_with_a_shared_page_that_is_only_read():
    GOOD.check(vocab_size=9, num_blocks=5, block_size=4)
    Batch([], [], [], []).check(vocab_size=9, num_blocks=5, block_size=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lens": [3, 1]}, "2 query lengths"),
        ({"query_lens": [3, 2, 0]}, "sum to 5"),
        ({"token_ids": [5, 6, 7, 9]}, "token id lies outside"),
        ({"token_ids": [5, -6, 7, 8]}, "token id lies outside"),
        ({"block_tables": [[5], [0, 1], [0]]}, "block id lies outside"),
        ({"block_tables": [[-1], [0, 1], [0]]}, "block id lies outside"),
        ({"kv_lens": [2, 5, 4]}, "3 new tokens in a context of 2"),
        ({"kv_lens": [3, 9, 4]}, "2 blocks of 4 for a context of 9"),
        ({"block_tables": [[4], [0, 1], [1]]}, "which another row also holds"),
        ({"block_tables": [[1], [0, 1], [0]]}, "which another row also holds"),
    ],
)
def test_a_bad_batch_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GOOD, **change).check(vocab_size=9, num_blocks=5, block_size=4)
