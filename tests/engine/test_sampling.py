"""Settings of a request: unknown names and values out of range are refused in one clear error."""

import dataclasses

import pytest

from nanokit.engine.config import EngineConfig
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError


def test_the_default_is_greedy_and_repeatable():
    assert Sampling().is_greedy
    assert not Sampling().is_filtered


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
        ("top_k", -1), ("top_p", 1.01), ("top_p", -0.01), ("top_p", float("nan")), ("min_p", 1.5),
        ("repetition_penalty", 0.0), ("max_tokens", 0), ("max_tokens", 1.5), ("stop", ("",)), ("stop", 3),
        ("seed", -1), ("seed", 2**64), ("suppress", (-1,)), ("suppress", ("a",)),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ParameterError, match=name) as caught:
        Sampling(**{name: value})
    assert caught.value.needed


def test_an_unknown_name_is_refused_with_the_known_ones():
    """nano-vllm drops unknown keyword arguments silently."""
    with pytest.raises(ParameterError, match="no parameter temprature") as caught:
        Sampling(temprature=1.0)
    assert "temperature" in str(caught.value.needed)


def test_settings_are_frozen_and_replaceable():
    sampling = Sampling(temperature=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.temperature = 1.0
    assert dataclasses.replace(sampling, top_k=3) == Sampling(temperature=0.5, top_k=3)
    with pytest.raises(ParameterError):
        dataclasses.replace(sampling, top_k=-3)


def test_one_stop_string_is_a_list_of_one():
    """tuple("end") would be the stop strings e, n and d."""
    assert Sampling(stop="end").stop == ("end",)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")


def test_an_engine_needs_a_budget_for_every_running_sequence():
    with pytest.raises(ParameterError, match="token in every step"):
        EngineConfig(max_context=10, num_blocks=1, max_seqs=8, token_budget=4)
    with pytest.raises(ParameterError, match="num_blocks"):
        EngineConfig(max_context=10, num_blocks=0)
