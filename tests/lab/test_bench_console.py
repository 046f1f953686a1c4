"""`nanokit bench` from the command line to the JSON."""

import json
from pathlib import Path

import pytest
from tiny import save_tiny, tiny_model

from nanokit.cli import main
from nanokit.lab import lock
from nanokit.lab.bench import console, decode, schema
from nanokit.lab.bench.limit import BenchError
from nanokit.lab.bench.verify_cost import read_v


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("console") / "tiny", tiny_model("llama"))


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


OPTIONS = {
    "prefill": ["--tokens", "64", "100"],
    "decode": ["--ctx", "64", "100", "--steps", "2", "--temperature", ".7", "--neighbours", "1"],
    "batch": ["--sequences", "1", "3", "--steps", "2"],
    "verify-cost": ["--rows", "1", "4", "--ctx", "64", "--steps", "1"],
}


@pytest.mark.parametrize("kind", schema.KINDS)
def test_one_schema_for_all_kinds(kind: str, tiny: Path, tmp_path: Path, capsys) -> None:
    target = tmp_path / "out.json"
    common = ["--model", str(tiny), "--activations", "fp32", "--preset", "smoke", "--json", str(target)]
    assert main(["bench", kind, *common, *OPTIONS[kind]]) == 0
    found = schema.read(target)
    assert found["kind"] == kind
    assert found["metrics"]
    assert all(isinstance(value, int | float) for name, value in found["metrics"].items() if name != "v")
    assert found["spread"].keys() == found["samples"].keys()
    assert found["setting"]["model"] == "tiny"
    assert found["setting"]["kv_format"] == "fp32"
    assert "load" in found["machine"]
    assert "torch" in found["versions"]
    assert found["params"]["preset"] == "smoke"
    printed = capsys.readouterr().out
    assert all(name in printed for name in found["samples"])
    assert all(name in printed for name in found["metrics"] if name != "v")


def test_a_policy_is_what_runs_and_what_is_said(tiny: Path, capsys) -> None:
    """Weights as stored under the name of a policy would be a figure of another model."""
    options = ["--model", str(tiny), "--preset", "smoke", "--tokens", "64", "--json", "-"]
    assert main(["bench", "prefill", *options, "--policy", "int8-sym-channel"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"]["model"] == "tiny as int8-sym-channel"


def test_a_policy_beside_other_programs_is_refused(tiny: Path, capsys) -> None:
    """They would run the file's weights, and a ratio of the two would look like one of speed."""
    options = ["--model", str(tiny), "--preset", "smoke", "--policy", "int8-sym-channel", "--peer", "transformers"]
    assert main(["bench", "prefill", *options]) == 2
    assert "other weights" in capsys.readouterr().err


def test_a_controller_reads_v(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "v.json"
    options = ["--activations", "fp32", "--rows", "1", "2", "8", "--ctx", "64", "80", "--steps", "1"]
    assert (
        main(["bench", "verify-cost", "--model", str(tiny), "--preset", "smoke", "--json", str(target), *options]) == 0
    )
    v = read_v(schema.read(target))
    assert {ctx: list(rows) for ctx, rows in v.items()} == {64: [1, 2, 8], 80: [1, 2, 8]}
    assert v[64][1] == v[80][1] == 1.0
    assert v[64][8] == schema.read(target)["metrics"]["v_ratio_of_8_at_64"]


def test_json_on_standard_output_is_nothing_but_json(tiny: Path, capsys) -> None:
    assert (
        main(["bench", "prefill", "--model", str(tiny), "--activations", "fp32", "--preset", "smoke", "--json", "-"])
        == 0
    )
    said = capsys.readouterr()
    assert json.loads(said.out)["schema"] == schema.SCHEMA
    assert "ttft_ms" in said.err


def test_a_share_above_one_is_an_error_and_leaves_no_file(tiny: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """The figure would be copied from the file, whatever a remark says."""
    monkeypatch.setattr(decode, "reader", lambda engine: lambda: 1e-6)
    target = tmp_path / "out.json"
    assert (
        main(
            [
                "bench",
                "decode",
                "--model",
                str(tiny),
                "--activations",
                "fp32",
                "--preset",
                "smoke",
                "--json",
                str(target),
            ]
        )
        == 1
    )
    assert "faster than memory allows" in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize("where", ["no-such-folder/out.json", "."])
def test_a_target_that_cannot_be_written_is_said_before_the_measurement(where, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decode, "decode", lambda *_, **__: pytest.fail("measured"))
    assert main(["bench", "decode", "--json", where]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["decode", "--nonsense"], ["decode", "--ctx", "x"], ["decode", "--ctx", "1"],
     ["decode", "--threads", "0"], ["batch", "--peer", "x"], []],
)  # fmt: skip
def test_what_cannot_be_meant_ends_with_2(arguments: list[str], capsys) -> None:
    try:
        code: object = main(["bench", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert capsys.readouterr().err


def test_the_help_of_a_kind_lists_its_knobs(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "decode", "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert all(option in said for option in ("--ctx", "--peer", "--neighbours", "--top-p", "--json", "--threads"))


@pytest.mark.parametrize("content", ["", "[]", '{"schema": "nanokit.run/1"}', '{"schema": "nanokit.bench/1"}'])
def test_a_foreign_file_is_no_benchmark(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(BenchError, match="is no benchmark"):
        schema.read(path)


@pytest.mark.parametrize(("load", "said"), [(None, False), (0.4, False), (2.0, False), (3.5, True)])
def test_a_machine_that_was_busy_before_is_remarked(load: float | None, said: bool) -> None:
    """Neighbours that never pause spread no samples: a peer came out at a thirtieth of its speed without a word."""
    assert bool(console.crowded({"load": load, "cores": 2})) == said
