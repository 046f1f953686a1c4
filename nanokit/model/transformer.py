"""The model as the engine sees it: one ragged forward, and a head.

Prefill chunks, decode and verification are one call over a batch of flattened tokens. The layers themselves live in
a kernel backend, which packs the weights once (`bind`), resolves a step once (`plan`) and then runs it in one call.
"""

from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from nanokit.errors import ParameterError, naming
from nanokit.kernels import reference
from nanokit.model.batch import Batch
from nanokit.model.config import ModelConfig
from nanokit.model.head import FullHead, HeadProduct
from nanokit.model.source import ModelSource, footprint
from nanokit.model.weights import find_weights

# activation mode -> backend that runs it; fp32 is the mode in which the engine equals transformers
BACKENDS: dict[str, ModuleType] = {"fp32": reference}


class BoundModel(HeadProduct, Protocol):
    """What `bind(config, weights, resident)` of a backend returns."""

    def plan(self, batch: Batch, pages: Any) -> Any: ...

    def run(self, plan: Any) -> Tensor: ...


class Transformer:
    """config, bound weights and the head; name and footprint are those of the source it was read from."""

    def __init__(
        self, source: ModelSource, config: ModelConfig, activations: str = "fp32", *, resident: bool = True
    ) -> None:
        """Bind the weights of an opened source. config: the source's own, or one with an overridden rope.

        resident: False leaves the layers in the file and reads them again in every step.
        """
        self.config, self.activations = config, check_activations(activations)
        self.name, self.footprint = source.name, footprint(source)
        self.vocab_size = config.vocab_size
        with naming(source.name):
            weights = find_weights(config, source)
            self._bound: BoundModel = BACKENDS[activations].bind(config, weights, resident)
        self.head = FullHead(self._bound, config.vocab_size)

    def forward(self, batch: Batch, pages: Any) -> Tensor:
        """Hidden states after the final norm, [rows, hidden_size]; the keys and values of the batch's tokens are in
        the pages afterwards. Raises ValueError for a batch that would read or write where it must not."""
        batch.check(vocab_size=self.vocab_size, num_blocks=pages.num_blocks, block_size=pages.block_size)
        with torch.inference_mode():
            return self._bound.run(self._bound.plan(batch, pages))


def check_activations(mode: str) -> str:
    """The activation mode, or ParameterError listing those that exist."""
    if mode not in BACKENDS:
        raise ParameterError("unknown activation mode", found=repr(mode), needed="one of " + ", ".join(BACKENDS))
    return mode
