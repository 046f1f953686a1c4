"""What a base address costs: loads of one width, from a cache or from memory, at every offset.

A load that touches two cache lines is two reads of the first cache. What that costs depends on where the bytes come
from: as long as they wait for memory, nothing. So the same buffer is read by the same loop (kernels/cpu/c/align.c, one
thread, nothing but loads) at every offset, with the working set in L1, in L2 and beyond all caches of the core, in
turns. Offset 0 stands twice in every turn: what its two series differ by is noise, and so is a difference that is not
larger. Rejected: random addresses (they measure the translation of addresses), and all threads (two cores that wait for
one memory hide what a load costs).
"""

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nanokit.kernels.cpu.align import Loads
from nanokit.kernels.cpu.library import library
from nanokit.lab.bench.timing import Rounds, Samples, Visit, in_turns, milliseconds
from nanokit.lab.experiments.alignment_params import BUDGET_S, AlignmentParams, AlignmentResult, straddling
from nanokit.lab.experiments.reading import reader_of
from nanokit.lab.lock import measuring
from nanokit.lab.machine import cache_bytes
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent
from nanokit.lab.result import Result
from nanokit.lab.steadiness import remarks
from nanokit.lab.table import Table

PAGE = 4096
SAMPLE_BYTES = {"L1": 64 << 20, "L2": 48 << 20}  # of one sample: some tenths of a millisecond and more
USUAL = {1: 32 << 10, 2: 512 << 10}  # caches of a machine that does not list its own
CLAIMED_GAIN, CLAIMED_WIDTH = 0.19, 32  # Q8


@dataclass(frozen=True)
class LoadsResult(AlignmentResult):
    """Series `read_gb_s_<set>_<width>_<offset>`, and `…_again` of offset 0; metrics: medians, and by set and width
    `noise_vs_aligned_<set>_<width>` and `gain_vs_straddling_<set>_<width>`."""

    @property
    def widths(self) -> list[int]:
        """Those that this build has."""
        return [width for width in self.asked.widths if width in self.settings["widths"]]

    def speed(self, where: str, width: int, offset: int | str) -> float:
        """Median, GB/s. offset: bytes, or "again"."""
        return self.metrics[f"read_gb_s_{where}_{width}_{offset}"]

    def relative(self, where: str, width: int, offset: int) -> float:
        """Over the speed at offset 0, the mean of its two medians."""
        return self.speed(where, width, offset) / self.aligned(where, width)

    def aligned(self, where: str, width: int) -> float:
        """GB/s at offset 0."""
        return (self.speed(where, width, 0) + self.speed(where, width, "again")) / 2

    def noise(self, where: str, width: int) -> float:
        return self.metrics[f"noise_vs_aligned_{where}_{width}"]

    def gain(self, where: str, width: int) -> float | None:
        """How much faster aligned loads are than those that straddle, over all offsets; None where none straddle."""
        return self.metrics.get(f"gain_vs_straddling_{where}_{width}")

    def table(self, where: str = "") -> Table:
        """One working set (empty: the first): by offset and width, GB/s with its extremes, and that over offset 0."""
        rows, where = [], where or self.asked.sets[0]
        for offset in self.asked.offsets:
            cells = []
            for width in self.widths:
                values = self.samples[f"read_gb_s_{where}_{width}_{offset}"]
                cells += [
                    f"{min(values):.1f} | {statistics.median(values):.1f} | {max(values):.1f}",
                    f"{self.relative(where, width, offset):.2f}",
                ]
            rows.append((str(offset), *cells))
        columns = ["offset"]
        for width in self.widths:
            columns += [f"{width} bytes: GB/s in {where}", f"{width}: over aligned"]
        return Table(columns, rows, right=columns)

    def summary(self) -> Table:
        """By working set and width: aligned speed, its share of streaming, its gain over straddling loads, noise."""
        rows, stream = [], self.metrics["stream_gb_s"]
        for where in self.asked.sets:
            for width in self.widths:
                speed, gain = self.aligned(where, width), self.gain(where, width)
                cells = (f"{speed:.1f}", f"{speed / stream:.2f}", "-" if gain is None else f"{gain:+.0%}")
                rows.append((where, str(width), *cells, f"{self.noise(where, width):.1%}"))
        columns = ("in", "bytes a load", "GB/s aligned", "of streaming", "gain of alignment", "noise floor")
        return Table(columns, rows, right=columns[1:])

    @property
    def verdict_q8(self) -> str:
        """Of the claim that data aligned to 32 bytes are read with 19 % more bandwidth: by working set, whether the
        gain of aligned 32-byte loads exceeds the noise."""
        width = CLAIMED_WIDTH if CLAIMED_WIDTH in self.widths else self.widths[-1]
        found = {where: self.gain(where, width) for where in self.asked.sets}
        gains = {where: gain for where, gain in found.items() if gain is not None}
        if not gains:
            return "not tested: no offset makes such loads straddle"
        real = [where for where, gain in gains.items() if gain > self.noise(where, width)]
        said = ", ".join(f"{gains[where]:+.0%} in {where}" for where in gains)
        if len(real) == len(gains):
            return f"holds: aligned loads of {width} bytes give {said} (claimed {CLAIMED_GAIN:+.0%})"
        if not real:
            return f"does not hold: aligned loads of {width} bytes give {said} (claimed {CLAIMED_GAIN:+.0%})"
        lost = " and ".join(where for where in gains if where not in real)
        return f"holds in part: {said} (claimed {CLAIMED_GAIN:+.0%}); in {lost} it is within the noise"


