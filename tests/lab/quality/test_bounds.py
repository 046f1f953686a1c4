"""The issue's bounds on the default model and the fixed text, against the fp32-activation reference.

Weights and pages are judged with a16 activations, which lose next to nothing, so that each bound is about one thing.
Bounds, not figures: what was measured stands in run records.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from nanokit.engine.load import load
from nanokit.lab.quality.divergence import Divergences, compare_engine
from nanokit.lab.quality.reference import reference
from nanokit.model import calibrate

pytestmark = pytest.mark.model

WINDOWS = 5


def measured(
    path: Path, activations: str = "a16", kv: str = "fp32", policy: str | None = None, windows: int = WINDOWS
) -> Divergences:
    """On the first so many windows of the one reference."""
    engine = load(path, ctx=512, max_seqs=1, activations=activations, kv_format=kv, policy=policy, prefix_cache=False)
    ref = reference(str(path), windows=WINDOWS)
    return compare_engine(engine, replace(ref, windows=ref.windows[:windows], hidden=ref.hidden[:windows]))


@pytest.mark.parametrize(("policy", "most"), [("int8-sym-channel", 0.005), ("nvfp4", 0.28), ("int4-sym-g32", 0.45)])
def test_weights(policy: str, most: float, default_model: Path) -> None:
    """A format whose scales or codes are wrong in a way that a matrix's own tests do not see."""
    found = measured(default_model, policy=policy).summary()
    assert 0 < found["kl_mean"] < most
    if policy.startswith("int8"):
        assert found["top1"] > 0.95


@pytest.mark.filterwarnings("ignore:.*a calibration text runs")
def test_a_text_in_view_takes_half_of_the_loss_off(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through all layers, on a text of another domain: corrections that fit the calibration text alone, or layers
    rounded for inputs that they do not get. A quarter of the calibration text will do."""
    monkeypatch.setattr(calibrate, "MOST_WINDOWS", 4)
    plain, found = (
        measured(default_model, policy=f"int4-sym-g64{method}", windows=1).summary()["kl_mean"]
        for method in ("", "+gptq")
    )
    assert found < 0.5 * plain


def test_the_references_own_grid_loses_nothing(default_model: Path) -> None:
    """Q4_1 again on its own blocks. Any loss would be the measure's, or the rounding of scales."""
    kept, again = (measured(default_model, policy=policy) for policy in (None, "int4-asym-g32"))
    assert again.kl.tolist() == kept.kl.tolist()
    assert kept.summary()["kl_mean"] < 1e-4


def test_pages(default_model: Path) -> None:
    kept, int8 = (measured(default_model, kv=kv).summary()["kl_mean"] for kv in ("fp32", "int8"))
    assert kept < int8 < 0.001


def test_pages_of_four_bits(default_model: Path) -> None:
    """kivi4: keys by channel, values by token. Codes that kept more than int8 does would not be four bits."""
    kivi4 = measured(default_model, kv="kivi4", windows=1).summary()["kl_mean"]
    assert 0.001 < kivi4 < 0.03


def test_activations(default_model: Path) -> None:
    """Why a scale a token: one for the model's whole life has to cover its massive activations."""
    token, static = (measured(default_model, activations=mode).summary()["kl_mean"] for mode in ("token", "static"))
    assert token < 0.05
    assert static > 0.5
