"""The C code under sanitizers, in processes of their own: reads beyond an array and races between threads often give
the right answer, until they do not.

The kernels' tests themselves are run again, over a library compiled with checks, with fewer examples. The address
sanitizer must be there before Python is, hence LD_PRELOAD. Leaks are not looked for: Python never gives all back.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanokit.kernels.cpu import build, compiler

HERE = Path(__file__).parent
TESTS = sorted(str(path) for path in HERE.glob("test_cpu_*.py"))
CHECKS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
THREAD_CHECKS = "-O1 -g -fsanitize=thread"
BROKEN = """
#include "nk.h"
int beyond(int i) { int few[4] = {1, 2, 3, 4}; return few[i]; }
int overflow(int i) { return 2147483647 + i; }
"""
RACING = """
#include <pthread.h>
static int shared;
static void *add(void *many) { for (int i = 0; i < 1000; i++) shared += *(int *)many; return 0; }
int race(int many) {
  pthread_t other;
  pthread_create(&other, 0, add, &many);
  add(&many);
  pthread_join(other, 0);
  return shared;
}
"""
CALL = """
import ctypes, sys
function = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])
function(int(sys.argv[3]))
print("passed")
"""


def cc(options: str, *words: str) -> None:
    command = [*compiler.find_compiler().command, "-std=gnu11", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    subprocess.run([*command, f"-I{build.SOURCES}", *options.split(), *words, "-lm"], check=True)


@pytest.fixture(scope="module")
def preload() -> dict[str, str]:
    """The environment of a Python under the address sanitizer; skips where the compiler brings none that can be
    preloaded (clang links its own in, macOS forbids it)."""
    return preloaded("libasan.so", "libubsan.so")


def preloaded(*runtimes: str) -> dict[str, str]:
    """This environment with the compiler's libraries of these names loaded before all others."""
    found = []
    for name in (*runtimes, "libstdc++.so"):  # the last, so that exceptions of torch find their way
        command = [*compiler.find_compiler().command, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if not os.path.isabs(path) or not sys.platform.startswith("linux"):
            pytest.skip(f"no {name} beside this compiler")
        found.append(path)
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return kept | {
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize(
    ("function", "argument", "said"),
    [("beyond", 3, "passed"), ("beyond", 4, "out of bounds"), ("overflow", 1, "signed integer overflow")],
)
def test_the_sanitizers_see(preload, tmp_path, function, argument, said) -> None:
    """A sanitizer that is not really there finds nothing, and everything below would pass."""
    (tmp_path / "broken.c").write_text(BROKEN)
    library = str(tmp_path / "broken.so")
    cc(f"{CHECKS} -fPIC -shared", str(tmp_path / "broken.c"), "-o", library)
    done = subprocess.run(
        [sys.executable, "-c", CALL, library, function, str(argument)], env=preload, capture_output=True, text=True
    )
    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == (said == "passed")


@pytest.mark.parametrize("variant", ["avx512", "portable"])
def test_kernels_touch_only_what_is_theirs(preload, monkeypatch, variant) -> None:
    """The kernels' own tests, under the address and undefined-behaviour sanitizers."""
    found = compiler.find_compiler()
    if not found.offers(compiler.VARIANTS[variant]):
        pytest.skip("not for this CPU")
    monkeypatch.setenv("NANOKIT_CPU_CFLAGS", CHECKS)
    build.build(found, compiler.VARIANTS[variant])  # here, where the compiler itself is not under the sanitizer
    environment = preload | {"NANOKIT_CPU_KERNELS": variant, "NANOKIT_CPU_CFLAGS": CHECKS}
    plugins = ["-p", "sanitized", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, *TESTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1])
    said = (done.stdout + done.stderr)[-6000:]
    assert done.returncode == 0, said
    assert " passed" in said  # and not all skipped


def test_threads_of_a_step_do_not_race(monkeypatch, tmp_path) -> None:
    """Whole steps under the thread sanitizer: scratch that two threads take for theirs, an input that is overwritten
    while another thread still multiplies with it. First a race that it must see."""
    environment = preloaded("libtsan.so") | {"NANOKIT_CPU_CFLAGS": THREAD_CHECKS}
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []  # this sanitizer knows few layouts of memory
    if subprocess.run([*fixed, sys.executable, "-c", ""], env=environment, capture_output=True).returncode:
        pytest.skip("the thread sanitizer does not start here")
    (tmp_path / "racing.c").write_text(RACING)
    library = str(tmp_path / "racing.so")
    cc(f"{THREAD_CHECKS} -fPIC -shared", str(tmp_path / "racing.c"), "-o", library)
    command = [*fixed, sys.executable, "-c", CALL, library, "race", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "data race" in done.stderr
    assert done.returncode != 0
    variant = compiler.choose(compiler.find_compiler())
    monkeypatch.setenv("NANOKIT_CPU_CFLAGS", THREAD_CHECKS)
    build.build(compiler.find_compiler(), variant)
    plugins = ["-p", "sanitized", "-p", "no:cacheprovider", "-k", "same_bits or two_models or argmax"]
    command = [*fixed, sys.executable, "-m", "pytest", "-q", "-x", *plugins, str(HERE / "test_cpu_model.py")]
    environment["NANOKIT_CPU_KERNELS"] = variant.name
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1])
    said = (done.stdout + done.stderr)[-6000:]
    assert done.returncode == 0, said
    assert " passed" in said


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_team(tmp_path, sanitizer) -> None:
    """Threads that hand out work without locks: a missing order between two of them shows in no result."""
    program = str(tmp_path / "team")
    sources = [str(HERE / "team_main.c"), str(build.SOURCES / "team.c")]
    cc(f"-O1 -g -fsanitize={sanitizer} -fno-sanitize-recover=all", *sources, "-o", program)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_warnings(tmp_path) -> None:
    """Every variant compiles without a warning, which at a user's only scrolls by."""
    found = compiler.find_compiler()
    for variant in compiler.VARIANTS.values():
        if found.offers(variant):
            options = [*compiler.flags(variant), "-Werror", "-fsyntax-only"]
            for source in build.SOURCES.glob("*.c"):
                subprocess.run([*found.command, *options, str(source)], check=True)
