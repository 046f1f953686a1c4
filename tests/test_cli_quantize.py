"""`nanokit quantize`, and `--policy` where a model is loaded."""

from pathlib import Path

import pytest
from tiny import compiled_model, save_tiny, save_tiny_gguf, tiny_model

from nanokit.cli import main


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return save_tiny_gguf(path, compiled_model("llama", tied=True), types="Q8_0")


def test_a_file_is_written_and_answers(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path alone on standard output, so that it can be the next command's argument; what was lost on the other."""
    out = tmp_path / "small.safetensors"
    assert main(["quantize", str(gguf), str(out), "--policy", "int4-sym-g32+search"]) == 0
    printed, said = capsys.readouterr()
    assert printed.strip() == str(out)
    assert "quantized a second time (Q8_0 before)" in said
    assert "8.50 -> 4.50 bits" in said
    assert main(["generate", "hello", "--raw", "--max-tokens", "3", "--ctx", "64", "--model", str(out)]) == 0


def test_floats_are_quantized_for_the_first_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning about a second time is for those whom it concerns."""
    folder = save_tiny(tmp_path / "tiny", compiled_model("llama"))
    assert main(["quantize", str(folder), str(tmp_path / "a.safetensors"), "--policy", "nvfp4"]) == 0
    assert "second time" not in capsys.readouterr().err


def test_floats_again_are_no_second_quantization(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is lost by it, and nothing comes back."""
    assert main(["quantize", str(gguf), str(tmp_path / "f32.gguf"), "--policy", "f32"]) == 0
    said = capsys.readouterr().err
    assert "floats of quantized weights (Q8_0 before): what was lost stays lost" in said
    assert "8.50 -> 32.00 bits" in said


def test_matrices_that_no_block_divides_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is larger than its policy has to say why."""
    source = save_tiny_gguf(tmp_path / "in.gguf", tiny_model("llama", tied=True))  # 60 columns
    assert main(["quantize", str(source), str(tmp_path / "out.gguf"), "--policy", "q4_0"]) == 0
    said = capsys.readouterr().err
    assert "12 matrices became F16, for no block divides their columns: blk.0.attn_q.weight, " in said


def test_a_policy_at_loading(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--policy` runs what `quantize` would write."""
    command = ["generate", "hello", "--raw", "--max-tokens", "3", "--ctx", "64", "--model", str(gguf), "--json"]
    assert main([*command, "--policy", "int4-sym-g32"]) == 0
    assert "as int4-sym-g32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("policy", "says"),
    [("int4-sym-g128", "g32, g64"), ("int3", "nvfp4, mxfp4, nf4"), ("nvfp4;9.q=keep", "layers 0 to 1")],
)
def test_what_was_typed_wrong(
    policy: str, says: str, gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the choices, and no file."""
    assert main(["quantize", str(gguf), str(tmp_path / "out.safetensors"), "--policy", policy]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_calibration_text_that_is_not_there(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Falling back to the kit's own text would calibrate on another domain than was asked for."""
    command = ["quantize", str(gguf), str(tmp_path / "out.safetensors"), "--policy", "nvfp4+gptq"]
    assert main([*command, "--calibration", str(tmp_path / "no.txt")]) == 2
    assert "calibration text" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("abc")
    assert main([*command, "--calibration", str(tmp_path / "short.txt")]) == 2
    assert "too short to calibrate on" in capsys.readouterr().err
    assert main([*command[:4], "nvfp4", "--calibration", str(tmp_path / "short.txt")]) == 2
    assert "looks at no text" in capsys.readouterr().err
