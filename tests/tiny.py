"""Tiny random checkpoints, written by transformers, and a tiny tokenizer for them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

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
