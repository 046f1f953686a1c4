"""Controls and the copied command line: one dataclass is the source of both."""

import shlex

import pytest
from demo_notebook import as_typed
from toy import ToyParams

from nanokit.errors import ParameterError
from nanokit.lab.controls import Controls, command


def test_controls_show_range_unit_and_help():
    controls = Controls(ToyParams())
    depth = controls.by_name["depth"]
    assert (depth.min, depth.max, depth.description) == (1, 9, "depth (tokens)")
    assert "tokens guessed" in depth.tooltip
    assert depth.continuous_update is False
    assert controls.by_name["method"].options == ("draft", "ngram")
    assert all(widget.description and widget.tooltip for widget in controls.by_name.values())


def test_a_hidden_parameter_keeps_its_value():
    controls = Controls(ToyParams(depth=8), hidden=["preset", "depth"])
    assert controls.by_name["depth"] not in controls.widget.children
    assert len(controls.widget.children) == len(controls.by_name) - 2
    assert controls.params() == ToyParams(depth=8)


def test_preset_moves_what_depends_on_it():
    controls = Controls(ToyParams())
    assert controls.by_name["prompts"].value == 4
    controls.set(preset="full")
    assert controls.params() == ToyParams(preset="full")
    assert controls.params().prompts == 16


def test_controls_refuse_what_the_dataclass_refuses():
    controls = Controls(ToyParams())
    with pytest.raises(ParameterError, match="depht"):
        controls.set(depht=3)
    with pytest.raises(ParameterError, match="out of range"):
        controls.set(depth=10)
    with pytest.raises(ParameterError, match="sed"):
        Controls(ToyParams(), hidden=["sed"])
    controls.by_name["depths"].value = "[1, x]"
    with pytest.raises(ParameterError, match="depths"):
        controls.params()


def test_command_line_survives_the_shell_and_comes_back_as_the_same_parameters():
    """Guards quoting: what is copied must repeat the run, whatever the prompt holds."""
    p = ToyParams(text='it\'s "$HOME" `x`; ü', depths=[9], greedy=False, preset="full", prompts=3)
    words = shlex.split(command(p, "00 tour.ipynb"))
    assert words[:3] == ["nanokit", "run", "00 tour.ipynb"]
    assert set(words[3::2]) == {"-p"}
    assert as_typed(ToyParams, dict(word.split("=", 1) for word in words[4::2])) == p
    assert command(ToyParams(), "n.ipynb") == "nanokit run n.ipynb"
