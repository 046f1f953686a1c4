"""Quality in its scenario: does a ranking of settings made at one context length hold at another?

One reference a context length (fp32 activations, fp32 pages, weights as stored); against it every setting of weights
and KV pages, on windows of that length whose second half is scored. Two kinds of setting, so that every difference has
one cause: other KV pages under the stored weights, and other weights over fp16 pages. Activations are the same in all.
Beyond the length that a model was trained for its rope frequencies are scaled down to fit, in the reference as well.

Batch and page layout are settings too, that should change nothing at all: their rows repeat a setting with several
windows in one batch, in chunks, over scattered pages, and what is reported is whether every bit of every figure is the
same. The noise floor is the reference against itself, summed in another order.

Two settings are told apart where their mean divergences differ by more than twice the standard error of the difference;
a ranking is reversed where a pair is told apart at both lengths and in opposite order.
"""

import math
import threading
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from nanokit.engine.load import LoadedEngine, load
from nanokit.errors import ParameterError
from nanokit.kernels.activations import MODES
from nanokit.kv.pages import DTYPES
from nanokit.lab.experiments.kernel_params import opened
from nanokit.lab.lock import measuring
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.quality.divergence import Divergences, compare_engine, reference_floor
from nanokit.lab.quality.passes import Pass
from nanokit.lab.quality.reference import Reference, reference
from nanokit.lab.quality.texts import text_ids
from nanokit.lab.result import Result
from nanokit.lab.table import Table
from nanokit.model.config import ModelConfig
from nanokit.model.source import ModelSource
from nanokit.quant.policy import parse_policy

STORED = "keep"
BUCKETS = 4
TOLD_APART = 2.0  # standard errors
CLAIMED = (2000, 32000)  # tokens between which rankings are said to reverse (Q10)
SMALL_CHUNK = 192


@experiment_params
class ContextParams(Params):
    """Which lengths, which settings of weights and KV pages, how many windows."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    contexts: list[int] = knob(
        [], "lengths of the windows; beyond the model's own, rope is scaled", unit="tokens", low=64, high=32768,
        by_preset={"smoke": [64, 192], "quick": [128, 640], "full": [512, 2048, 8192, 12288]},
    )  # fmt: skip
    kv_formats: list[str] = knob(
        [], "formats of KV pages under the stored weights", choices=tuple(DTYPES),
        by_preset={"smoke": ["fp16", "int8"], "quick": ["int8", "int8-static", "kivi4"],
                   "full": ["fp16", "int8", "int8-static", "int4", "kivi4"]},
    )  # fmt: skip
    policies: list[str] = knob(
        [], "policies of weights, over fp16 pages",
        by_preset={"smoke": ["int4-sym-g64"], "quick": ["nvfp4", "int4-sym-g64"],
                   "full": ["int8-sym-channel", "nvfp4", "int4-sym-g32", "int4-sym-g64"]},
    )  # fmt: skip
    batch: int = knob(4, "windows computed together in the rows that should change nothing", low=2, high=8)
    activations: str = knob("a16", "activation mode of every setting", choices=MODES[1:])
    windows: int = knob(
        0, "windows of each length, as far as the text goes", low=1, high=32,
        by_preset={"smoke": 1, "quick": 1, "full": 4},
    )  # fmt: skip

    def check(self) -> None:
        for policy in self.policies:
            parse_policy(policy)
        if sorted(set(self.contexts)) != self.contexts:
            raise ParameterError("contexts rise from short to long", found=self.contexts, needed="each once, ascending")


@dataclass(frozen=True)
class Cell:
    """One setting at one length."""

    setting: str
    context: int
    kl: float
    se: float
    top1: float
    ppl_ratio: float
    buckets: dict[str, float]


@dataclass(frozen=True)
class ContextResult(Result):
    """cells: every setting at every length; floors: noise floor by length; reversed_pairs: see the module. Metrics:
    `kl_<setting>_<length>` (nats), `floor_<length>`, `pairs_told_apart`, `pairs_reversed`, `unequal_layouts`."""

    cells: list[Cell] = field(default_factory=list)
    floors: dict[int, float] = field(default_factory=dict)
    reversed_pairs: list[tuple[str, str]] = field(default_factory=list)
    verdict_q10: str = ""
    verdict_q11: str = ""

    def of(self, setting: str) -> list[Cell]:
        """A setting's cells, by length."""
        return [cell for cell in self.cells if cell.setting == setting]

    @property
    def names(self) -> list[str]:
        """The settings, in the order in which they were measured."""
        return list(dict.fromkeys(cell.setting for cell in self.cells))

    def table(self) -> Table:
        """A row a setting: KL with its standard error and same best token at every length."""
        lengths = sorted({cell.context for cell in self.cells})
        columns = ("setting", *(f"KL at {n:,}" for n in lengths), f"same best token at {lengths[-1]:,}")
        rows = [
            (
                name,
                *(f"{cell.kl:.2g} ± {cell.se:.1g}" for cell in self.of(name)),
                f"{self.of(name)[-1].top1:.1%}",
            )
            for name in self.names
        ]
        floor = ("nothing (noise floor)", *(f"{self.floors[n]:.1g}" for n in lengths), "")
        return Table(columns, [floor, *rows], right=columns[1:])

    def positions(self) -> Table:
        """A row a setting: KL by position in the longest windows."""
        longest = max(cell.context for cell in self.cells)
        cells = [cell for cell in self.cells if cell.context == longest]
        columns = ("setting", *cells[0].buckets)
        return Table(
            columns, [(c.setting, *(f"{v:.2g}" for v in c.buckets.values())) for c in cells], right=columns[1:]
        )


