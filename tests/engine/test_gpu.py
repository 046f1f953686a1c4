"""The engine on the Triton kernels: one code path for device="cuda" and for the interpreter, which runs it here."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import compiled_model, save_tiny, save_tiny_gguf

from nanokit.engine import load as load_module
from nanokit.engine.load import load
from nanokit.engine.sampling import Sampling
from nanokit.errors import NanokitError, ParameterError
from nanokit.kernels.gpu import NoGpuError, runtime

pytestmark = [
    pytest.mark.skipif(not runtime.INTERPRETED, reason="this process compiles kernels for a GPU"),
    pytest.mark.filterwarnings("ignore:.*runs in Triton's interpreter"),
]
PROMPTS = [[5, 9, 2], [7]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tmp_path_factory.mktemp("gpu") / "tiny.gguf", compiled_model("llama"), types="Q4_1")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=3, ignore_eos=True),
        Sampling(max_tokens=3, ignore_eos=True, temperature=0.8, seed=3),
        Sampling(max_tokens=3, ignore_eos=True, temperature=1.5, top_k=40, top_p=0.9, repetition_penalty=1.3, seed=4),
    ],
    ids=["greedy", "sampled", "filtered"],
)
def test_answers_are_those_of_the_cpu(file: Path, sampling: Sampling) -> None:
    """Greedy, drawn and filtered: batch, pages, head and selection on the device, ids and noise on the host. In a16,
    where no rounding shows."""
    options: dict[str, Any] = {"activations": "a16", "kv_format": "fp16", "ctx": 64, "max_seqs": 2}
    wanted = load(file, **options).generate(PROMPTS, sampling)
    engine = load(file, device="interpreter", **options)
    got = engine.generate(PROMPTS, sampling)
    assert [done.token_ids for done in got] == [done.token_ids for done in wanted]
    assert engine.model.kernels == "triton-interpreter"
    assert not engine.model.compiled  # by C
    assert engine.model.device == runtime.device()


def test_what_the_device_takes_by_itself(file: Path) -> None:
    """Modes and pages as beside the C kernels, but for pages that are sealed."""
    with pytest.warns(UserWarning, match=r"tiny\.gguf runs in Triton's interpreter.*minutes"):
        engine = load(file, device="interpreter", ctx=64, max_seqs=1)
    assert (engine.model.activations, engine.kv.kv_format) == ("a8g32", "fp16")
    assert load(file, device="interpreter", activations="fp32", ctx=64, max_seqs=1).kv.kv_format == "fp32"
    small = load(file, device="interpreter", kv_format="int4", ctx=64, max_seqs=1)
    [done] = small.generate([[5, 9]], Sampling(max_tokens=1, ignore_eos=True))
    assert len(done.token_ids) == 1
    with pytest.raises(ParameterError, match=r"(?s)Triton kernels have no kivi4 pages.*int8"):
        load(file, device="interpreter", kv_format="kivi4")


def test_static_activations_are_calibrated_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the kit's text, through the device's pages: peaks come back to the host and go there again."""
    monkeypatch.setattr(load_module, "CALIBRATION_TOKENS", 4)
    engine = load(file, device="interpreter", activations="static", ctx=2, max_seqs=1, kv_memory="40KiB")
    assert engine.model._bound.peaks is not None
    [done] = engine.generate([[5]], Sampling(max_tokens=1, ignore_eos=True))
    assert len(done.token_ids) == 1


def test_nothing_stands_in_for_a_gpu(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who asked for it must not wait for something else: no GPU, weights that it cannot take, and layers left
    in their file are refused with what to do."""
    if not torch.cuda.is_available():
        with pytest.raises(NoGpuError, match=r'(?s)no GPU.*device="cpu"'):
            load(file, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GeForce RTX 2080")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(NoGpuError, match=r"(?s)RTX 2080 is too old.*7\.5.*8\.0"):
        load(file, device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(NoGpuError, match=r"(?s)interprets.*TRITON_INTERPRET=0"):
        load(file, device="cuda")
    with pytest.raises(ParameterError, match="mapped"):
        load(file, device="interpreter", mapped=True)
    floats = save_tiny(tmp_path / "floats", compiled_model("llama"))
    with pytest.raises(NoGpuError, match=r"(?s)F32 .model.layers.0.*Q4_0") as caught:
        load(floats, device="interpreter")
    assert isinstance(caught.value, NanokitError)


def test_the_command_line_takes_a_device(file: Path) -> None:
    """Also that a process which has not asked for Triton does not import it: it costs a tenth of a second."""
    ask = ["generate", "a", "--raw", "--model", str(file), "--ctx", "32", "--max-tokens", "1"]
    script = "import sys; from nanokit.cli import main; code = main(sys.argv[1:]); print('triton' in sys.modules, code)"
    for device, imported in (("cpu", False), ("interpreter", True)):
        done = subprocess.run(
            [sys.executable, "-c", script, *ask, "--device", device], capture_output=True, text=True, timeout=120
        )
        assert done.stdout.split("\n")[-2] == f"{imported} 0", done.stdout + done.stderr
