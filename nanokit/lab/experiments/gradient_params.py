"""What is asked of the gradient contract's experiments: one set of parameters for all that train the model."""

from dataclasses import dataclass

from nanokit.errors import ParameterError
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.quality.tasks import TASKS
from nanokit.lab.result import Result
from nanokit.quant.weight_format import weight_format

PRODUCTS = ("fp32", "bf16")


@experiment_params
class GradientParams(Params):
    """The model, the policy that it is trained for, and how long."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    weights: str = knob("int4-sym-g64", "weight format that the model is trained for")
    scales: str = knob(
        "own", "scales while it trains, the weights' own in every step or searched once", choices=("own", "searched")
    )
    formats: list[str] = knob(
        ["int4-sym-g64", "int4-asym-g32", "int8-sym-channel", "nvfp4", "mxfp4", "nf4", "q4_0", "q8_0"],
        "weight formats whose trained, kept and packed weights are compared",
    )
    texts: int = knob(
        0, "texts that the model writes itself", unit="texts", low=2, high=512,
        by_preset={"smoke": 4, "quick": 16, "full": 64},
    )  # fmt: skip
    text_tokens: int = knob(
        0, "length of each", unit="tokens", low=16, high=1024,
        by_preset={"smoke": 48, "quick": 64, "full": 256},
    )  # fmt: skip
    batch: int = knob(
        0, "texts of a training step", unit="texts", low=1, high=64,
        by_preset={"smoke": 2, "quick": 4, "full": 4},
    )  # fmt: skip
    steps: int = knob(
        0, "training steps of QAT", unit="steps", low=2, high=5000,
        by_preset={"smoke": 2, "quick": 5, "full": 56},
    )  # fmt: skip
    learning_rate: float = knob(
        0.0, "learning rate of QAT, at its highest", low=1e-7, high=1e-1,
        by_preset={"smoke": 3e-4, "quick": 3e-4, "full": 1e-4},
    )  # fmt: skip
    lora_steps: int = knob(
        0, "training steps of each adapter", unit="steps", low=2, high=5000,
        by_preset={"smoke": 2, "quick": 3, "full": 16},
    )  # fmt: skip
    lora_rank: int = knob(8, "rank of the adapters", low=1, high=256)
    lora_learning_rate: float = knob(
        0.0, "learning rate of the adapters, at its highest", low=1e-7, high=1e-1,
        by_preset={"smoke": 4e-3, "quick": 4e-3, "full": 1e-3},
    )  # fmt: skip
    products: str = knob(
        "", "what training multiplies in; empty is the faster one on this machine", choices=("", *PRODUCTS)
    )
    layers: int = knob(
        0, "layers that are rounded, counted from the first; the others stay as they are stored", unit="layers",
        low=1, high=200, by_preset={"smoke": 4, "quick": 10, "full": 200},
    )  # fmt: skip
    windows: int = knob(
        0, "windows of the evaluation text, second halves scored", unit="windows", low=1, high=20,
        by_preset={"smoke": 1, "quick": 2, "full": 4},
    )  # fmt: skip
    window_tokens: int = knob(
        0, "length of each", unit="tokens", low=64, high=2048,
        by_preset={"smoke": 128, "quick": 256, "full": 512},
    )  # fmt: skip
    tasks: list[str] = knob(
        [], "tasks on which models are scored", choices=TASKS,
        by_preset={"smoke": [], "quick": [], "full": list(TASKS)},
    )  # fmt: skip
    items: int = knob(
        0, "items of each task, at most", unit="items", low=2, high=10000,
        by_preset={"smoke": 4, "quick": 40, "full": 200},
    )  # fmt: skip
    seed: int = knob(0, "seed of the texts, their order and the adapters", low=0, high=2**31 - 1)

    def check(self) -> None:
        for name in (self.weights, *self.formats):
            weight_format(name)
        if self.batch > self.texts:
            raise ParameterError("a step takes more texts than there are", found=self.batch, needed=f"{self.texts}")


@dataclass(frozen=True)
class GradientResult(Result):
    """A Result of GradientParams."""

    @property
    def asked(self) -> GradientParams:
        assert isinstance(self.params, GradientParams)
        return self.params

    @property
    def where(self) -> str:
        """Which layers are rounded, for titles: nothing where all are."""
        return f" in the first {self.asked.layers} layers" if ";" in str(self.settings.get("policy", "")) else ""
