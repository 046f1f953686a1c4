"""Quantize any torch module with Linear or Conv2d layers, in place: `apply` at once, or `prepare`, train, `convert`.

    quant.apply(model, "int4-sym-g64")             Linear -> QuantLinear, Conv2d -> QuantConv2d
    quant.prepare(model, "int4-sym-g64")           Linear -> FakeQuantLinear, whose weights train on the grid
    quant.convert(model)                           FakeQuantLinear -> QuantLinear, bit for bit what was trained

The policy is that of quant/policy.py. A layer's role is read from the last part of its name (q_proj, down_proj, …,
lm_head) and its number from the first part that is one; a layer with another name gets what the policy says of all
layers. A head that is tied to an embedding stays as it is, and a policy that names it is refused: it would split them.

Everything that can be refused is refused before the first layer changes, with the names of the layers: a model of which
half is quantized is neither. The weights of a Conv2d are the matrix of quant/conv.py, those that were pruned
(quant/pruning.py) stay zero. Scales wider than a matrix (qkv, global), and those of a search, are found once and stay
fixed while a prepared layer trains; all others are the weights' own in every pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from torch import nn

from nanokit.errors import ParameterError
from nanokit.quant.conv import Convolution, FakeQuantConv2d, QuantConv2d
from nanokit.quant.layers import FakeQuantized, FakeQuantLinear, Quantized, QuantLinear
from nanokit.quant.policy import BY_TEXT, CLASSES, Choice, Policy, parse_policy
from nanokit.quant.pruning import parameter_of, zeros_of
from nanokit.quant.qtensor import QTensor
from nanokit.quant.rounding import check_searchable, search
from nanokit.quant.storage import has_minimums
from nanokit.quant.weight_format import WeightFormat

ROLE_NAMES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down", "lm_head": "head",
}  # fmt: skip
KINDS: tuple[type[nn.Linear | nn.Conv2d], ...] = (nn.Linear, nn.Conv2d)
SHOWN = 6  # names of layers in a message
Layer = TypeVar("Layer", bound=nn.Module)


@dataclass(frozen=True)
class _Site:
    """A layer to be changed. name: its first one; places: every module and attribute that holds it."""

    name: str
    layer: nn.Linear | nn.Conv2d
    role: str
    number: int | None
    form: WeightFormat
    method: str
    places: list[tuple[nn.Module, str]] = field(repr=False)

    @property
    def weights(self) -> np.ndarray:
        """fp32 [rows, columns]."""
        return self.layer.weight.detach().flatten(1).float().cpu().numpy()

    def kept(self, q: QTensor) -> Quantized:
        """The layer of these codes."""
        if isinstance(self.layer, nn.Conv2d):
            return QuantConv2d(q, self.layer.bias, Convolution.of(self.layer))
        return QuantLinear(q, self.layer.bias)

    def trained(self, ranges: QTensor | None) -> FakeQuantized:
        """The layer that rounds in every pass."""
        if isinstance(self.layer, nn.Conv2d):
            return FakeQuantConv2d(self.layer, self.form, ranges)
        return FakeQuantLinear(self.layer, self.form, ranges)

    def put(self, made: nn.Module) -> None:
        for parent, attribute in self.places:
            setattr(parent, attribute, made)


def apply(module: nn.Module, policy: str | Policy) -> nn.Module:
    """Quantize the Linear and Conv2d layers that the policy names; returns `module`.

    Raises ParameterError, before anything changes, for a policy that is wrong, does not fit or needs a calibration
    text, for weights that are not finite, and where no layer would change.
    """
    for site, q in list(_quantized(_sites(module, policy))):  # all of them, before the first is put
        site.put(site.kept(q).to(site.layer.weight.device))
    return module


def prepare(module: nn.Module, policy: str | Policy) -> nn.Module:
    """Round the weights of the layers that the policy names in every forward pass, with gradients; returns `module`.
    The parameters stay the same objects. Raises ParameterError as `apply` does."""
    sites = _sites(module, policy)
    fixed = [site for site in sites if site.method or site.form.scope in ("qkv", "global")]
    ranges = {site.name: q for site, q in _quantized(fixed, sites)}
    for site in sites:
        site.put(site.trained(ranges.get(site.name)).to(site.layer.weight.device).train(site.layer.training))
    return module


def convert(module: nn.Module) -> nn.Module:
    """Replace every prepared layer by the quantized one; returns `module`.

    Raises ParameterError where there is none, and ModelFileError, before anything changes, for weights that are no
    longer finite.
    """
    found = located(module, FakeQuantized)
    if not found:
        raise ParameterError("no layer of this module is prepared", do="call prepare(module, policy) first")
    made = [(places, layer.converted(name)) for name, layer, places in found]
    for places, quantized in made:
        for parent, attribute in places:
            setattr(parent, attribute, quantized)
    return module


def _sites(module: nn.Module, policy: str | Policy) -> list[_Site]:
    """The layers that the policy changes, all of them checked."""
    chosen = parse_policy(policy) if isinstance(policy, str) else policy
    if by_text := chosen.methods & BY_TEXT:
        raise ParameterError(
            f"policy {chosen.name} needs a calibration text",
            found="+" + " and +".join(sorted(by_text)),
            needed="a method that looks at weights alone: none, or +search",
            do="quantize the model with nanokit.load(policy=…) or nanokit quantize, which have a text",
        )
    if floats := {rule.choice.floats for rule in chosen.rules if rule.choice.floats}:
        raise ParameterError(
            f"policy {chosen.name} is about floats, and a module's layers are floats already",
            found=", ".join(sorted(floats)),
            needed="formats with codes, or keep",
            do="convert parameters with torch: module.half(), module.bfloat16()",
        )
    sites, layers = [], 0
    tied = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    found = located(module, *KINDS)
    for name, layer, places in found:
        role, number = _role(name)
        layers = max(layers, 0 if number is None else number + 1)
        choice = _choice(chosen, role, number)
        if choice.format is None:
            continue
        is_tied = id(parameter_of(layer, name)) in tied
        if role == "head" and is_tied:
            raise ParameterError(
                f"policy {chosen.name} names the head, and {name} is the embedding as well",
                do="leave the head as it is, or give it weights of its own first",
            )
        if not is_tied:
            sites.append(_Site(name, layer, role, number, choice.format, choice.method, places))
    if not sites:
        raise ParameterError(
            f"policy {chosen.name} changes no layer of this module",
            found=f"{len(found)} Linear and Conv2d layers, tied heads among them",
            needed="at least one that the policy names",
            do=f"layers are told by their names: {', '.join(ROLE_NAMES)}; others take what it says of all layers",
        )
    if layers:
        chosen.check_layers(layers)
    _check(chosen, sites)
    return sites


def _role(name: str) -> tuple[str, int | None]:
    """Role of a layer, "" where its name says none, and the number of the layer that it is in."""
    parts = name.split(".")
    role = ROLE_NAMES.get(parts[-1], "")
    return role, None if role == "head" else next((int(part) for part in parts if part.isdecimal()), None)


def _choice(policy: Policy, role: str, number: int | None) -> Choice:
    """The policy's choice; for a layer without a role the last one that is made for all of them."""
    if role:
        return policy.choice(role, number)
    policy.choice("head")  # refuses auto
    for rule in reversed(policy.rules):
        inside = rule.layers is None or (number is not None and rule.layers[0] <= number <= rule.layers[1])
        if rule.roles == CLASSES["all"] and inside:
            return rule.choice
    return Choice()


