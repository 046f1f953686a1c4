"""A second engine over the same pages: only where it overwrites nothing that the first will read."""

from pathlib import Path

import pytest
from tiny import compiled_model, save_tiny_gguf

from nanokit.engine.load import load
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError
from nanokit.lab.engines import in_mode

GREEDY = Sampling(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tmp_path_factory.mktemp("engines") / "tiny.gguf", compiled_model("llama"), types="Q4_1")


def test_pages_that_hold_something_are_not_lent(file: Path) -> None:
    """What the first has cached or computes would be another prompt's keys and values: another answer, no error."""
    with pytest.raises(ParameterError, match="prefix_cache=False"):
        in_mode(load(file, ctx=128), "token")
    engine = load(file, ctx=128, prefix_cache=False)
    running = engine.add([1], GREEDY)
    with pytest.raises(ParameterError, match="wait or run"):
        in_mode(engine, "token")
    engine.abort(running)
    engine.step()
    assert in_mode(engine, "token").model.activations == "token"


def test_a_view_gives_the_originals_of_its_pages_back(file: Path) -> None:
    """Of kivi4 pages, whose engine tells them of blocks that nobody holds any more."""
    engine = load(file, ctx=256, kv_format="kivi4", prefix_cache=False)
    view = in_mode(engine, "token")
    answers = [each.generate([[5, 9, 2] * 40], GREEDY)[0].token_ids for each in (view, engine, view)]
    assert answers[0] == answers[2]
    assert engine.kv._open is not None
    assert not engine.kv._open._open
