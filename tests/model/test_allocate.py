"""Formats bought for a budget: against an exhaustive search, a whole forward, and what policies can spell."""

from itertools import product
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tiny import save_tiny, tiny_model

from nanokit.errors import ParameterError
from nanokit.model.allocate import HALVES, Cost, allocate, resolve, sensitivities, spelled
from nanokit.model.load import open_model
from nanokit.model.requantize import requantized
from nanokit.quant.policy import CLASSES, parse_policy
from nanokit.quant.storage import stored_nbytes

LAYERS, FORMATS = 3, ("int4-sym-channel", "nvfp4", "int8-sym-g64")
BITS = {"int4-sym-channel": 4.0, "nvfp4": 4.5, "int8-sym-g64": 8.25}


def costs_of(kls: list[float]) -> list[Cost]:
    places = [(layer, half, name) for layer in range(LAYERS) for half in HALVES for name in FORMATS]
    size = {"attn": 1000, "ffn": 3000}
    return [
        Cost(layer, half, name, BITS[name] * size[half], kl)
        for (layer, half, name), kl in zip(places, kls, strict=True)
    ]


@given(st.lists(st.floats(0, 1), min_size=18, max_size=18), st.floats(4.0, 8.5))
@settings(max_examples=60, deadline=None)
def test_near_the_best_of_all_choices(kls: list[float], bits: float) -> None:
    """Within the budget; and no choice of the same price or less saves more than the steps of a hull can miss: one."""
    costs = costs_of(kls)
    budget = bits * LAYERS * 4000
    chosen = allocate(costs, budget)
    assert [(cost.layer, cost.half) for cost in chosen] == list(product(range(LAYERS), HALVES))
    assert sum(cost.bits for cost in chosen) <= budget
    halves = [costs[at : at + 3] for at in range(0, 18, 3)]
    best = min(
        sum(cost.kl for cost in choice) for choice in product(*halves) if sum(cost.bits for cost in choice) <= budget
    )
    largest = max(max(c.kl for c in half) - min(c.kl for c in half) for half in halves)
    assert best <= sum(cost.kl for cost in chosen) + 1e-12
    assert sum(cost.kl for cost in chosen) <= best + largest + 1e-12


def test_a_budget_that_is_met_exactly_buys_what_is_best() -> None:
    """Convex costs, where steps along the hull find the optimum."""
    kls = [each for weight in (1.0, 5.0, 0.1, 0.3, 2.0, 0.2) for each in (weight, weight / 3, 0.0)]
    costs = costs_of(kls)
    chosen = allocate(costs, 4.0 * 12000 + 0.5 * (3000 + 1000))
    assert [cost.format for cost in chosen] == ["int4-sym-channel", "nvfp4", *["int4-sym-channel"] * 2, "nvfp4",
                                                "int4-sym-channel"]  # fmt: skip


def test_a_budget_below_everything_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ParameterError, match=r"(?s)auto:3 is too little.*3 bits a weight.*at least 4\.000"):
        allocate(costs_of([0.0] * 18), 3.0 * 12000, "auto:3", 12000)


@given(st.lists(st.sampled_from(FORMATS), min_size=12, max_size=12))
@settings(deadline=None)
def test_the_spelling_means_the_choices(names: list[str]) -> None:
    chosen = [
        Cost(layer, half, name, 0, 0) for (layer, half), name in zip(product(range(6), HALVES), names, strict=True)
    ]
    policy = parse_policy(spelled(chosen))
    for cost in chosen:
        for role in CLASSES[cost.half]:
            assert policy.choice(role, cost.layer).name == cost.format
    assert policy.choice("head").format is None
    assert policy.name == spelled(chosen)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("allocate") / "tiny"
    model = tiny_model("llama", heads=8, hidden=128, head_dim=16, intermediate=192)
    return model, open_model(save_tiny(folder, model))


def texts() -> list[list[int]]:
    return torch.randint(0, 256, (3, 60), generator=torch.Generator().manual_seed(0)).tolist()


def test_costs_are_those_of_a_whole_forward_with_one_half_quantized(tiny) -> None:
    """By transformers, the half's weights replaced in its own modules."""
    model, source = tiny
    costs = sensitivities(source, texts(), ("int4-sym-g64", "int8-sym-g64"))
    assert len(costs) == 8
    windows = [texts()[0], texts()[1]]

    def scored() -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor(windows)).logits[:, 30:].flatten(0, 1).log_softmax(-1)

    before, state = scored(), {name: values.clone() for name, values in model.state_dict().items()}
    for cost in (costs[0], costs[6]):
        made = requantized(source, f"keep;head=keep;{cost.layer}.{cost.half}={cost.format}")
        model.load_state_dict({name: made.tensor(name) for name in state if name in source.stored}, strict=False)
        found = scored()
        model.load_state_dict(state)
        kl = float((before.exp() * (before - found)).sum(-1).mean())
        assert cost.kl == pytest.approx(kl, rel=1e-3, abs=1e-6)
        assert kl > 0


def test_a_model_is_resolved_within_its_budget_twice_alike(tiny) -> None:
    _, source = tiny
    policies = [resolve(source, 5.0, texts()) for _ in range(2)]
    assert policies[0].name == policies[1].name
    made = requantized(source, policies[0])
    names = [name for name in source.stored if "proj.weight" in name]
    stored = sum(stored_nbytes(made.quantized(name, 0, source.stored[name].shape[0])) for name in names)
    weights = sum(source.tensor(name).numel() for name in names)
    assert 4.2 < 8 * stored / weights <= 5.0
    told: list[int] = []
    resolve(source, 9.0, texts(), lambda done, total, what: told.append(done))
    assert told == [0, 1, 2]
