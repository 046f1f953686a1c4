"""Compiling and caching the kernels under faults; with one small source file, so that a build takes a blink."""

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanokit.errors import ParameterError
from nanokit.kernels.cpu import build, compiler, library, structs

C = build.SOURCES
HEADERS = sorted(path.name for path in C.glob("*.h"))
LOAD = """
import sys
from pathlib import Path
from nanokit.kernels.cpu import build, library
build.SOURCES = Path(sys.argv[1])
print(library.library().variant)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and sources of one file."""
    sources = tmp_path / "sources with a space"
    sources.mkdir()
    for name in (*HEADERS, "abi.c"):
        shutil.copy(C / name, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("NANOKIT_HOME", str(tmp_path / "home"))
    for name in ("NANOKIT_CPU_KERNELS", "NANOKIT_CPU_CFLAGS", "CC"):
        monkeypatch.delenv(name, raising=False)
    library._loaded.cache_clear()
    yield tmp_path / "home"
    library._loaded.cache_clear()


def chosen() -> tuple[compiler.Compiler, compiler.Variant]:
    found = compiler.find_compiler()
    return found, compiler.choose(found)


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def counting(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with every build."""
    calls: list[object] = []
    whole = build.compile_library
    monkeypatch.setattr(build, "compile_library", lambda *a: calls.append(a) or whole(*a))
    return calls


def process(home: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(build.SOURCES)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_built_once_and_again_when_anything_changes(home, monkeypatch) -> None:
    """A key that forgets the headers, the flags or the compiler runs yesterday's kernels."""
    builds = counting(monkeypatch)
    first = build.build(*chosen())
    assert build.build(*chosen()) == first
    assert len(builds) == 1
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert first.parent == home / "kernels"
    (build.SOURCES / "vec.h").open("a").write("/* changed */\n")
    build.build(*chosen())
    monkeypatch.setenv("NANOKIT_CPU_CFLAGS", "-g")
    build.build(*chosen())
    path = program(home.parent / "othercc", f'exec {shutil.which("cc")} "$@"')
    monkeypatch.setenv("CC", str(path))
    build.build(*chosen())
    assert len(builds) == 4


def test_two_processes_at_once(home) -> None:
    """Both compile; neither may load the other's half-written file."""
    both = [process(home) for _ in range(2)]
    for one in both:
        out, err = one.communicate(timeout=120)
        assert one.returncode == 0, err
        assert out.strip() in compiler.VARIANTS
        assert err.count("\n") <= 1
    assert not list((home / "kernels").glob(".new-*"))
    later = process(home)
    assert later.communicate(timeout=120)[1] == ""  # cached: nothing is said


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_damaged_library_is_made_anew(home, monkeypatch, damage) -> None:
    """dlopen of a file that was cut short kills the process with SIGBUS: it must be found before."""
    path = build.build(*chosen())
    whole = path.read_bytes()
    broken = {"cut": whole[: len(whole) // 2], "empty": b"", "flipped": whole[:-1] + bytes([whole[-1] ^ 1])}[damage]
    path.write_bytes(broken)
    assert build.cached(*chosen()) is None
    assert build.build(*chosen()).read_bytes() != broken
    library.library()


def open_to_others(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def elsewhere(folder: Path) -> None:
    (folder.parent / "other").mkdir(parents=True)
    folder.symlink_to(folder.parent / "other")


def a_file(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("")


def below_a_file(folder: Path) -> None:
    folder.parent.write_text("")


@pytest.mark.parametrize("spoil", [open_to_others, elsewhere, a_file, below_a_file])
def test_cache_that_cannot_be_used(home, monkeypatch, capsys, spoil) -> None:
    """A folder in which others may plant a library is not run from; the kernels work all the same, said once."""
    spoil(home / "kernels")
    monkeypatch.setattr(build, "_said", set())
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    for _ in range(2):
        path = build.build(*chosen())
        assert not path.is_relative_to(home)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    said = capsys.readouterr().err
    assert said.count("cannot be kept") == 1
    assert str(home / "kernels") in said


def test_planted_library_is_not_loaded(home, monkeypatch) -> None:
    """Its name and content agree, as anybody could arrange; the folder is what makes the difference."""
    path = build.build(*chosen())
    path.parent.chmod(0o770)
    assert build.cached(*chosen()) is None
    path.parent.chmod(0o700)
    assert build.cached(*chosen()) == path
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert build.cached(*chosen()) is None


def test_full_disk(home, monkeypatch, capsys) -> None:
    """The compiled file does not fit into the cache: the process goes on with a copy of its own."""
    whole = shutil.copyfile

    def full(source: Path, target: Path) -> object:
        if Path(target).is_relative_to(home):
            raise OSError(28, "No space left on device")
        return whole(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(build, "_said", set())
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert build.build(*chosen()).is_file()
    assert "No space left on device" in capsys.readouterr().err
    assert not list((home / "kernels").glob("*.so"))


def test_cache_does_not_grow_for_ever(home, monkeypatch) -> None:
    """Every edit of a source makes a library; the newest must be among those that stay."""
    monkeypatch.setattr(build, "KEPT", 3)
    for i in range(5):
        monkeypatch.setenv("NANOKIT_CPU_CFLAGS", f"-DEDIT={i}")
        newest = build.build(*chosen())
    assert len(list(newest.parent.glob("*.so"))) == 3
    assert newest.is_file()


def test_what_the_compiler_said_is_shown(home) -> None:
    """A bare exit status leaves a person with nothing to act on."""
    (build.SOURCES / "wrong.c").write_text('#include "no_such_header.h"\n')
    with pytest.raises(
        build.KernelError, match=r"no_such_header\.h(.|\n)*by: .*wrong\.c(.|\n)*NANOKIT_CPU_KERNELS=none"
    ):
        build.build(*chosen())
    assert not (home / "kernels").exists()


def test_no_compiler(home, monkeypatch, tmp_path) -> None:
    """bind must be able to tell "use the reference" from a failure; a CC that is wrong is named, not passed over."""
    monkeypatch.setenv("CC", str(program(tmp_path / "broken", "exit 1")))
    with pytest.raises(compiler.NoKernelsError, match="broken"):
        library.library()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(compiler.NoKernelsError, match="no C compiler") as caught:
        library.library()
    assert not caught.value.by_request


def test_variants_by_environment(home, monkeypatch) -> None:
    """Each variant that this machine has can be forced; what it lacks, or what nobody knows, is an error."""
    found = compiler.find_compiler()
    for name, variant in compiler.VARIANTS.items():
        monkeypatch.setenv("NANOKIT_CPU_KERNELS", name)
        if found.offers(variant):
            assert library.library().card()["variant"] == name
        else:
            with pytest.raises(ParameterError, match="not for this CPU"):
                library.library()
    monkeypatch.setenv("NANOKIT_CPU_KERNELS", "avx1024")
    with pytest.raises(ParameterError, match=r"avx512 \| portable-avx2 \| portable \| none"):
        library.library()
    monkeypatch.setenv("NANOKIT_CPU_KERNELS", "none")
    with pytest.raises(compiler.NoKernelsError) as caught:
        library.library()
    assert caught.value.by_request


@pytest.mark.parametrize(
    ("missing", "best"),
    [
        (set(), "avx512"),
        ({"__AVX512VNNI__"}, "portable-avx2"),
        ({"__AVX512F__", "__AVX2__"}, "portable"),
    ],
)
def test_best_variant(monkeypatch, missing, best) -> None:
    """An AVX-512 CPU without VNNI, and an ARM one, must not be given instructions that they lack."""
    monkeypatch.delenv("NANOKIT_CPU_KERNELS", raising=False)
    needed = {macro for variant in compiler.VARIANTS.values() for macro in variant.macros}
    found = compiler.Compiler(("cc",), "1")
    found.__dict__["macros"] = "".join(f"#define {macro} 1\n" for macro in needed - missing)
    assert compiler.choose(found).name == best


def test_structures_as_in_the_header() -> None:
    """The load compares sizes; two pointers that changed places would have the same."""
    text = re.sub(r"/\*.*?\*/", "", (C / "nk.h").read_text(), flags=re.S)
    for structure in structs.STRUCTURES:
        [body] = re.findall(r"typedef struct \{([^}]*)\} " + structure.__name__ + ";", text)
        names = [name for line in body.split(";") for name in re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", line.strip())]
        assert names == [name for name, *_ in structure._fields_]


def test_drift_is_refused(home, monkeypatch) -> None:
    """A structure that grew on one side only would be read beyond its end."""

    class Act(ctypes.Structure):
        _fields_ = (*structs.Act._fields_, ("more", ctypes.c_void_p))

    monkeypatch.setattr(library, "STRUCTURES", (structs.Matrix, Act))
    with pytest.raises(build.KernelError, match=r"Act of \d+ bytes"):
        library.library()


def test_unknown_function_is_named(home) -> None:
    """ctypes raises AttributeError with a path."""
    with pytest.raises(build.KernelError, match="no function not_there"):
        library.library().declare("not_there", None)
