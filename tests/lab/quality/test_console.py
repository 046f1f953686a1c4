"""`nanokit quality` from the command line to the JSON, on a tiny model."""

import json
from pathlib import Path

import pytest
from tiny import compiled_model, save_tiny_gguf

from nanokit.cli import main
from nanokit.errors import ParameterError
from nanokit.lab import lock
from nanokit.lab.plots import quality_pareto
from nanokit.lab.plots.quality_plot import frontier
from nanokit.lab.quality.measure import Measured, QualityResult, _pareto, measure_quality
from nanokit.lab.quality.params import QualityParams
from nanokit.lab.quality.schema import SCHEMA


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("console")
    return save_tiny_gguf(folder / "tiny.gguf", compiled_model("llama"), types="Q8_0")


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


SMALL = ["--ctx", "96", "--windows", "2", "--text", "lighthouse", "--preset", "smoke"]


def test_one_setting_prints_and_writes_what_the_issue_asks_for(tiny: Path, tmp_path: Path, capsys) -> None:
    target = tmp_path / "quality.json"
    options = ["--policy", "int4-sym-g32", "--activations", "a16", "--kv", "int8", "--batch", "2"]
    assert main(["quality", str(tiny), *options, *SMALL, "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["schema"] == SCHEMA
    (one,) = found["policies"]
    named = ["kl_mean", "kl_p99", "top1", "ppl_ratio", "ppl_ratio_se", "bits_per_weight", "stored_bytes"]
    named += ["ms_per_token", "noise_floor_kl"]
    assert all(isinstance(one["metrics"][name], int | float) for name in named)
    assert one["metrics"]["bits_per_weight"] == pytest.approx(4 + 16 / 32)
    assert one["metrics"]["kl_mean"] > 1e-5
    assert one["metrics"]["scored_tokens"] == 2 * 48
    assert sum(bucket["scored_tokens"] for bucket in one["positions"].values()) == 2 * 48
    assert "tiny.gguf" in found["reference"]
    assert "lighthouse.txt" in found["reference"]
    held = found["setting"]
    assert (held["activations"], held["kv_format"], held["batch"], held["ctx"]) == ("a16", "int8", 2, 96)
    assert {"machine", "versions", "started", "samples", "remarks"} <= found.keys()
    printed = capsys.readouterr().out
    assert all(name in printed for name in named)
    assert found["reference"] in printed


def test_policies_share_a_run(tiny: Path) -> None:
    """Finer scales diverge less, and a policy's figures must be its own whatever stands beside it."""
    asked = {"model": str(tiny), "ctx": 96, "text": "lighthouse", "preset": "smoke", "windows": 2}
    both = measure_quality(QualityParams(policy=["int4-sym-tensor", "int8-sym-g32"], **asked))
    coarse, fine = (each.metrics for each in both.policies)
    assert fine["kl_mean"] < coarse["kl_mean"] / 3
    assert both.metrics["kl_mean_of_int8-sym-g32"] == fine["kl_mean"]
    alone = measure_quality(QualityParams(policy=["int8-sym-g32"], **asked))
    assert alone.metrics["kl_mean"] == fine["kl_mean"]
    assert len(both.table().rows) == 2
    assert "int4-sym-tensor" in quality_pareto(both).to_json()


def made(**figures: tuple[float, float]) -> QualityResult:
    """A result of bits and divergence by policy, standard error a tenth."""
    policies = tuple(
        Measured(name, {"bits_per_weight": bits, "kl_mean": kl, "kl_mean_se": kl / 10, "ms_per_token": 1.0})
        for name, (bits, kl) in figures.items()
    )
    return QualityResult(QualityParams(), {}, settings={"model": "m", "reference": "r"}, policies=policies)


def test_who_is_beaten() -> None:
    """Beaten is who has no fewer bits and more divergence; within the errors nobody is called beaten."""
    result = made(small=(4.0, 0.9), wasteful=(4.5, 0.95), clear=(4.5, 2.0), good=(4.5, 0.4), exact=(8.0, 0.001))
    assert [each.policy for each in frontier(result)] == ["small", "good", "exact"]
    notes = _pareto({each.policy: each for each in result.policies})
    assert [note.split()[0] for note in notes] == ["wasteful", "clear"]
    assert all("good takes no more" in note for note in notes)
    near = made(a=(4.0, 0.90), b=(4.0, 0.95))
    assert _pareto({each.policy: each for each in near.policies}) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "int5-sym"], "int4"),
        (["--policy", "int4-sym-g32", "int4-sym-g32"], "different"),
        (["--activations", "a9"], "a8g32"),
        (["--kv", "int7"], "fp16"),
        (["--text", "wikitext"], "evaluation"),
        (["--task", "mathematics"], "arithmetic"),
        (["--layout", "diagonal"], "scattered"),
        (["--ctx", "4096"], "longer than the model's context"),
        (["--ctx", "512", "--windows", "400"], "too short"),
        (["--policy", "int4-sym-g96"], "g32"),
    ],
)
def test_bad_input_is_refused_by_name(options: list[str], words: str, tiny: Path, capsys) -> None:
    """Before anything is measured, with what was found and what would do."""
    assert main(["quality", str(tiny), "--preset", "smoke", "--windows", "1", *options]) == 2
    assert words in capsys.readouterr().err


def test_params_refuse_what_the_command_does() -> None:
    with pytest.raises(ParameterError, match="unknown task"):
        QualityParams(tasks=["sums"])
