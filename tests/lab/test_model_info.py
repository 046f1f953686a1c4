"""`nanokit model info`: quick whatever the header holds, and of use for files that are broken."""

import struct
import time
from pathlib import Path

import pytest
from handmade_gguf import array, gguf_bytes, info, pair, text, u32, u64
from tiny import save_tiny_gguf, tiny_model

from nanokit.errors import ModelFileError
from nanokit.gguf.faults import FAULTS, inject
from nanokit.lab.model_info import main

PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "ffn_norm")


def large_header(path: Path, tensors: int = 1000, entries: int = 150_000) -> Path:
    """A file of many small tensors with a vocabulary, scores, token types and merges of a large model."""

    def strings(prefix: bytes) -> bytes:
        length = u64(len(prefix) + 6)
        return array(8, entries, b"".join(length + prefix + b"%06d" % i for i in range(entries)))

    pairs = [
        pair("general.architecture", 8, text("llama")),
        pair("llama.block_count", 4, u32(tensors // len(PARTS))),
        pair("llama.rope.freq_base", 6, struct.pack("<f", 5e5)),
        pair("tokenizer.ggml.tokens", 9, strings("Ġtoken".encode())),
        pair("tokenizer.ggml.scores", 9, array(6, entries, bytes(4 * entries))),
        pair("tokenizer.ggml.token_type", 9, array(5, entries, u32(1) * entries)),
        pair("tokenizer.ggml.merges", 9, strings("Ġto ken".encode())),
    ]
    nbytes = 64 * 18  # of a Q4_0 matrix of 64 x 32
    names = [f"blk.{i // len(PARTS)}.{PARTS[i % len(PARTS)]}.weight" for i in range(tensors)]
    infos = [info(name, [32, 64], 2, i * nbytes) for i, name in enumerate(names)]
    path.write_bytes(gguf_bytes(pairs, infos, bytes(tensors * nbytes)))
    return path


def seconds(path: Path) -> float:
    """The best of three: what the machine does beside is none of the command's."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        assert main(str(path), None, None) == 0
        times.append(time.perf_counter() - begin)
    return min(times)


def test_a_large_header_takes_no_second(tmp_path: Path) -> None:
    """Anything that is slow for each entry: the gguf library's reader takes many seconds. Asked for is 1 s; the bound
    leaves room for slow machines."""
    assert seconds(large_header(tmp_path / "large.gguf")) < 3


@pytest.mark.model
def test_the_default_model_takes_no_time(default_model: Path) -> None:
    """Asked for is .3 s after import; the bound leaves room for slow machines."""
    assert seconds(default_model) < 0.9


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_file_is_described_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A file that no reader should open is refused by key or tensor; any other is one that people want to look at."""
    base = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    source = save_tiny_gguf(tmp_path / "sound.gguf", tiny_model("llama", tied=True, **base))
    found = inject(name, source, tmp_path / "broken.gguf")
    if found.fault.place == "file":
        with pytest.raises(ModelFileError) as caught:
            main(str(tmp_path / "broken.gguf"), None, None)
        assert all(each in str(caught.value) for each in ("broken.gguf", *found.keys, *found.tensors))
        return
    assert main(str(tmp_path / "broken.gguf"), None, None) == 0
    said = capsys.readouterr().out
    shows = {
        "rope-base-10000": "10000.0",
        "rope-base-missing": "not stated",
        "rope-base-text": "'50000.0', a text and no number",
        "frequency-scale-half": "linear",
        "head-count-32": "query heads        32",
        "tied-head-dropped": "missing, and so is the embedding",
    }
    assert shows.get(name, "50000.0") in said


@pytest.mark.parametrize("pairs", [[], [pair("general.architecture", 8, text("llama"))]])
def test_a_file_without_tensors_is_all_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pairs: list[bytes]
) -> None:
    """A vocabulary alone, or what is left of a model: counted as nothing, not as a tensor that is missing."""
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(pairs))
    assert main(str(tmp_path / "m.gguf"), None, None) == 0
    size = (tmp_path / "m.gguf").stat().st_size
    assert f"{size:,}, {size:,} of them header" in capsys.readouterr().out