def _check(policy: Policy, sites: list[_Site]) -> None:
    refused: dict[str, list[str]] = {}
    for site in sites:
        try:
            site.form.group_of(site.layer.weight[0].numel())
            if site.method:
                check_searchable(site.form)
        except ParameterError as error:
            refused.setdefault(f"{error.what}: {error.found}, needed {error.needed}", []).append(site.name)
        if not any(type(site.layer).forward is kind.forward for kind in KINDS):
            refused.setdefault(f"{type(site.layer).__name__} computes in a way of its own", []).append(site.name)
        if zeros_of(site.layer) is not None and has_minimums(site.form.name):
            refused.setdefault(f"pruned, and {site.form.name} holds no exact zero", []).append(site.name)
        if not site.layer.weight.is_floating_point():
            refused.setdefault(f"weights are {site.layer.weight.dtype}, needed floats", []).append(site.name)
        elif not bool(site.layer.weight.isfinite().all()):
            refused.setdefault("weights are not all finite", []).append(site.name)
    if refused:
        count = sum(map(len, refused.values()))
        raise ParameterError(
            f"policy {policy.name} does not fit {count} layer{'s' * (count > 1)}, and nothing was changed",
            found="; ".join(f"{_listed(names)}: {why}" for why, names in refused.items()),
            do="choose another format or a group that divides the columns, or except these layers: …;down=keep",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _quantized(sites: list[_Site], among: list[_Site] | None = None) -> Iterator[tuple[_Site, QTensor]]:
    """Each of the layers quantized, one at a time. among: those that scales of a wide scope serve; None: `sites`."""
    spans: dict[tuple[str, int | None], tuple[float, float]] = {}
    for site in sites if among is None else among:
        if (shared := _shared(site)) is not None:
            low, high = site.layer.weight.detach().aminmax()
            before = spans.get(shared, (float("inf"), float("-inf")))
            spans[shared] = min(before[0], float(low)), max(before[1], float(high))
    for site in sites:
        if site.method == "search":
            yield site, search(site.weights, site.form, name=site.name)
        else:
            shared = _shared(site)
            yield site, site.form.quantize(site.weights, site.name, spans[shared] if shared else None)


def _shared(site: _Site) -> tuple[str, int | None] | None:
    """What names the layers that have one scale together; None where a layer has scales of its own."""
    if site.form.scope == "global":
        return site.form.name, None
    if site.form.scope == "qkv":
        return (f"{site.form.name} qkv", site.number) if site.role in ("q", "k", "v") else (site.name, None)
    return None


def located(module: nn.Module, *kind: type[Layer]) -> list[tuple[str, Layer, list[tuple[nn.Module, str]]]]:
    """Every layer of these kinds: its first name, itself, and all modules and attributes that hold it."""
    if isinstance(module, kind):
        raise ParameterError(
            "a layer cannot be replaced in place by itself",
            found=type(module).__name__,
            needed="a module that holds it",
            do="wrap it: torch.nn.Sequential(layer)",
        )
    found: dict[nn.Module, tuple[str, Layer, list[tuple[nn.Module, str]]]] = {}
    for prefix, parent in module.named_modules():
        for attribute, child in parent._modules.items():
            if isinstance(child, kind):
                name = f"{prefix}.{attribute}" if prefix else attribute
                found.setdefault(child, (name, child, []))[2].append((parent, attribute))
    return list(found.values())
