"""`nanokit.load`: the one way from a name to an engine that answers.

The order matters: open (headers only), decide the sizes of the KV pool, compare the sum with free memory, and only
then read weights. A refusal therefore costs milliseconds and names the option that would help.
"""

import time
import warnings
from pathlib import Path

from nanokit.engine.engine import Engine, EngineConfig, Prompt
from nanokit.engine.limits import prompt_ids
from nanokit.engine.settings import checked_call
from nanokit.errors import ParameterError, RequestError
from nanokit.kv.calibrate import kv_peaks
from nanokit.kv.pages import BLOCK_SIZE, CPU_FORMATS, DTYPES, PagedKV, PoolBytes
from nanokit.model import memory
from nanokit.model.batch import Batch
from nanokit.model.config import ModelConfig, override_rope
from nanokit.model.load import open_model
from nanokit.model.source import ModelSource
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.transformer import OpenedModel, Transformer
from nanokit.paths import data_dir
from nanokit.quant.policy import BY_TEXT, parse_policy

CALIBRATION_TEXT = "texts/lighthouse.txt"
CALIBRATION_TOKENS = 512
DEFAULT_CTX = 8192
DEFAULT_KV_MEMORY = 1 << 30
SMALLER_PAGES = {"fp32": "fp16", "fp16": "int8", "int8": "int4", "int8-static": "int4"}  # on every device


