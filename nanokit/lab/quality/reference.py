"""What a quantized model is compared with: the same file in fp32 activations and fp32 KV pages.

The torch reference backend computes it, as transformers would. Its *weights* are those of the file, dequantized: for a
4-bit file the reference is 4-bit. So a figure here says what a further step costs, not what quantizing cost at all.

Memory. A reference keeps the hidden states of its scored tokens (2.3 kB each for the default model) and the head's
matrix (113 MB), not logits (197 kB a token): the logits of a few rows are multiplied out again where they are compared,
which takes less time than comparing them. The layers are dropped once the windows have run. Two references are kept.
Rejected: logits in memory, whose full preset would take gigabytes, and logits on disk, which read no faster.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanokit.errors import ParameterError
from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.lab.quality.passes import Pass, hidden_states
from nanokit.lab.quality.texts import WINDOW, cut, text_ids
from nanokit.model import memory
from nanokit.model.config import override_rope
from nanokit.model.load import open_model
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.transformer import OpenedModel, Transformer

SMALL_CHUNK = 48  # tokens; neither a divisor nor a multiple of a page


@dataclass(frozen=True)
class Reference:
    """The reference's output on windows of a text.

    model, text: their names. windows: token ids, all of one length. hidden: of each window the states from which its
    second half is predicted, fp32 [scored, hidden_size]; hidden[w][i] predicts token `first + i` of window w.
    again: the states of window 0 computed once more, in small chunks: what nothing but another order of summation does.
    head: fp32 matrix [vocab_size, hidden_size] and bias or None.
    """

    model: str
    text: str
    windows: list[list[int]]
    hidden: list[Tensor] = field(repr=False)
    again: Tensor = field(repr=False)
    head: tuple[Tensor, Tensor | None] = field(repr=False)

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return len(self.windows[0])

    @property
    def first(self) -> int:
        """The first scored token of a window: every token from here on is predicted from all before it."""
        return self.length // 2

    @property
    def scored(self) -> int:
        """Scored tokens of all windows."""
        return len(self.windows) * (self.length - self.first)

    @property
    def name(self) -> str:
        """The sentence that goes with every figure: what it is compared with, on what."""
        return (
            f"{self.model}, its stored weights with fp32 activations and fp32 KV pages; {self.text}.txt, "
            f"{len(self.windows)} windows of {self.length} tokens, second half scored ({self.scored} tokens)"
        )

    def logits(self, window: int, rows: slice) -> Tensor:
        """fp32 [rows, vocab_size] of these scored rows of a window."""
        return self.head_of(self.hidden[window][rows])

    def head_of(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab_size] of hidden states."""
        with torch.inference_mode():
            return linear(hidden, *self.head)


@lru_cache(maxsize=2)
def reference(
    model: str = "", windows: int = 4, text: str = "evaluation", length: int = WINDOW, rope_scale: float = 0.0
) -> Reference:
    """The reference of a model on the first windows of a text, computed at first use; the two used last are kept.

    model: as for `nanokit.load`; empty is the default model. rope_scale: for windows beyond the model's context, its
    frequencies multiplied by this; 0 leaves them. Raises ParameterError for an unknown text and one too short, and
    what opening a model raises.
    """
    source = open_model(model or _default())
    config = override_rope(source.config, base=None, scale=rope_scale or None, force=bool(rope_scale))
    if length > config.max_context and not rope_scale:
        raise ParameterError(
            "windows are longer than the model's context",
            found=f"{length} tokens",
            needed=f"at most {config.max_context}",
            do="use shorter windows, or a rope_scale below 1",
        )
    ids = text_ids(source.tokenizer, text)
    cuts = cut(ids, windows, length, beginning(source.tokenizer), f"{text}.txt")
    opened = OpenedModel(source, config, "fp32")
    how, other = Pass(), Pass(chunk=SMALL_CHUNK)
    blocks = how.blocks(length, BLOCK_SIZE)
    memory.check_budget(
        opened.weight_bytes, blocks * PagedKV.bytes_per_block(config, "fp32"), source.name, "use shorter windows"
    )
    exact, pages = Transformer(opened), PagedKV(config, blocks, "fp32")
    first = length // 2 - 1  # the row that predicts the first scored token
    tables = how.tables(range(blocks))

    def states(windows: list[list[int]], how: Pass) -> list[Tensor]:
        each = hidden_states(lambda batch: exact.forward(batch, pages), windows, first, tables, how)
        return [rows[:-1].clone() for rows in each]  # the last row predicts what is not there

    head = opened.weights.head
    matrix = opened.weights.embedding if head is None else head.weight
    bias = None if head is None or head.bias is None else head.bias.dense()
    kept, again = states(cuts, how), states(cuts[:1], other)[0]
    return Reference(source.name, text, cuts, kept, again, (matrix.dense(), bias))


def beginning(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that a model's tokenizer puts before every text: of most models none, or one."""
    return tokenizer.encode("", add_special=True)


def _default() -> str:
    from nanokit.model.fetch import resolve_default

    return str(resolve_default())
