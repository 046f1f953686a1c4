"""A model that was trained on a grid, as a file and a source: what the engine runs is what was trained, bit for bit.

`quant.prepare` rounds the layers of a `TrainableModel` in every pass. Here their weights take the place of those in the
file that the module was made of: all else (embedding, head, norms, configuration, tokenizer) is the file's own.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from nanokit.errors import ParameterError
from nanokit.model import saved
from nanokit.model.calibrate import Calibrated
from nanokit.model.requantize import Requantized
from nanokit.model.source import ModelSource
from nanokit.model.trainable import TrainableModel
from nanokit.model.weights import find_weights
from nanokit.quant.layers import FakeQuantLinear, QuantLinear
from nanokit.quant.policy import ATTENTION, FEED_FORWARD, Choice, Policy
from nanokit.quant.qtensor import QTensor
from nanokit.quant.weight_format import weight_format


def trained_source(model: TrainableModel, base: ModelSource, policy: Policy) -> Requantized:
    """`base` with the weights of the model's prepared or converted layers. policy: what is noted of them. Raises
    ParameterError where no layer is either, or where one that is neither has changed, whose weights have no place in
    such a file; ModelFileError for weights that are no longer finite."""
    matrices = dict(_matrices(model, base))
    if not matrices:
        raise ParameterError("no layer of this model is quantized", do="call quant.prepare(model, policy) first")
    choices = {name: Choice(weight_format(q.format)) for name, q in matrices.items()}
    return Requantized(base, policy, choices, lambda: Calibrated(matrices, {}))


def save_trained(model: TrainableModel, base: ModelSource, policy: Policy, path: Path) -> None:
    """Write such a source as `nanokit quantize` writes one; `nanokit.load(path)` runs it. Raises as `trained_source`
    and `saved.write` do."""
    saved.write(trained_source(model, base, policy), path, policy.name)


def _matrices(model: TrainableModel, base: ModelSource) -> Iterator[tuple[str, QTensor]]:
    stored = find_weights(base.config, base)
    for layer, found in zip(model.layers, stored.layers, strict=True):
        for part, roles in ((layer.self_attn, ATTENTION), (layer.mlp, FEED_FORWARD)):
            for role in roles:
                linear, name = getattr(part, f"{role}_proj"), getattr(found, role).weight.name
                if isinstance(linear, FakeQuantLinear):
                    linear = linear.converted(name)
                if isinstance(linear, QuantLinear):
                    yield name, linear.qtensor()
                elif not torch.equal(linear.weight, getattr(found, role).weight.dense()):
                    raise ParameterError(
                        f"{name} was trained and is not quantized",
                        found="other weights than the file's",
                        needed="layers that are quantized, or as the file has them",
                        do="name the layer in the policy, or freeze it",
                    )
