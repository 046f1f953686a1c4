"""A plain wheel carries notebooks, data and C sources, and its kernels under their own name only."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from nanokit.paths import notebooks_dir

ROOT = notebooks_dir().parent

PROBE = """
import importlib.util
from nanokit import paths
from nanokit.lab.cell import find_notebook
assert paths.PACKAGE.is_relative_to({site!r}), paths.PACKAGE
print(paths.notebooks_dir().relative_to(paths.PACKAGE))
data = paths.data_dir()
print(all((data / name).stat().st_size > 1000 for name in ("texts/lighthouse.txt", "tasks/chat.jsonl", "digits.npz")))
print(find_notebook("tour").name)
import nanokit.kernels.reference, nanokit.lab.plots, nanokit.lab.quality.console, nanokit.engine.load
from nanokit.kernels.cpu.build import SOURCES
print(*sorted(path.name for path in SOURCES.iterdir()), sep=",")
print(importlib.util.find_spec("kernels"))
"""


def test_a_wheel_carries_what_it_needs(tmp_path: Path) -> None:
    """A wheel without notebooks installs fine and then has nothing to run."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".ipynb_checkpoints")
    for name in ("nanokit", "kernels", "notebooks", "data"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)], check=True)
    [wheel] = tmp_path.glob("nanokit-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
        assert {name for name in top if not name.endswith(".dist-info")} == {"nanokit"}
        archive.extractall(site)
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(site=str(site))],
        cwd=tmp_path, env={"PYTHONPATH": str(site), "PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sources = ",".join(sorted(path.name for path in (ROOT / "kernels" / "cpu" / "c").iterdir()))
    assert done.stdout.split() == ["_shipped/notebooks", "True", "00_tour.ipynb", sources, "None"]
