"""The doctor in environments broken on purpose: each fault must be found, and named with its mend."""

import json
import os
import stat
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanokit import checks, doctor, paths
from nanokit.lab import jupyter
from nanokit.model.spec import DEFAULT_MODEL


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache and run folder, and a Lab settings folder of the test's own."""
    monkeypatch.setenv("NANOKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NANOKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("JUPYTERLAB_DIR", str(tmp_path / "lab"))
    return tmp_path / "home"


def program(path: Path, text: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_report_of_this_machine() -> None:
    """Every check ends in a verdict, every bad one names a mend in one line, and looking changes nothing."""
    before = Path(paths.cache_dir()).exists()
    found = doctor.run()
    assert [check.name for check in found] == list(doctor.CHECKS)
    for check in found:
        assert check.status in {"ok", "warn", "fail"}
        assert check.found
        assert "\n" not in check.found + check.mend
        assert bool(check.mend) == (check.status != "ok"), check
    assert Path(paths.cache_dir()).exists() == before
    assert not jupyter.overrides_path().exists()


def test_no_network_and_quick(tmp_path) -> None:
    """A fresh process, sockets forbidden. The bound is generous: it guards against a benchmark."""
    script = (
        "import socket\n"
        "def refuse(*_, **__): raise SystemExit('the doctor went to the network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from nanokit import doctor\n"
        "print(doctor.to_json(doctor.run()))\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert time.monotonic() - begin < 20
    assert [set(entry) for entry in json.loads(done.stdout)] == [{"name", "status", "found", "mend"}] * len(
        doctor.CHECKS
    )


def test_exit_code_and_text() -> None:
    """Scripts read the exit code: a warning is not a failure."""
    fine, odd = doctor.Check("a", "ok", "x"), doctor.Check("long name", "warn", "y", "do z")
    bad = doctor.Check("c", "fail", "w", "do v")
    assert [doctor.exit_code(found) for found in ([fine], [fine, odd], [fine, bad])] == [0, 0, 1]
    text = doctor.render([fine, odd, bad])
    assert text.splitlines() == [
        "ok    a          x",
        "warn  long name  y",
        "                 mend: do z",
        "fail  c          w",
        "                 mend: do v",
        "1 ok, 1 warn, 1 fail",
    ]


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'x'"), OSError(5, "bad disk"), ValueError("odd")]
)
def test_broken_install_is_a_finding(monkeypatch, error) -> None:
    """The doctor is called when things are broken: it must not fall over the first of them."""

    def stumble() -> checks.Verdict:
        raise error

    monkeypatch.setitem(doctor.CHECKS, "torch", stumble)
    found = {check.name: check for check in doctor.run()}
    assert found["torch"].status == "fail"
    assert str(error) in found["torch"].found
    assert found["notebooks"].found


def test_missing_notebooks_are_a_finding(tmp_path, monkeypatch) -> None:
    """A wheel without its data: NanokitError's own words become the row."""
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "nowhere" / "nanokit")
    check = {check.name: check for check in doctor.run()}["notebooks"]
    assert (check.status, bool(check.mend)) == ("fail", True)
    assert "nowhere" in check.found


@pytest.mark.parametrize(
    ("version", "status"), [("3.10.9", "fail"), ("3.11.0", "ok"), ("3.13.2", "ok"), ("3.14.0", "fail")]
)
def test_python_range(monkeypatch, version, status) -> None:
    monkeypatch.setattr(checks.platform, "python_version", lambda: version)
    assert checks.python()[0] == status


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (("Linux", "x86_64"), "ok"),
        (("Linux", "aarch64"), "ok"),
        (("Darwin", "arm64"), "warn"),
        (("Windows", "AMD64"), "warn"),
        (("Darwin", "x86_64"), "fail"),
        (("Linux", "riscv64"), "fail"),
    ],
)
def test_platforms(monkeypatch, kind, status) -> None:
    monkeypatch.setattr(checks.platform, "system", lambda: kind[0])
    monkeypatch.setattr(checks.platform, "machine", lambda: kind[1])
    assert checks.system()[0] == status


def test_packages_missing_or_too_old(monkeypatch) -> None:
    """`--no-deps`, or another project that pulled a package back; extras and foreign markers do not count."""
    wants = [
        "numpy>=99",
        "no-such-package>=1",
        "also-none; extra == 'test'",
        "none-here; sys_platform == 'plan9'",
    ]
    monkeypatch.setattr(checks.metadata, "requires", lambda name: wants)
    status, found, _ = checks.packages()
    assert (status, found) == (
        "fail",
        f"numpy {metadata.version('numpy')} is not >=99, no-such-package is missing",
    )


