"""INT8 as exported models often have it: one scale a weight matrix and one calibrated scale an activation tensor.

Weights, a scale for each matrix (`tensor`, and `reduced` with codes up to 63, as exporters choose for processors whose
8-bit multiplication would saturate) or for each output (`channel`); activations, static with a zero point as ONNX has
them (`affine`, computed by a torch module of the same weights: quant/affine.py), static and symmetric as in the engine,
or with a scale a token. Every pair of both, and a16 beside them, which leaves the weights' part alone. The reference is
the file's own weights with fp32 activations; that file is 4-bit, and 8 bits hold its codes well, so that the weights'
part is small by nature here.

`smooth` are weights with a scale for each output after SmoothQuant's migration (quant/smooth.py): what is done where
activations have to be static, or a scale a token is not enough. Its peaks come from the text that the static scales
come from.
"""

import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanokit.engine.load import load
from nanokit.lab.engines import in_mode
from nanokit.lab.experiments.drift_damage import compared, scored, windows_of
from nanokit.lab.experiments.drift_params import (
    EXPORTED,
    KV_FORMAT,
    DriftParams,
    DriftResult,
    exact_engine,
    text_start,
)
from nanokit.lab.experiments.kernel_params import opened
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.quality.intervals import standard_error
from nanokit.lab.table import Table
from nanokit.model import saved
from nanokit.model.load import open_model
from nanokit.model.requantize import requantized
from nanokit.model.source import ModelSource
from nanokit.model.trainable import TrainableModel
from nanokit.model.weights import find_weights
from nanokit.quant.affine import AffineRanges

ACTIVATIONS = ("affine", "static", "token", "a16")
HEAD = "the head's input"
MUCH = 10.0  # points of equal best tokens that count as much accuracy
HELPS = 0.25  # share of a divergence that has to go


@dataclass(frozen=True)
class ExportResult(DriftResult):
    """`kl_mean_<weights>_<activations>` (nats), `kl_se_…` and `top1_…`, on the first of the texts."""

    def table(self) -> Table:
        """Weights a row, activations a column."""
        m = self.metrics
        rows = [
            (EXPORTED[name], *(
                f"{m[f'kl_mean_{name}_{mode}']:.3g} ± {m[f'kl_se_{name}_{mode}']:.1g}, {m[f'top1_{name}_{mode}']:.0%}"
                for mode in ACTIVATIONS
            ))
            for name in self.asked.exported
        ]  # fmt: skip
        columns = ("weights", *(f"{mode}: KL (nats), same best token" for mode in ACTIVATIONS))
        return Table(columns, rows, right=columns[1:])

    @property
    def verdict_q18(self) -> str:
        """Of the claim that static INT8 with unsuitable scales loses much accuracy: a scale a matrix and affine static
        activations beside a scale an output and a token, and which of the two the loss comes from."""
        m = self.metrics
        points = {pair: 100 * m[f"top1_{pair}"] for pair in ("tensor_affine", "tensor_token", "channel_token")}
        lost = points["channel_token"] - points["tensor_affine"]
        weights = points["channel_token"] - points["tensor_token"]
        if lost < MUCH:
            return f"does not hold here: {lost:.0f} points of equal best tokens"
        cause = "activations" if lost - weights > weights else "weights"
        return (
            f"holds here: {lost:.0f} points of equal best tokens are lost; "
            f"{max(weights, lost - weights):.0f} of them come from the {cause}"
        )

    @property
    def migration(self) -> str:
        """Whether moving outliers into the weights makes up for static activations: it repairs them if they then cost
        no more than a scale a token costs without it, within two standard errors of both."""
        m = self.metrics
        if "smooth" not in self.asked.exported:
            return "migration was not measured: `exported` leaves out smooth"
        before, after, goal = (m[f"kl_mean_{pair}"] for pair in ("channel_static", "smooth_static", "channel_token"))
        noise = 2 * (m["kl_se_smooth_static"] ** 2 + m["kl_se_channel_token"] ** 2) ** 0.5
        if after <= goal + noise:
            does = "repairs"
        else:
            does = "helps, but does not repair," if after <= (1 - HELPS) * before else "does not repair"
        return (
            f"migration {does} static activations here: of their {before:.2g} nats {after:.2g} are left, and the best "
            f"token is the same {m['top1_smooth_static']:.0%} of the time, not {m['top1_channel_static']:.0%}; a scale "
            f"a token costs {goal:.2g} nats without it and {m['kl_mean_smooth_token']:.2g} with it"
        )


def drift_export(
    p: DriftParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> ExportResult:
    """KL to the file's weights in fp32 activations of every pair of weights and activations.

    Raises StoppedError when cancelled, BusyError, ParameterError for a text too short, and what `nanokit.load` raises.
    """
    progress = progress or Silent()
    metrics: dict[str, float] = {}
    with measuring("activation drift: exported INT8"):
        progress.start(len(p.exported) + 1, "loading the model")
        exact, text = exact_engine(p.model), p.texts[0]
        calibration = text_start(exact, p.calibration, p.tokens)
        windows = windows_of(exact, text, p)
        expected = [scored(exact, window) for window in windows]
        for name in p.exported:
            stop_if(cancel)
            progress.step(EXPORTED[name])
            with tempfile.TemporaryDirectory() as folder:  # rounded once; the engine and the module read it
                path = Path(folder) / "exported.safetensors"
                source = requantized(opened(p.model)[0], EXPORTED[name], calibration=[calibration])
                saved.write(source, path, EXPORTED[name])
                for mode, found in _outputs(path, calibration, windows):
                    kls, same = compared(expected, found)
                    metrics |= {
                        f"kl_mean_{name}_{mode}": float(kls.mean()),
                        f"kl_se_{name}_{mode}": standard_error(kls),
                        f"top1_{name}_{mode}": float(same.mean()),
                    }
    settings = {
        "model": exact.model.name,
        "kv_format": KV_FORMAT,
        "policies": {name: EXPORTED[name] for name in p.exported},
        "exported_text": text,
    }
    return ExportResult(p, metrics, settings=settings)


def _outputs(path: Path, calibration: list[int], windows: list[list[int]]) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """Every one of ACTIVATIONS with the scored logits of each window."""
    yield "affine", _affine(open_model(path), calibration, windows)
    ctx = max(map(len, (calibration, *windows)))
    engine = load(path, ctx=ctx, max_seqs=1, kv_format=KV_FORMAT, prefix_cache=False)
    engine.calibrate(calibration)
    for mode in ACTIVATIONS[1:]:
        yield mode, (scored(in_mode(engine, mode), window) for window in windows)


def _affine(source: ModelSource, calibration: list[int], windows: list[list[int]]) -> Iterator[Tensor]:
    """The scored logits of the same weights with affine static inputs, the head's included."""
    module = TrainableModel(source.config, find_weights(source.config, source)).requires_grad_(False)
    ranges = AffineRanges()
    with torch.no_grad():
        with ranges.observing(module):
            ranges.observe(HEAD, module(torch.tensor([calibration])))
        for window in windows:
            with ranges.applied(module):
                hidden = module(torch.tensor([window]))[0]
            yield ranges.rounded(HEAD, hidden[len(window) // 2 - 1 : -1]) @ module.head.T
