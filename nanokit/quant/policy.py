"""Which matrix of a model gets which format: one grammar for API, command line, parameters and panels.

    int4-sym-g64                                       every product of the layers
    int4-sym-g64+gptq                                  … rounded with a method: +search, +awq, +gptq, +smooth
    mix:attn=int4-sym-channel,ffn=int4-sym-g64         attention (q k v o) and feed-forward (gate up down) apart
    mix:attn=nvfp4,ffn=nvfp4,head=q8_0                 … and the head; what is not named stays as it is stored
    nvfp4;down=int8-sym-g32;0-3.ffn=q8_0;5.q=keep      overrides: role or class, of all or of some layers
    auto:4.25                                          formats chosen by measured sensitivity, so many bits a weight
    f32, f16, bf16                                     floats of this type, head and embedding too; q4_0;head=f16
    keep                                               everything as it is stored

The last override that fits a matrix wins. Head and embedding, which `head` names together, stay as they are stored
unless it is named: they are the most sensitive matrices, and a large part of a small model's bytes. Floats among them
become int8-sym-g32, for kernels run codes (`head=keep` leaves the floats, and runs at the speed of torch). But a policy
that begins with a type of floats takes them too: it is there to undo a quantization, and a head in codes would not be
undone. Norms and biases are never quantized. `auto` says how much, not what: `nanokit.model.allocate` turns it into a
policy of this grammar by measuring a model.

Rejected: regular expressions over tensor names (each file format has its own names, and a typing error matches nothing
in silence), and a file of settings (a policy should fit into a table's cell).
"""

import re
from dataclasses import dataclass, field

from nanokit.errors import ParameterError
from nanokit.quant.weight_format import WeightFormat, weight_format

ATTENTION = ("q", "k", "v", "o")
FEED_FORWARD = ("gate", "up", "down")
ROLES = (*ATTENTION, *FEED_FORWARD, "head")
CLASSES = {"attn": ATTENTION, "ffn": FEED_FORWARD, "all": ATTENTION + FEED_FORWARD}
METHODS = ("search", "awq", "gptq", "smooth")
BY_TEXT = frozenset(METHODS) - {"search"}  # methods that look at a calibration text: nanokit.model.calibrate
DEFAULT = "int4-sym-g32"  # group-wise everywhere, as measured (notebook 10)
FLOAT_HEAD = "int8-sym-g32"
FLOAT_TYPES = ("f32", "f16", "bf16")
MOST_LAYERS = 10_000
_SELECTOR = re.compile(r"(?:(\d{1,5})(?:-(\d{1,5}))?(?:\.(?=[a-z])|$))?([a-z]*)")
_GRAMMAR = (
    "FORMAT, FORMAT+search, FORMAT+awq, FORMAT+gptq, FORMAT+smooth, mix:attn=FORMAT,ffn=FORMAT[,head=FORMAT], "
    "f32, f16, bf16, auto:BITS or keep; overrides after ';', such as down=q8_0, 0-3.ffn=int8-sym-g32 or 5.q=keep"
)


@dataclass(frozen=True)
class Choice:
    """What happens to a matrix. format: its codes. method: how it is rounded to them, "" to nearest. floats: one of
    FLOAT_TYPES that it becomes instead of codes, or "". With neither it stays as it is stored. misfit: of floats, the
    format that was asked for where no group of it divides the columns."""

    format: WeightFormat | None = None
    method: str = ""
    floats: str = ""
    misfit: str = ""

    @property
    def name(self) -> str:
        if self.format is None:
            return self.floats or "keep"
        return self.format.name + (f"+{self.method}" if self.method else "")


@dataclass(frozen=True)
class Rule:
    """A choice for some roles, in the layers first … last, or (None) in all."""

    selector: str
    roles: tuple[str, ...]
    layers: tuple[int, int] | None
    choice: Choice


