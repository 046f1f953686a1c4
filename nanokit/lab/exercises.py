"""Exercises with a check: the reader's own number, compared with what the run measured."""

import math
from typing import Any


def check(answer: Any, expected: float, hint: str, *, tolerance: float = 0.02) -> None:
    """Say whether `answer` is right to within the relative tolerance; None means not yet answered.

    expected: from the run's own Result, never typed in. Prints one line; a wrong answer gets the hint, not the
    solution.
    """
    try:
        number = None if answer is None else float(answer)
    except (TypeError, ValueError):
        number = math.nan
    if number is None:
        text = f"No answer yet. Hint: {hint}"
    elif math.isnan(number):
        text = f"Not yet: {answer!r} is no number. Hint: {hint}"
    elif abs(number - expected) <= tolerance * abs(expected):
        text = "Right."
    else:
        shown = f"{number:g}" if tolerance else repr(number)
        text = f"Not yet: {shown} is too {'large' if number > expected else 'small'}. Hint: {hint}"
    print(text)  # noqa: T201 - a cell's output is what this function is for
