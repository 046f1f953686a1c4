"""Text <-> token ids, the same whether the model came as a GGUF file or as a directory.

The ids are those of the model's own tokenizer.json, special tokens in the text included. Decoding is the
UTF-8 of the tokens' joined bytes, with U+FFFD for what is broken; `StreamDecoder` follows the same rule token
by token, so its pieces always add up to `decode`. On valid text that is what transformers gives. Where a run
of SentencePiece byte tokens is broken, the `tokenizers` decoder turns *every* byte of the run into U+FFFD;
here the whole characters survive, because a stream has shown them already. Cleaning up spaces after decoding
is not done.
"""

import codecs
import operator
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from nanokit.errors import TokenizerError
from nanokit.model.tokenizer_parts import Pieces, TokenizerParts

if TYPE_CHECKING:
    from nanokit.model.chat import ChatTemplate


class Tokenizer:
    """Encode, decode, stream and render chats for one model.

    Attributes: `vocab_size` (one more than the largest id), `bos_id`, `eos_ids` (every id that ends a
    generation), `add_bos` (whether `encode` puts BOS first), `chat_template` (its source, or None), `parts` (what it
    is made of).
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self.parts = parts
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.chat_template = parts.chat_template
        self._backend = parts.backend
        self._special_texts = parts.special_texts
        self._pieces = Pieces(parts.backend)
        self._padded_size = parts.vocab_size
        self._chat: ChatTemplate | None = None
        self.add_bos = parts.bos_id is not None and parts.backend.encode("").ids[:1] == [parts.bos_id]

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From a GGUF file's metadata. Raises TokenizerError for a broken or unsupported vocabulary."""
        from nanokit.model.tokenizer_gguf import read_gguf

        return cls(read_gguf(metadata))

    @classmethod
    def from_directory(cls, path: str | PathLike[str]) -> "Tokenizer":
        """From a directory with a tokenizer.json. Raises TokenizerError when it is missing or broken."""
        from nanokit.model.tokenizer_directory import read_directory

        return cls(read_directory(path))

    def pad_to(self, size: int) -> None:
        """Accept ids below `size` that stand for no token, as empty text: a model whose embedding is padded beyond
        the vocabulary may draw one."""
        self._padded_size = max(size, self.vocab_size)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`; special tokens in it are parsed. `add_special` adds BOS where the model does.

        Raises TokenizerError for a text that is not valid Unicode (a lone surrogate), or not text at all.
        """
        if not isinstance(text, str):
            raise TokenizerError(
                "only text can be encoded",
                found=type(text).__name__,
                needed="str",
                do="decode bytes as UTF-8 first",
            )
        try:
            text.encode()  # the library would only say that this is not a str
        except UnicodeEncodeError as error:
            raise TokenizerError(
                "the text is not valid Unicode",
                found=f"a lone surrogate, U+{ord(text[error.start]):04X}, at position {error.start}",
                needed="text that can be written as UTF-8",
                do="pass the text as UTF-8, or drop what is broken in it",
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; special tokens are left out unless `skip_special` is False.

        Raises TokenizerError naming an id that the vocabulary does not hold.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream(self, *, skip_special: bool = True) -> "StreamDecoder":
        """A decoder for one text that arrives token by token."""
        return StreamDecoder(self._pieces, self._padded_size, skip_special=skip_special)

    def chat_text(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The messages (`role` and `content` each) as the model's chat template writes them.

        Raises TokenizerError when there is no template, when it fails, or when a message is not what it
        should be.
        """
        if self._chat is None:
            if self.chat_template is None:
                raise TokenizerError(
                    "this model has no chat template",
                    needed="an instruction-tuned model whose files carry one",
                    do="give the model a plain prompt instead of messages",
                )
            from nanokit.model.chat import ChatTemplate

            self._chat = ChatTemplate(self.chat_template)
        return self._chat.render(
            messages, add_generation_prompt=add_generation_prompt, special_texts=self._special_texts
        )

    def chat_ids(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of `chat_text`. The template writes BOS where the model wants it; none is added here."""
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special=False)


class StreamDecoder:
    """Whole characters of one text as its tokens arrive, O(1) each; joined they equal `Tokenizer.decode`."""

    def __init__(self, pieces: Pieces, size: int, *, skip_special: bool) -> None:
        self._pieces, self._size, self._skip_special = pieces, size, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = pieces.strips_first_space

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes, if any. Raises TokenizerError for an unknown id."""
        index = operator.index(token_id)
        piece = self._pieces.bytes_of(index)
        if piece is None:
            if 0 <= index < self._size:
                return ""
            raise TokenizerError(
                "a token id is outside of the vocabulary",
                found=index,
                needed=f"an id of the tokenizer's vocabulary, whose size is {self._size}",
                do="check that the ids come from this model's tokenizer",
            )
        if self._skip_special and self._pieces.is_special(index):
            return ""
        return self._emit(self._utf8.decode(piece))

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for a character that was cut off, else nothing."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
