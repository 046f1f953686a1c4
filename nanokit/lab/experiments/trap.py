"""One fault under a slider: a copy is written, verified alone and beside the good file, and both predict a text."""

import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nanokit.errors import ParameterError
from nanokit.gguf.faults import FAULTS, inject
from nanokit.lab.experiments.trap_files import checked, good_file, predicted
from nanokit.lab.experiments.trap_params import WRONG_BASE
from nanokit.lab.lock import measuring
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.quality.texts import text_names
from nanokit.lab.result import Result
from nanokit.lab.table import Table
from nanokit.model.verify.report import Check
from nanokit.model.verify.variants import Gain, gain


@experiment_params
class TrapParams(Params):
    """Which fault, and how much text."""

    model: str = knob("", "GGUF model in one file, a good one; empty is the default model")
    fault: str = knob(WRONG_BASE, "what is done to a copy of it", choices=tuple(FAULTS))
    text: str = knob("evaluation", "name of a text in data/texts that is predicted")
    tokens: int = knob(
        0, "of the text", unit="tokens", low=32, high=8192, by_preset={"smoke": 64, "quick": 128, "full": 1024}
    )

    def check(self) -> None:
        if self.text not in text_names():
            raise ParameterError("unknown text", found=repr(self.text), needed="one of " + ", ".join(text_names()))


@dataclass(frozen=True)
class TrapResult(Result):
    """Metrics: `failed_alone`, `failed_against`, and where the copy runs `gain` and `error`, nats a token by which the
    good file makes the text likelier. said: what was done. alone, beside: the checks, by name."""

    said: str = ""
    alone: Mapping[str, Check] = field(default_factory=dict)
    beside: Mapping[str, Check] = field(default_factory=dict)

    @property
    def undone(self) -> Gain | None:
        """What the good file gains, None where the copy does not run."""
        return Gain(self.metrics["gain"], self.metrics["error"]) if "gain" in self.metrics else None

    def table(self) -> Table:
        """A check a row."""
        rows: list[tuple[str, str, str, str]] = []
        for name, check in self.beside.items():
            alone = self.alone[name].verdict if name in self.alone else ""
            rows.append((name, alone, check.verdict, check.said))
        rows += [(name, each.verdict, "", each.said) for name, each in self.alone.items() if name not in self.beside]
        return Table(("check", "alone", "beside the good file", "found"), rows)


def trap(p: TrapParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> TrapResult:
    """Put one fault in and look. Raises what `traps` raises."""
    progress = progress or Silent()
    with measuring("a broken GGUF file"), tempfile.TemporaryDirectory() as folder:
        progress.start(3, "writing the copy")
        good = good_file(p.model, p.text, p.tokens)
        path = Path(folder) / f"{p.fault}.gguf"
        said = inject(p.fault, good.path, path).said
        stop_if(cancel)
        progress.step("verify")
        alone, beside, source, weights, _ = checked(path, good)
        metrics = {
            f"failed_{name}": float(sum(each.verdict == "failed" for each in every))
            for name, every in (("alone", alone), ("against", beside))
        }
        stop_if(cancel)
        progress.step("the text")
        if source is not None and weights is not None:
            cost = gain(*(predicted(*model, good.ids) for model in ((source, weights), (good.source, good.weights))))
            metrics |= {"gain": cost.mean, "error": cost.error}
    settings = {"model": good.source.name, "text_tokens": len(good.ids)}
    named = ({each.name: each for each in every} for every in (alone, beside))
    return TrapResult(p, metrics, {}, settings, {"fault": said}, [], said, *named)
