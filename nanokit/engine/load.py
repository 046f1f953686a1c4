"""`nanokit.load`: the one way from a name to an engine that answers.

The order matters: open (headers only), decide the sizes of the KV pool, compare the sum with free memory, and only
then read weights. A refusal therefore costs milliseconds and names the option that would help.
"""

import time
import warnings
from pathlib import Path

from nanokit.engine.engine import Engine, EngineConfig
from nanokit.engine.settings import checked_call
from nanokit.errors import ParameterError
from nanokit.kv.pages import BLOCK_SIZE, DTYPES, PagedKV
from nanokit.model import memory
from nanokit.model.config import ModelConfig, override_rope
from nanokit.model.load import open_model
from nanokit.model.source import ModelSource, footprint
from nanokit.model.transformer import Transformer, check_activations

DEFAULT_CTX = 8192
DEFAULT_KV_MEMORY = 1 << 30


class LoadedEngine(Engine):
    """An engine over a model that `load` read: its `model` knows its name, its activation mode and its bytes."""

    model: Transformer

    def __repr__(self) -> str:
        sizes = self.config
        return (
            f"<{type(self).__name__} {self.model.name}: {self.model.activations} activations, "
            f"context {sizes.max_context}, {sizes.num_blocks} KV blocks of {sizes.block_size} tokens>"
        )


@checked_call
def load(
    source: str | Path | None = None,
    *,
    ctx: int | None = None,
    kv_memory: int | str | None = None,
    max_seqs: int = 16,
    token_budget: int = 512,
    prefix_cache: bool = True,
    kv_format: str = "fp32",
    activations: str = "fp32",
    rope_freq_base: float | None = None,
    rope_freq_scale: float | None = None,
    force: bool = False,
    mapped: bool | None = None,
) -> LoadedEngine:
    """Load a model and return the engine that runs it.

    source: a .gguf file, a folder of safetensors, or org/name on the hub; None is the default model, fetched once.
    ctx: longest prompt + answer in tokens (the model's own, at most 8,192, if None). kv_memory: bytes or "2GiB" for
    KV pages (if None, room for max_seqs sequences of ctx tokens up to 1 GiB, and for at least one). max_seqs:
    sequences that run at once. token_budget: tokens computed a step. prefix_cache: reuse pages of equal prompt
    beginnings. kv_format: "fp32" or "fp16" pages. activations: "fp32" computes as transformers does.
    rope_freq_base, rope_freq_scale: override the model's own values (or supply a base that a file lacks), with `force`
    only; `force` also allows a ctx
    beyond what the model was trained for. mapped: leave the layers' weights in their file and widen them again in
    every step; None does so, with a warning, only when they do not fit into memory.

    Raises ModelFileError, TokenizerError, MemoryBudgetError, ParameterError, FetchError.
    """
    check_activations(activations)
    if kv_format not in DTYPES:
        raise ParameterError("unknown kv_format", found=repr(kv_format), needed=" or ".join(DTYPES))
    if source is None:
        from nanokit.model.fetch import resolve_default

        source = resolve_default()
    opened = open_model(source, rope_base=rope_freq_base if force else None)
    config = override_rope(opened.config, base=rope_freq_base, scale=rope_freq_scale, force=force)
    max_context = _context(ctx, config, force)
    per_block = PagedKV.bytes_per_block(config, kv_format)
    num_blocks = _blocks(kv_memory, max_context, max_seqs, per_block)
    engine_config = EngineConfig(
        max_context=max_context,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_seqs=max_seqs,
        token_budget=token_budget,
        prefix_cache=prefix_cache,
    )
    mapped = _placement(opened, num_blocks * per_block, _kv_advice(max_context, per_block), mapped)
    started = time.perf_counter()
    model = Transformer(opened, config, activations, resident=not mapped)
    if mapped:
        again = memory.human(model.footprint.per_token_stored)
        seconds = time.perf_counter() - started
        warnings.warn(
            f"{opened.name} runs from its file: every step reads and widens {again} of weights again, "
            f"which took {seconds:.1f} s at loading",
            stacklevel=2,
        )
    return LoadedEngine(model, opened.tokenizer, engine_config, kv=PagedKV(config, num_blocks, kv_format))


def _placement(opened: ModelSource, kv_bytes: int, kv_advice: str, mapped: bool | None) -> bool:
    """Whether the layers stay in their file. Raises MemoryBudgetError when the model fits neither way."""
    needed, free = footprint(opened), memory.free_memory()
    if mapped is None:
        mapped = needed.dense > free and needed.mapped + kv_bytes <= free
    weights = needed.mapped if mapped else needed.dense
    memory.check_budget(weights, kv_bytes, opened.name, kv_advice, free)
    return mapped


def _context(ctx: int | None, config: ModelConfig, force: bool) -> int:
    if ctx is None:
        return min(config.max_context, DEFAULT_CTX)
    if ctx < 2 or (ctx > config.max_context and not force):
        raise ParameterError(
            "ctx is out of range",
            found=ctx,
            needed=f"2 to {config.max_context} tokens, the length that the model was trained for",
            do="lower ctx, or pass force (--force) to go beyond it at the cost of quality",
        )
    return ctx


def _blocks(kv_memory: int | str | None, max_context: int, max_seqs: int, per_block: int) -> int:
    for_one = -(-max_context // BLOCK_SIZE)
    if kv_memory is None:
        return max(for_one, min(for_one * max(max_seqs, 1), DEFAULT_KV_MEMORY // per_block))
    blocks = memory.parse_bytes(kv_memory) // per_block
    if blocks < 1:
        raise ParameterError(
            "kv_memory is too small for one block",
            found=f"{memory.parse_bytes(kv_memory)} bytes",
            needed=f"at least {per_block} ({BLOCK_SIZE} tokens of all layers); "
            f"{memory.human(for_one * per_block)} for one sequence of {max_context} tokens",
        )
    return blocks


def _kv_advice(max_context: int, per_block: int) -> str:
    one = memory.human(-(-max_context // BLOCK_SIZE) * per_block)
    return (
        f'lower ctx (now {max_context}: one full sequence takes {one}), kv_memory or max_seqs, or use kv_format="fp16"'
    )
