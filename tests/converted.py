"""Tiny models as a directory and as a GGUF file that was converted from it, and what is said of such files."""

from collections.abc import Mapping
from pathlib import Path

from tiny import save_tiny, tiny_model
from transformers import PreTrainedModel

from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Key, rewrite
from nanokit.model.convert import convert
from nanokit.model.verify.report import Check, Report

MERGES = ("h e", "l l", "he ll")
# Fault -> the check that has to catch it, and a key or tensor that it has to name.
CAUGHT = {
    "rope-base-missing": ("rope base", "llama.rope.freq_base"),
    "rope-base-text": ("rope base", "llama.rope.freq_base"),
    "gate-up-fused": ("gate, up and down", "blk.0.ffn_up.weight"),
    "head-count-32": ("head counts", "llama.attention.head_count"),
    "truncated-magic": ("magic and version", ""),
    "truncated-keys": ("keys and values", "tokenizer.ggml."),
    "truncated-table": ("tensor table", "blk."),
    "truncated-first": ("file size", "token_embd.weight"),
    "truncated-middle": ("file size", "blk."),
    "truncated-last": ("file size", "output_norm.weight"),
    "tensor-misaligned": ("tensor places", "blk."),
    "tensors-overlapping": ("tensor places", "blk."),
    "alignment-0": ("alignment", "general.alignment"),
    "alignment-13": ("alignment", "general.alignment"),
    "alignment-2-31": ("alignment", "general.alignment"),
    "tied-head-dropped": ("head", "token_embd.weight"),
    "nan-scale": ("finite weights", "blk."),
}


def converted(folder: Path, model: PreTrainedModel) -> dict[str, Path]:
    """In F32."""
    directory = save_tiny(folder / "source", model, MERGES)
    return {"gguf": convert(directory, folder / "good.gguf", "f32").path, "directory": directory}


def converted_llama(folder: Path) -> dict[str, Path]:
    """A tied llama with GQA and rope base 50,000."""
    rope = {"rope_type": "default", "rope_theta": 5e4}
    return converted(folder, tiny_model("llama", tied=True, rope_parameters=rope))


def changed(files: Mapping[str, Path], tmp_path: Path, **keys: Key | None) -> GGUFFile:
    """The sound file with other keys; None drops one. tmp_path: where it is written, as changed.gguf."""
    target = tmp_path / "changed.gguf"
    rewrite(files["gguf"], target, {}, keys)
    return GGUFFile.open(target)


def found(report: Report, name: str) -> Check:
    """The check of this name."""
    return next(check for check in report.checks if check.name == name)
