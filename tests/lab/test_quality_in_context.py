"""Rankings over context lengths, and the experiment on a tiny model."""

from pathlib import Path

import pytest
from tiny import compiled_model, save_tiny_gguf

from nanokit.errors import ParameterError
from nanokit.lab.experiments.quality_in_context import Cell, ContextParams, compare_rankings, quality_in_context
from nanokit.lab.plots.context_plot import by_context, by_position


def cells(*rows: tuple[str, int, float, float]) -> list[Cell]:
    return [Cell(name, context, kl, se, 0.9, 1.0, {"a": kl, "b": kl}) for name, context, kl, se in rows]


def test_a_reversal_needs_both_ends() -> None:
    """Noise that swaps two settings once in a while is no reversed ranking."""
    turned = cells(("a", 512, 0.1, 0.001), ("a", 8192, 0.3, 0.001), ("b", 512, 0.2, 0.001), ("b", 8192, 0.2, 0.001))
    assert compare_rankings(turned) == (1, [("a", "b")])
    kept = cells(("a", 512, 0.1, 0.001), ("a", 8192, 0.1, 0.001), ("b", 512, 0.2, 0.001), ("b", 8192, 0.2, 0.001))
    assert compare_rankings(kept) == (1, [])
    vague = cells(("a", 512, 0.1, 0.001), ("a", 8192, 0.3, 0.1), ("b", 512, 0.2, 0.001), ("b", 8192, 0.2, 0.1))
    assert compare_rankings(vague) == (0, [])


def test_only_the_ends_count() -> None:
    """The claim is about two lengths; what lies between must not be mistaken for the longest."""
    found = cells(
        ("a", 1, 0.1, 0.001), ("a", 2, 0.9, 0.001), ("a", 3, 0.1, 0.001),
        ("b", 1, 0.2, 0.001), ("b", 2, 0.2, 0.001), ("b", 3, 0.2, 0.001),
    )  # fmt: skip
    assert compare_rankings(found) == (1, [])


@pytest.mark.parametrize("wrong", [{"contexts": [128, 64]}, {"contexts": [64, 64]}, {"policies": ["int3"]}])
def test_parameters_that_cannot_be_run(wrong: dict) -> None:
    """Found after minutes of reference, a typing error costs the minutes."""
    with pytest.raises(ParameterError):
        ContextParams(**wrong)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return save_tiny_gguf(path, compiled_model("llama", tied=True), types="Q8_0")


def test_every_setting_at_every_length(model: Path) -> None:
    """A cell of another setting or length, or of an engine whose rope is not the reference's, gives another verdict."""
    p = ContextParams(
        preset="smoke", model=str(model), contexts=[64, 512, 640], kv_formats=["fp32", "int8"],
        policies=["int4-sym-g32"], windows=2, batch=2,
    )  # fmt: skip
    found = quality_in_context(p)
    assert [(c.setting, c.context) for c in found.cells] == [
        (name, length) for name in ("KV fp32", "KV int8", "int4-sym-g32") for length in (64, 512, 640)
    ]
    assert all(c.kl < 1e-6 for c in found.of("KV fp32")), "a16 and fp32 pages lose nothing that KL can see"
    assert all(1e-7 < c.kl < found.of("int4-sym-g32")[i].kl for i, c in enumerate(found.of("KV int8")))
    assert found.metrics["unequal_layouts"] == 0
    assert all(floor < 1e-9 for floor in found.floors.values())
    assert len(found.table().rows) == 4
    assert len(found.positions().rows) == 3
    for figure in (by_context(found), by_position(found)):
        assert len(figure.data) >= 3
