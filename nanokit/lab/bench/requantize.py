"""A Q4_0 copy of a Q4_1 model, for the comparison with llama.cpp's fastest 4-bit kernels.

Each 2-D Q4_1 tensor is dequantized and quantized again by the gguf library; everything else, metadata included, is
copied byte for byte. The copy answers a little worse than its source (it is quantized twice) and is for timing only.
It is written once into the kit's cache, under a name that changes with the source, and renamed into place when it is
complete.
"""

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

from nanokit.gguf.reader import GGUFFile
from nanokit.lab.bench.limit import BenchError
from nanokit.paths import cache_dir


def main_type(file: Path) -> str:
    """The type that most bytes of the layers' matrices have. Raises BenchError for anything but a GGUF file."""
    if file.is_dir():
        raise BenchError(
            "llama.cpp reads GGUF files only", found=f"the folder {file.name}", needed="a .gguf file", do="convert it"
        )
    sizes: Counter[str] = Counter()
    for name, info in GGUFFile.open(file).tensors.items():
        if name.startswith("blk.") and len(info.shape) == 2:
            sizes[info.type] += info.nbytes
    return sizes.most_common(1)[0][0]


def q4_0_copy(source: Path) -> Path:
    """The path of the copy, written if it is not there."""
    facts = source.stat()
    key = hashlib.sha256(f"{source.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:12]
    target = cache_dir() / "bench" / f"{source.stem}.{key}.Q4_0.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            _write(source, scratch)
            os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)
    return target


def _write(source: Path, target: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    q4_0, q4_1 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1
    for tensor in reader.tensors:
        data: Any = tensor.data
        kind = tensor.tensor_type
        if kind == q4_1 and len(tensor.shape) == 2:
            data, kind = gguf.quants.quantize(gguf.quants.dequantize(data, q4_1), q4_0), q4_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
