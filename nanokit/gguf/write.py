"""A GGUF file that is another one with some tensors replaced, by the gguf library's writer.

Metadata is copied key by key, in the file's own types (but for empty arrays, which the library cannot write), unless
another value is given; tensors that are not replaced are copied byte for byte. The new file is written beside its place
and renamed when it is complete.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanokit.errors import ModelFileError

FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "MXFP4": 38}  # llama.cpp's LLAMA_FTYPE_MOSTLY_…


def rewrite(
    source: Path,
    target: Path,
    replaced: Mapping[str, tuple[str, np.ndarray]],
    keys: Mapping[str, tuple[str, Any]] | None = None,
) -> None:
    """Write `target`: `source` with the tensors `replaced` = {name: (GGML type, its blocks as uint8 [rows, bytes], or
    float32 values for F32)}, and the metadata `keys` = {name: (GGUF value type, such as "UINT32", and value)}.

    Raises ModelFileError for a sharded source, OSError for a place that cannot be written. An existing file is replaced
    at the end.
    """
    import gguf  # takes half a second

    reader = gguf.GGUFReader(source)
    if "split.count" in reader.fields:
        raise ModelFileError(
            f"{source.name} is one of several shards", needed="a model in one file", do="merge its shards first"
        )
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    writer = gguf.GGUFWriter(scratch, reader.fields["general.architecture"].contents())
    try:
        _copy_metadata(reader, writer, _main_type(replaced), keys or {})
        for tensor in reader.tensors:
            data: Any = tensor.data
            kind = tensor.tensor_type
            if tensor.name in replaced:
                name, data = replaced[tensor.name]
                kind = gguf.GGMLQuantizationType[name]
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def _copy_metadata(reader: Any, writer: Any, file_type: int | None, keys: Mapping[str, tuple[str, Any]]) -> None:
    import gguf

    for name, (kind, value) in keys.items():
        writer.add_key_value(name, value, gguf.GGUFValueType[kind])

    if "general.quantization_version" not in reader.fields and file_type is not None:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)  # the format wants it beside quantized tensors
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF.") or field.name in keys:
            continue  # the writer's own, or written above
        value = field.contents()
        if isinstance(value, list) and not value:
            continue
        if field.name == "general.file_type" and file_type is not None:
            value = file_type
        if field.name == "general.alignment":
            writer.add_custom_alignment(value)
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)


def _main_type(replaced: Mapping[str, tuple[str, np.ndarray]]) -> int | None:
    """What the file calls itself: the type that most of the replaced bytes have."""
    sizes: dict[str, int] = {}
    for name, data in replaced.values():
        sizes[name] = sizes.get(name, 0) + data.nbytes
    return FILE_TYPES.get(max(sizes, key=sizes.__getitem__)) if sizes else None
