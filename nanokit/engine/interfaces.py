"""What the engine needs of the floors below it: three small protocols and nothing else of a model.

They live here, on the floor that calls them, so that a scripted model of twenty lines can drive the whole
engine in a test, and a researcher's own model or tokenizer needs no base class.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from nanokit.model.batch import Batch
from nanokit.model.head import Head


class CausalModel(Protocol):
    """Trunk and head. `kv` is whatever the model's own KV store is; the engine only passes it through."""

    vocab_size: int
    activations: str

    @property
    def head(self) -> Head:
        """The output head."""
        ...

    def in_mode(self, mode: str) -> "CausalModel":
        """The same weights with the inputs of products kept in another activation mode than `activations`, the model's
        own. Asked for in every step that needs it, so it is kept; raises ParameterError for a mode that it cannot run.
        """
        ...

    def forward(self, batch: Batch, kv: Any) -> Tensor:
        """Write the KV of the batch's tokens into their blocks and return hidden states after the final norm,
        [sum(query_lens), hidden_size], in the order of `batch.token_ids`."""
        ...


class StreamDecoder(Protocol):
    """Turns ids into text one at a time, giving out whole characters only."""

    def push(self, token_id: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is left, an incomplete character as U+FFFD."""
        ...


class TextTokenizer(Protocol):
    """See nanokit.model.tokenizer.Tokenizer."""

    eos_ids: tuple[int, ...]
    chat_template: str | None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text."""
        ...

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation through the model's chat template, ready for the answer."""
        ...

    def stream(self) -> StreamDecoder:
        """A fresh decoder."""
        ...
