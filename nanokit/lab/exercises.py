"""Exercises with a check: the reader's own number, compared with what the run measured."""


def check(answer: float | None, expected: float, hint: str, *, tolerance: float = 0.02) -> None:
    """Say whether `answer` is right to within the relative tolerance; None means not yet answered.

    expected: from the run's own Result, never typed in. Prints one line; a wrong answer gets the hint, not the
    solution.
    """
    if answer is None:
        text = f"No answer yet. Hint: {hint}"
    elif abs(answer - expected) <= tolerance * abs(expected):
        text = "Right."
    else:
        text = f"Not yet: {answer:g} is too {'large' if answer > expected else 'small'}. Hint: {hint}"
    print(text)  # noqa: T201 - a cell's output is what this function is for
