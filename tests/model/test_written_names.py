"""New files under long names, and those that cannot be opened again: refused early, or left without a name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny, tiny_model

from nanokit.errors import ModelFileError, NanokitError
from nanokit.model import quantize as quantizing
from nanokit.model.convert import convert
from nanokit.model.quantize import quantize
from nanokit.model.requantize import Requantized
from nanokit.model.source import SafetensorsSource

LONGEST = 255  # bytes of a name, on the file systems in use
SET = len("-00001-of-00001")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", tied=True, heads=4, head_dim=16, hidden=64)
    return save_tiny(tmp_path_factory.mktemp("hf") / "tiny", model, ["h e", "l l", "he ll"])


def named(folder: Path, length: int, suffix: str = ".gguf") -> Path:
    """A name of so many bytes, most of them in letters of three."""
    free = length - len(suffix)
    return folder / ("あ" * (free // 3) + "n" * (free % 3) + suffix)


@pytest.mark.parametrize(
    ("make", "suffix"), [(convert, ".gguf"), (quantize, ".gguf"), (quantize, ".safetensors")],
)  # fmt: skip
def test_the_longest_name_is_no_hindrance(folder: Path, tmp_path: Path, make: Callable[..., Any], suffix: str) -> None:
    """A scratch file of a scratch file has the longest name of all: found behind the tensors, it costs the work."""
    path = named(tmp_path, LONGEST, suffix)
    make(folder, path, "q8_0")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    if suffix == ".gguf":
        path = named(tmp_path, LONGEST - SET)
        assert len(make(folder, path, "q8_0", shard_size=20_000).files) > 1


@pytest.mark.parametrize("make", [convert, quantize])
def test_a_name_that_is_too_long_is_refused_before_any_weight(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., object]
) -> None:
    """By its own length, or by that of the numbers that files of a set get."""
    monkeypatch.setattr(SafetensorsSource, "tensor", None)
    for length, more in ((LONGEST + 1, {}), (LONGEST - SET + 1, {"shard_size": 20_000})):
        with pytest.raises(NanokitError, match="cannot be written"):
            make(folder, named(tmp_path, length), "q8_0", **more)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("suffix", "more"), [(".gguf", {}), (".gguf", {"shard_size": 20_000}), (".safetensors", {})]
)  # fmt: skip
def test_what_cannot_be_opened_never_gets_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, more: dict[str, Any]
) -> None:
    """The next mistake of ours: opened only after the rename, it is a broken file where a sound one may have been."""
    path = tmp_path / f"out{suffix}"
    path.write_bytes(b"old")
    parts = quantizing.gguf_parts

    def without_a_base(*args: Any) -> Any:
        keys, entries = parts(*args)
        return {name: key for name, key in keys.items() if not name.endswith("freq_base")}, entries

    monkeypatch.setattr(quantizing, "gguf_parts", without_a_base)
    monkeypatch.setattr(Requantized, "facts", lambda _: {})
    with pytest.raises(ModelFileError, match=rf"out\{suffix}"):
        quantize(folder, path, "q8_0", force=True, **more)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("suffix", [".gguf", ".safetensors"])
def test_every_tensor_is_a_step(folder: Path, tmp_path: Path, suffix: str) -> None:
    """Rounding a large model takes minutes, in which nothing is seen to happen."""
    steps: list[tuple[int, int]] = []
    quantize(folder, tmp_path / f"out{suffix}", "q8_0", progress=lambda done, total, _: steps.append((done, total)))
    assert steps == [(i, 20) for i in range(1, 21)]  # 2 layers of 9 tensors, embedding and norm
