"""Which C compiler there is, and which variant of the kernels it can make for this CPU.

The CPU is asked through the compiler: the macros that `-march=native` defines say at once what the CPU has, what the
system lets programs use and what this compiler knows how to emit, on every architecture. Reading /proc/cpuinfo was
rejected: it is Linux's alone, and an old compiler cannot use what it lists.

    NANOKIT_CPU_KERNELS  avx512 | portable-avx2 | portable | none; default: the first that this CPU has
    NANOKIT_CPU_CFLAGS   more flags after the kit's own, for sanitizers and profilers
    CC                   the compiler; default: cc, gcc or clang, the first that runs
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property

from nanokit.errors import NanokitError, ParameterError

FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-semantic-interposition",
    "-Wall", "-Wextra", "-Wno-psabi",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One way to compile the same sources. macros: what the CPU must have, named as compilers define it."""

    name: str
    flags: tuple[str, ...]
    macros: frozenset[str]


AVX512 = frozenset({"__AVX512F__", "__AVX512BW__", "__AVX512VL__", "__AVX512DQ__", "__AVX512VNNI__"})
VARIANTS = {
    variant.name: variant
    for variant in (  # the best first
        Variant("avx512", ("-march=native", "-DNK_AVX512"), AVX512),
        Variant("portable-avx2", ("-mavx2", "-mf16c"), frozenset({"__AVX2__", "__F16C__"})),
        Variant("portable", (), frozenset()),
    )
}
NONE = "none"


class NoKernelsError(NanokitError):
    """There are no C kernels here, and the reference can stand in: no compiler, or NANOKIT_CPU_KERNELS=none.

    by_request: the latter, which needs no comment.
    """

    by_request = False


@dataclass(frozen=True)
class Compiler:
    """A compiler that ran. command: its words; version: the first line of what it says about itself."""

    command: tuple[str, ...]
    version: str

    @cached_property
    def macros(self) -> str:
        """All that it defines for this CPU, one `#define` a line; for its own default where it cannot ask the CPU."""
        for native in (["-march=native"], []):
            command = [*self.command, *native, "-dM", "-E", "-x", "c", os.devnull]
            answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
            if answer.returncode == 0:
                return answer.stdout
        return ""

    def offers(self, variant: Variant) -> bool:
        """Whether this compiler and this CPU have what the variant needs."""
        return variant.macros <= set(re.findall(r"^#define (\w+)", self.macros, re.MULTILINE))


def find_compiler() -> Compiler:
    """`$CC`, else the first of cc, gcc and clang that runs (macOS has a `cc` that only offers to install one).

    Raises NoKernelsError: none, a `CC` that does not run, or Windows (the kernels need POSIX threads).
    """
    if sys.platform == "win32":
        raise NoKernelsError("the C kernels do not run under Windows itself", do="use WSL2, the Linux inside Windows")
    asked = shlex.split(os.environ.get("CC", ""))
    for words in [asked] if asked else [["cc"], ["gcc"], ["clang"]]:
        program = shutil.which(words[0])
        if program is None:
            continue
        command = (program, *words[1:])
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
        if answer.returncode == 0:
            return Compiler(command, answer.stdout.splitlines()[0] if answer.stdout else "no version")
    if asked:
        raise NoKernelsError("CC is not a C compiler", found=shlex.join(asked), do="correct or unset CC")
    raise NoKernelsError(
        "no C compiler", needed="cc, gcc or clang on the PATH, or $CC",
        do="xcode-select --install" if sys.platform == "darwin"
        else "install gcc or clang, e.g. `apt install build-essential`",
    )  # fmt: skip


def choose(compiler: Compiler) -> Variant:
    """The variant that NANOKIT_CPU_KERNELS names, or the best.

    Raises ParameterError when it is unknown or not for this CPU, NoKernelsError when it is `none`.
    """
    asked = requested()
    if asked is None:
        return next(variant for variant in VARIANTS.values() if compiler.offers(variant))
    variant = VARIANTS[asked]
    if not compiler.offers(variant):
        raise ParameterError(
            f"NANOKIT_CPU_KERNELS={asked} is not for this CPU and compiler",
            found=f"{compiler.command[0]} ({compiler.version}), -march=native",
            needed=", ".join(sorted(variant.macros)),
            do="unset NANOKIT_CPU_KERNELS for the best that there is, or set it to portable",
        )
    return variant


def requested() -> str | None:
    """The variant that NANOKIT_CPU_KERNELS asks for, None for the best. Raises as `choose`, without a compiler."""
    asked = os.environ.get("NANOKIT_CPU_KERNELS") or None
    if asked == NONE:
        off = NoKernelsError("the C kernels are switched off", found="NANOKIT_CPU_KERNELS=none", do="unset it")
        off.by_request = True
        raise off
    if asked is not None and asked not in VARIANTS:
        raise ParameterError(
            "unknown NANOKIT_CPU_KERNELS", found=repr(asked), needed=" | ".join([*VARIANTS, NONE]),
            do="unset it for the best that this CPU has",
        )  # fmt: skip
    return asked


def flags(variant: Variant) -> list[str]:
    """All flags of the variant, in the order in which the compiler gets them."""
    return [*FLAGS, *variant.flags, *shlex.split(os.environ.get("NANOKIT_CPU_CFLAGS", ""))]
