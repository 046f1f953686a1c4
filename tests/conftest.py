"""Fixtures over the real default model: fetched once, loaded once, read by an independent oracle once."""

import importlib.util
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from nanokit.engine.load import LoadedEngine, load
from nanokit.errors import FetchError
from nanokit.model.fetch import fetch_default_model

# Notebooks that pytest executes record their figures; those are no runs of the user's.
os.environ.setdefault("NANOKIT_RUNS", tempfile.mkdtemp(prefix="nanokit-test-runs-"))

# A shell starts what it puts in the background with interrupts ignored, and whoever we start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("triton") is None:  # there is none but on Linux
    collect_ignore = ["engine/test_gpu.py", "kernels/gpu"]


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Path of the default model, fetched if the cache lacks it; skips, with the reason, where it cannot be had."""
    try:
        return fetch_default_model()
    except FetchError as error:
        pytest.skip(f"the default model is not there: {error.what} ({error.found})")


@pytest.fixture(scope="session")
def engine(default_model: Path) -> LoadedEngine:
    """The default model, ready to answer; tests leave nothing running in it."""
    return load(default_model, kv_memory="512MiB")


@pytest.fixture(scope="session")
def exact_engine(default_model: Path) -> LoadedEngine:
    """The default model with activations and pages in fp32, as transformers computes; of few pages."""
    return load(default_model, activations="fp32", kv_memory="64MiB")


@pytest.fixture(scope="session")
def oracle(default_model: Path) -> torch.nn.Module:
    """transformers' own reading of the same file (seconds: its dequantization is independent of ours)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    )
    return model.eval()
