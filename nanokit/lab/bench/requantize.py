"""A Q4_0 copy of a Q4_1 model, for the comparison with llama.cpp's fastest 4-bit kernels.

Each 2-D Q4_1 tensor is dequantized and quantized again; everything else is copied byte for byte. The copy answers a
little worse than its source (it is quantized twice) and is for timing only. It is written once into the kit's cache,
under a name that changes with the source.
"""

import hashlib
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Entry, rewrite
from nanokit.lab.bench.limit import BenchError
from nanokit.paths import cache_dir
from nanokit.quant.ggml import GGML_FORMATS, to_blocks


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
        _write(source, target)
    return target


def _write(source: Path, target: Path) -> None:
    file = GGUFFile.open(source)
    matrices = {name: info for name, info in file.tensors.items() if info.type == "Q4_1" and len(info.shape) == 2}
    rewrite(source, target, {n: Entry(n, "Q4_0", info.shape, partial(_q4_0, file, n)) for n, info in matrices.items()})


def _q4_0(file: GGUFFile, name: str) -> np.ndarray:
    return to_blocks(GGML_FORMATS["q4_0"].quantize(file.tensor(name), name))
