"""What a reader is told of an answer."""

import numpy as np
import pytest
import torch

from nanokit.lab.exercises import check


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "No answer yet"),
        (2.0, "Right"),
        (np.float32(2), "Right"),
        (torch.tensor(2.0), "Right"),
        (3, "3 is too large"),
        ("two", "'two' is no number"),
        ([2.0], "is no number"),
        (float("nan"), "nan is no number"),
    ],
)
def test_every_answer_gets_a_sentence(answer: object, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Text or a list in the cell ended in a traceback, and NaN was too small."""
    check(answer, 2.0, "half of four")
    assert told in capsys.readouterr().out


def test_an_answer_to_the_last_bit_is_shown_to_the_last_bit(capsys: pytest.CaptureFixture[str]) -> None:
    """Digits copied from a table are too few, and that must be visible."""
    check(3.1819582, 3.18195819854736, "all digits", tolerance=0)
    assert "3.1819582 is too large" in capsys.readouterr().out
