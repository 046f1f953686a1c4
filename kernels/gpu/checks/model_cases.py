"""A whole tiny model through gpu.bound against kernels/reference.py, and fake quantization there and back.

The model lies in memory; nothing is written or read. It, its pages and its batches are of floors above the kernels and
looked up when they are wanted.

How close is close. With activations in fp32 the logits are within 1e-3 of their own spread: a dozen products of some
hundred columns, each with its bound. With quantized activations a number beside a tie may take the other code, which a
bound would have to allow everywhere; what is held down instead is the mean error against the mean effect of quantizing
at all, a fifth of it: a layer that quantizes twice, or not at all, is far beyond.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nanokit.kernels import fake_quant as reference_fake_quant
from nanokit.kernels import gpu, reference
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.checks.material import activations, there, weights
from nanokit.kernels.gpu.checks.work import Case, Judgement, Work, equal
from nanokit.kernels.gpu.fake_quant import fake_quantize
from nanokit.quant.integer import integer_format
from nanokit.quant.qtensor import Coding, QTensor

if TYPE_CHECKING:
    from nanokit.model.config import ModelConfig
    from nanokit.model.weights import Weights

VOCAB = 331
LENGTHS = (70, 5)  # of texts: more than a page, and a part of one
TINY_LENGTHS = (4, 2)
TYPES = {"Q4_1": "Q4_1", "Q8_0": "int8-sym-g32"}  # of files -> of material.KINDS


def cases(tiny: bool) -> list[Case]:
    """Modes, formats of pages, and a row in company; formats of fake quantization with ranges given and not."""
    asked = [("fp32", "fp32"), ("a8g32", "fp16"), *([] if tiny else [("a16", "int8"), ("token", "int4")])]
    found = [
        Case("model", f"{mode} activations, {kv_format} pages", partial(_logits, mode, kv_format, tiny))
        for mode, kv_format in asked
    ]
    found.append(Case("model", "a8g32: a text alone as beside another", partial(_alone, tiny)))
    rows, columns = (3, 192) if tiny else (37, 1536)
    for name in ("int4-sym-g32", "int8-asym-g64", "int4-asym-g96", "int8-sym-channel"):
        for given in (False, True):
            told = f"{name}, ranges {'given' if given else 'of the weights'}"
            found.append(Case("fake_quant", told, partial(_fake_quant, name, rows, columns, given)))
    return found


class _Memory:
    """Weights by the names of GGUF files (nanokit.model.weights.TensorSource)."""

    kind = 0

    def __init__(self, config: "ModelConfig") -> None:
        from nanokit.model.weights import Stored

        self._matrices: dict[str, tuple[str, QTensor]] = {}
        self._vectors: dict[str, Tensor] = {}
        c, heads, kv = config, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._matrix("token_embd", VOCAB, c.hidden_size, "Q8_0")
        self._matrix("output", VOCAB, c.hidden_size, "Q8_0")
        self._vector("output_norm", c.hidden_size)
        for layer in range(c.num_layers):
            at = f"blk.{layer}."
            for name, rows, columns in (
                ("attn_q", heads, c.hidden_size), ("attn_k", kv, c.hidden_size), ("attn_v", kv, c.hidden_size),
                ("attn_output", c.hidden_size, heads), ("ffn_gate", c.intermediate_size, c.hidden_size),
                ("ffn_up", c.intermediate_size, c.hidden_size), ("ffn_down", c.hidden_size, c.intermediate_size),
            ):  # fmt: skip
                self._matrix(at + name, rows, columns, "Q4_1")
            for name, length in (("attn_norm", c.hidden_size), ("ffn_norm", c.hidden_size),
                                 ("attn_q_norm", c.head_dim), ("attn_k_norm", c.head_dim)):  # fmt: skip
                self._vector(at + name, length)
        self.stored = {
            name: Stored(q.shape, q.codes.nbytes, kind, Coding(q.code_range, q.table is not None, q.group))
            for name, (kind, q) in self._matrices.items()
        }
        self.stored |= {name: Stored(tuple(x.shape), x.nbytes, "F32") for name, x in self._vectors.items()}

    def _matrix(self, name: str, rows: int, columns: int, kind: str) -> None:
        self._matrices[f"{name}.weight"] = kind, weights(TYPES[kind], rows, columns, len(self._matrices))

    def _vector(self, name: str, length: int) -> None:
        noise = torch.Generator().manual_seed(len(self._vectors))
        self._vectors[f"{name}.weight"] = torch.rand(length, generator=noise) + 0.5

    def tensor(self, name: str) -> Tensor:
        if name in self._vectors:
            return self._vectors[name]
        return torch.from_numpy(self._matrices[name][1].dequantize())

    def quantized(self, name: str, first: int, end: int) -> QTensor | None:
        return self._matrices[name][1].rows(first, end) if name in self._matrices else None


def _model(tiny: bool) -> "tuple[ModelConfig, Weights]":
    """Qwen 3's kind, since it has the most parts."""
    from nanokit.model.config import ModelConfig
    from nanokit.model.rope import Rope
    from nanokit.model.weights import find_weights

    size = 1 if tiny else 4
    config = ModelConfig(
        "qwen3", VOCAB, 64 * size, 96 * size, 1 if tiny else 2, 4, 2, 16 * size, 4096, 1e-6, Rope(1e6), False
    )
    return config, find_weights(config, _Memory(config))


