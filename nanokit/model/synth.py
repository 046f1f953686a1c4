"""A model file of random weights in the shapes of a known model: its speed and its memory without its download.

How fast a model runs on a machine depends on its shapes and on the type of its weights, not on what it has learned.
The file is an ordinary GGUF file that this kit and others load; the text that it writes is noise. Every matrix is of
the one type that was asked for, the head too (quantizers keep that one wider).

Blocks are drawn as they are stored, codes and sub-scales from all that they can be; what remains, the blocks' own
scales, centres the weights and gives them a standard deviation of about 1 / sqrt(columns), so that a product keeps the
size of its input. Drawing floats and quantizing them was rejected: many times slower, and to a few types only.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import pre_tokenizers

from nanokit.errors import NanokitError, ParameterError
from nanokit.model.config import ModelConfig
from nanokit.model.memory import human
from nanokit.model.rope import Rope
from nanokit.model.weights import GLOBAL_NAMES, LAYER_NAMES
from nanokit.quant.formats import FORMATS, Format

Progress = Callable[[str, int, int], None]


def _shape(
    architecture: str, vocab: int, hidden: int, intermediate: int, layers: int, heads: tuple[int, int], context: int,
    base: float, eps: float, *, tied: bool,
) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        architecture=architecture, vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        num_layers=layers, num_heads=heads[0], num_kv_heads=heads[1], head_dim=hidden // heads[0], max_context=context,
        rms_eps=eps, rope=Rope(base), tied_head=tied,
    )  # fmt: skip


# Facts of the published config.json of each. Llama's stretching of long contexts is left out: it costs no time.
SHAPES = {
    "smollm2-135m": _shape("llama", 49152, 576, 1536, 30, (9, 3), 8192, 1e5, 1e-5, tied=True),
    "qwen2-0.5b": _shape("qwen2", 151936, 896, 4864, 24, (14, 2), 131072, 1e6, 1e-6, tied=True),
    "qwen2-1.5b": _shape("qwen2", 151936, 1536, 8960, 28, (12, 2), 131072, 1e6, 1e-6, tied=True),
    "qwen2-7b": _shape("qwen2", 152064, 3584, 18944, 28, (28, 4), 131072, 1e6, 1e-6, tied=False),
    "llama-3.2-1b": _shape("llama", 128256, 2048, 8192, 16, (32, 8), 131072, 5e5, 1e-5, tied=True),
    "llama-3.1-8b": _shape("llama", 128256, 4096, 14336, 32, (32, 8), 131072, 5e5, 1e-5, tied=False),
}

# Type -> where a block keeps its own fp16 scale and, second, what its minimums are multiplied by.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip
PIECE = 16 << 20  # bytes drawn and written at a time
ALIGNMENT = 32


def synthesize(
    like: str, type_name: str, path: Path, *, seed: int = 0, force: bool = False, progress: Progress | None = None
) -> Path:
    """Write the file; equal arguments give equal bytes. like: one of SHAPES; type_name: one of HALVES, in any case.

    The file appears whole or not at all. Raises ParameterError for an unknown name, a type whose blocks do not fit the
    shapes, and a file that is there already without `force`; NanokitError when the disk has too little space.
    """
    shape, type_name = SHAPES.get(like), type_name.upper()
    if shape is None:
        raise ParameterError("there are no shapes of this name", found=repr(like), needed=", ".join(SHAPES))
    if type_name not in HALVES:
        raise ParameterError("weights of this type are not drawn", found=type_name, needed=", ".join(HALVES))
    if seed < 0:
        raise ParameterError("the seed is out of range", found=seed, needed="0 or more")
    if path.is_dir() or (path.exists() and not force):
        raise ParameterError(f"{path} is there already", do="name another file, or add --force to replace it")
    tensors = list(_tensors(shape, FORMATS[type_name]))
    total = sum(tensor.room for tensor in tensors)
    _check_room(path, total)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            partial = Path(folder) / path.name
            _write_header(partial, like, shape, tensors)
            _write_tensors(partial, tensors, np.random.default_rng(seed), progress or (lambda *_: None))
            os.replace(partial, path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise NanokitError(f"{path} cannot be written", found=error.strerror or str(error)) from error
        raise _no_room(path, total) from error
    return path


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    format: Format

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.shape)

    @property
    def room(self) -> int:
        """Its bytes in the file, with those that lie idle before the next one."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


