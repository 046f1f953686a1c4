"""How one request wants its tokens drawn, validated where it enters.

Greedy is the default. Readers come from transformers, whose `generate` is greedy unless told otherwise, and a
notebook that measures must give the same answer when a cell is run again. A default of 1.0, which chat
servers use, was rejected: a small model left unfiltered at temperature 1 wanders, and every comparison would
need a seed first.
"""

from typing import Annotated, Any

from pydantic import Field, field_validator

from nanokit.engine.settings import settings
from nanokit.errors import ParameterError
from nanokit.kernels.activations import MODES

# Gumbel noise spans less than 26 (u lies in [2**-33, 1 - 2**-33]): at this temperature it moves logits by
# less than 3e-4. Below it a draw *is* the argmax, and logits / temperature would only lose precision.
GREEDY_BELOW = 1e-5

Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


@settings
class Sampling:
    """Settings of one request. Raises ParameterError when one is unknown or out of range.

    temperature: 0 (or below 1e-5) is greedy. top_k: 0 keeps all. top_p: the smallest set of the most probable
    tokens whose probabilities reach it; 1 keeps all, 0 keeps one. min_p: drop tokens less probable than min_p
    times the most probable. repetition_penalty: on ids of the prompt and of the answer so far. max_tokens: of
    the answer. stop: strings that end the answer and are not part of it (one string is taken as a list of
    one). seed: None draws one, which the result records. ignore_eos: go on past end-of-sequence tokens.
    suppress: token ids never drawn. activations: how the inputs of products are kept while this request is computed,
    one of kernels.activations.MODES; None is the engine's own mode. A step reads the weights once for each mode in it.
    An answer in "tensor" depends on who else is computed in that mode beside it and on how its prompt was cut into
    chunks; nothing of it is shared with other requests.
    """

    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Probability = 1.0
    min_p: Probability = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 128
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    ignore_eos: bool = False
    suppress: tuple[Annotated[int, Field(ge=0)], ...] = ()
    activations: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("activations")
    @classmethod
    def _known_mode(cls, value: str | None) -> str | None:
        if value not in (None, *MODES):
            raise ParameterError("unknown activation mode", found=repr(value), needed="one of " + ", ".join(MODES))
        return value

    @property
    def is_greedy(self) -> bool:
        """Whether every draw is the argmax of the (edited) logits."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def is_filtered(self) -> bool:
        """Whether a draw needs to see the distribution before it is made."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
