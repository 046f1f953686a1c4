"""Sizes as a person writes them, what is free, and the refusal before anything is allocated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanokit.errors import MemoryBudgetError, ParameterError
from nanokit.model import memory

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (536870912, 512 * MIB), ("512MiB", 512 * MIB), ("2G", 2 * GIB), ("2GB", 2 * 10**9), ("1.5 gib", 3 * GIB // 2),
        (" 7 ", 7), ("0", 0),
    ],
)  # fmt: skip
def test_sizes_as_people_write_them(text: Any, expected: int) -> None:
    assert memory.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "2 apples", "1..5G", "nan", -5, "9" * 400, "٣GiB"])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ParameterError, match="not a memory size"):
        memory.parse_bytes(text)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """free(files…) with 8 GiB available on the machine, inside a control group that has these files."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(memory, "CGROUP", tmp_path)

    def free(**files: object) -> int:
        for name, content in files.items():
            (tmp_path / name.replace("_", ".")).write_text(f"{content}\n")
        return memory.free_memory()

    return free


def test_what_a_container_allows_counts(machine: Any) -> None:
    """A limit below what the machine has free is what kills the process."""
    assert machine() == 8 * GIB
    files = {"memory_current": GIB, "memory_stat": "anon 5"}
    assert machine(memory_max="max", **files) == 8 * GIB
    assert machine(memory_max=64 * GIB, **files) == 8 * GIB
    assert machine(memory_max=3 * GIB, **files) == 2 * GIB
    assert machine(memory_max=GIB // 2, **files) == 0


def test_cached_files_are_not_taken_for_used_memory(machine: Any) -> None:
    """A container is charged for the page cache: having just read the model file must not refuse the model."""
    stat = f"anon {MIB}\nfile {2 * GIB}\ninactive_file {2 * GIB}\nactive_file 0"
    assert machine(memory_max=3 * GIB, memory_current=2 * GIB + MIB, memory_stat=stat) == 3 * GIB - MIB


def test_what_torch_keeps_of_a_gpu_can_be_had_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a second model where the first one was would be refused for memory that torch holds for it."""
    cuda = SimpleNamespace(
        mem_get_info=lambda _: (3 * GIB, 80 * GIB), memory_reserved=lambda _: 70 * GIB, memory_allocated=lambda _: GIB
    )
    monkeypatch.setattr(memory.torch, "cuda", cuda)
    assert memory.free_gpu_memory(torch.device("cuda", 0)) == 72 * GIB


def test_a_budget_that_fits_exactly_passes_and_one_byte_more_is_refused() -> None:
    memory.check_budget(600, 400, "m", "lower ctx", free=1000)
    with pytest.raises(MemoryBudgetError) as caught:
        memory.check_budget(600, 401, "m.gguf", "lower ctx", free=1000)
    assert str(caught.value).splitlines() == [
        "m.gguf does not fit into memory",
        "  found: 1000 B free",
        "  needed: 600 B for weights + 401 B for KV pages",
        "  do: lower ctx",
    ]


def test_weights_alone_too_large_are_not_blamed_on_the_kv_pages() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        memory.check_budget(3 * GIB, 1, "m.gguf", "lower ctx", free=2 * GIB)
    assert "smaller" in str(caught.value.do)
    assert "ctx" not in str(caught.value.do)