@dataclass(frozen=True)
class Policy:
    """A parsed policy. name: in one spelling, which reads as the same policy; auto_bits: of `auto`, None otherwise."""

    name: str
    rules: tuple[Rule, ...] = field(repr=False)
    auto_bits: float | None = None

    def choice(self, role: str, layer: int | None = None) -> Choice:
        """For a matrix: its role, one of ROLES, and the number of its layer (None for the head)."""
        if self.auto_bits is not None:
            raise ParameterError(
                f"{self.name} has to be resolved for a model first",
                do="quantize with nanokit.load(policy=…) or nanokit quantize, which measure the model",
            )
        return self.named(role, layer) or Choice()

    def named(self, role: str, layer: int | None = None) -> Choice | None:
        """The same, or None where no rule is about this matrix."""
        for rule in reversed(self.rules):
            in_layers = rule.layers is None or (layer is not None and rule.layers[0] <= layer <= rule.layers[1])
            if role in rule.roles and in_layers:
                return rule.choice
        return None

    @property
    def methods(self) -> frozenset[str]:
        """The rounding methods that it asks for; some of them need a calibration text."""
        return frozenset(rule.choice.method for rule in self.rules if rule.choice.method)

    def check_layers(self, count: int) -> None:
        """Raise ParameterError for an override of a layer that a model of so many does not have."""
        for rule in self.rules:
            if rule.layers is not None and rule.layers[1] >= count:
                raise ParameterError(
                    f"policy {self.name}: there is no layer {rule.layers[1]}",
                    found=rule.selector,
                    needed=f"layers 0 to {count - 1}",
                )


def parse_policy(text: str) -> Policy:
    """Read a policy. Raises ParameterError that says which part is wrong and lists what there is."""
    base, *overrides = (part.strip().lower() for part in text.split(";"))
    bits = None
    if base.startswith("auto:"):
        bits, rules = _bits(base.removeprefix("auto:"), text), []
        name = f"auto:{bits!r}"
    elif base.startswith("mix:"):
        rules = [_rule(each, text, in_mix=True) for each in base.removeprefix("mix:").split(",")]
        name = "mix:" + ",".join(_spelled(rule) for rule in rules)
    else:
        choice = _choice(base, text)
        rules = [Rule("all", ROLES if choice.floats else CLASSES["all"], None, choice)]
        name = choice.name
    if bits is not None and overrides:
        raise ParameterError(f"policy {text!r}: auto takes no overrides", found=overrides[0], needed="auto:BITS alone")
    extra = [_rule(each, text) for each in overrides]
    return Policy(";".join([name, *map(_spelled, extra)]), (*rules, *extra), bits)


def _spelled(rule: Rule) -> str:
    return f"{rule.selector}={rule.choice.name}"


def _bits(text: str, policy: str) -> float:
    try:
        bits = float(text)
    except ValueError:
        bits = 0.0
    if not 2.0 <= bits <= 16.0:
        raise ParameterError(f"policy {policy!r} has no budget", found=text, needed="bits a weight, 2 to 16: auto:4.25")
    return bits


def _choice(text: str, policy: str) -> Choice:
    if text == "keep":
        return Choice()
    name, plus, method = (part.strip() for part in text.partition("+"))
    if plus and method not in METHODS:
        raise ParameterError(
            f"policy {policy!r}: unknown rounding method", found=method, needed=f"one of {', '.join(METHODS)}"
        )
    if name in FLOAT_TYPES:
        if plus:
            raise ParameterError(
                f"policy {policy!r}: floats are not rounded by a method", found=text, needed=name, do="leave it out"
            )
        return Choice(floats=name)
    try:
        return Choice(weight_format(name), method)
    except ParameterError as error:
        raise ParameterError(
            f"policy {policy!r}: {error.what}",
            found=error.found,
            needed=f"{error.needed}; or {', '.join(FLOAT_TYPES)}",
            do=f"the grammar is {_GRAMMAR}",
        ) from error


def _rule(text: str, policy: str, in_mix: bool = False) -> Rule:
    selector, equals, choice = text.partition("=")
    match = _SELECTOR.fullmatch(selector.strip())
    word = match[3] if match else ""
    roles = CLASSES.get(word or "all") or ((word,) if word in ROLES else ())
    numbered = match is not None and match[1] is not None
    if not equals or not match or not roles or not selector or (numbered and (in_mix or word == "head")):
        raise ParameterError(
            f"policy {policy!r}: {text!r} says nothing of a matrix",
            found=selector or "nothing",
            needed=f"{', '.join((*CLASSES, *ROLES))}"
            + ("" if in_mix else ", perhaps with layers before it: 0-3.ffn")
            + ", then = and a format",
        )
    first = int(match[1]) if numbered else None
    last = int(match[2] or match[1]) if numbered else None
    if first is not None and last is not None and not first <= last < MOST_LAYERS:
        raise ParameterError(f"policy {policy!r}: layers run upwards", found=selector, needed="such as 0-3.ffn")
    layers = None if first is None or last is None else (first, last)
    number = "" if layers is None else f"{layers[0]}" if layers[0] == layers[1] else f"{layers[0]}-{layers[1]}"
    spelled = ".".join(part for part in (number, word if word != "all" or not number else "") if part)
    return Rule(spelled, roles, layers, _choice(choice.strip(), policy))
