"""Whole tiny models for the tests of every backend: files in many formats, steps over them, and what compares them.

How two backends are compared. A rounding difference of 1e-7 in a norm moves a number across the middle between two
codes now and then; that code differs by one, and from there on the row by part of what quantization costs it. So
equality to float rounding holds for every row in which no code tipped over, and for no other. With eight bits that is
nearly every row of a short text: asserted are 85 % to 1e-5 of the logits' spread, and the mean of all to a fifth of the
mode's own effect; of the few rows that an interpreter has time for, where chance has more to say, half, and the effect
itself. (`tensor` scales a whole step by one number, whose last bit touches every row: there the mean only.) In a16 some
code tips over in every row, and each is a 65,000th: asserted is 1e-3.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tiny import compiled_model, save_tiny_gguf
from torch import Tensor

from nanokit.kernels.activations import no_peaks, note_peak
from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.model.batch import Batch
from nanokit.model.load import open_model
from nanokit.model.weights import find_weights

K_TYPES = {
    "token_embd": "Q6_K", "attn_q": "Q2_K", "attn_k": "Q3_K", "attn_v": "Q4_K", "attn_output": "Q5_K",
    "ffn_gate": "Q6_K", "ffn_up": "IQ4_XS", "ffn_down": "Q4_K", "output": "Q5_K",
}  # fmt: skip
MIXED = {
    "token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "attn_output": "Q5_0",
    "ffn_gate": "IQ4_NL", "ffn_up": "MXFP4", "ffn_down": "Q5_1", "output": "Q4_0",
}  # fmt: skip
FILES: dict[str, tuple[str, bool, str | Mapping[str, str]]] = {
    "llama-Q4_0": ("llama", False, "Q4_0"),
    "llama-Q4_1-tied": ("llama", True, "Q4_1"),
    "llama-Q8_0-tied": ("llama", True, "Q8_0"),
    "qwen2-Q5_0": ("qwen2", False, "Q5_0"),
    "qwen2-Q5_1-tied": ("qwen2", True, "Q5_1"),
    "qwen3-mixed": ("qwen3", False, MIXED),
    "qwen3-K-tied": ("qwen3", True, K_TYPES),
    "llama-K": ("llama", False, K_TYPES),
}
Open = Callable[[str], tuple]


def opener(folder: Path) -> Open:
    """Configuration and weights of one of FILES, written into the folder when it is first asked for."""

    @lru_cache
    def open_file(name: str) -> tuple:
        architecture, tied, types = FILES[name]
        columns = 256 if types is K_TYPES else 64
        path = save_tiny_gguf(folder / f"{name}.gguf", compiled_model(architecture, tied=tied, columns=columns),
                              types=types)  # fmt: skip
        return opened_file(path)

    return open_file


def opened_file(path: Path) -> tuple:
    source = open_model(path)
    return source.config, find_weights(source.config, source)


def calibrate(bound: Any, config: object) -> Tensor:
    """Peaks from a text, a tenth lower, so that some activations are clipped."""
    peaks = no_peaks(config.num_layers)
    texts = tokens(1, 60, seed=9)
    hidden = bound.run(plan_all(bound, texts, PagedKV(config, 1)), peaks)
    note_peak(peaks, 4 * config.num_layers, hidden)
    bound.calibrate(0.9 * peaks)
    return peaks


def tokens(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(0, 331, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def plan_all(bound: Any, texts: list[list[int]], pages: PagedKV) -> object:
    """Whole texts in one step, each in blocks of its own."""
    each = -(-max(map(len, texts)) // BLOCK_SIZE)
    lengths = [len(text) for text in texts]
    tables = [list(range(each * i, each * (i + 1))) for i in range(len(texts))]
    return bound.plan(Batch([token for text in texts for token in text], lengths, lengths, tables), pages)


def pages_for(config: Any, blocks: int, kv_format: str = "fp32", device: torch.device | str = "cpu") -> PagedKV:
    """Pages; static ones with scales that clip some of what tiny models compute."""
    pages = PagedKV(config, blocks, kv_format, device)
    if kv_format == "int8-static":
        pages.calibrate(
            1.0 + torch.rand(config.num_layers, 2, config.num_kv_heads, generator=torch.Generator().manual_seed(4))
        )
    return pages


def logits_of(
    bound: Any, config: object, texts: list[list[int]], kv_format: str = "fp32", device: torch.device | str = "cpu"
) -> Tensor:
    """On the CPU, of every token."""
    pages = pages_for(config, len(texts) * -(-max(map(len, texts)) // BLOCK_SIZE), kv_format, device)
    return bound.logits(bound.run(plan_all(bound, texts, pages))).cpu()


def assert_equals_the_reference(got: Tensor, wanted: Tensor, plain: Tensor, mode: str, *, few: bool = False) -> None:
    """Logits of a backend against the reference's in the same mode, and in fp32 (plain); see the module."""
    assert got.shape == wanted.shape
    error, effect, size = (got - wanted).abs(), (wanted - plain).abs(), plain.std()
    if mode == "fp32":
        assert error.max() < 1e-4 * size
    elif mode == "a16":
        assert error.max() < 1e-3 * size
        assert (got - plain).abs().mean() < 1e-4 * size
    else:
        assert error.mean() < (1.0 if few else 0.2) * effect.mean(), mode
        if mode != "tensor":
            assert (error.amax(1) < 1e-5 * size).float().mean() > (0.45 if few else 0.85), mode


@dataclass(frozen=True)
class Text:
    ids: list[int]
    table: list[int]


def step(bound: Any, pages: PagedKV, parts: list[tuple[Text, int, int]]) -> list[Tensor]:
    """Hidden states of the tokens first ... end - 1 of each text."""
    batch = Batch(
        [token for text, first, end in parts for token in text.ids[first:end]],
        [end - first for _, first, end in parts],
        [end for _, _, end in parts],
        [text.table for text, _, _ in parts],
    )
    batch.check(vocab_size=331, num_blocks=pages.num_blocks, block_size=BLOCK_SIZE)
    return list(bound.run(bound.plan(batch, pages)).split(batch.query_lens))
