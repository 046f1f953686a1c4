"""`nanokit quality` from the command line to the JSON, on a tiny model."""

import json
import math
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tiny import compiled_model, save_tiny_gguf, tiny_model

from nanokit.cli import main
from nanokit.errors import NanokitError, ParameterError
from nanokit.lab import lock
from nanokit.lab.plots import quality_pareto
from nanokit.lab.plots.quality_plot import frontier
from nanokit.lab.progress import CallbackProgress, StoppedError
from nanokit.lab.quality import passes
from nanokit.lab.quality.measure import Measured, QualityResult, _pareto, measure_quality
from nanokit.lab.quality.params import QualityParams
from nanokit.lab.quality.reference import forget
from nanokit.lab.quality.schema import SCHEMA, document


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


def test_auto_says_what_it_chose(tiny: Path) -> None:
    """A figure of "auto:6" alone could not be repeated on another machine."""
    asked = {"model": str(tiny), "ctx": 96, "text": "lighthouse", "preset": "smoke", "windows": 1}
    [note] = [each for each in measure_quality(QualityParams(policy=["auto:6"], **asked)).remarks if "chose" in each]
    again = measure_quality(QualityParams(policy=[note.split(" chose ")[1]], **asked))
    assert again.metrics["bits_per_weight"] <= 6


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
        (["--ctx", "513"], "longer than the model's context"),
        (["--ctx", "512", "--windows", "400"], "too short"),
        (["--policy", "keep", "int4-sym-g96"], "g32"),
        (["--policy", "int4-sym-g64"], "does not fit tiny.gguf"),
        (["--policy", "keep", "int4-sym-g32", "int4-sym-g64"], "does not fit tiny.gguf"),
        (["--policy", "keep", "int4-sym-g32;7.down=q8_0"], "layer"),
    ],
)
def test_bad_input_is_refused_by_name(options: list[str], words: str, tiny: Path, capsys, monkeypatch) -> None:
    """Before anything is computed, with what was found and what would do: of several policies the last one too."""
    forget()
    monkeypatch.setattr(passes, "Batch", None)  # no window can be run
    assert main(["quality", str(tiny), "--preset", "smoke", "--windows", "1", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_context_too_short_for_the_tasks_is_refused_before_anything_is_computed(tmp_path: Path, monkeypatch) -> None:
    model = compiled_model("llama")
    file = save_tiny_gguf(tmp_path / "short.gguf", model, types="Q8_0", **{"llama.context_length": 128})
    monkeypatch.setattr(passes, "Batch", None)
    p = QualityParams(model=str(file), ctx=96, text="lighthouse", preset="smoke", tasks=["chat"])
    with pytest.raises(ParameterError, match=r"(?s)128 tokens.*512, for the tasks"):
        measure_quality(p)


@pytest.mark.parametrize("where", ["reference", "int4-sym-g32"])
def test_cancelling_ends_it_between_two_windows(tiny: Path, monkeypatch, where: str) -> None:
    """Of hundreds of windows: whoever pressed stop would wait for minutes."""
    forget()
    cancel, forwards, steps = threading.Event(), [], ["reference"]
    batch = passes.Batch

    def counted(*args):
        forwards.append(steps[-1])
        if steps[-1] == where:
            cancel.set()
        return batch(*args)

    monkeypatch.setattr(passes, "Batch", counted)
    p = QualityParams(model=str(tiny), policy=["int4-sym-g32"], ctx=96, text="lighthouse", windows=3, preset="smoke")
    told = CallbackProgress(lambda done, total, text: steps.append("reference" if done == 0 else text))
    with pytest.raises(StoppedError):
        measure_quality(p, progress=told, cancel=cancel)
    assert forwards.count(where) == 1


def test_the_shortest_windows_have_finite_figures(tiny: Path, tmp_path: Path, capsys) -> None:
    """One token a bucket has no standard error, and a JSON with Infinity is none."""
    target = tmp_path / "short.json"
    for ctx, buckets in (("4", 1), ("8", 2)):
        options = ["--ctx", ctx, "--windows", "1", "--text", "lighthouse", "--preset", "smoke", "--json", str(target)]
        assert main(["quality", str(tiny), *options]) == 0
        (one,) = json.loads(target.read_text(), parse_constant=pytest.fail)["policies"]
        assert len(one["positions"]) == buckets
        assert all(isinstance(each, int | float) for found in one["positions"].values() for each in found.values())
        assert "inf" not in capsys.readouterr().out.replace("tiny.gguf", "")


def test_figures_that_are_no_numbers_are_not_written() -> None:
    result = made(broken=(4.0, math.nan))
    result = replace(result, metrics={"reference_floor_kl": 0.0})
    with pytest.raises(NanokitError, match=r"policies\[0\].metrics.kl_mean, policies\[0\].metrics.kl_mean_se"):
        document(result, {}, datetime.now(UTC), 1.0)


def test_params_refuse_what_the_command_does() -> None:
    with pytest.raises(ParameterError, match="unknown task"):
        QualityParams(tasks=["sums"])


def test_a_file_is_compared_with_what_it_came_from(tiny: Path, tmp_path: Path) -> None:
    """Compared with itself, a quantized file looks lossless: the one answer that nobody asked for."""
    from nanokit.model.quantize import quantize

    small = tmp_path / "small.safetensors"
    quantize(tiny, small, "int4-sym-g32")
    asked = {"ctx": 96, "windows": 1, "text": "lighthouse", "preset": "smoke", "activations": "a16"}
    alone = measure_quality(QualityParams(model=str(small), **asked))
    assert alone.metrics["kl_mean"] < 1e-5
    assert any("--reference" in remark for remark in alone.remarks)
    against = measure_quality(QualityParams(model=str(small), reference=str(tiny), **asked))
    loaded = measure_quality(QualityParams(model=str(tiny), policy=["int4-sym-g32"], **asked))
    assert against.metrics["kl_mean"] == pytest.approx(loaded.metrics["kl_mean"], rel=1e-6)
    assert not any("--reference" in remark for remark in against.remarks)
    other = save_tiny_gguf(tmp_path / "other.gguf", compiled_model("llama", columns=256), types="Q8_0")
    other_vocabulary = save_tiny_gguf(tmp_path / "v.gguf", tiny_model("llama", vocab=400), types="F32")
    assert measure_quality(QualityParams(model=str(small), reference=str(other), **asked)).metrics["kl_mean"] > 0.01
    with pytest.raises(ParameterError, match="same vocabulary"):
        measure_quality(QualityParams(model=str(small), reference=str(other_vocabulary), **asked))
