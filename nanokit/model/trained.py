"""A model that was trained on a grid, as a file and a source: what the engine runs is what was trained, bit for bit.

`quant.prepare` rounds the layers of a `TrainableModel` in every pass. Here their weights take the place of those in the
file that the module was made of. All else (embedding, head, norms, biases, layers that are not quantized) is the file's
own, and has to be so in the module: what a file would leave out is refused instead.
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
from nanokit.model.weights import Weights, find_weights
from nanokit.quant.layers import FakeQuantLinear, QuantLinear
from nanokit.quant.policy import ATTENTION, FEED_FORWARD, Choice, Policy
from nanokit.quant.qtensor import QTensor
from nanokit.quant.weight_format import weight_format


def trained_source(model: TrainableModel, base: ModelSource, policy: Policy) -> Requantized:
    """`base` with the weights of the model's prepared or converted layers. policy: the one that they were made by.
    Raises ParameterError where no layer is either, where formats are not the policy's, and where anything else of the
    model is not as the file has it (adapters too); ModelFileError for weights that are no longer finite."""
    stored = find_weights(base.config, base)
    matrices = dict(_matrices(model, stored, policy))
    if not matrices:
        raise ParameterError("no layer of this model is quantized", do="call quant.prepare(model, policy) first")
    _check_rest(model, TrainableModel(base.config, stored))
    choices = {name: Choice(weight_format(q.format)) for name, q in matrices.items()}
    return Requantized(base, policy, choices, lambda: Calibrated(matrices, {}))


def save_trained(model: TrainableModel, base: ModelSource, policy: Policy, path: Path) -> None:
    """Write such a source as `nanokit quantize` writes one; `nanokit.load(path)` runs it. Raises as `trained_source`
    and `saved.write` do."""
    saved.write(trained_source(model, base, policy), path, policy.name)


def _matrices(model: TrainableModel, stored: Weights, policy: Policy) -> Iterator[tuple[str, QTensor]]:
    for index, (layer, found) in enumerate(zip(model.layers, stored.layers, strict=True)):
        for part, roles in ((layer.self_attn, ATTENTION), (layer.mlp, FEED_FORWARD)):
            for role in roles:
                linear, name = getattr(part, f"{role}_proj"), getattr(found, role).weight.name
                if isinstance(linear, FakeQuantLinear):
                    linear = linear.converted(name)
                if isinstance(linear, QuantLinear):
                    wanted = policy.choice(role, index).format
                    if wanted is None or wanted.name != linear.format_name.lower():
                        raise ParameterError(
                            f"{name} is not what the policy {policy.name} makes of it",
                            found=linear.format_name,
                            needed=wanted.name if wanted else "a layer that is kept as it is stored",
                        )
                    yield name, linear.qtensor()


def _check_rest(model: TrainableModel, fresh: TrainableModel) -> None:
    """Raise ParameterError where something that is not a quantized layer's weight differs from a model just read."""
    quantized = {name for name, part in model.named_modules() if isinstance(part, FakeQuantLinear | QuantLinear)}
    found = model.state_dict()
    for key, value in fresh.state_dict().items():
        module, _, last = key.rpartition(".")
        if module in quantized and last == "weight":
            continue
        if key not in found or not torch.equal(found[key].float(), value):
            raise ParameterError(
                f"{key} is not as the file has it, and would be left out of the new one",
                found="other values" if key in found else "a layer of another kind",
                needed="changes in quantized layers alone",
                do="name the layer in the policy, freeze what is none of its layers, and train without adapters",
            )
