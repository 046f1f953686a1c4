"""The parameters of the notebook on GGUF traps, and what is kept of each file that is looked at."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.gguf.faults import FAULTS
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.quality.texts import text_names
from nanokit.model.verify.behaviour import Asymmetry
from nanokit.model.verify.report import Check

GOOD = "good file"
EVERY = "all"
MOST = [name for name in FAULTS if name != "k-wrong-heads"]  # which takes longest to be told from other head counts
ROUNDED = "4-bit rounding, again"
WRONG_BASE, HALF_SCALE, ONE_LAYER = "rope-base-10000", "frequency-scale-half", "gate-up-swapped-one"
ROPE_FAULTS = (WRONG_BASE, "rope-base-missing", "rope-base-text", HALF_SCALE)
FEED_FORWARD_FAULTS = (ONE_LAYER, "gate-up-swapped-all", "gate-up-fused")
PARTS = 4  # of a text, by position


@experiment_params
class TrapsParams(Params):
    """Which faults are put into which model, and how long the texts are."""

    model: str = knob("", "GGUF model in one file, a good one; empty is the default model")
    faults: list[str] = knob(
        [], "faults that are put into copies of it, each alone", choices=(EVERY, *FAULTS),
        by_preset={"smoke": [WRONG_BASE, "rope-base-text", "alignment-13"], "quick": MOST, "full": [EVERY]},
    )  # fmt: skip
    text: str = knob("evaluation", "name of a text in data/texts that is predicted")
    tokens: int = knob(
        0, "of the text", unit="tokens", low=32, high=8192, by_preset={"smoke": 96, "quick": 512, "full": 2048}
    )
    answer: int = knob(
        0, "greedy tokens of each answer", unit="tokens", low=16, high=1024,
        by_preset={"smoke": 48, "quick": 160, "full": 256},
    )  # fmt: skip
    bound: float = knob(2.0, "times the good file's perplexity that is an alarm", low=1.0, high=1000.0)
    repeats: int = knob(
        0, "first tokens timed in each file", low=1, high=50, by_preset={"smoke": 1, "quick": 1, "full": 9}
    )

    def check(self) -> None:
        if self.text not in text_names():
            raise ParameterError("unknown text", found=repr(self.text), needed="one of " + ", ".join(text_names()))

    @property
    def injected(self) -> list[str]:
        """The faults, in the order in which they are shown."""
        return [name for name in FAULTS if EVERY in self.faults or name in self.faults]


@dataclass(frozen=True)
class TrapFile:
    """One file that was looked at. said: what is wrong with it, in a sentence; refused: what `nanokit.load` says, ""
    where it loads; alone, beside: the checks of `verify` without and with the good file at hand, the predictions left
    to `losses`; answer, first_token_ms, circle_from (tokens before it, infinite where there is none): see smoke;
    losses: nats of each token of the text but the first, None where nothing runs; asymmetry: of gate and up on it, of
    the good file and one with a layer swapped."""

    name: str
    said: str
    refused: str
    alone: tuple[Check, ...]
    beside: tuple[Check, ...]
    answer: str = ""
    first_token_ms: float = math.nan
    circle_from: float = math.inf
    losses: Tensor | None = None
    asymmetry: Asymmetry = field(default_factory=Asymmetry)

    def failed(self, *, beside: bool = False) -> list[Check]:
        """What failed, without or with the good file at hand."""
        return [check for check in (self.beside if beside else self.alone) if check.verdict == "failed"]

    def perplexity(self, part: int | None = None) -> float:
        """Of the text, or of one of PARTS equal stretches of it. NaN where a probability is no number."""
        assert self.losses is not None
        losses = self.losses if part is None else torch.tensor_split(self.losses, PARTS)[part]
        return math.exp(min(float(losses.mean()), 700.0)) if bool(losses.isfinite().all()) else math.nan
