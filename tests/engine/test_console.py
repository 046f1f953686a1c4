"""`nanokit generate` and `nanokit chat` over a tiny checkpoint: what was typed reaches the engine, or is refused."""

import io
import json
import warnings
from types import SimpleNamespace

import pytest
from tiny import save_tiny, tiny_model

from nanokit.cli import main

TEMPLATE = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_tiny(tmp_path_factory.mktemp("console") / "tiny", tiny_model("llama"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def type_in(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


def generated(capsys: pytest.CaptureFixture[str], *argv: str) -> SimpleNamespace:
    assert main(["generate", *argv, "--json"]) == 0
    return SimpleNamespace(**json.loads(capsys.readouterr().out))


def test_a_seed_of_zero_is_a_seed(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    """0 == False: an option dropped because it is "empty" draws a new seed each time, unseen."""
    options = ("moon", "--model", tiny, "--temperature", "1", "--max-tokens", "6", "--seed", "0")
    first, second = generated(capsys, *options), generated(capsys, *options)
    assert first.seed == 0
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--max-tokens", "max_tokens"),
        ("--ctx", "ctx"),
        ("--repetition-penalty", "repetition_penalty"),
        ("--kv-memory", "kv_memory"),
        ("--rope-freq-base", "rope-freq-base"),
    ],
)
def test_a_zero_where_none_is_allowed_is_refused(
    tiny: str, capsys: pytest.CaptureFixture[str], option: str, named: str
) -> None:
    assert main(["generate", "moon", "--model", tiny, option, "0", "--force"]) == 2
    assert named in capsys.readouterr().err


def test_top_p_of_zero_is_greedy(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = generated(capsys, "moon", "--model", tiny, "--max-tokens", "8")
    narrow = generated(capsys, "moon", "--model", tiny, "--max-tokens", "8", "--temperature", "9", "--top-p", "0")
    assert narrow.token_ids == greedy.token_ids


def test_rope_options_need_force_and_then_change_the_answer(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = generated(capsys, "the moon and the tide", "--model", tiny, "--max-tokens", "12")
    for option, value in (("--rope-freq-base", "17"), ("--rope-freq-scale", "0.1")):
        argv = ["generate", "the moon and the tide", "--model", tiny, option, value, "--max-tokens", "12"]
        assert main(argv) == 2
        refusal = capsys.readouterr().err
        assert "--force" in refusal
        assert "10000" in refusal
        assert generated(capsys, *argv[1:], "--force").token_ids != plain.token_ids


def test_chat_renders_the_conversation_so_far(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn sends all turns before it; a turn that does not fit is refused and forgotten, and the next one is
    answered."""
    asked: list[list[dict[str, str]]] = []
    from nanokit.model.tokenizer import Tokenizer

    render = Tokenizer.chat_ids
    monkeypatch.setattr(
        Tokenizer,
        "chat_ids",
        lambda self, messages: (asked.append(list(messages)), render(self, messages))[1],
    )
    type_in(monkeypatch, b"one\n" + b"x" * 600 + b"\ntwo\n/reset\nthree\n")
    assert main(["chat", "--model", tiny, "--system", "be brief", "--max-tokens", "3"]) == 2, "a turn was refused"
    said = capsys.readouterr()
    roles = [[m["role"] for m in messages] for messages in asked]
    opening, turn = ["system", "user"], ["assistant", "user"]
    assert roles == [opening, [*opening, *turn], [*opening, *turn], opening]
    assert asked[2][-1]["content"] == "two"
    assert "longer than the context" in said.err
    assert said.err.count(" do: ") == 1
    assert len(said.out.splitlines()) >= 3


def test_an_unknown_slash_command_is_no_question(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/help` went to the model, which answered something."""
    type_in(monkeypatch, b"/help\n/exit\n")
    assert main(["chat", "--model", tiny]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("/reset") == 2


def test_a_pipe_without_a_dash_is_read(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, b"moon\n")
    piped = generated(capsys, "--model", tiny, "--max-tokens", "3")
    assert piped.prompt_ids == generated(capsys, "moon", "--model", tiny, "--max-tokens", "3").prompt_ids


def test_a_greedy_answer_shows_no_seed(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A number that changes with every run suggests randomness that is not there."""
    main(["generate", "moon", "--model", tiny, "--max-tokens", "3"])
    assert "seed" not in capsys.readouterr().err
    main(["generate", "moon", "--model", tiny, "--max-tokens", "3", "--temperature", "1", "--seed", "9"])
    assert "seed 9" in capsys.readouterr().err


def test_weights_left_in_their_file_are_said_to_be_slow(tiny: str) -> None:
    """And in a sentence: a warning of Python's own names a line of source code first."""
    with pytest.warns(UserWarning, match="tiny runs from its file") as caught:
        assert main(["generate", "moon", "--model", tiny, "--max-tokens", "3", "--mapped"]) == 0
    shown = warnings.formatwarning(caught[0].message, UserWarning, caught[0].filename, caught[0].lineno)
    assert shown.startswith("nanokit: tiny runs from its file")


@pytest.mark.parametrize("argv", [["chat"], ["generate", "-"]])
def test_input_that_is_not_utf8_is_refused(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    type_in(monkeypatch, b"moon \xff\n")
    assert main([*argv, "--model", tiny]) == 2
    refusal = capsys.readouterr().err
    assert "not UTF-8" in refusal
    assert "0xff" in refusal


def test_an_empty_prompt_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", " \n", "--model", "no-such-model"]) == 2
    assert "empty" in capsys.readouterr().err