def loads(
    p: AlignmentParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> LoadsResult:
    """Time every width at every offset in every working set, in turns.

    Raises NoKernelsError where there is no compiler (nothing else has loads of a known width), StoppedError when
    cancelled, BusyError."""
    progress, made = progress or Silent(), Loads()
    with measuring("loads"):
        visits = {where: _visit(made, p, where) for where in p.sets}
        turns = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress, cancel=cancel).run(visits)
    samples = turns.samples
    metrics = {name: statistics.median(values) for name, values in samples.items()}
    metrics.setdefault("stream_gb_s", float("nan"))
    for where in p.sets:
        for width in p.widths:
            if width in made.widths:
                metrics |= _derived(metrics, p.offsets, where, width)
    settings = {
        "widths": list(made.widths), "kernels": library().card(), "sizes": {each: size_of(each, p) for each in p.sets}
    }  # fmt: skip
    said = [*turns.remarks, *_left_out(made, p.widths), *_about_caches(p), *few(remarks(samples))]
    return LoadsResult(p, metrics, samples, settings, remarks=said)


def size_of(where: str, p: AlignmentParams) -> int:
    """Bytes that are read: half of the cache, in whole KiB."""
    if where == "memory":
        return p.memory_mib << 20
    level = int(where[1])
    return cache_bytes().get(level, USUAL[level]) // 2 // 1024 * 1024


def on_page(size: int) -> np.ndarray:
    """Bytes that are all there, the first of them at a multiple of PAGE."""
    buffer = np.ones(size + PAGE, np.uint8)  # a zeroed one may be a single shared page
    return buffer[-buffer.ctypes.data % PAGE :][:size]


def timer(made: Loads, part: np.ndarray, width: int, passes: int) -> Callable[[], float]:
    """A function that reads it so many times and returns GB/s."""
    return lambda: passes * part.nbytes / milliseconds(lambda: made.read(part, width, passes)) / 1e6


