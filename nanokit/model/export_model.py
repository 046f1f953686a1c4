"""A whole model of any source as the metadata and the tensors of a GGUF file.

Conversion and quantization write the same files: this is what they have in common. A GGUF file that becomes another one
is no conversion (gguf/write.py copies it: its metadata says more than a configuration does).
"""

from collections.abc import Iterator

from nanokit.gguf.write import Entry, Key, main_type
from nanokit.model.export import entry_of
from nanokit.model.export_keys import frequency_entry, model_keys
from nanokit.model.export_tokenizer import tokenizer_keys
from nanokit.model.requantize import Requantized
from nanokit.model.source import check_vocabulary
from nanokit.model.weights import GLOBAL_NAMES, LAYER_NAMES, Linear, Matrix, Weights, find_weights


def gguf_parts(source: Requantized, alignment: int) -> tuple[dict[str, Key], list[Entry]]:
    """All keys, and all tensors in llama.cpp's order; a weight is read when its tensor is written. alignment: of each
    tensor, in bytes. Raises ModelFileError for more tokens than the embedding has rows, TokenizerError for a tokenizer
    that GGUF cannot say."""
    check_vocabulary(source.base.name, source.tokenizer, source.config)
    entries = [*_entries(source)]
    keys = model_keys(source.config, source.base.name, alignment=alignment, file_type=main_type(entries))
    keys |= tokenizer_keys(source.tokenizer, source.config.vocab_size, source.config.architecture)
    return keys, entries


def gguf_names(weights: Weights) -> Iterator[tuple[str, str]]:
    """The name of every tensor in its source, and the one that it has in a GGUF file."""
    return _names(weights, 0)


def transformers_names(weights: Weights) -> Iterator[tuple[str, str]]:
    """The name of every tensor in its source, and the one that it has in a transformers folder."""
    return _names(weights, 1)


def _names(weights: Weights, kind: int) -> Iterator[tuple[str, str]]:
    """kind: of the second name, as `TensorSource.kind`."""
    yield from _of(weights.embedding, GLOBAL_NAMES["embedding"][kind])
    for index, layer in enumerate(weights.layers):
        prefix = ("blk.", "model.layers.")[kind] + f"{index}."
        for part, names in LAYER_NAMES.items():
            yield from _of(getattr(layer, part), prefix + names[kind])
    yield from _of(weights.final_norm, GLOBAL_NAMES["final_norm"][kind])
    yield from _of(weights.head, GLOBAL_NAMES["head"][kind])


def _entries(source: Requantized) -> Iterator[Entry]:
    for name, target in gguf_names(find_weights(source.config, source)):
        yield entry_of(source, name, target)
    frequencies = frequency_entry(source.config)
    if frequencies is not None:
        yield frequencies


def _of(found: Matrix | Linear | None, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(found, Linear):
        yield from _of(found.weight, name)
        if found.bias is not None:
            yield found.bias.name, f"{name}.bias"
    elif found is not None:
        yield found.name, f"{name}.weight"
