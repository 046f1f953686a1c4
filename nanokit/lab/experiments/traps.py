"""Every fault of `gguf.faults` put into a model, one at a time: what it looks like, what it costs, and what catches it.

The passes over the text are shared. A fault of the rope leaves every weight as it was, so all such files, and all ropes
that are tried beside them, are variants over the good file's weights that walk its layers together; only files with
other weights are run by themselves. Beside them runs the good model with the matrices of its layers rounded to 4 bits
once more: what people put up with, to compare costs with.

Rejected: a bound on perplexity as the only detector, since it needs the good file and says nothing of the cause; and
running the ropes over files whose weights `verify` has failed already.
"""

import hashlib
import tempfile
import threading
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.reference import Layer
from nanokit.lab.experiments.smoke import other_ropes
from nanokit.lab.experiments.trap_files import Good, good_file, look, predicted
from nanokit.lab.experiments.trap_params import GOOD, ONE_LAYER, ROUNDED, TrapFile, TrapsParams
from nanokit.lab.experiments.trap_result import TrapsResult, figures, stretches
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.model.config import override_rope
from nanokit.model.rope import Rope
from nanokit.model.verify.behaviour import Asymmetry
from nanokit.model.verify.divergence import kl
from nanokit.model.verify.variants import AS_IS, Head, Variant, final_states
from nanokit.quant.integer import integer_format
from nanokit.quant.policy import ATTENTION, FEED_FORWARD

ROUNDING = "int4-sym-g32"


def traps(p: TrapsParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> TrapsResult:
    """Look at every copy. Copies lie in a temporary folder, one at a time.

    Raises StoppedError when cancelled, BusyError while something else is measured, ParameterError for a model that is
    not one GGUF file or cannot have a fault, OSError where there is no room for a copy, and what `nanokit.load` raises
    of the good file.
    """
    progress = progress or Silent()
    with measuring("broken GGUF files"), tempfile.TemporaryDirectory() as folder:
        good = good_file(p.model, p.text, p.tokens)
        progress.start(len(p.injected) + 2, GOOD)
        files: dict[str, TrapFile] = {}
        ropes: dict[str, Rope] = {}
        for name in (GOOD, *p.injected):
            stop_if(cancel)
            looked = look(good, name, Path(folder), p.text, p.answer, p.repeats)
            files[name] = looked.file
            if looked.source is not None and looked.weights is not None:
                if looked.own_weights:
                    seen = Asymmetry()
                    see = seen.see if name == ONE_LAYER else None  # a second of work, for the figure that shows it
                    losses = predicted(looked.source, looked.weights, good.ids, see)
                    files[name] = replace(looked.file, losses=losses, asymmetry=seen)
                else:
                    ropes[name] = looked.rope
            (Path(folder) / f"{name}.gguf").unlink(missing_ok=True)
            progress.step(name)
        stop_if(cancel)
        passed = _rope_pass(good, ropes)
    for name, label in passed.of.items():
        seen = passed.seen if name == GOOD else Asymmetry()
        files[name] = replace(files[name], losses=passed.losses[label], asymmetry=seen)
    metrics, samples = figures(files, passed.rounded)
    samples |= {f"kl_{name}": [value for *_, value in places] for name, places in passed.kl.items()}
    config = good.source.config
    settings = {
        "model": good.source.name, "text": p.text, "text_tokens": len(good.ids), "rope_base": config.rope.base,
        "rounding": ROUNDING, "layers": config.num_layers, "digest": _digest(good.path),
    }  # fmt: skip
    texts = {f"answer_{name}": file.answer or file.refused for name, file in files.items()}
    return TrapsResult(
        p, metrics, samples, settings, texts, files=files, ropes=passed.ropes, rope_losses=passed.losses,
        rope_of=passed.of, kl=passed.kl, override=_override(good),
    )  # fmt: skip


@dataclass(frozen=True)
class _Passed:
    """ropes, losses: by label; of: file -> label; rounded: losses; kl: of files with a wrong rope and of ROUNDED; seen:
    gate and up of the good file."""

    ropes: Mapping[str, Rope]
    losses: Mapping[str, Tensor]
    of: Mapping[str, str]
    rounded: Tensor
    kl: Mapping[str, list[tuple[int, int, float]]]
    seen: Asymmetry


def _rope_pass(good: Good, stated: Mapping[str, Rope]) -> _Passed:
    """The text under the good file's rope, usual other ones and those that the files state, in one walk over the
    layers. stated: by file, the good one among them."""
    own = good.source.config.rope
    ropes = {AS_IS: own, **{name: each.rope for name, each in other_ropes(own).items() if each.rope is not None}}
    ropes |= {name: rope for name, rope in stated.items() if rope not in ropes.values()}
    labels = {rope: label for label, rope in reversed(ropes.items())}
    tried = {name: Variant(rope=rope) for name, rope in ropes.items() if name != AS_IS}
    seen = Asymmetry()
    states = final_states(
        good.source.config, good.weights, good.ids, {**tried, ROUNDED: Variant(change=_rounded)}, see=seen.see
    )
    head = Head(good.weights)
    losses = {name: head.losses(each, good.ids) for name, each in states.items()}
    of = {name: labels[rope] for name, rope in stated.items()}
    compared = {name: label for name, label in of.items() if name != GOOD} | {ROUNDED: ROUNDED}
    found = {name: stretches(kl(head, head, states[each], states[AS_IS])[0]) for name, each in compared.items()}
    return _Passed(ropes, {name: losses[name] for name in ropes}, of, losses[ROUNDED], found, seen)


def _rounded(_: int, layer: Layer) -> Layer:
    """A layer with its matrices rounded to ROUNDING."""
    other = copy(layer)
    for part in (*ATTENTION, *FEED_FORWARD):
        product = copy(getattr(layer, part))
        product.weight = torch.from_numpy(integer_format(ROUNDING).quantize(product.weight.numpy()).dequantize())
        setattr(other, part, product)
    return other


def _digest(path: Path) -> str:
    """The first 32 bits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8]


def _override(good: Good) -> str:
    """What the rule of `nanokit model convert` says to another rope base; "" where it takes it."""
    try:
        override_rope(good.source.config, base=good.source.config.rope.base / 10)
    except ParameterError as error:
        return f"{error.what}; found {error.found}"
    return ""
