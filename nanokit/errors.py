"""Errors that a person can act on.

Every failure that the kit foresees is a `NanokitError`: what was wrong, what was found, what was needed and what
to do. The command line prints it without a traceback and exits with `exit_code`; a panel shows it as text; a
notebook shows it as any exception. A plain `ValueError` with one sentence was rejected: the three questions a
person asks next ("what did it see?", "what did it want?", "what now?") went unanswered half of the time.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class NanokitError(Exception):
    """A foreseen failure.

    what: one sentence without a full stop; found/needed/do: short phrases, left out of the message when None.
    """

    exit_code = 1

    def __init__(self, what: str, *, found: object = None, needed: object = None, do: str | None = None) -> None:
        self.what, self.found, self.needed, self.do = what, found, needed, do
        lines = [what]
        for label, value in (("found", found), ("needed", needed), ("do", do)):
            if value is not None:
                lines.append(f"  {label}: {value}")
        super().__init__("\n".join(lines))


class ModelFileError(NanokitError):
    """A model file or directory is missing, truncated, corrupt, foreign or of an unsupported kind."""


class UnsupportedModelError(ModelFileError):
    """A model that may well be sound, of a kind that the kit does not run."""


class TokenizerError(NanokitError):
    """A tokenizer cannot be built, or a text cannot be encoded or rendered through the chat template."""


class FetchError(NanokitError):
    """The default model could not be downloaded, checked or stored."""


class MemoryBudgetError(NanokitError):
    """Weights and KV pages would not fit into the memory that is free or allowed."""


class ParameterError(NanokitError, ValueError):
    """A parameter, option or configuration key is unknown, of the wrong type or out of range."""

    exit_code = 2


class RequestError(NanokitError, ValueError):
    """A generation request cannot be served: empty, longer than the context, or larger than the pool."""

    exit_code = 2


class NotebookRunError(NanokitError):
    """A notebook did not run to its end; the executed copy and a record of the failure were written."""


@contextmanager
def naming(model: str) -> Iterator[None]:
    """A refusal inside names the model: a session may load several, and the fault lies deep in one of them."""
    try:
        yield
    except (ModelFileError, TokenizerError) as error:
        if model in error.what:
            raise
        raise type(error)(f"{model}: {error.what}", found=error.found, needed=error.needed, do=error.do) from error
