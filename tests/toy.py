"""Parameters of a toy experiment: a knob of every kind, and two that can contradict each other."""

from nanokit.errors import ParameterError
from nanokit.lab.params import Params, experiment_params, knob


@experiment_params
class ToyParams(Params):
    depth: int = knob(3, "tokens guessed", unit="tokens", low=1, high=9)
    acceptance: float = knob(0.5, "share of guesses that hold", low=0.0, high=1.0, step=0.05)
    prompts: int = knob(0, "prompts", low=1, high=99, by_preset={"smoke": 1, "quick": 4, "full": 16})
    method: str = knob("draft", "proposer", choices=("draft", "ngram"))
    text: str = knob("a b", "the prompt")
    greedy: bool = knob(True, "take the best token")
    depths: list[int] = knob([1, 3], "depths to try", low=1, high=9)

    def check(self) -> None:
        if self.method == "ngram" and self.depth > 8:
            raise ParameterError("an ngram guesses 8 tokens at most", found=self.depth, do="lower depth")