def test_cpu_without_vectors_is_a_warning(monkeypatch) -> None:
    from nanokit.lab import machine

    monkeypatch.setattr(machine, "machine_card", lambda: SimpleNamespace(cpu="Old", isa=("f16c",)))
    monkeypatch.setattr(checks.sys, "platform", "linux")
    assert checks.cpu()[0] == "warn"
    monkeypatch.setattr(machine, "machine_card", lambda: SimpleNamespace(cpu="New", isa=("avx2",)))
    assert checks.cpu() == ("ok", "New: avx2", "")


def test_gpu_behind_a_cpu_build(monkeypatch, tmp_path) -> None:
    """The usual reason for "why is it slow": a driver is there, torch cannot use it."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.gpu() == ("ok", "none; the CPU is used; the Triton kernels run in the interpreter", "")
    program(tmp_path / "nvidia-smi")
    assert checks.gpu()[0] == "warn"


def test_gpu_offers_the_check_of_its_kernels_until_there_is_one(monkeypatch, home) -> None:
    """Kernels that nobody has tried on this card, a check of another card, one that found faults, one that is fine."""
    import torch

    cards = SimpleNamespace(name="NVIDIA Test 9000", total_memory=24 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards)
    path = paths.gpu_file("check", cards.name)
    assert path == home / "gpu" / "check-nvidia-test-9000.json"
    other = paths.gpu_file("check", "NVIDIA Test 9001")
    path.parent.mkdir(parents=True)
    fine = {"started": "2026-11-30T03:00:00+00:00", "faults": [], "skipped": ["x"]}
    fine["versions"] = {name: metadata.version(name) for name in ("torch", "triton", "nanokit")}
    other.write_text(json.dumps(fine))
    status, found, mend = checks.gpu()
    assert (status, "not been checked" in found) == ("warn", True)
    assert mend == f"{sys.executable} -m nanokit.kernels.gpu.check (three minutes)"
    path.write_text("[1]")
    assert checks.gpu()[0] == "warn"
    path.write_text(json.dumps(fine | {"faults": ["a", "b"]}))
    status, found, mend = checks.gpu()
    assert (status, "2 faults" in found, str(path) in mend) == ("warn", True, True)
    path.write_text(json.dumps(fine))
    status, found, mend = checks.gpu()
    assert (status, mend) == ("ok", "")
    assert "checked on 2026-11-30: all right, 1 cases" in found
    path.write_text(json.dumps(fine | {"versions": fine["versions"] | {"triton": "3.4"}}))
    assert checks.gpu()[0] == "warn"
    cards.major = 7
    assert checks.gpu() == ("ok", "NVIDIA Test 9000, 24.00 GiB; older than the kernels can use, the CPU is used", "")
    cards.major = 9
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    assert checks.gpu() == ("ok", "NVIDIA Test 9000, 24.00 GiB; not used: no Triton for this system", "")


def test_driver_too_old_is_quoted(monkeypatch) -> None:
    import torch

    def old() -> bool:
        checks.warnings.warn("The NVIDIA driver is too old\nmore", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old)
    assert checks.gpu()[:2] == ("warn", "The NVIDIA driver is too old")


def test_compiler_must_run(monkeypatch, tmp_path) -> None:
    """None; one that exists and fails (macOS without its tools); one that runs; `CC` before the others."""
    for name in ("CC", "NANOKIT_CPU_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    status, found, mend = checks.compiler()
    assert (status, "slower" in found, "install" in mend) == ("warn", True, True)
    program(tmp_path / "cc", "exit 1")
    assert checks.compiler()[0] == "warn"
    program(tmp_path / "clang", "echo clang version 99")
    status, found, _ = checks.compiler()
    assert status == "ok"
    assert found.startswith(f"{tmp_path / 'clang'}: clang version 99; portable kernels")
    monkeypatch.setenv("CC", str(program(tmp_path / "mycc", "echo mine")))
    assert "mine" in checks.compiler()[1]
    monkeypatch.setenv("CC", str(tmp_path / "nowhere"))
    assert "nowhere" in checks.compiler()[1]


def test_kernels_of_the_doctor_are_those_that_run(monkeypatch, home) -> None:
    """A variant that was asked for is the one that is named; a name that nobody knows is a failure."""
    monkeypatch.setenv("NANOKIT_CPU_KERNELS", "portable")
    assert "; portable kernels, compiled at first use" in checks.compiler()[1]
    monkeypatch.setenv("NANOKIT_CPU_KERNELS", "none")
    assert checks.compiler()[0] == "warn"
    monkeypatch.setenv("NANOKIT_CPU_KERNELS", "fast")
    [line] = [check for check in doctor.run() if check.name == "C compiler"]
    assert (line.status, "'fast'" in line.found) == ("fail", True)
    assert not home.exists()


def test_browser_path_wins_and_is_checked(monkeypatch, tmp_path) -> None:
    """kaleido takes BROWSER_PATH unseen and fails much later."""
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    status, found, mend = checks.browser()
    assert (status, "BROWSER_PATH" in mend) == ("warn", True)
    assert str(tmp_path / "none") in found
    monkeypatch.setenv("BROWSER_PATH", str(program(tmp_path / "chrome")))
    assert checks.browser() == ("ok", str(tmp_path / "chrome"), "")


def test_model_absent_wrong_and_without_pip(home, monkeypatch) -> None:
    """Absent is one fetch away; a wrong file in its place is a failure that names the file."""
    status, _, mend = checks.model()
    assert (status, "nanokit model fetch" in mend) == ("warn", True)
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    assert "ensurepip" in checks.model()[2]
    path = home / "models" / DEFAULT_MODEL.filename
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    status, found, _ = checks.model()
    assert status == "fail"
    assert str(path) in found
    assert "4 bytes" in found


def test_kernel_of_another_environment(monkeypatch, tmp_path) -> None:
    """A python3 kernel left in the user's folder by another project: notebooks start, nanokit is missing."""
    folder = tmp_path / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))

    def kernel_runs(argv0: str) -> None:
        spec = {"argv": [argv0, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "P"}
        (folder / "kernel.json").write_text(json.dumps(spec))

    kernel_runs("/opt/other/bin/python")
    status, found, mend = checks.kernel()
    assert (status, "ipykernel install" in mend) == ("fail", True)
    assert "/opt/other/bin/python" in found
    for same in ("python", "python3", os.path.join(os.path.dirname(sys.executable), "python9")):
        kernel_runs(same)
        assert checks.kernel()[0] == "ok", same


def test_fix_writes_the_lab_settings() -> None:
    """`nanokit doctor --fix`: missing before, present after, and nothing else is touched."""
    status, _, mend = checks.overrides()
    assert (status, "--fix" in mend) == ("warn", True)
    fixed = {check.name: check.status for check in doctor.run(mend=True)}
    assert fixed["Lab settings"] == "ok"
    assert jupyter.overrides_status()[0] == "present"


def test_fix_that_cannot_write(tmp_path, monkeypatch) -> None:
    """A system-wide environment: the reason is the finding, not a traceback."""
    (tmp_path / "lab").write_text("a file where the folder belongs")
    check = {check.name: check for check in doctor.run(mend=True)}["Lab settings"]
    assert check.status == "fail"
    assert check.mend


def test_cache_is_a_file_or_read_only(home, monkeypatch) -> None:
    assert checks.cache() == ("ok", f"{home} (will be made)", "")
    home.write_text("not a folder")
    assert checks.cache()[0] == "fail"
    home.unlink()
    home.mkdir()
    assert checks.cache() == ("ok", str(home), "")

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    status, found, mend = checks.runs()
    assert (status, mend) == ("fail", "set NANOKIT_RUNS to a folder that you may write")
    assert "Read-only" in found


def test_little_disk_and_memory(monkeypatch) -> None:
    """Room is needed for the download only while the model is absent; memory in two degrees."""
    usage = checks.shutil.disk_usage("/")._replace(free=300 * 10**6)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda place: usage)
    assert checks.disk()[0] == "warn"
    model = checks.default_model_path()
    model.parent.mkdir(parents=True)
    model.touch()
    assert checks.disk()[0] == "ok"
    for free, status in ((10**10, "ok"), (8 * 10**8, "warn"), (10**8, "fail")):
        monkeypatch.setattr(checks, "free_memory", lambda free=free: free)
        assert checks.memory()[0] == status