def _visit(made: Loads, p: AlignmentParams, where: str) -> Visit:
    size = size_of(where, p)
    base = on_page(size + max(p.offsets))
    passes = max(1, SAMPLE_BYTES.get(where, 0) // size)

    def timed(width: int, offset: int) -> Callable[[], float]:
        return timer(made, base[offset : offset + size], width, passes)

    actions = {}
    for width in p.widths:
        if width in made.widths:
            for offset in p.offsets:
                actions[f"read_gb_s_{where}_{width}_{offset}"] = timed(width, offset)
            actions[f"read_gb_s_{where}_{width}_again"] = timed(width, 0)
    if where == "memory":
        stream = reader_of([base[:size]], threads=1)
        actions["stream_gb_s"] = lambda: size / milliseconds(stream) / 1e6

    def visit() -> Samples:
        return in_turns(actions, 1 if where == "memory" else 3)

    return visit


def _derived(m: dict[str, float], offsets: Sequence[int], where: str, width: int) -> dict[str, float]:
    """The noise floor: what speeds differ by that should be equal, at offset 0, at 0 again and at every offset at which
    no load straddles. The gain: of the former over the mean speed of the offsets at which loads do."""
    at = f"{where}_{width}"
    straddled = [offset for offset in offsets if straddling(width, offset) > 0]
    equal = [m[f"read_gb_s_{at}_{offset}"] for offset in (*(o for o in offsets if o not in straddled), "again")]
    found = {f"noise_vs_aligned_{at}": (max(equal) - min(equal)) / max(equal)}
    if straddled:
        crossing = statistics.mean(m[f"read_gb_s_{at}_{offset}"] for offset in straddled)
        found[f"gain_vs_straddling_{at}"] = statistics.mean(equal) / crossing - 1
    return found


def _left_out(made: Loads, asked: Sequence[int]) -> list[str]:
    lacking = [str(width) for width in asked if width not in made.widths]
    return [f"this build ({library().variant}) has no loads of {' or '.join(lacking)} bytes"] if lacking else []


def _about_caches(p: AlignmentParams) -> list[str]:
    """Where the working sets may not lie where they are said to lie."""
    found, said = cache_bytes(), []
    if not {1, 2} <= set(found):
        said.append("this machine does not list its caches: usual sizes were taken")
    last = max(found.values(), default=0)
    if "memory" in p.sets and last > p.memory_mib << 20:
        said.append(
            f"the last cache is listed with {last >> 20} MiB (of a whole processor, and perhaps shared with other "
            f"machines): some of the {p.memory_mib} MiB called memory may lie there"
        )
    return said


def few(said: Sequence[str]) -> list[str]:
    """The first of many remarks of one kind, and how many others there are."""
    return list(said[:1]) + ([f"so do {len(said) - 1} other series"] if len(said) > 1 else [])


# -- one point of it, for the panel -----------------------------------------------------------------------------------


@experiment_params
class LoadParams(Params):
    """One width, one offset, one size."""

    offset: int = knob(4, "where reading begins, after a multiple of 4096", unit="bytes", low=0, high=128, step=4)
    width: int = knob(32, "bytes of a load", choices=(16, 32, 64))
    kib: int = knob(512, "bytes that are read again and again", unit="KiB", low=8, high=262144, step=8)
    repeats: int = knob(0, "samples", low=3, high=200, by_preset={"smoke": 5, "quick": 25, "full": 100})


@dataclass(frozen=True)
class LoadResult(Result):
    """Series `at_offset_gb_s`, `aligned_gb_s` and `aligned_again_gb_s`."""


def load(p: LoadParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> LoadResult:
    """Time loads at the offset and at offset 0, twice. Raises as `loads`, and ParameterError for a width that the build
    lacks."""
    made, size = Loads(), p.kib << 10
    base = on_page(size + p.offset)
    begins = {"at_offset_gb_s": p.offset, "aligned_gb_s": 0, "aligned_again_gb_s": 0}
    passes = max(1, SAMPLE_BYTES["L2"] // size)
    actions = {name: timer(made, base[at : at + size], p.width, passes) for name, at in begins.items()}
    with measuring("loads"):
        rounds = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress or Silent(), cancel=cancel)
        samples = rounds.run({"loads": lambda: in_turns(actions, 1)}).samples
    metrics = {name: statistics.median(values) for name, values in samples.items()}
    metrics["on_two_lines_rate"] = straddling(p.width, p.offset)
    return LoadResult(p, metrics, samples, remarks=remarks(samples))
