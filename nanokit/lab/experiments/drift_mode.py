"""One activation mode on one text under sliders: KL to fp32 activations, token by token."""

import threading
from dataclasses import dataclass

from nanokit.kernels.activations import MODES
from nanokit.lab.engines import in_mode
from nanokit.lab.experiments.drift_damage import compared, scored
from nanokit.lab.experiments.drift_params import (
    TEXTS,
    exact_engine,
    fast_engine,
    peaks_without_first,
    text_start,
    watch,
)
from nanokit.lab.lock import measuring
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent
from nanokit.lab.quality.intervals import standard_error
from nanokit.lab.result import Result
from nanokit.lab.table import Table
from nanokit.quant.drift import Watch

OWN = "the text itself"


@experiment_params
class ModeParams(Params):
    """A mode, a text, and what static scales come from."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    activations: str = knob("static", "activation mode", choices=MODES[1:])
    text: str = knob("arithmetic", "text that runs", choices=TEXTS)
    calibration: str = knob("calibration", "what static scales come from", choices=(*TEXTS, OWN))
    without_first: bool = knob(False, "leave first positions out of the calibration")
    tokens: int = knob(
        0, "tokens of the text, of which the second half is scored", unit="tokens", low=32, high=512,
        by_preset={"smoke": 64, "quick": 192, "full": 384},
    )  # fmt: skip


@dataclass(frozen=True)
class ModeResult(Result):
    """Series `kl`: of each scored token, nats. kl_mean, kl_se, top1."""

    def table(self) -> Table:
        m = self.metrics
        columns = ("mean KL (nats)", "same best token", "scored tokens")
        return Table(columns, [(f"{m['kl_mean']:.3g} ± {m['kl_se']:.1g}", f"{m['top1']:.1%}",
                                f"{len(self.samples['kl'])}")], right=columns)  # fmt: skip


def drift_mode(p: ModeParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> ModeResult:
    """Compare one mode with fp32 activations. Raises BusyError, ParameterError for a text too short."""
    progress = progress or Silent()
    with measuring("one activation mode"):
        progress.start(2, "running the text in fp32")
        exact, fast = exact_engine(p.model), fast_engine(p.model)
        window = text_start(exact, p.text, p.tokens)
        expected = scored(exact, window)
        progress.step(p.activations)
        if p.activations == "static":
            ids = window if p.calibration == OWN else text_start(exact, p.calibration, p.tokens)
            fast.calibrate(ids)
            if p.without_first:
                profile = watch(exact, ids, Watch(exact.model.name)).profile()
                fast.model.calibrate(peaks_without_first(profile, exact.model.config.num_layers))
        kls, same = compared([expected], [scored(in_mode(fast, p.activations), window)])
    metrics = {"kl_mean": float(kls.mean()), "kl_se": standard_error(kls), "top1": float(same.mean())}
    settings = {"model": fast.model.name, "reference": "the file's weights with fp32 activations"}
    return ModeResult(p, metrics, {"kl": kls.tolist()}, settings)
