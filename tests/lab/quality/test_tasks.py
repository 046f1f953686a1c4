"""Tasks: true items, points that are the model's, and comparisons that see what changed."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import save_tiny, tiny_model

from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError
from nanokit.lab.quality.tasks import TASKS, Item, TaskScore, items, paired, score, score_items
from nanokit.paths import data_dir

SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "x": lambda a, b: a * b}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_large_and_its_items_differ(task: str) -> None:
    found = items(task)
    assert len(found) >= 150
    assert len({item.id for item in found}) == len({(item.prompt, item.answer) for item in found}) == len(found)
    for item in found:
        assert item.answer == item.answer.strip()
        assert "\n" not in item.answer
        assert not item.choices or (item.answer in item.choices and len(set(item.choices)) == len(item.choices) >= 2)
        assert not item.prompt.endswith(" "), "the answer's own space would be a second one"


def test_right_choices_stand_at_every_place() -> None:
    """A model that always takes one place must get a quarter."""
    places = [item.choices.index(item.answer) for item in items("chat")]
    assert min(places.count(place) for place in range(4)) > len(places) / 6


def test_sums_are_right() -> None:
    """An item whose answer, or whose example, is wrong would count knowledge as a fault."""
    for item in items("arithmetic"):
        solved = f"{item.prompt} {item.answer}"
        sums = re.findall(r"(\d+) ([-+x]) (\d+) = (\d+)", solved)
        assert len(sums) == 4, item.id
        for a, sign, b, result in sums:
            assert SIGNS[sign](int(a), int(b)) == int(result), item.id
        if "Question" in solved:
            told = re.findall(r"has (\d+) \w+ and gets (\d+) more", solved)
            assert told == [(a, b) for a, _, b, _ in sums], item.id


def test_patterns_are_complete() -> None:
    """Of those that can be told by a rule: what is copied or closed is in the prompt."""
    for item in items("completion"):
        kind, last = item.id.split("-")[1], item.prompt.splitlines()[-1]
        if kind == "copynum":
            assert last == f"{item.answer} ->"
        elif kind == "copylist":
            assert item.prompt.splitlines()[-2] == f"Input: {item.answer}"
        elif kind == "brackets":
            closing = {"(": ")", "[": "]", "{": "}"}
            assert item.answer == "".join(closing[c] for c in reversed(last) if c in closing)
        elif kind == "lookup":
            name = re.findall(r'data\["(\w+)"\]', item.prompt)[-1]
            assert f'"{name}": {item.answer},' in item.prompt


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedEngine, torch.nn.Module]:
    model = tiny_model("llama")
    folder = save_tiny(tmp_path_factory.mktemp("tasks"), model)
    return load(folder, activations="fp32", kv_memory="4MiB"), model


def test_choices_are_scored_as_transformers_would(tiny: tuple[LoadedEngine, torch.nn.Module]) -> None:
    """A choice scored after another one in the same pages, off by a token, or not by its length, picks another."""
    engine, model = tiny
    words = ["one", "twelve", "seven", "hundred", "a", "the", "nothing", "at", "all", "or", "more", "than", "ever"]
    asked = [
        Item(f"i{n}", f"number {n} of many", words[0], (*words[n % 5 :: 3], f"{words[n % 7]} {n}")) for n in range(18)
    ]
    found = score_items(engine, asked, "made up")
    encode = engine.tokenizer.encode
    for item in asked:
        prompt = encode(f"Question: {item.prompt}\nAnswer:")
        likelihoods = {}
        for choice in item.choices:
            ids = encode(f" {choice}")
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + ids])).logits[0].double().log_softmax(-1)
            each = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])
            likelihoods[choice] = float(each.sum()) / len(choice)
        assert found.given[item.id] == max(likelihoods, key=likelihoods.__getitem__)
    assert engine.pool.held == 0
    assert len(set(found.given.values())) > 3


def test_written_answers_are_first_lines(monkeypatch: pytest.MonkeyPatch, tiny: tuple[LoadedEngine, Any]) -> None:
    """What the model writes on after its answer, and spaces around it, must not make it wrong; nor may it be cut off
    before the answer's end."""
    engine, _ = tiny
    asked: list[Sampling] = []

    def generate(prompts: list[list[int]], sampling: list[Sampling]) -> list[SimpleNamespace]:
        asked.extend(sampling)
        return [SimpleNamespace(text=text) for text in (" 12 ", " 12 and", "")]

    monkeypatch.setattr(engine, "generate", generate)
    found = score_items(engine, [Item(name, "4 x 3 =", "12") for name in "abc"], "made up")
    assert list(found.right.values()) == [True, False, False]
    assert found.points == pytest.approx(100 / 3)
    assert all(each.stop == ("\n",) and each.is_greedy and each.max_tokens > 3 for each in asked)


def test_a_paired_comparison_counts_what_changed() -> None:
    """Equal items say nothing, however many they are; the exact test is the binomial one."""

    def made(right: list[bool]) -> TaskScore:
        return TaskScore("t", {str(n): each for n, each in enumerate(right)}, {})

    before = made([True] * 60 + [False] * 40)
    after = made([True] * 50 + [False] * 10 + [True] * 2 + [False] * 38)
    change = paired(before, after)
    assert (change.gained, change.lost, change.difference) == (2, 10, pytest.approx(-8.0))
    assert change.p == pytest.approx(2 * sum(math.comb(12, k) for k in range(3)) / 2**12)
    assert change.interval[0] < change.difference < change.interval[1] < 0
    assert paired(before, before).p == 1.0
    with pytest.raises(ParameterError, match="different items"):
        paired(before, made([True]))


def test_an_unknown_task_lists_the_known_ones() -> None:
    """And every file of the folder is known."""
    assert {path.stem for path in (data_dir() / "tasks").glob("*.jsonl")} == set(TASKS)
    with pytest.raises(ParameterError, match="completion"):
        items("mathematics")


@pytest.mark.model
@pytest.mark.parametrize("task", ["arithmetic", "completion", "chat"])
def test_the_default_model_is_neither_at_the_floor_nor_at_the_ceiling(engine: LoadedEngine, task: str) -> None:
    """A task that a model cannot do, or cannot fail, shows no damage."""
    low, high = score(engine, task, 40).interval
    assert low > 20
    assert high < 85