def quality_in_context(
    p: ContextParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> ContextResult:
    """Measure every setting at every length. Raises StoppedError when cancelled, BusyError while something else is
    measured, and what `nanokit.load` raises."""
    progress = progress or Silent()
    settings = [(STORED, kv) for kv in p.kv_formats] + [(policy, "fp16") for policy in p.policies]
    source, _ = opened(p.model)
    with measuring("quality in context"):
        progress.start((1 + len(settings)) * len(p.contexts), "reference")
        refs = []
        for context in p.contexts:
            stop_if(cancel)
            refs.append(_reference(source, p, context))
            progress.step(f"reference at {context}")
        cells: list[Cell] = []
        unequal: list[str] = []
        for policy, kv_format in settings:
            name, engine = name_of(policy, kv_format), None
            for ref in refs:
                stop_if(cancel)
                if engine is None or ref.length > engine.config.max_context:
                    engine = _engine(source, p, _same_rope(refs, ref, source), policy, kv_format)
                plain = compare_engine(engine, ref)
                cells.append(_cell(name, ref.length, plain))
                if ref is refs[0]:
                    unequal += _unequal(engine, ref, plain, name, p.batch)
                progress.step(f"{name} at {ref.length}")
    return _result(p, cells, refs, unequal, source.config)


def _same_rope(refs: list[Reference], ref: Reference, source: ModelSource) -> int:
    """The longest context that one engine can serve from this one on: beyond the model's own each has its own rope."""
    own = source.config.max_context
    return ref.length if ref.length > own else max(each.length for each in refs if each.length <= own)


def name_of(policy: str, kv_format: str) -> str:
    """What a setting is called: what differs from the stored weights over fp16 pages."""
    return f"KV {kv_format}" if policy == STORED else policy


def _reference(source: ModelSource, p: ContextParams, context: int) -> Reference:
    """As many windows as asked for, or as the text has."""
    windows = min(p.windows, len(text_ids(source.tokenizer, "evaluation")) // context)
    scale = source.config.max_context / context
    return reference(p.model, max(windows, 1), length=context, rope_scale=scale if scale < 1 else 0.0)


def _engine(source: ModelSource, p: ContextParams, ctx: int, policy: str, kv_format: str) -> LoadedEngine:
    scale = source.config.max_context / ctx
    return load(
        p.model or None,
        ctx=ctx,
        max_seqs=p.batch,
        prefix_cache=False,
        policy=None if policy == STORED else policy,
        kv_format=kv_format,
        activations=p.activations,
        rope_freq_scale=scale if scale < 1 else None,
        force=scale < 1,
    )


def _cell(name: str, context: int, found: Divergences) -> Cell:
    m = found.summary()
    buckets = {f"{low:,}-{high:,}": part["kl_mean"] for (low, high), part in found.by_position(BUCKETS).items()}
    return Cell(name, context, m["kl_mean"], m["kl_mean_se"], m["top1"], m["ppl_ratio"], buckets)


def _unequal(engine: LoadedEngine, ref: Reference, plain: Divergences, name: str, batch: int) -> list[str]:
    """The ways of computing this setting that changed a figure: there should be none."""
    ways = {"scattered pages": Pass(layout="scattered"), f"chunks of {SMALL_CHUNK}": Pass(chunk=SMALL_CHUNK)}
    if len(ref.windows) > 1:
        ways[f"batch of {batch}"] = Pass(batch=batch)
    others = {way: compare_engine(engine, ref, how) for way, how in ways.items()}
    return [f"{name}: {way}" for way, other in others.items() if not np.array_equal(other.kl, plain.kl)]


def _result(
    p: ContextParams, cells: list[Cell], refs: list[Reference], unequal: list[str], config: ModelConfig
) -> ContextResult:
    apart, turned = compare_rankings(cells)
    floors = {ref.length: reference_floor(ref) for ref in refs}
    metrics = {f"kl_{cell.setting.replace(' ', '_')}_{cell.context}": cell.kl for cell in cells}
    metrics |= {f"floor_{context}": floor for context, floor in floors.items()}
    metrics |= {"pairs_told_apart": apart, "pairs_reversed": len(turned), "unequal_layouts": len(unequal)}
    settings = {
        "references": [ref.name for ref in refs], "changed_by_layout": unequal, "layers": config.num_layers,
        "kv_heads": config.num_kv_heads, "head_dim": config.head_dim,
    }  # fmt: skip
    return ContextResult(
        p, metrics, {}, settings, cells=cells, floors=floors, reversed_pairs=turned,
        verdict_q10=_verdict_q10(cells, apart, turned), verdict_q11=_verdict_q11(cells, unequal),
    )  # fmt: skip


def compare_rankings(cells: list[Cell]) -> tuple[int, list[tuple[str, str]]]:
    """Pairs of settings that are told apart at the shortest and at the longest length, and those of them whose order is
    another there."""
    names = list(dict.fromkeys(cell.setting for cell in cells))
    ends = {name: [c for c in cells if c.setting == name] for name in names}
    apart, turned = 0, []
    for a, b in combinations(names, 2):
        signs = [_told_apart(ends[a][at], ends[b][at]) for at in (0, -1)]
        if all(signs):
            apart += 1
            if signs[0] != signs[1]:
                turned.append((a, b))
    return apart, turned


def _told_apart(a: Cell, b: Cell) -> int:
    """-1 where a diverges less, 1 where b does, 0 where the errors are too large to say."""
    margin = TOLD_APART * math.hypot(a.se, b.se)
    return 0 if abs(a.kl - b.kl) <= margin else (1 if a.kl > b.kl else -1)


def _verdict_q10(cells: list[Cell], apart: int, turned: list[tuple[str, str]]) -> str:
    lengths = sorted({cell.context for cell in cells})
    claimed = " and ".join(f"{length:,}" for length in CLAIMED)
    span = f"between {lengths[0]:,} and {lengths[-1]:,} tokens (the claim speaks of {claimed})"
    if len(lengths) < 2 or not apart:
        return f"is not tested by this run: no two settings are told apart at two lengths ({span})"
    if turned:
        example = f"{turned[0][0]} and {turned[0][1]}"
        return f"holds in part: {span} {len(turned)} of {apart} pairs change places, {example} for one"
    moved = _largest_growth(cells)
    return (
        f"does not hold here: {span} none of {apart} pairs that can be told apart change places; what changes is the "
        f"size of the damage, most for {moved[0]} ({moved[1]:.1f} times)"
    )


def _largest_growth(cells: list[Cell]) -> tuple[str, float]:
    growth = {}
    for name in dict.fromkeys(cell.setting for cell in cells):
        first, *_, last = [cell.kl for cell in cells if cell.setting == name]
        growth[name] = last / first if first > 0 else 1.0
    name = max(growth, key=lambda each: abs(math.log(max(growth[each], 1e-9))))
    return name, growth[name]


def _verdict_q11(cells: list[Cell], unequal: list[str]) -> str:
    if unequal:
        return f"holds: {', '.join(unequal)} changed figures"
    fixed, own = ([c.kl for c in cells if c.setting == name] for name in ("KV int8-static", "KV int8"))
    said = "does not hold as said: batch, chunks and scattered pages change no bit of any setting"
    if not fixed or not own:
        return said + "; scales fixed at calibration were not among the settings"
    return (
        f"{said}; what does differ is a static cache's fixed scales: {fixed[0] / own[0]:.1f} times the divergence of "
        f"scales of each token at the shortest length, {fixed[-1] / own[-1]:.1f} times at the longest"
    )
