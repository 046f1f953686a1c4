"""How weights are spread, and what a format makes of one matrix: statistics before any model is run.

    std, absmax, absmax / std, kurtosis      of every matrix; kurtosis of a normal distribution is 3
    SQNR     10 log10(sum w^2 / sum (w - rounded w)^2), dB: 6 dB more is half of the error
    clipped  share of weights beyond the outermost level of their group
    zero     share that becomes 0 although it was not
    bits     entropy of the codes: of 4 bits, how many are made use of

A matrix of normal random numbers stands beside the model's. The model's own weights may lie on a grid already: those of
a Q4_1 file are 16 levels in every 32, and a format with the same groups and a minimum finds them all again. That is no
merit of the format, and the random matrix shows it.
"""

import math
import statistics
import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanokit.kernels.reference import heads, rms_norm
from nanokit.lab.experiments.kernel_params import opened
from nanokit.lab.experiments.range_params import EXACT_DB, PROSE, ROLES, RangeParams, RangeResult
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.quality.texts import text_ids
from nanokit.lab.table import Table
from nanokit.model.weights import Matrix, Weights
from nanokit.model.windows import Windows, read_layer, run_layer, windows_of
from nanokit.quant.qtensor import QTensor
from nanokit.quant.storage import nominal_bits
from nanokit.quant.weight_format import WeightFormat, weight_format

NORMAL = (1024, 1152)  # rows, columns of the random matrix: every group here divides them
SEED = 5
ROUNDED = 2.0**-10  # by more than a scale of eleven bits is rounded: what lies beyond the end by less is not clipped
CLAIMED_K, CLAIMED_V = (0.02, 0.05), (0.3, 0.5)  # Q2: standard deviations of the key and value projections
CLAIMED_ORDERS = 16.0  # Q20
SPREAD = ("std", "absmax", "peak_over_std", "kurtosis")
AFTER = ("sqnr_db", "clipped", "zero", "bits")


