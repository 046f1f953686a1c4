"""Tiny random checkpoints, written by transformers, and a tiny tokenizer for them."""

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from nanokit.model.weights import GLOBAL_NAMES, LAYER_NAMES

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VOCAB = 320


def tiny_model(
    architecture: str, *, tied: bool = False, heads: int = 6, kv_heads: int = 2, **extra: Any
) -> PreTrainedModel:
    """A random model of two layers whose logits are far apart, GQA and an odd number of rotary pairs included."""
    torch.manual_seed(7)
    config = CONFIGS[architecture](
        vocab_size=VOCAB, hidden_size=60, intermediate_size=96, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=10, max_position_embeddings=512, tie_word_embeddings=tied,
        initializer_range=0.2, eos_token_id=[258, 257], bos_token_id=256, pad_token_id=None, **extra,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # transformers starts these at 1 and 0, which would hide faults
            parameter.data.normal_(0.7, 0.2)
    return model


def save_tiny(directory: Path, model: PreTrainedModel, **how: Any) -> Path:
    """Write checkpoint and byte-level tokenizer as a transformers directory; how: passed to save_pretrained."""
    model.save_pretrained(directory, **how)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def save_tiny_gguf(
    path: Path, model: PreTrainedModel, tensors: dict[str, torch.Tensor] | None = None, **changes: Any
) -> Path:
    """The same model as an F32 GGUF file, written with the gguf library. tensors: further ones; changes: metadata
    values, None drops a key."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    metadata: dict[str, Any] = {
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim if arch != "qwen2" else 10,
        f"{arch}.attention.value_length": 10,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **changes,
    }
    for key, value in metadata.items():
        if value is not None:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<s>", "</s>", "<|end|>", "ab"] + [f"<unused{i}>" for i in range(VOCAB - 260)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 3 + [1] + [3] * (VOCAB - 260))
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
            target = f"blk.{index}.{names[rest]}.{kind}"
        else:
            target = f"{names[base]}.{kind}"
        if arch == "llama" and (".attn_q." in target or ".attn_k." in target):
            heads = config.num_attention_heads if ".attn_q." in target else config.num_key_value_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(target, tensor.numpy())
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
