"""The fixed texts: the ones that data/README.md describes, and cut into windows that follow each other."""

import hashlib
import re
from pathlib import Path

import pytest

from nanokit.errors import ParameterError
from nanokit.lab.quality.texts import cut, text_ids, text_names, text_path
from nanokit.model.load import open_model
from nanokit.paths import data_dir

LISTED = dict(
    reversed(line.split())
    for line in (data_dir() / "README.md").read_text("utf-8").splitlines()
    if re.fullmatch(r"[0-9a-f]{64}  \S+", line)
)


def test_texts_are_the_recorded_ones() -> None:
    """A text that was edited, or checked out with other line ends, would change every figure measured on it."""
    found = {f"texts/{name}.txt" for name in text_names()}
    assert found == {name for name in LISTED if name.startswith("texts/")}
    for name in found:
        assert hashlib.sha256((data_dir() / name).read_bytes()).hexdigest() == LISTED[name], name


@pytest.mark.model
def test_token_counts_are_the_recorded_ones(default_model: Path) -> None:
    """The table's counts, and the least that the evaluation and calibration texts must have."""
    tokenizer = open_model(default_model).tokenizer
    counts = {name: len(text_ids(tokenizer, name)) for name in text_names()}
    table = (data_dir() / "README.md").read_text("utf-8")
    for name, count in counts.items():
        assert re.search(rf"\| `texts/{name}.txt` \|[^|]*\| {count} \|", table), (name, count)
    assert counts["evaluation"] >= 10_000
    assert counts["calibration"] >= 8_000
    assert min(counts["arithmetic"], counts["code"]) >= 1_500


def test_windows_follow_each_other_and_begin_as_the_model_wants() -> None:
    """A gap, an overlap, or a beginning that makes windows longer would score other tokens than said."""
    ids = list(range(100, 140))
    assert cut(ids, 3, 10, []) == [ids[:10], ids[10:20], ids[20:30]]
    windows = cut(ids, 2, 10, [1])
    assert windows == [[1, *ids[:9]], [1, *ids[9:18]]]
    assert len(cut(ids, 4, 10, [])) == 4


@pytest.mark.parametrize(
    ("windows", "length", "words"), [(5, 10, "too short"), (0, 10, "cannot be scored"), (1, 3, "cannot be scored")]
)
def test_windows_that_cannot_be_cut_are_refused(windows: int, length: int, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        cut(list(range(40)), windows, length, [])


def test_an_unknown_text_lists_the_known_ones() -> None:
    with pytest.raises(ParameterError, match="evaluation"):
        text_path("wikitext")
