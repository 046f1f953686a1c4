"""What each activation mode does to a model's output on texts that static scales were not calibrated on.

Static scales can fail in two ways, and a figure on another text alone does not tell them apart: the text has values
beyond the calibrated peak (drift), or the peak was so large from the beginning that ordinary values have hardly a code
(resolution). So static runs three times:

    static           calibrated on the calibration text, as one would
    static, own      calibrated on the very window that is measured: no drift is left, and no figure can be better
    static, later    calibrated on the calibration text without first positions, whose huge values are then clipped

What is between the first two is what drift costs. Logits are compared with those of fp32 activations and the same
weights, in windows whose second half is scored (lab/quality); pages are fp16 in all.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanokit.engine.load import LoadedEngine
from nanokit.lab.engines import in_mode
from nanokit.lab.experiments.agreement import divergence
from nanokit.lab.experiments.drift_params import (
    DriftParams,
    DriftResult,
    exact_engine,
    fast_engine,
    forward,
    peaks_without_first,
    text_start,
    watch,
)
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.quality.intervals import standard_error
from nanokit.lab.quality.reference import beginning
from nanokit.lab.quality.texts import cut, text_ids
from nanokit.lab.table import Table
from nanokit.quant.drift import Watch

STATIC = {"static": "static", "static_own": "static, own", "static_later": "static, later"}


@dataclass(frozen=True)
class DamageResult(DriftResult):
    """`kl_mean_<setting>_<text>` with `kl_se_…` (nats) and `top1_<setting>_<text>`; settings: see `settings_of`."""

    def table(self) -> Table:
        """A setting a row: KL and the share of equal best tokens on each text."""
        m, rows = self.metrics, []
        for name in settings_of(self.asked):
            cells = [
                f"{m[f'kl_mean_{name}_{text}']:.3g} ± {m[f'kl_se_{name}_{text}']:.1g}, {m[f'top1_{name}_{text}']:.0%}"
                for text in self.asked.texts
            ]
            rows.append((STATIC.get(name, name), *cells))
        columns = ("activations", *(f"{text}: KL (nats), same best token" for text in self.asked.texts))
        return Table(columns, rows, right=columns[1:])


def settings_of(p: DriftParams) -> list[str]:
    """Static in its three ways, then the other modes."""
    return [*STATIC, *p.modes]


def drift_damage(
    p: DriftParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> DamageResult:
    """KL to fp32 activations of every setting on every text.

    Raises StoppedError when cancelled, BusyError, ParameterError for a text too short, and what `nanokit.load` raises.
    """
    progress = progress or Silent()
    metrics: dict[str, float] = {}
    with measuring("activation drift: damage"):
        progress.start(len(p.texts) * (len(settings_of(p)) + 1) + 1, "loading the model")
        exact, fast = exact_engine(p.model), fast_engine(p.model)
        ids = text_start(exact, p.calibration, p.tokens)
        fast.calibrate(ids)
        calibrated = fast.model.peaks
        profile = watch(exact, ids, Watch(exact.model.name)).profile()
        later = peaks_without_first(profile, exact.model.config.num_layers)
        assert calibrated is not None
        for text in p.texts:
            progress.step(f"{text}.txt in fp32")
            windows = windows_of(exact, text, p)
            expected = [scored(exact, window) for window in windows]
            for name in settings_of(p):
                stop_if(cancel)
                progress.step(f"{text}.txt, {STATIC.get(name, name)}")
                found = _found(fast, name, windows, {"static": calibrated, "static_later": later})
                kls, same = compared(expected, found)
                metrics[f"kl_mean_{name}_{text}"] = float(kls.mean())
                metrics[f"kl_se_{name}_{text}"] = standard_error(kls)
                metrics[f"top1_{name}_{text}"] = float(same.mean())
        fast.model.calibrate(calibrated)
    settings = {
        "model": fast.model.name, "kernels": fast.model.kernels, "kv_format": fast.kv.kv_format,
        "reference": "the file's weights with fp32 activations",
        "scored_tokens": dict.fromkeys(p.texts, p.windows * (p.window_tokens - p.window_tokens // 2)),
    }  # fmt: skip
    return DamageResult(p, metrics, settings=settings)


def windows_of(engine: LoadedEngine, text: str, p: DriftParams) -> list[list[int]]:
    ids = text_ids(engine.tokenizer, text)
    return cut(ids, p.windows, p.window_tokens, beginning(engine.tokenizer), f"{text}.txt")


def scored(engine: LoadedEngine, window: list[int]) -> Tensor:
    """The logits that predict a window's second half."""
    with torch.inference_mode():
        return engine.model.head.logits(forward(engine, window)[len(window) // 2 - 1 : -1].contiguous())


def _found(fast: LoadedEngine, name: str, windows: list[list[int]], peaks: dict[str, Tensor]) -> Iterator[Tensor]:
    for window in windows:
        if name == "static_own":
            fast.calibrate(window)
        elif name in peaks:
            fast.model.calibrate(peaks[name])
        yield scored(in_mode(fast, "static" if name in STATIC else name), window)


def compared(expected: Iterable[Tensor], found: Iterable[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """KL and whether the best token is the same, of every scored token."""
    kls, same = [], []
    for wanted, got in zip(expected, found, strict=True):
        kls.append(divergence(wanted, got))
        same.append(wanted.argmax(-1) == got.argmax(-1))
    return torch.cat(kls).numpy(), torch.cat(same).double().numpy()
