"""Parameters: every way in ends in the same types, the same checks and the same readable refusal."""

import dataclasses
import json
from pathlib import Path

import nbformat
import pytest
from demo_notebook import as_typed
from hypothesis import given
from hypothesis import strategies as st

from nanokit.errors import NotebookRunError, ParameterError
from nanokit.lab.cell import differences, read_cell, resolve
from nanokit.lab.params import PRESETS, Params, experiment_params, knob
from nanokit.lab.values import literal, parse_value

HERE = Path(__file__).parent


@experiment_params
class DemoParams(Params):
    tokens: int = knob(0, "tokens to generate", low=1, high=512, by_preset={"smoke": 8, "quick": 32, "full": 128})
    heat: float = knob(0.5, "randomness", unit="per step", low=0.0, high=2.0, step=0.1)
    name: str = knob("a name", "who asks")
    depths: list[int] = knob([1, 3], "depths to try", low=0, high=16)
    tags: list[str] = knob([], "labels")
    warm: bool = knob(True, "warm up first")


def notebook(cell: str, *, params: str | None = None) -> nbformat.NotebookNode:
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nb.cells[0].metadata["tags"] = ["parameters"]
    nb.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
    if params:
        nb.metadata["nanokit"] = {"params": params}
    return nb


def test_a_preset_fills_only_the_sizes_that_were_left_open():
    assert [DemoParams(preset=p).tokens for p in PRESETS] == [8, 32, 128]
    assert DemoParams(preset="full", tokens=3).tokens == 3


def test_what_a_record_holds_makes_the_same_parameters_again():
    """A sentinel left in a record would mean another size once the presets change."""
    p = DemoParams(preset="smoke", depths=[2])
    assert p.to_dict()["tokens"] == 8
    assert DemoParams.from_mapping(json.loads(json.dumps(p.to_dict()))) == p


def test_parameters_are_frozen_and_do_not_share_lists():
    p = DemoParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.tokens = 4  # type: ignore[misc]
    p.to_dict()["depths"].append(99)  # type: ignore[union-attr]
    p.depths.append(7)
    assert DemoParams().depths == [1, 3]


@pytest.mark.parametrize(
    ("values", "name", "found", "allowed"),
    [
        ({"tokens": 513}, "tokens", "513", "1 to 512"),
        ({"tokens": True}, "tokens", "bool", "a whole number"),
        ({"tokens": 4.0}, "tokens", "float", "a whole number"),
        ({"heat": float("nan")}, "heat", "nan", "0 to 2 per step"),
        ({"heat": "1"}, "heat", "str", "a finite number"),
        ({"name": 7}, "name", "7 (int)", "a text"),  # what papermill makes of `-p name 007`
        ({"depths": [1, 17]}, "depths", "17", "0 to 16"),
        ({"depths": [1, True]}, "depths", "True", "list[int]"),
        ({"depths": "[1, 2]"}, "depths", "str", "list[int]"),  # what papermill makes of `-p depths [1,2]`
        ({"warm": 1}, "warm", "int", "true or false"),
        ({"preset": "fast"}, "preset", "fast", "smoke | quick | full"),
        ({"tokns": 3}, "tokns", "tokns", "tokens"),
    ],
)
def test_a_wrong_value_is_refused_with_name_found_and_allowed(values, name, found, allowed):
    for make in (lambda: DemoParams(**values), lambda: DemoParams.from_mapping(values)):
        with pytest.raises(ParameterError) as error:
            make()
        text = str(error.value)
        assert repr(name) in text
        assert found in text
        assert allowed in text


def test_a_notebook_gives_only_its_parameters():
    """Names that a notebook defines besides must not be taken for unknown parameters."""
    space = {"tokens": 5, "heat": 1, "np": object(), "_": 3, "preset": "smoke"}
    p = DemoParams.from_notebook(space)
    assert (p.tokens, p.heat, p.name) == (5, 1.0, "a name")
    assert isinstance(p.heat, float)
    with pytest.raises(ParameterError, match="tokens"):
        DemoParams.from_notebook({**space, "tokens": "5"})


def test_strings_are_read_by_the_type_of_the_field():
    texts = {
        "name": "007",
        "tokens": "7",
        "depths": "[4, 5]",
        "tags": '["a,b"]',
        "warm": "False",
        "heat": "1e0",
    }
    p = as_typed(DemoParams, texts)
    assert p.to_dict() == {
        "preset": "quick",
        "tokens": 7,
        "heat": 1.0,
        "name": "007",
        "depths": [4, 5],
        "tags": ["a,b"],
        "warm": False,
    }


@pytest.mark.parametrize(
    "texts",
    [
        {"tokens": "4.5"},
        {"heat": "nan"},
        {"heat": "inf"},
        {"warm": "1"},
        {"depths": "4"},
        {"tags": "[1]"},
        {"x": "1"},
    ],
)
def test_a_string_of_another_type_is_refused(texts):
    with pytest.raises(ParameterError, match=repr(next(iter(texts)))):
        as_typed(DemoParams, texts)