@dataclass(frozen=True)
class SpreadResult(RangeResult):
    """Series by layer: `<statistic>_<role>` and, by format, `<statistic>_<role>_<format>`; `k_state_std` and
    `v_state_std`: of the projections' outputs. Metrics: medians, and of the random matrix
    `normal_<statistic>_<format>`."""

    def series(self, statistic: str, role: str, name: str = "") -> list[float]:
        return self.samples["_".join(part for part in (statistic, role, name) if part)]

    def table(self) -> Table:
        """The model's matrices by role, before anything is rounded: the median layer, and the least and most of std."""
        rows = []
        for role in ROLES:
            std = self.series("std", role)
            cells = [f"{self.metrics[f'{each}_{role}']:.3g}" for each in SPREAD]
            rows.append((role, self.settings["stored"][role], *cells, f"{min(std):.3f} to {max(std):.3f}"))
        return Table(("weights of", "stored in", "std", "largest", "largest / std", "kurtosis", "std by layer"), rows,
                     right=("std", "largest", "largest / std", "kurtosis", "std by layer"))  # fmt: skip

    def rounded(self, role: str = "down") -> Table:
        """What each format makes of the matrices of one role, and of normal random numbers."""
        rows = []
        for name in self.asked.formats:
            cells = [
                _decibels(self.metrics[f"sqnr_db_{role}_{name}"]),
                _decibels(self.metrics[f"normal_sqnr_db_{name}"]),
            ]
            cells += [f"{self.metrics[f'{each}_{role}_{name}']:.2%}" for each in ("clipped", "zero")]
            bits = self.metrics[f"bits_{role}_{name}"]
            rows.append((name, f"{self.metrics[f'width_{name}']:.2f}", *cells, f"{bits:.2f}"))
        columns = (
            "format",
            "bits a weight",
            f"SQNR of {role} (dB)",
            "of normal (dB)",
            "clipped",
            "become 0",
            "bits used",
        )
        return Table(columns, rows, right=columns[1:])

    @property
    def flattered(self) -> list[str]:
        """Formats that lose nothing on this model's weights although they do on normal ones."""
        return [
            name for name in self.asked.formats
            if all(self.metrics[f"sqnr_db_{role}_{name}"] >= EXACT_DB for role in ROLES)
            and self.metrics[f"normal_sqnr_db_{name}"] < EXACT_DB
        ]  # fmt: skip

    @property
    def verdict_q2(self) -> str:
        """Of the claim that keys' weights are spread over .02 to .05 and values' over .3 to .5."""
        found = {role: (min(self.series("std", role)), max(self.series("std", role))) for role in "kv"}
        states = {each: (min(s), max(s)) for each in "kv" if (s := self.samples[f"{each}_state_std"])}
        apart = self.metrics["std_v"] / self.metrics["std_k"]
        claimed = statistics.mean(CLAIMED_V) / statistics.mean(CLAIMED_K)
        within = _inside(found["k"], CLAIMED_K) and _inside(found["v"], CLAIMED_V)
        verdict = "holds" if within else "does not hold" if apart < claimed / 3 else "holds in part"
        return (
            f"{verdict}: weights of k have a std of {_range(found['k'])}, of v {_range(found['v'])}; what they give, "
            f"{_range(states['k'])} and {_range(states['v'])} (claimed {_range(CLAIMED_K)} and {_range(CLAIMED_V)})"
        )

    @property
    def verdict_q20(self) -> str:
        """Of the claim that sixteen orders of magnitude lie between FP16 and INT4."""
        half, codes = orders(torch.float16), math.log10(7)
        between = half - codes
        verdict = "holds" if between >= CLAIMED_ORDERS - 0.5 else "does not hold"
        return (
            f"{verdict}: FP16 spans {half:.1f} orders of magnitude (normal numbers alone "
            f"{orders(torch.float16, subnormal=False):.1f}), INT4 codes {codes:.1f}; {between:.1f} lie between "
            f"(claimed {CLAIMED_ORDERS:.0f}). Scales in FP16 give the span back, group by group"
        )


def orders(dtype: torch.dtype, subnormal: bool = True) -> float:
    """log10 of the largest finite number of a type over its smallest positive one."""
    limits = torch.finfo(dtype)
    return math.log10(limits.max / (limits.smallest_normal * (limits.eps if subnormal else 1.0)))


def _inside(found: tuple[float, float], claimed: tuple[float, float]) -> bool:
    return claimed[0] <= found[0] and found[1] <= claimed[1]


def _range(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.2f} to {pair[1]:.2f}"


def _decibels(value: float) -> str:
    return "exact" if value >= EXACT_DB else f"{value:.1f}"