def _tensors(c: ModelConfig, format_: Format) -> Iterator[_Tensor]:
    """In the order in which a step reads them."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    rows = {"q": q, "k": kv, "v": kv, "o": c.hidden_size, "gate": c.intermediate_size, "up": c.intermediate_size,
            "down": c.hidden_size}  # fmt: skip
    columns = {"o": q, "down": c.intermediate_size}

    def matrix(name: str, shape: tuple[int, int]) -> _Tensor:
        if shape[1] % format_.block_size:
            raise ParameterError(
                f"{format_.name} does not suit these shapes",
                found=f"{shape[1]} columns of {name}",
                needed=f"a multiple of {format_.block_size}",
                do="choose a type of 32-weight blocks: "
                + ", ".join(name for name in HALVES if FORMATS[name].block_size == 32),
            )
        return _Tensor(f"{name}.weight", shape, format_)

    def vector(name: str, length: int) -> _Tensor:
        return _Tensor(name, (length,), FORMATS["F32"])

    yield matrix(GLOBAL_NAMES["embedding"][0], (c.vocab_size, c.hidden_size))
    for layer in range(c.num_layers):
        names = {ours: f"blk.{layer}.{theirs}" for ours, (theirs, _) in LAYER_NAMES.items()}
        yield vector(names["attn_norm"] + ".weight", c.hidden_size)
        for part, count in rows.items():
            if part == "gate":
                yield vector(names["ffn_norm"] + ".weight", c.hidden_size)
            yield matrix(names[part], (count, columns.get(part, c.hidden_size)))
            if c.architecture == "qwen2" and part in ("q", "k", "v"):
                yield vector(names[part] + ".bias", count)
    yield vector(GLOBAL_NAMES["final_norm"][0] + ".weight", c.hidden_size)
    if not c.tied_head:
        yield matrix(GLOBAL_NAMES["head"][0], (c.vocab_size, c.hidden_size))


def _check_room(path: Path, needed: int) -> None:
    if not path.parent.is_dir():
        raise ParameterError(f"there is no folder {path.parent}", do="create it, or name another one")
    if shutil.disk_usage(path.parent).free < needed:
        raise _no_room(path, needed)


def _no_room(path: Path, needed: int) -> NanokitError:
    return NanokitError(
        f"too little free disk space to write {path.name}",
        found=f"{human(shutil.disk_usage(path.parent).free)} free in {path.parent}",
        needed=human(needed),
        do="free some, or name a file on another disk",
    )


def _write_header(path: Path, like: str, c: ModelConfig, tensors: list[_Tensor]) -> None:
    """Metadata, vocabulary and the table of tensors, up to where their bytes begin."""
    writer = GGUFWriter(path, c.architecture)
    writer.add_name(f"random weights in the shapes of {like}")
    writer.add_context_length(c.max_context)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope.base)
    writer.add_layer_norm_rms_eps(c.rms_eps)
    _add_vocabulary(writer, c.vocab_size)
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.format.name]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """A token for each byte, an end, and numbers up to the size, which no text is encoded to."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "<|endoftext|>", "th"]
    tokens += [f"Ġ{token:x}" for token in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in tokens])
    writer.add_token_merges(["t h"])  # readers want one
    writer.add_bos_token_id(len(letters))
    writer.add_eos_token_id(len(letters))
    writer.add_add_bos_token(False)


def _write_tensors(path: Path, tensors: list[_Tensor], noise: np.random.Generator, progress: Progress) -> None:
    total, done = sum(tensor.room for tensor in tensors), 0
    halves = _halves(tensors[0].format)
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % ALIGNMENT))
        for tensor in tensors:
            for piece in _pieces(tensor, halves, noise):
                file.write(piece.data)
                done += piece.nbytes
                progress(f"writing {path.name}", done, total)
            file.write(bytes(tensor.room - tensor.nbytes))
            done += tensor.room - tensor.nbytes
        file.flush()
        os.fsync(file.fileno())


def _pieces(tensor: _Tensor, halves: np.ndarray, noise: np.random.Generator) -> Iterator[np.ndarray]:
    """The bytes of a tensor, uint8, some at a time. Norms are 1, biases small."""
    if len(tensor.shape) == 1:
        is_norm = tensor.name.endswith("norm.weight")
        values = np.ones(tensor.shape) if is_norm else noise.standard_normal(tensor.shape) / 10
        yield values.astype("<f4").view(np.uint8)
        return
    blocks, step = prod(tensor.shape) // tensor.format.block_size, PIECE // tensor.format.block_bytes
    halves = halves * tensor.shape[1] ** -0.5
    for first in range(0, blocks, step):
        yield _blocks(tensor.format, min(step, blocks - first), halves, noise).reshape(-1)


def _blocks(format_: Format, count: int, halves: np.ndarray, noise: np.random.Generator) -> np.ndarray:
    """uint8 [count, block_bytes]: any codes; halves times a number of either sign, its size from 2/3 to 4/3."""
    raw = np.frombuffer(noise.bytes(count * format_.block_bytes), np.uint8).reshape(count, -1).copy()
    sizes = noise.uniform(2 / 3, 4 / 3, count) * noise.choice([-1, 1], count)
    for at, half in zip(HALVES[format_.name], halves, strict=True):
        raw[:, at : at + 2] = (half * sizes).astype("<f2").reshape(-1, 1).view(np.uint8)
    return raw


def _halves(format_: Format) -> np.ndarray:
    """What blocks multiply by, so that weights lie around 0 with a standard deviation of 1; found on a sample.

    Weights are a sum of what each half multiplies: scales times codes, and minimums, which are to cancel its mean.
    """
    sample, places = np.random.default_rng(0).bytes(4096 * format_.block_bytes), HALVES[format_.name]
    parts = []
    for chosen in places:
        raw = np.frombuffer(sample, np.uint8).reshape(4096, -1).copy()
        for at in places:
            raw[:, at : at + 2] = np.array([at == chosen], "<f2").view(np.uint8)
        parts.append(format_.decode(raw, (4096, format_.block_size)).dequantize())
    halves = np.array([1.0, *(-parts[0].mean() / minimums.mean() for minimums in parts[1:])])
    weights = sum(half * part for half, part in zip(halves, parts, strict=True))
    return halves / np.sqrt(np.square(weights).mean())
