"""The machine card and the streaming bandwidth."""

import json
import platform
import subprocess
import sys
import time

import psutil
import pytest
import torch

from nanokit.errors import NanokitError
from nanokit.lab import machine
from nanokit.lab.machine import machine_card, measure_bandwidth, versions


def test_the_card_agrees_with_other_sources():
    card = machine_card()
    assert card.arch == platform.machine()
    assert card.threads == torch.get_num_threads()
    assert card.ram_gib == pytest.approx(psutil.virtual_memory().total / 2**30, abs=0.1)
    assert card.versions["torch"] == torch.__version__
    if platform.machine() == "x86_64":
        assert ("avx2" in card.isa) == (
            "AVX2" in torch.backends.cpu.get_cpu_capability() or "AVX512" in torch.backends.cpu.get_cpu_capability()
        )
    json.dumps(card.to_record(), allow_nan=False)
    assert "versions" not in card.to_record()


def test_unknown_stays_unknown(monkeypatch):
    """A guess in a card would be a figure that nobody measured."""
    monkeypatch.setattr(machine, "_cpuinfo", lambda key: None)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(sys, "platform", "other")
    card = machine_card()
    assert (card.cpu, card.isa) == (None, ())
    assert "unknown" in str(card.table())


def test_versions_import_nothing_heavy():
    """Reading transformers' version by importing it costs more than a second at every run."""
    code = (
        "import sys; import nanokit.lab; from nanokit.lab.machine import versions; v = versions();"
        "heavy = {'transformers', 'torch', 'papermill', 'plotly', 'ipywidgets'} & set(sys.modules);"
        "print(v['transformers'], sorted(heavy))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == f"{versions()['transformers']} []"


def test_bandwidth_counts_bytes_over_time(monkeypatch):
    """With a clock that says a pass took 1 ms, 64 MiB are 67.1 GB/s, whatever the machine."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 1e-3)
    found = measure_bandwidth(repeats=3, buffer_bytes=64 * 2**20)
    assert found.samples_gb_s == pytest.approx([64 * 2**20 / 1e6] * 3)
    assert found.buffer_bytes == 64 * 2**20


def test_a_real_measurement_is_plausible():
    found = measure_bandwidth(repeats=3, buffer_bytes=64 * 2**20)
    assert 0.2 < found.median_gb_s < 5000
    assert "GB/s" in str(found.table())


def test_too_large_a_buffer_is_refused_before_it_is_allocated():
    with pytest.raises(NanokitError, match="not enough free memory"):
        measure_bandwidth(buffer_bytes=psutil.virtual_memory().total)
