"""The fixed texts in data/texts, cut into windows.

A window stands alone: the model sees nothing before it, and only its second half is scored, so that every scored token
has at least half a window of context. Windows follow each other in the text without a gap and without overlap.
Rejected: a sliding window, which scores every token with full context and computes everything twice.
"""

from pathlib import Path

from nanokit.errors import ParameterError
from nanokit.model.tokenizer import Tokenizer
from nanokit.paths import data_dir

WINDOW = 512  # tokens; with the second half scored the convention of llama.cpp's perplexity tool, for comparison


def text_names() -> list[str]:
    """What `text` may be: the names of the files in data/texts, without their ending."""
    return sorted(path.stem for path in (data_dir() / "texts").glob("*.txt"))


def text_path(name: str) -> Path:
    """The file of a text. Raises ParameterError for a name that is none of `text_names`."""
    if name not in text_names():
        raise ParameterError("unknown text", found=repr(name), needed="one of " + ", ".join(text_names()))
    return data_dir() / "texts" / f"{name}.txt"


def text_ids(tokenizer: Tokenizer, name: str) -> list[int]:
    """All tokens of a text, without special ones. Raises ParameterError for an unknown name."""
    return tokenizer.encode(text_path(name).read_text("utf-8"), add_special=False)


def cut(ids: list[int], windows: int, length: int, prefix: list[int], name: str = "the text") -> list[list[int]]:
    """The first `windows` windows of `length` tokens. prefix: what every window begins with (a model's
    beginning-of-sequence token, or nothing), counted in its length. Raises ParameterError for a text too short, and
    for windows without a second half."""
    fresh = length - len(prefix)
    if length < 4 or fresh < 2 or windows < 1:
        raise ParameterError(
            "windows cannot be scored", found=f"{windows} of {length} tokens", needed="at least 1 of at least 4 tokens"
        )
    if windows * fresh > len(ids):
        raise ParameterError(
            f"{name} is too short",
            found=f"{len(ids)} tokens",
            needed=f"{windows * fresh} for {windows} windows of {length}",
            do=f"use at most {len(ids) // fresh} windows of this length, or a shorter length",
        )
    return [prefix + ids[at : at + fresh] for at in range(0, windows * fresh, fresh)]
