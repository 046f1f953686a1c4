"""A bound model from outside: what C trusts is checked, and nothing around a call reaches into it."""

import threading
import weakref
from pathlib import Path

import pytest
import torch
from tiny import compiled_model, save_tiny_gguf

from nanokit.kernels import cpu
from nanokit.kernels.cpu.bound import Bound
from nanokit.kv.pages import PagedKV
from nanokit.model.batch import Batch
from nanokit.model.load import open_model
from nanokit.model.weights import find_weights


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tmp_path_factory.mktemp("bound") / "m.gguf", compiled_model("llama"), types="Q4_0")


@pytest.fixture
def bound(kernels, file) -> Bound:
    source = open_model(file)
    return cpu.bind(source.config, find_weights(source.config, source), activations="a8g32")


def step(bound: Bound, rows: int, pages: PagedKV) -> torch.Tensor:
    return bound.run(bound.plan(Batch(list(range(rows)), [rows], [rows], [[0]]), pages))


@pytest.mark.parametrize("ids", [[-1], [331], [0, 10**9]])
def test_ids_beyond_the_vocabulary_are_refused(bound: Bound, ids: list[int]) -> None:
    """C finds a panel by the id: -1 read the stack, a large one killed the process."""
    with pytest.raises(IndexError, match="330"):
        bound.logits(torch.ones(1, 64), torch.tensor(ids))


def test_pages_of_one_forward_are_not_kept(bound: Bound) -> None:
    """A model keeps the addresses of the pages it saw last, and a calibration's pages are as large as its text; a plan
    keeps its pages for as long as it may be run."""
    pages = PagedKV(bound._config, 1)
    plan = bound.plan(Batch([1], [1], [1], [[0]]), pages)
    seen, wanted = weakref.ref(pages), bound.run(plan)
    del pages
    assert seen() is not None
    assert torch.equal(bound.run(plan), wanted)
    del plan
    assert seen() is None
    assert torch.equal(step(bound, 1, PagedKV(bound._config, 1)), step(bound, 1, PagedKV(bound._config, 1)))


def test_two_threads_use_one_model(bound: Bound) -> None:
    """A step plans its scratch before the team's queue is reached: without a lock the other thread's is torn away."""
    pages = [PagedKV(bound._config, 1) for _ in range(2)]
    wanted = {rows: step(bound, rows, pages[0]) for rows in (1, 7, 40)}
    wrong = []

    def work(own: PagedKV) -> None:
        for i in range(60):
            rows = (1, 7, 40)[i % 3]
            hidden = step(bound, rows, own)
            if not torch.equal(hidden, wanted[rows]) or len(bound.argmax(hidden)) != rows:
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(own,)) for own in pages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_torchs_default_dtype_changes_nothing(bound: Bound, dtype: torch.dtype) -> None:
    """Half the memory that C writes to was a damaged heap."""
    pages = PagedKV(bound._config, 1)
    hidden = step(bound, 5, pages)
    wanted = bound.logits(hidden)
    torch.set_default_dtype(dtype)
    try:
        again = step(bound, 5, pages)
        assert torch.equal(bound.logits(again), wanted)
        assert torch.equal(bound.logits(again, torch.tensor([3])), wanted[:, 3:4])
    finally:
        torch.set_default_dtype(torch.float32)
