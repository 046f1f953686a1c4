"""What `nanokit quality` and the notebooks may ask: one setting, or several weight policies in it."""

from nanokit.errors import ParameterError
from nanokit.kernels.activations import MODES
from nanokit.kv.pages import DTYPES
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.quality.passes import LAYOUTS
from nanokit.lab.quality.tasks import TASKS
from nanokit.lab.quality.texts import WINDOW, text_names
from nanokit.quant.policy import parse_policy

KEEP = "keep"


@experiment_params
class QualityParams(Params):
    """A scenario (context, batch, KV format, layout, activations) and the weight policies that are measured in it."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    reference: str = knob(
        "", "model that it is compared with, such as the one that a file was made from; empty is itself"
    )
    policy: list[str] = knob([KEEP], "weight policies, as int4-sym-g64; keep leaves the file's own weights")
    activations: str = knob("", "activation mode; empty is the engine's own choice")
    kv_format: str = knob("", "format of the KV pages; empty is the engine's own choice")
    ctx: int = knob(WINDOW, "length of a window, its second half is scored", unit="tokens", low=4, high=1 << 20)
    batch: int = knob(1, "windows computed together", low=1, high=256)
    layout: str = knob("consecutive", "page ids of a window", choices=LAYOUTS)
    text: str = knob("evaluation", "name of a text in data/texts")
    windows: int = knob(0, "windows of the text", low=1, high=4096, by_preset={"smoke": 1, "quick": 4, "full": 32})
    tasks: list[str] = knob([], "tasks of data/tasks to score as well")
    items: int = knob(
        0, "items of each task, spread evenly", low=1, high=10_000, by_preset={"smoke": 16, "quick": 60, "full": 10_000}
    )
    repeats: int = knob(0, "rounds of timing", low=2, high=1000, by_preset={"smoke": 2, "quick": 3, "full": 15})

    def check(self) -> None:
        """Everything that can be told from names alone, before a model is opened."""
        names = [parse_policy(each).name for each in self.policy]
        if not names or len(set(names)) < len(names):
            raise ParameterError("policies have to be different ones", found=self.policy, needed="at least one")
        for what, values, known in (
            ("activation mode", [self.activations], ("", *MODES)),
            ("kv_format", [self.kv_format], ("", *DTYPES)),
            ("text", [self.text], text_names()),
            ("task", self.tasks, TASKS),
        ):
            for value in values:
                if value not in known:
                    needed = "one of " + ", ".join(each for each in known if each)
                    raise ParameterError(f"unknown {what}", found=repr(value), needed=needed)
        if len(set(self.tasks)) < len(self.tasks):
            raise ParameterError("a task stands twice", found=self.tasks, needed="different tasks")
