"""A tiny legitimate file whose gate and up are one matrix: what a fused w1 must be told from."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 320, 64, 96, 4, 2, 16


def save_tiny_phi3(path: Path, architecture: str = "phi3") -> Path:
    """Two layers of random F32 weights, written with the gguf library, as Phi-3 files have them: q, k and v in one
    matrix attn_qkv, gate and up in one ffn_up of twice the rows. architecture: what the file says that it is."""
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, "<s>", "</s>"] + [f"<unused{i}>" for i in range(VOCAB - 258)])
    writer.add_token_types([1] * 256 + [3] * (VOCAB - 256))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCAB, HIDDEN)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_up": (2 * FFN, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, FFN),
        }
    for name, shape in shapes.items():
        values = random.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
