"""A generation that is steered while it runs: the engine's side of the live panel.

Temperature, top-p and the length can change between two steps, since a request's sampling is read anew for every
token. The noise of a draw is keyed by seed, position and token, so that moving a slider and moving it back gives the
text that would have come without.
"""

from collections.abc import Iterator

from nanokit.engine.sampling import Sampling
from nanokit.engine.stream import Stream
from nanokit.lab.engines import engine_for
from nanokit.lab.live import Event
from nanokit.lab.params import Params, experiment_params, knob


@experiment_params
class TuningParams(Params):
    """What is asked, and the settings that may change on the way."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    question: str = knob("Tell a short story about a lighthouse.", "what the model is asked")
    temperature: float = knob(0.7, "randomness, 0 is greedy", low=0.0, high=2.0, step=0.05)
    top_p: float = knob(0.9, "share of probability that may be drawn from", low=0.0, high=1.0, step=0.01)
    max_tokens: int = knob(
        0, "longest answer", unit="tokens", low=1, high=1024,
        by_preset={"smoke": 16, "quick": 60, "full": 300},
    )  # fmt: skip
    seed: int = knob(1, "seed of sampling", low=0, high=2**31 - 1)


class TuningStepper:
    """`start` begins an answer, each step is one token, `update` changes the settings from the next token on."""

    steers = frozenset({"temperature", "top_p", "max_tokens"})

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._model = ""

    def start(self, params: TuningParams) -> Iterator[Event]:
        """Raises what `nanokit.load` raises. Closing the iterator ends the generation."""
        engine = engine_for(params.model)
        self._model = params.model
        ids = engine.tokenizer.chat_ids([{"role": "user", "content": params.question}])
        with engine.stream(ids, _sampling(params)) as stream:
            self._stream = stream
            for chunk in stream:
                yield Event(chunk.text, len(chunk.token_ids))

    def update(self, params: TuningParams) -> None:
        """Change the settings of the answer that is being written, if it still is."""
        if self._stream is not None:
            engine_for(self._model).update(self._stream.request_id, _sampling(params, keep_seed=True))


def _sampling(params: TuningParams, *, keep_seed: bool = False) -> Sampling:
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        max_tokens=params.max_tokens,
        seed=None if keep_seed else params.seed,
    )
