"""The folder kernels/ is nanokit.kernels and nothing else."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import importlib.util, sys
spec = importlib.util.find_spec("kernels")
try:
    import kernels.reference
except ModuleNotFoundError:
    print("refused")
from transformers.utils.import_utils import is_kernels_available
print(is_kernels_available())
import nanokit.kernels.reference
"""


def test_never_importable_as_top_level_kernels(tmp_path: Path) -> None:
    """transformers looks up a package of that name: found as ours, in any folder, it would be handed our code."""
    for cwd in (ROOT, tmp_path):
        done = subprocess.run([sys.executable, "-c", PROBE], cwd=cwd, capture_output=True, text=True)
        assert done.stdout.split() == ["refused", "False"], done.stdout + done.stderr
