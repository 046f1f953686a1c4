"""Folders that load, and that no GGUF file can say: refused by what is wrong in them, before a weight is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny, tiny_model

from nanokit.errors import ModelFileError, TokenizerError
from nanokit.model.convert import convert
from nanokit.model.quantize import quantize
from nanokit.model.source import SafetensorsSource

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 1e39, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", tied=True, heads=4, head_dim=16, hidden=64)
    return save_tiny(tmp_path_factory.mktemp("hf") / "tiny", model, ["h e", "l l", "he ll"])


@pytest.fixture
def copy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that can be changed, whose weights cannot be read."""
    shutil.copytree(folder, tmp_path / "hf")
    monkeypatch.setattr(SafetensorsSource, "tensor", None)
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_position_embeddings": 1 << 33}, r"context_length(?s:.*)8589934592"),
        ({"rms_norm_eps": 1e-60}, r"rms_epsilon(?s:.*)1e-60"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e39}}, r"freq_base(?s:.*)1e\+39"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e39}},
            r"scaling\.factor(?s:.*)1e\+39",
        ),
        ({"rope_parameters": LLAMA3}, r"llama3(?s:.*)1e\+39"),
    ],
    ids=["context", "eps", "base", "factor", "llama3"],
)
@pytest.mark.parametrize("make", [convert, quantize])
def test_numbers_that_no_file_can_hold_are_refused_before_any_weight(
    copy: Path, tmp_path: Path, make: Callable[[Path, Path, str], object], change: dict[str, Any], named: str
) -> None:
    """config.json has decimals of any size, a GGUF file 32 bits of them: an OverflowError behind a traceback, or a zero
    in silence, in a file that then cannot be read."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelFileError, match=named):
        make(copy, tmp_path / "out.gguf", "q8_0")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("chat_template.jinja", "{% for %}", r"folder's own chat template is broken(?s:.*)TemplateSyntaxError"),
        (
            "generation_config.json",
            '{"eos_token_id": [258, -1]}',
            r"end of text(?s:.*)eos_token_id -1\n",
        ),
        ("generation_config.json", '{"eos_token_id": 320}', r"end of text(?s:.*)eos_token_id 320"),
    ],
)
@pytest.mark.parametrize("make", [convert, quantize])
def test_what_is_broken_in_the_folder_is_said_of_the_folder(
    copy: Path, tmp_path: Path, make: Callable[[Path, Path, str], object], file: str, text: str, named: str
) -> None:
    """Found in the new file, it reads as a fault of the converter, or as one of a download that nobody made."""
    (copy / file).write_text(text)
    with pytest.raises(TokenizerError, match=named) as caught:
        make(copy, tmp_path / "out.gguf", "q8_0")
    assert file in str(caught.value.do)
    assert not (tmp_path / "out.gguf").exists()


def test_a_tokenizer_without_merges_is_told_so(tmp_path: Path) -> None:
    """'found: none' left open what there was none of."""
    save_tiny(tmp_path / "hf", tiny_model("llama", heads=4, head_dim=16, hidden=64))
    with pytest.raises(TokenizerError, match="no merges: every byte of a text"):
        convert(tmp_path / "hf", tmp_path / "out.gguf")