def test_the_cell_reads_back_as_the_dataclass_through_papermills_parser():
    nb = notebook(DemoParams.parameter_lines())
    assert differences(nb, DemoParams) == []
    assert {name: line.default for name, line in read_cell(nb).items()} == {
        name: k.default for name, k in DemoParams.KNOBS.items()
    }


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("0.5", "0.6", "heat: the cell's default"),
        ("heat: float", "heat: int", "heat: the cell's type"),
        ("randomness", "warmth", "heat: the cell's help"),
        ("heat:", "heath:", "names"),
    ],
)
def test_a_cell_that_drifted_from_the_dataclass_is_told(old, new, says):
    cell = DemoParams.parameter_lines()
    assert old in cell
    assert any(d.startswith(says) for d in differences(notebook(cell.replace(old, new)), DemoParams))


@pytest.mark.parametrize(
    "line",
    [
        "k: int | None = 1",
        "k = 1; z = 2",
        'mode: Literal["a", "b"] = "a"',
        "k = print",
        "k = {1: 2}",
        "k: int = 2**3",
    ],
)
def test_a_line_beyond_papermills_parser_is_refused_not_dropped(line):
    """papermill skips such lines with a warning, and the parameter could then never be set."""
    with pytest.raises(NotebookRunError, match="parameters cell"):
        read_cell(notebook("a: int = 1\n" + line))


def test_without_a_dataclass_the_cell_gives_the_types():
    nb = notebook('k = 3\nname: str = "x"\nitems: list[int] = []\nrate: float = 1.0')
    got = resolve(nb, {"k": "5", "name": "007", "items": "[1, 2]", "rate": 2}, HERE)
    assert got.injected == {"k": 5, "name": "007", "items": [1, 2], "rate": 2}
    for bad in ({"k": "x"}, {"k": 2.5}, {"k": True}, {"items": ["a"]}):
        with pytest.raises(ParameterError, match=next(iter(bad))):
            resolve(nb, bad, HERE)
    with pytest.raises(ParameterError, match="did you mean 'name'"):
        resolve(nb, {"nam": "x"}, HERE)


def test_a_named_dataclass_adds_ranges_and_presets():
    nb = notebook(DemoParams.parameter_lines(), params=f"{__name__}:DemoParams")
    assert resolve(nb, {"preset": "full"}, HERE).full["tokens"] == 128
    with pytest.raises(ParameterError, match="1 to 512"):
        resolve(nb, {"tokens": "600"}, HERE)
    for wrong in ("no.such:Thing", f"{__name__}:notebook", "nonsense"):
        with pytest.raises(NotebookRunError, match="parameters class"):
            resolve(notebook("k = 1", params=wrong), {}, HERE)


def test_a_knob_that_contradicts_itself_fails_when_the_class_is_made():
    for bad in (
        lambda: knob(9, "too large", high=3),
        lambda: knob(1, "has # sign"),
        lambda: knob(1, "k=1"),
        lambda: knob(1, ""),
        lambda: knob(1.5, "no int"),
        lambda: knob(1, "open size with a default", by_preset={"smoke": 1, "quick": 2, "full": 3}),
        lambda: knob(0, "preset missing", by_preset={"smoke": 1}),
        lambda: knob(0, "preset outside", low=1, by_preset={"smoke": 0, "quick": 2, "full": 3}),
    ):
        with pytest.raises(TypeError):
            experiment_params(type("Bad", (Params,), {"__annotations__": {"k": int}, "k": bad()}))
    with pytest.raises(TypeError, match="type"):
        experiment_params(type("Bad", (Params,), {"__annotations__": {"k": dict}, "k": knob(1, "a dict")}))


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.lists(st.integers()))
def test_every_value_survives_its_own_text(value):
    """A record's value that reads back as another one would repeat another experiment."""
    type_name = "list[int]" if isinstance(value, list) else type(value).__name__
    text = json.dumps(value)
    assert parse_value("v", type_name, text) == value
    assert eval(literal(value)) == value


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",))))
def test_every_text_survives_as_a_literal(text):
    assert eval(literal(text)) == text
    assert parse_value("v", "str", text) == text


def test_a_large_bound_is_written_in_full():
    """`0 to 2.14748e+09` is no range that a person can type."""

    @experiment_params
    class Seeded(Params):
        seed: int = knob(0, "seed", low=0, high=2**31 - 1)
        share: float = knob(0.5, "share", low=0.25, high=1.0)

    assert Seeded.KNOBS["seed"].allowed == "0 to 2147483647"
    assert Seeded.KNOBS["share"].allowed == "0.25 to 1"