class LoadedEngine(Engine):
    """An engine over a model that `load` read: its `model` knows its name, its activation mode and its bytes."""

    model: Transformer
    tokenizer: Tokenizer
    kv: PagedKV

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: EngineConfig, *, kv: PagedKV) -> None:
        super().__init__(model, tokenizer, config, kv=kv)
        self.pool.released = kv.release

    def calibrate(self, prompt: Prompt | None = None) -> None:
        """Take the peaks of static activations from one forward over a prompt; None is the beginning of the kit's own
        text, which is what `load` takes for an engine that is static itself. Any other engine on kernels that have the
        mode computes static requests from then on. Forgets cached prompts: pages under other peaks are other pages.

        Raises RequestError for a prompt that is longer than the context or the KV pool, and while requests wait or run.
        """
        size = self.config.block_size
        ids = self._calibration_ids(prompt)
        with self._lock:
            self._check_idle("static activations")
            blocks = [self.pool.allocate() for _ in range(-(-len(ids) // size))]
            try:
                self.model.calibrate(self.model.peaks_of(Batch(ids, [len(ids)], [len(ids)], [blocks]), self.kv))
            finally:
                self.pool.release(blocks)
            self._forget_pages()

    def calibrate_kv(self, prompt: Prompt | None = None) -> None:
        """Take the scales of int8-static pages from a prompt; None is the beginning of the kit's own text, which `load`
        takes. Forgets cached prompts.

        Raises RequestError for a prompt as `calibrate` does, and while requests wait or run; ParameterError for pages
        of another format.
        """
        self.kv.check_static()
        ids = self._calibration_ids(prompt)
        with self._lock:
            self._check_idle("int8-static pages")
            self.kv.calibrate(kv_peaks(self.model, ids))
            self._forget_pages()

    def check_integrity(self) -> None:
        """As `Engine` does, and that of the pages."""
        with self._lock:
            super().check_integrity()
            self.kv.check_integrity(self.config.max_seqs, self.config.token_budget)

    def _calibration_ids(self, prompt: Prompt | None) -> list[int]:
        room = min(self.config.max_context, self.pool.num_blocks * self.config.block_size)
        if prompt is None:
            text = (data_dir() / CALIBRATION_TEXT).read_text(encoding="utf-8")
            prompt = self.tokenizer.encode(text)[: min(CALIBRATION_TOKENS, room)]
        ids = prompt_ids(prompt, self.tokenizer, self.model.vocab_size)
        if len(ids) > room:
            raise RequestError(
                "the calibration text does not fit into the context, or into the KV pool",
                found=f"{len(ids)} tokens",
                needed=f"at most {room}",
            )
        return ids

    def _check_idle(self, what: str) -> None:
        if self._requests:
            raise RequestError(
                f"{what} cannot be calibrated now",
                found=f"{len(self._requests)} requests that wait or run",
                needed="none: their pages were computed under the peaks that stand",
            )

    def _forget_pages(self) -> None:
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.clear()

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
    kv_format: str | None = None,
    activations: str | None = None,
    policy: str | None = None,
    device: str = "cpu",
    rope_freq_base: float | None = None,
    rope_freq_scale: float | None = None,
    force: bool = False,
    mapped: bool | None = None,
) -> LoadedEngine:
    """Load a model and return the engine that runs it.

    source: a .gguf file, a folder of safetensors, or org/name on the hub; None is the default model, fetched once. ctx:
    longest prompt + answer in tokens (the model's own, at most 8,192, if None). kv_memory: bytes or "2GiB" for KV pages
    (if None, room for max_seqs sequences of ctx tokens up to 1 GiB, and for at least one). max_seqs: sequences that run
    at once. token_budget: tokens computed a step. prefix_cache: reuse pages of equal prompt beginnings. kv_format:
    "fp32", "fp16", "int8", "int8-static", "int4" or "kivi4" pages (nanokit/kv/pages.py says what each keeps; a GPU has
    no "kivi4"); None is fp16, and fp32 where activations are fp32. activations: how the inputs of products are kept,
    one of kernels.activations.MODES; None is a8g32 in the C and Triton kernels, and fp32, which computes as
    transformers does, where C cannot run the model. "int8-static" and "static" are calibrated on a text of the kit's
    own. policy: quantize the weights on their way in, as "int4-sym-g64" (nanokit/quant/policy.py has the grammar); None
    runs them as they are stored. device: "cpu"; "cuda", a GPU; or "interpreter", the GPU's kernels run by Triton's
    interpreter, to be read and tested and far too slow for a real model. rope_freq_base, rope_freq_scale: override the
    model's own values (or supply a base that a file lacks), with `force` only; `force` also allows a ctx beyond what
    the model was trained for. mapped: leave the layers' weights in their file and widen them again in every step; None
    does so, with a warning, only when they do not fit into memory.

    Raises ModelFileError, TokenizerError, MemoryBudgetError, ParameterError, FetchError, NoGpuError.
    """
    if kv_format is not None and kv_format not in DTYPES:
        raise ParameterError("unknown kv_format", found=repr(kv_format), needed=", ".join(DTYPES))
    if source is None:
        from nanokit.model.fetch import resolve_default

        source = resolve_default()
    model_source = open_model(source, rope_base=rope_freq_base if force else None)
    config = override_rope(model_source.config, base=rope_freq_base, scale=rope_freq_scale, force=force)
    max_context = _context(ctx, config, force)
    if policy is not None:
        model_source = _requantized(model_source, policy, mapped)
    opened = OpenedModel(model_source, config, activations, resident=not mapped, device=device)
    kv_format = kv_format or ("fp32" if opened.activations == "fp32" else "fp16")
    if opened.on_gpu and kv_format in CPU_FORMATS:
        raise ParameterError(
            f"the Triton kernels have no {kv_format} pages", found=f"kv_format={kv_format!r} with device={device!r}",
            needed=", ".join(each for each in DTYPES if each not in CPU_FORMATS), do='use int8, or device="cpu"',
        )  # fmt: skip
    sizes = PagedKV.pool_bytes(config, kv_format, max_seqs, token_budget)
    num_blocks = _blocks(kv_memory, max_context, max_seqs, sizes)
    kv_bytes = sizes.of(num_blocks)
    engine_config = EngineConfig(
        max_context=max_context,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_seqs=max_seqs,
        token_budget=token_budget,
        prefix_cache=prefix_cache,
    )
    if mapped is None and policy is None and not opened.on_gpu:
        opened = _placed(opened, activations, kv_bytes)
    memory.check_budget(
        opened.weight_bytes, kv_bytes, opened.source.name, _kv_advice(max_context, sizes, kv_format),
        free=memory.free_gpu_memory(opened.device) if opened.device.type == "cuda" else None,
    )  # fmt: skip
    model = _read(opened)
    pages = PagedKV(config, num_blocks, kv_format, model.device)
    engine = LoadedEngine(model, model_source.tokenizer, engine_config, kv=pages)
    if kv_format == "int8-static":
        engine.calibrate_kv()
    if model.activations == "static":
        engine.calibrate()
    return engine


def _requantized(source: ModelSource, policy: str, mapped: bool | None) -> ModelSource:
    from nanokit.model.requantize import requantized

    if mapped:
        raise ParameterError(
            "weights that stay in their file would be quantized again in every step",
            found=f"mapped with policy {policy!r}",
            do="write the quantized model first: nanokit quantize",
        )
    found = requantized(source, policy)
    if found.policy.methods & BY_TEXT or parse_policy(policy).auto_bits is not None:
        warnings.warn(
            f"{found.name}: a calibration text runs through the model at every loading, which takes minutes; "
            "nanokit quantize writes the result",
            stacklevel=4,
        )
    return found


def _placed(opened: OpenedModel, activations: str | None, kv_bytes: int) -> OpenedModel:
    """The same model, its layers left in their file if only so it fits."""
    free = memory.free_memory()
    if opened.weight_bytes <= free:
        return opened
    mapped = OpenedModel(opened.source, opened.config, activations, resident=False)
    return mapped if mapped.weight_bytes + kv_bytes <= free else opened


def _read(opened: OpenedModel) -> Transformer:
    started = time.perf_counter()
    model = Transformer(opened)
    if not opened.resident:
        again = memory.human(model.footprint.per_token_stored)
        seconds = time.perf_counter() - started
        warnings.warn(
            f"{model.name} runs from its file: every step reads and widens {again} of weights again, "
            f"which took {seconds:.1f} s at loading",
            stacklevel=3,
        )
    return model


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


def _blocks(kv_memory: int | str | None, max_context: int, max_seqs: int, sizes: PoolBytes) -> int:
    for_one = -(-max_context // BLOCK_SIZE)
    if kv_memory is None:
        return max(for_one, min(for_one * max(max_seqs, 1), sizes.blocks_in(DEFAULT_KV_MEMORY)))
    blocks = sizes.blocks_in(memory.parse_bytes(kv_memory))
    if blocks < 1:
        raise ParameterError(
            "kv_memory is too small for one block",
            found=f"{memory.parse_bytes(kv_memory)} bytes",
            needed=f"at least {sizes.of(1)} ({BLOCK_SIZE} tokens of all layers); "
            f"{memory.human(sizes.of(for_one))} for one sequence of {max_context} tokens",
        )
    return blocks


def _kv_advice(max_context: int, sizes: PoolBytes, kv_format: str) -> str:
    one = memory.human(sizes.of(-(-max_context // BLOCK_SIZE)))
    lower = f"lower ctx (now {max_context}: one full sequence takes {one}), kv_memory or max_seqs"
    smaller = SMALLER_PAGES.get(kv_format)
    return f'{lower}, or use kv_format="{smaller}"' if smaller else lower
