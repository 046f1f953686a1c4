"""The check of the Triton kernels, run here in all that it can be: a person with a GPU has one try at it."""

import ast
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nanokit.kernels.gpu
import nanokit.kernels.gpu.device
from nanokit.kernels.gpu import ahead, runtime
from nanokit.kernels.gpu.checks import offsets, product_cases, program, run, work

KEYS = {"schema", "mode", "timings", "options", "device", "correctness", "speed", "offsets", "tuned", "compiled",
        "skipped", "remarks", "faults", "interrupted", "machine", "versions", "git", "code_sha256", "started",
        "duration_s"}  # fmt: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not runtime.INTERPRETED, reason="the check is tested where kernels are interpreted"),
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def launchable() -> set[str]:
    """Functions of device/*.py that ask which program they are: what can be launched. Read from the source."""
    found = set()
    for module in pkgutil.iter_modules(nanokit.kernels.gpu.device.__path__):
        tree = ast.parse((Path(nanokit.kernels.gpu.device.__path__[0]) / f"{module.name}.py").read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and "program_id" in {
                part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
            }:
                found.add(node.name)
    return found


def called(*arguments: str) -> int:
    return program.main(list(arguments))


def test_all_of_it_in_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    """A kernel that no case launches, a field that is missing, a case that never ran, a cache that interpreted figures
    reach."""
    launched = set()
    original = runtime.launch

    def noted(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.add(kernel.__name__)
        original(kernel, *arguments, **options)

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("nanokit.kernels.gpu") and vars(module).get("launch") is original:
            monkeypatch.setattr(module, "launch", noted)
    assert called("--interpret", "--json", str(tmp_path / "a.json")) == 0
    assert launched == launchable()
    assert len(launched) > 15
    made = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert set(made) == KEYS
    assert (made["schema"], made["mode"], made["timings"]) == ("nanokit.gpu-check/1", "interpreter", "interpreter")
    assert made["faults"] == made["skipped"] == made["tuned"] == made["compiled"] == []
    assert made["device"] is None
    assert {each["op"] for each in made["correctness"]} == set(run.OPS) - {"offsets"}
    assert all(each["ok"] and each["error"] <= each["bound"] for each in made["correctness"])
    assert [each["offset"] for each in made["offsets"]] == list(offsets.OFFSETS)
    assert all(each["equal"] for each in made["offsets"])
    ops = {each["op"] for each in made["speed"]}
    assert ops == {"copy", "bf16", "product", "attention", "rms_norm", "silu_gate", "rope", "select", "fake_quant"}
    for each in made["speed"]:
        assert set(each["ms"]) == {"min", "median", "max", "n"}
        assert each["gb_s"] > 0
        assert each["op"] != "product" or each["vs_bf16"] > 0
    out = capsys.readouterr().out
    assert "times say nothing about a GPU" in out
    assert out.endswith("interpreter\n")
    assert not home.exists()


def test_what_is_wrong_comes_first_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A result beyond its bound, and a launch that raises: exit code 1, each named with its case, others still run."""
    right = product_cases.multiply

    def wrong(weights: Any, x: Any, ids: Any = None) -> torch.Tensor:
        if weights.name == "fp4-g16":
            raise RuntimeError("CUDA error:\n  misaligned address")
        return right(weights, x, ids) * (1.0 + 2.0**-15)

    monkeypatch.setattr(product_cases, "multiply", wrong)
    asked = ("--interpret", "--only", "product", "quantize", "--first", "4", "--json", str(tmp_path / "a.json"))
    assert called(*asked) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "WRONG"
    assert lines[1].startswith("  product: int4-sym-g32 a8g32, 2 x 96 -> 21: error ")
    assert lines[4] == "  product: fp4-g16 a8g32, 2 x 96 -> 21: RuntimeError: CUDA error: misaligned address"
    assert lines[-1].startswith("WRONG")
    made = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert [each["ok"] for each in made["correctness"] if each["op"] == "quantize"] == [True] * 4
    assert made["correctness"][3]["error"] is None


def test_a_timing_that_fails_and_other_bits_at_an_offset_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no cases, and must not be lost for that."""
    monkeypatch.setattr(run.speed, "argmax_rows", lambda logits: 1 / 0)
    assert called("--interpret", "--only", "select", "--first", "1") == 1
    monkeypatch.setattr(offsets, "multiply", lambda weights, x: torch.rand(1))
    assert called("--interpret", "--only", "offsets") == 1


def test_a_device_left_in_an_error_does_not_lose_the_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After an illegal access every CUDA call raises, the copy that speeds are compared with first of all."""

    def broken(bench: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(run.Bench, "measure_copy", broken)
    assert called("--interpret", "--only", "select", "--first", "1", "--json", str(tmp_path / "a.json")) == 1
    [fault] = json.loads((tmp_path / "a.json").read_text("utf-8"))["faults"]
    assert fault == "copy: timing torch's copy: RuntimeError: CUDA error: an illegal memory access was encountered"


def test_not_a_number_is_never_within_a_bound() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert not work.within(nan, torch.ones(2).double(), torch.ones(2), 1e9).ok
    assert not work.equal((nan, torch.ones(2))).ok
    assert work.equal((nan, nan)).ok
    assert not work.equal((torch.ones(2), torch.ones(3))).ok
    assert not work.within(torch.ones(2), torch.ones(3), torch.ones(3), 1.0).ok
    assert not work.within(torch.ones(1), torch.zeros(1), torch.zeros(1), 1e9).ok


def test_what_had_no_time_is_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Silence would pass for a check; and a check of nothing is none."""
    assert called("--interpret", "--seconds", "1e-9", "--json", str(tmp_path / "a.json")) == 1
    made = json.loads((tmp_path / "a.json").read_text("utf-8"))
    cases, tasks = run.all_cases(True), run.speed.tasks(True)
    assert made["correctness"] == made["speed"] == []
    assert len(made["skipped"]) == len(cases) + len(tasks) + len(offsets.OFFSETS) + 1  # torch's copy
    out = capsys.readouterr().out
    assert out.startswith("WRONG\n  nothing was checked")
    assert made["skipped"][0] in out


def test_an_interruption_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Minutes on somebody's GPU would be lost; the exit code is the one of Ctrl-C."""
    whole, seen = run.outcome_of, []

    def third(case: Any) -> Any:
        seen.append(case)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return whole(case)

    monkeypatch.setattr(run, "outcome_of", third)
    assert called("--interpret", "--only", "quantize", "--json", str(tmp_path / "a.json")) == 130
    made = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert made["interrupted"]
    assert len(made["correctness"]) == 2
    out = capsys.readouterr().out
    assert "note: interrupted" in out
    assert "all right as far as it went" in out


def test_a_document_that_cannot_be_written_leaves_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They come first, and the exit code tells."""

    def full(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert called("--interpret", "--only", "select", "--first", "1", "--json", str(tmp_path / "a.json")) == 1
    said = capsys.readouterr()
    assert "all right" in said.out
    assert "No space left" in said.err
    assert not (tmp_path / "a.json").exists()


def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 2, before a minute is spent; without a GPU the way to the interpreter is named."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert called() == 2
    assert "--interpret" in capsys.readouterr().err
    for asked in (["--only", "matmul"], ["--arch", "12"], ["--json", str(tmp_path / "none" / "a.json")],
                  ["--json", str(tmp_path)], ["--first", "0"], ["--seconds", "0"],
                  ["--seconds", "-1"], ["--arch", "90", "--tune"],
                  ["--arch", "90", "--interpret"], ["--tune", "--only", "select"], ["--tune", "--seconds", "9"],
                  ["--arch", "90", "--seconds", "9"]):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            called(*asked)
        assert stopped.value.code == 2, asked


# --- what only a device reaches, on one that is made up ---


def test_spilled_registers_are_a_fault() -> None:
    report = ahead.Report("product", 80, {"KIND": 0}, 4, 255, 432, 1024, 9, {16: 1}, None)
    [fault] = run.Findings(compiled=[report]).faults
    assert "sm_80 product spills" in fault


PROBE = """
from nanokit.kernels.gpu.checks import compiled, offsets, work
print(offsets.loads_at(0, 90), offsets.loads_at(1, 90))
def bad(): raise RuntimeError("no such tile")
print(compiled.compile_all(80, [work.Case("op", "bad", bad)], [], False))
"""


def test_all_kernels_compile_for_two_architectures(tmp_path: Path) -> None:
    """What the interpreter cannot see: types, shared memory, spilled registers, loads that did not become wide. The
    first two cases of each operation, a process an architecture; `--arch 80 90` alone does all."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    ops = [op for op in run.OPS if op != "model"]  # which launches what the others do
    command = [sys.executable, "-m", "nanokit.kernels.gpu.check", "--first", "2", "--only", *ops]
    running = [
        subprocess.Popen([*command, "--arch", arch, "--json", str(tmp_path / arch)], env=environment,
                         stdout=subprocess.PIPE, text=True)
        for arch in ("80", "90")
    ]  # fmt: skip
    probe = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    for process, arch in zip(running, ("80", "90"), strict=True):
        out, _ = process.communicate()
        assert process.returncode == 0, out
        made = json.loads((tmp_path / arch).read_text("utf-8"))
        assert made["mode"] == "compiled"
        assert {each["kernel"] for each in made["compiled"]} == launchable()
        assert {each["arch"] for each in made["compiled"]} == {int(arch)}
    aligned, shifted, faults = probe.stdout.splitlines()[0].partition("} {")[0], probe.stdout, probe.stdout
    assert "16: " in aligned
    assert "1: " in shifted.splitlines()[0].partition("} {")[2]
    assert "RuntimeError: no such tile" in faults
    assert "sm_80: bad" in faults
