"""What a policy does to a model: to its weights, to what each layer makes of the true state, and to what comes out.

One walk over the layers, in fp32 activations, with every policy beside the reference. In each layer a policy's weights
meet two states:

    the reference's own       y = layer(state), y' = rounded layer(state): SQNR of what the layer adds to the state.
                              The error is this layer's alone; nothing has come before.
    its own                   what this policy's earlier layers have left; at the end that is compared with the
                              reference over the vocabulary (lab/quality): KL, best token, perplexity.

So the first says where a policy does harm and the second what it amounts to. Only weights differ; activations, keys and
values stay in fp32. The first is looked at in one window of text, and its tokens are summed up by their median, without
the first of them, whose state is a hundred times larger than any other. Every figure is against the file's own weights:
where those have four bits already, so does the reference. `keep` rounds nothing: what it shows is the noise floor of
the measurement.
"""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanokit.kernels.reference import rms_norm
from nanokit.lab.experiments.kernel_params import opened
from nanokit.lab.experiments.range_params import ARITHMETIC, EXACT_DB, POLICIES, PROSE, RangeParams, RangeResult
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.quality.divergence import Divergences, compare
from nanokit.lab.quality.reference import Reference, reference
from nanokit.lab.table import Table
from nanokit.model.requantize import requantized
from nanokit.model.source import ModelSource
from nanokit.model.weights import Weights, find_weights
from nanokit.model.windows import Windows, read_layer, run_layer, windows_of

PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")
SURE = 2.0  # standard errors beyond which a paired difference is one


@dataclass(frozen=True)
class DamageResult(RangeResult):
    """Metrics by setting: `kl_<setting>`, `kl_se_…`, `top1_…`, `ppl_factor_…`, `bits_…`, `arithmetic_kl_…`,
    `output_db_…` (the median layer); series `output_db_<setting>` by layer, `kl_<setting>` by scored token."""

    def row(self, setting: str) -> tuple[str, ...]:
        m = self.metrics
        return (
            setting, POLICIES[setting], f"{m[f'bits_{setting}']:.2f}", f"{m[f'output_db_{setting}']:.1f}",
            f"{min(self.samples[f'output_db_{setting}']):.1f}", f"{m[f'kl_{setting}']:.4f}",
            f"{m[f'kl_se_{setting}']:.4f}", f"{m[f'top1_{setting}']:.1%}", f"{m[f'ppl_factor_{setting}']:.3g}",
            f"{m[f'arithmetic_kl_{setting}']:.4f}",
        )  # fmt: skip

    def table(self) -> Table:
        """Every setting, in the order of the damage that it does."""
        order = sorted(self.asked.settings, key=lambda each: self.metrics[f"kl_{each}"])
        columns = ("setting", "policy", "bits a weight", "layer output (dB)", "worst layer", "KL (nats)", "± se",
                   "same best token", "perplexity, times", "KL on arithmetic")  # fmt: skip
        return Table(columns, [self.row(each) for each in order], right=columns[2:])

    def has(self, *settings: str) -> bool:
        return set(settings) <= set(self.asked.settings)

    def more(self, worse: str, better: str) -> tuple[float, float]:
        """How much more KL a setting has than another, token by token, and the standard error of that."""
        delta = np.array(self.samples[f"kl_{worse}"]) - np.array(self.samples[f"kl_{better}"])
        return float(delta.mean()), float(delta.std(ddof=1) / math.sqrt(len(delta)))

    def points(self, better: str, worse: str) -> float:
        """Percentage points of equal best tokens between two settings."""
        return 100 * (self.metrics[f"top1_{better}"] - self.metrics[f"top1_{worse}"])

    def surely(self, worse: str, better: str) -> bool:
        """Whether the one does more harm, beyond `SURE` standard errors."""
        mean, error = self.more(worse, better)
        return mean > SURE * error