def _texts(tiny: bool) -> list[list[int]]:
    noise = np.random.default_rng(1)
    return [noise.integers(0, VOCAB, length).tolist() for length in (TINY_LENGTHS if tiny else LENGTHS)]


def _run(bound: Any, config: "ModelConfig", texts: list[list[int]], kv_format: str, where: torch.device) -> Tensor:
    """Logits of all tokens in one step, each text in blocks of its own."""
    from nanokit.kv.pages import BLOCK_SIZE, PagedKV
    from nanokit.model.batch import Batch

    each = max(-(-len(text) // BLOCK_SIZE) for text in texts)
    lengths = [len(text) for text in texts]
    tables = [list(range(i * each, (i + 1) * each)) for i in range(len(texts))]
    batch = Batch([token for text in texts for token in text], lengths, lengths, tables)
    plan = bound.plan(batch, PagedKV(config, each * len(texts), kv_format, where))
    found: Tensor = bound.logits(bound.run(plan))
    return found


def _logits(mode: str, kv_format: str, tiny: bool) -> Work:
    (config, found), texts = _model(tiny), _texts(tiny)
    bound = gpu.bind(config, found, activations=mode)

    def launch() -> Tensor:
        return _run(bound, config, texts, kv_format, runtime.device())

    def judge(got: Tensor) -> Judgement:
        wanted, plain = (
            _run(reference.bind(config, found, activations=each), config, texts, kv_format, torch.device("cpu"))
            for each in (mode, "fp32")
        )
        error = (got.cpu() - wanted).abs()
        if mode == "fp32":
            return Judgement(float(error.max() / wanted.std()), 1e-3)
        return Judgement(float(error.mean() / (wanted - plain).abs().mean()), 0.2)

    return Work(launch, judge)


def _alone(tiny: bool) -> Work:
    """The engine rests on this: batching, prefix hits and verification would change a text otherwise."""
    (config, found), texts = _model(tiny), _texts(tiny)
    bound = gpu.bind(config, found, activations="a8g32")

    def launch() -> tuple[Tensor, Tensor]:
        apart = [_run(bound, config, [text], "fp16", runtime.device()) for text in texts]
        return _run(bound, config, texts, "fp16", runtime.device()), torch.cat(apart)

    return Work(launch, lambda pair: equal(pair))


def _fake_quant(name: str, rows: int, columns: int, given: bool) -> Work:
    """Values and gradients, bit for bit; given scales clip some weights."""
    fmt, w, upstream = integer_format(name), activations(rows, columns, 2), activations(rows, columns, 3)
    scales: Tensor | None = None
    minimums: Tensor | None = None
    if given:
        scales, minimums = reference_fake_quant.ranges(w, fmt)
        scales, minimums = scales * 0.6, None if fmt.symmetric else minimums * 0.6

    def launch() -> tuple[Tensor, Tensor]:
        leaf = there(w).clone().requires_grad_()
        ranges = [None if x is None else there(x) for x in (scales, minimums)]
        with torch.enable_grad():
            value = fake_quantize(leaf, fmt, *ranges)
            value.backward(there(upstream))
        assert leaf.grad is not None
        return value.detach(), leaf.grad

    def judge(found: tuple[Tensor, Tensor]) -> Judgement:
        leaf = w.clone().requires_grad_()
        value = reference_fake_quant.fake_quantize(leaf, fmt, scales, minimums)
        value.backward(upstream)
        assert leaf.grad is not None
        return equal((found[0], value.detach()), (found[1], leaf.grad))

    return Work(launch, judge)
