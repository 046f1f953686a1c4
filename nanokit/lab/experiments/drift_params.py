"""The parameters of the notebook on activation drift, and what its experiments share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanokit.engine.load import LoadedEngine
from nanokit.errors import ParameterError
from nanokit.kernels.activations import MODES, place_name
from nanokit.lab.engines import engine_for
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.quality.tasks import TASKS
from nanokit.lab.quality.texts import cut, text_ids
from nanokit.lab.result import Result
from nanokit.model.batch import Batch
from nanokit.quant.drift import Profile, Watch

TEXTS = ("calibration", "lighthouse", "evaluation", "arithmetic", "code")  # of data/texts
DYNAMIC = tuple(mode for mode in MODES if mode not in ("fp32", "static"))  # a16 first
EXPORTED = {"tensor": "int8-sym-tensor", "reduced": "int8-sym-tensor-reduced", "channel": "int8-sym-channel",
            "smooth": "int8-sym-channel+smooth"}  # fmt: skip
KV_FORMAT = "fp16"  # in every engine here, so that activations are all that differs
BLOCK = "attention block"
CHUNK = 256  # tokens that are watched at a time


@experiment_params
class DriftParams(Params):
    """What static scales are calibrated on, and what runs under them."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    calibration: str = knob("calibration", "text that profile and static scales come from", choices=TEXTS)
    tokens: int = knob(
        0, "length of that text, and of each text that is compared with it", unit="tokens", low=64, high=1536,
        by_preset={"smoke": 64, "quick": 256, "full": 1536},
    )  # fmt: skip
    texts: list[str] = knob(
        [], "texts that are run; the first is the healthy one, of the calibration's own kind", choices=TEXTS,
        by_preset={"smoke": ["evaluation", "arithmetic"], "quick": ["evaluation", "arithmetic", "code"],
                   "full": ["evaluation", "arithmetic", "code"]},
    )  # fmt: skip
    windows: int = knob(
        0, "windows of each text on which KL is measured, their second half scored", unit="windows", low=1, high=8,
        by_preset={"smoke": 1, "quick": 1, "full": 3},
    )  # fmt: skip
    window_tokens: int = knob(
        0, "length of a window", unit="tokens", low=32, high=1024, by_preset={"smoke": 64, "quick": 144, "full": 512},
    )  # fmt: skip
    modes: list[str] = knob(
        [], "activation modes beside static", choices=DYNAMIC,
        by_preset={"smoke": ["token", "a16"], "quick": ["tensor", "token", "a8g32", "a16"],
                   "full": ["tensor", "token", "a8g32", "a8g16", "a16"]},
    )  # fmt: skip
    scored: list[str] = knob(
        [], "activation modes whose task points are counted, beside static and a16",
        choices=DYNAMIC[1:],
        by_preset={"smoke": ["token"], "quick": ["token"], "full": ["tensor", "token", "a8g32", "a8g16"]},
    )  # fmt: skip
    tasks: list[str] = knob(
        [], "tasks that are scored", choices=TASKS,
        by_preset={"smoke": ["arithmetic"], "quick": ["arithmetic", "chat"], "full": list(TASKS)},
    )  # fmt: skip
    items: int = knob(
        0, "items of each task, at most", unit="items", low=2, high=10000,
        by_preset={"smoke": 4, "quick": 28, "full": 10000},
    )  # fmt: skip
    exported: list[str] = knob(
        [], "INT8 weights that are paired with static activations", choices=tuple(EXPORTED),
        by_preset={"smoke": ["tensor", "channel"], "quick": list(EXPORTED), "full": list(EXPORTED)},
    )  # fmt: skip
    std_ratio: float = knob(1.5, "ratio of std to the profile's, up or down, that is an alarm", low=1.01, high=100.0)
    peak_ratio: float = knob(3.0, "the same of the largest magnitude", low=1.01, high=100.0)
    repeats: int = knob(0, "rounds of timing", low=2, high=50, by_preset={"smoke": 2, "quick": 4, "full": 20})

    def check(self) -> None:
        if "token" not in self.scored:
            raise ParameterError("the claim is about a scale a token", found=self.scored, needed="token among them")
        if not {"tensor", "channel"} <= set(self.exported):
            raise ParameterError("the two ends of a claim", found=self.exported, needed="tensor and channel among them")
        if self.calibration in self.texts:
            raise ParameterError(
                "the calibration text cannot show a drift", found=self.calibration, needed="other texts than that one"
            )


@dataclass(frozen=True)
class DriftResult(Result):
    """A Result of DriftParams."""

    @property
    def asked(self) -> DriftParams:
        assert isinstance(self.params, DriftParams)
        return self.params


def exact_engine(model: str) -> LoadedEngine:
    """Activations in fp32, on the kernels that show what products see."""
    return engine_for(model, "fp32", KV_FORMAT)


def fast_engine(model: str) -> LoadedEngine:
    """The same weights on the kernels that run them best; `in_mode` gives it every other mode."""
    return engine_for(model, "", KV_FORMAT)


def text_start(engine: LoadedEngine, text: str, tokens: int) -> list[int]:
    """The first tokens of a text. Raises ParameterError where it has fewer."""
    [window] = cut(text_ids(engine.tokenizer, text), 1, tokens, [], f"{text}.txt")
    return window


def forward(engine: LoadedEngine, ids: Sequence[int]) -> Tensor:
    """Hidden states of a text in one forward, over pages that are given back."""
    blocks = [engine.pool.allocate() for _ in range(-(-len(ids) // engine.config.block_size))]
    try:
        with torch.inference_mode():
            return engine.model.forward(Batch(list(ids), [len(ids)], [len(ids)], [blocks]), engine.kv)
    finally:
        engine.pool.release(blocks)


def watch(engine: LoadedEngine, ids: Sequence[int], by: Watch, outputs: Sequence[Tensor] = ()) -> Watch:
    """Let `by` see a text in pieces of `CHUNK` tokens, each of which begins anew: one first position a piece.

    outputs: of each layer the matrix `o`, fp32. Given, what attention adds to the hidden state is seen as well, as
    "layer …, attention block": no product's input, but what accounts of drift quote.
    """
    blocks = {f"layer {layer}, attention output": (f"layer {layer}, {BLOCK}", o) for layer, o in enumerate(outputs)}

    def observe(place: str, x: Tensor, positions: Tensor) -> None:
        by.observe(place, x, positions)
        if place in blocks:
            name, matrix = blocks[place]
            by.observe(name, linear(x, matrix), positions)

    with engine.model.observing(observe):
        for at in range(0, len(ids), CHUNK):
            forward(engine, ids[at : at + CHUNK])
    return by


def peaks_without_first(profile: Profile, layers: int) -> Tensor:
    """Peaks of static activations from all positions but the first, fp32 [4 * layers + 1]."""
    return torch.tensor([profile.places[place_name(i, layers)]["later"].absmax for i in range(4 * layers + 1)])