def damage(p: RangeParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> DamageResult:
    """Walk through the model with every policy.

    Raises ParameterError for windows that the texts are too short for, StoppedError when cancelled, BusyError, and what
    `nanokit.load` raises of a model file."""
    progress = progress or Silent()
    with measuring("damage by policy"), torch.inference_mode():
        source, weights = opened(p.model)
        progress.start(len(weights.layers) + 2, "the reference")
        refs = [reference(p.model, count, text, p.length) for text, count in texts_of(p).items()]
        progress.step("layers")
        ids = [window for ref in refs for window in ref.windows]
        walk = _Walk(source, weights, [windows_of(source.config, each) for each in (ids, ids[:1])], p.settings)
        for index in range(len(weights.layers)):
            stop_if(cancel)
            walk.layer(index)
            progress.step(f"layer {index}")
        metrics, series = _compared(walk, refs)
    bits = {f"bits_{name}": value for name, value in walk.bits().items()}
    outputs = {f"output_db_{name}": values for name, values in walk.outputs.items()}
    medians = {name: median(values) for name, values in outputs.items()}
    settings = {"model": source.name, "reference": refs[0].name, "floor": "the setting keep"}
    return DamageResult(p, {**metrics, **bits, **medians}, {**outputs, **series}, settings)


def texts_of(p: RangeParams) -> dict[str, int]:
    """Windows of each text."""
    return {PROSE: p.windows, ARITHMETIC: max(1, p.windows // 2)}


class _Remembered:
    """A source that keeps the tensors of the layer in hand, which every policy asks for; of a walk over all of them, as
    for the scale of a whole model, few."""

    MOST = 16  # tensors of a layer, and some

    def __init__(self, base: ModelSource) -> None:
        self._base, self._kept = base, dict[str, Tensor]()

    def tensor(self, name: str) -> Tensor:
        if name not in self._kept:
            if len(self._kept) == self.MOST:
                self.forget()
            self._kept[name] = self._base.tensor(name)
        return self._kept[name]

    def forget(self) -> None:
        self._kept.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


class _Walk:
    """The states of the reference and of every policy, layer by layer."""

    def __init__(self, source: ModelSource, weights: Weights, windows: list[Windows], settings: list[str]) -> None:
        """windows: all of them, and the first alone, on which layers are judged."""
        self._source: Any = _Remembered(source)
        self._weights = find_weights(source.config, self._source)
        self._windows, self._judged = windows
        self._policies = {name: requantized(self._source, POLICIES[name]) for name in settings}
        self._rounded = {name: find_weights(source.config, each) for name, each in self._policies.items()}
        hidden = weights.embedding.dense()[self._windows.token_ids]
        self.hidden = hidden
        self.states: dict[str, Tensor] = dict.fromkeys(settings, hidden)
        self.outputs: dict[str, list[float]] = {name: [] for name in settings}
        self._final_norm = weights.final_norm.dense()

    def layer(self, index: int) -> None:
        """One layer of everybody."""
        self._source.forget()
        exact = read_layer(self._weights, index)
        before = self.hidden[: self._judged.lengths[0]]
        after = run_layer(exact, before, self._judged)
        for name, weights in self._rounded.items():
            rounded = read_layer(weights, index)
            self.outputs[name].append(output_db(before, after, run_layer(rounded, before, self._judged)))
            self.states[name] = run_layer(rounded, self.states[name], self._windows)
        self.hidden = run_layer(exact, self.hidden, self._windows)

    def last(self, name: str) -> Tensor:
        """States after the final norm, fp32 [rows, hidden_size]."""
        return rms_norm(self.states[name], self._final_norm, self._windows.config.rms_eps)

    def bits(self) -> dict[str, float]:
        """Bits a weight in the layers' products, by setting."""
        found = {}
        for name, source in self._policies.items():
            stored = [
                source.stored[getattr(layer, role).weight.name]
                for layer in self._rounded[name].layers
                for role in PRODUCTS
            ]
            found[name] = 8 * sum(each.nbytes for each in stored) / sum(math.prod(each.shape) for each in stored)
        return found


def output_db(before: Tensor, after: Tensor, found: Tensor) -> float:
    """SQNR of what a layer adds to the states of one window [tokens, hidden_size]: the median token, but the first."""
    signal, noise = ((b - a)[1:].double().square().sum(1) for a, b in ((before, after), (after, found)))
    return float((10 * torch.log10(signal / noise)).clamp(max=EXACT_DB).median())


def _compared(walk: _Walk, refs: list[Reference]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """KL and its kin of every setting, of both texts."""
    metrics: dict[str, float] = {}
    series: dict[str, list[float]] = {}
    for name in walk.states:
        prose, arithmetic = _by_text(walk.last(name), refs)
        said = prose.summary()
        metrics |= {
            f"kl_{name}": said["kl_mean"], f"kl_se_{name}": said["kl_mean_se"], f"top1_{name}": said["top1"],
            f"ppl_factor_{name}": said["ppl_ratio"], f"ppl_factor_se_{name}": said["ppl_ratio_se"],
            f"arithmetic_kl_{name}": arithmetic.summary()["kl_mean"],
            f"arithmetic_top1_{name}": arithmetic.summary()["top1"],
        }  # fmt: skip
        series[f"kl_{name}"] = [round(value, 7) for value in prose.kl.tolist()]
    return metrics, series


def _by_text(hidden: Tensor, refs: list[Reference]) -> list[Divergences]:
    found, rest = [], hidden
    for ref in refs:
        rows, rest = rest.split((len(ref.windows) * ref.length, len(rest) - len(ref.windows) * ref.length))
        states = iter(rows.split(ref.length))  # `compare` asks for the windows in their order
        found.append(compare(partial(_next_logits, ref, states), ref))
    return found


def _next_logits(ref: Reference, states: Iterator[Tensor], ids: list[int]) -> Tensor:
    return ref.head_of(next(states))