def spread(p: RangeParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> SpreadResult:
    """Look at the weights of some layers, and at the keys and values that a text makes of them.

    Raises ParameterError for a format that does not fit the model's columns, StoppedError when cancelled, BusyError,
    and what `nanokit.load` raises of a model file."""
    progress = progress or Silent()
    samples: dict[str, list[float]] = {}
    formats = {name: weight_format(name) for name in p.formats}
    with measuring("the spread of weights"), torch.inference_mode():
        source, weights = opened(p.model)
        chosen = chosen_layers(len(weights.layers), p.layers)
        progress.start(len(chosen) + 2, "weights")
        for index in chosen:
            stop_if(cancel)
            for role in ROLES:
                matrix: Matrix = getattr(weights.layers[index], role).weight
                found = _of_matrix(matrix.dense().numpy(), formats, matrix.name, f"_{role}")
                for name, value in found.items():
                    samples.setdefault(name, []).append(value)
            progress.step(f"layer {index}")
        stop_if(cancel)
        ids = text_ids(source.tokenizer, PROSE)[: p.length]
        samples |= _states(weights, windows_of(source.config, [ids]), chosen)
        progress.step("a random matrix")
        normal = np.random.default_rng(SEED).standard_normal(NORMAL, np.float32)
        made = _of_matrix(normal, formats, "the random matrix", "")
    metrics = {name: statistics.median(values) for name, values in samples.items()}
    metrics |= {f"normal_{name}": value for name, value in made.items()}
    metrics |= {f"width_{name}": _width(each) for name, each in formats.items()}
    stored = {role: getattr(weights.layers[0], role).weight.type for role in ROLES}
    settings = {"model": source.name, "layers": chosen, "stored": stored, "text": PROSE}
    return SpreadResult(p, metrics, samples, settings)


def chosen_layers(there: int, wanted: int) -> list[int]:
    """So many layers, first and last among them, evenly spread."""
    count = min(there, wanted)
    return sorted({round(at) for at in np.linspace(0, there - 1, count)})


def _of_matrix(w: np.ndarray, formats: dict[str, WeightFormat], name: str, at: str) -> dict[str, float]:
    std, absmax = float(w.std(dtype=np.float64)), float(np.abs(w).max())
    kurtosis = float(((w - w.mean(dtype=np.float64)) ** 4).mean(dtype=np.float64)) / std**4 if std else 0.0
    values = (std, absmax, absmax / std if std else 0.0, kurtosis)
    found = dict(zip((f"{each}{at}" for each in SPREAD), values, strict=True))
    for label, each in formats.items():
        found |= {f"{key}{at}_{label}": value for key, value in of_rounding(w, each.quantize(w, name)).items()}
    return found


def of_rounding(w: np.ndarray, q: QTensor) -> dict[str, float]:
    """What became of fp32 weights w [rows, columns]: `AFTER`, as the module says."""
    rounded = q.dequantize()
    ends = np.array(q.code_range if q.table is None else (q.table.min(), q.table.max()), np.float32)
    low, high = np.sort(q.scales[..., None] * ends, axis=-1).transpose(2, 0, 1)
    if q.minimums is not None:
        low, high = low + q.minimums, high + q.minimums
    grouped = w.reshape(*q.scales.shape, q.group)
    slack = np.maximum(np.abs(low), np.abs(high)) * ROUNDED
    beyond = (grouped < (low - slack)[..., None]) | (grouped > (high + slack)[..., None])
    counts = np.bincount(q.codes.reshape(-1).astype(np.int64) + 128)
    shares = counts[counts > 0] / q.codes.size
    return {
        "sqnr_db": sqnr_db(w, rounded - w),
        "clipped": float(beyond.mean()),
        "zero": float(((rounded == 0) & (w != 0)).mean()),
        "bits": float(-(shares * np.log2(shares)).sum()),
    }


def sqnr_db(signal: np.ndarray, noise: np.ndarray) -> float:
    """Decibels; EXACT_DB where there is no noise, and at most that."""
    power = [float(np.square(each, dtype=np.float64).sum()) for each in (signal, noise)]
    return min(EXACT_DB, 10 * math.log10(power[0] / power[1])) if power[1] and power[0] else EXACT_DB


def _width(each: WeightFormat) -> float:
    return nominal_bits(each, NORMAL)


def _states(weights: Weights, windows: Windows, chosen: list[int]) -> dict[str, list[float]]:
    """Standard deviation of keys and values, after their norms and rotation, by layer; without the first token of a
    window, whose states are like no other's."""
    hidden, found = _embedded(weights, windows), {"k_state_std": list[float](), "v_state_std": list[float]()}
    for index in range(len(weights.layers)):
        layer = read_layer(weights, index)
        if index in chosen:
            x = rms_norm(hidden, layer.attn_norm, windows.config.rms_eps)
            _, k, v = heads(layer, windows.config, x, windows.cos, windows.sin)
            found["k_state_std"].append(float(k[1:].std()))
            found["v_state_std"].append(float(v[1:].std()))
        if index == max(chosen):
            break
        hidden = run_layer(layer, hidden, windows)
    return found


def _embedded(weights: Weights, windows: Windows) -> Tensor:
    return weights.embedding.dense()[windows.token_ids]
