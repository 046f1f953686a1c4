"""Tiny random checkpoints, written by transformers, and a tiny tokenizer for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from stored import random_blocks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from nanokit.model.weights import GLOBAL_NAMES, LAYER_NAMES

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VOCAB = 320


def tiny_model(
    architecture: str,
    *,
    tied: bool = False,
    heads: int = 6,
    kv_heads: int = 2,
    hidden: int = 60,
    intermediate: int = 96,
    head_dim: int = 10,
    vocab: int = VOCAB,
    **extra: Any,
) -> PreTrainedModel:
    """A random model of two layers whose logits are far apart, GQA and an odd number of rotary pairs included."""
    torch.manual_seed(7)
    config = CONFIGS[architecture](
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=512,
        tie_word_embeddings=tied, initializer_range=0.2, eos_token_id=[258, 257],
        bos_token_id=256, pad_token_id=None, **extra,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # transformers starts these at 1 and 0, which would hide faults
            parameter.data.normal_(0.7, 0.2)
    return model


def compiled_model(architecture: str, *, tied: bool = False, columns: int = 64) -> PreTrainedModel:
    """One that the C kernels take (heads of 16, columns of 32): matrices that fill no panel of 16 rows, and, but for
    Qwen 2, queries wider than the hidden state. columns: of every matrix but `o`; 256 suits K types."""
    heads = columns // 16 if architecture == "qwen2" else max(8, columns // 16)
    return tiny_model(architecture, tied=tied, heads=heads, kv_heads=2, hidden=columns, head_dim=16, vocab=331,
                      intermediate=96 if columns == 64 else 2 * columns)  # fmt: skip


def save_tiny(directory: Path, model: PreTrainedModel, merges: Sequence[str] = (), **how: Any) -> Path:
    """Write checkpoint and byte-level tokenizer as a transformers directory. merges: pairs such as "h e", without which
    no GGUF file can have this tokenizer; their tokens come last. how: passed to save_pretrained."""
    model.save_pretrained(directory, **how)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    added = ["<s>", "</s>", "<|end|>"] if merges else []
    tokens = [*alphabet, *added, *(merge.replace(" ", "") for merge in merges)]
    pairs = [(merge.split()[0], merge.split()[1]) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def save_tiny_gguf(
    path: Path,
    model: PreTrainedModel,
    tensors: dict[str, torch.Tensor] | None = None,
    types: str | Mapping[str, str] = "F32",
    **changes: Any,
) -> Path:
    """The same model as a GGUF file, written with the gguf library. tensors: further ones; types: of the matrices, all
    alike or by name ("attn_q"), random ones where the library cannot quantize to it; changes: metadata values, None
    drops a key."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    metadata: dict[str, Any] = {
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **changes,
    }
    for key, value in metadata.items():
        if value is not None:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<s>", "</s>", "<|end|>", "ab"] + [f"<unused{i}>" for i in range(config.vocab_size - 260)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 3 + [1] + [3] * (config.vocab_size - 260))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    names = {ours[1]: ours[0] for ours in (*GLOBAL_NAMES.values(), *LAYER_NAMES.values())}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, kind = name.rpartition(".")
        if base.startswith("model.layers."):
            _, _, index, rest = base.split(".", 3)
            prefix, part = f"blk.{index}.", names[rest]
        else:
            prefix, part = "", names[base]
        if arch == "llama" and part in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        stored_as = "F32" if tensor.ndim == 1 else types if isinstance(types, str) else types[part]
        _add(writer, f"{prefix}{part}.{kind}", tensor.numpy(), gguf.GGMLQuantizationType[stored_as])
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    try:
        raw = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        raw = random_blocks(kind.name, *values.shape, seed=len(name), size=float(np.abs(values).mean()) / 2)
    writer.add_tensor(name, raw, raw_dtype=kind)
