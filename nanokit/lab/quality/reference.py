"""What a quantized model is compared with: the same file in fp32 activations and fp32 KV pages.

The torch reference backend computes it, as transformers would. Its *weights* are those of the file, dequantized: for a
4-bit file the reference is 4-bit. So a figure here says what a further step costs, not what quantizing cost at all.

Memory. A reference keeps the hidden states of its scored tokens (2.3 kB each for the default model) and the head's
matrix (113 MB), not logits (197 kB a token): the logits of a few rows are multiplied out again where they are compared,
which takes less time than comparing them. The layers are dropped once the windows have run. Two references are kept,
each for a state of the model's files: a file that was written anew is another model.
Rejected: logits in memory, whose full preset would take gigabytes, and logits on disk, which read no faster.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanokit.errors import ParameterError
from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.lab.quality.passes import Pass, hidden_states
from nanokit.lab.quality.texts import WINDOW, cut, text_ids
from nanokit.model import memory
from nanokit.model.config import ModelConfig, override_rope
from nanokit.model.load import open_model
from nanokit.model.source import ModelSource
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.transformer import OpenedModel, Transformer

SMALL_CHUNK = 48  # tokens; neither a divisor nor a multiple of a page
KEPT = 2

_kept: dict[tuple[object, ...], "Reference"] = {}  # used last comes last


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


def reference(
    model: str = "",
    windows: int = 4,
    text: str = "evaluation",
    length: int = WINDOW,
    rope_scale: float = 0.0,
    cancel: threading.Event | None = None,
) -> Reference:
    """The reference of a model on the first windows of a text, computed at first use; the two used last are kept.

    model: as for `nanokit.load`; empty is the default model. rope_scale: for windows beyond the model's context, its
    frequencies multiplied by this; 0 leaves them. Raises ParameterError for an unknown text and one too short,
    StoppedError once `cancel` is set, and what opening a model raises.
    """
    model = model or _default()
    key = (model, *_state(model), windows, text, length, rope_scale)
    found = _kept.pop(key, None)
    if found is None:
        found = _computed(open_model(model), windows, text, length, rope_scale, cancel)
    while len(_kept) >= KEPT:
        _kept.pop(next(iter(_kept)))
    _kept[key] = found
    return found


def forget() -> None:
    """Give back the memory of the references that are kept."""
    _kept.clear()


def source_of(model: str) -> ModelSource:
    """The model of a reference, opened without reading weights; empty is the default model."""
    return open_model(model or _default())


def check_length(length: int, config: ModelConfig) -> None:
    """Raise ParameterError for windows beyond the model's context."""
    if length > config.max_context:
        raise ParameterError(
            "windows are longer than the model's context",
            found=f"{length} tokens",
            needed=f"at most {config.max_context}",
            do="use shorter windows, or a rope_scale below 1",
        )


def _state(model: str) -> list[tuple[str, int, int]]:
    """Of each file of a model its path, time of writing in ns, and bytes; of a name on the hub nothing."""
    path = Path(model).expanduser().resolve()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(str(f), (found := f.stat()).st_mtime_ns, found.st_size) for f in files if f.is_file()]


def _computed(
    source: ModelSource, windows: int, text: str, length: int, rope_scale: float, cancel: threading.Event | None
) -> Reference:
    config = override_rope(source.config, base=None, scale=rope_scale or None, force=bool(rope_scale))
    if not rope_scale:
        check_length(length, config)
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
        each = hidden_states(lambda batch: exact.forward(batch, pages), windows, first, tables, how, cancel)
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
