"""One broken copy of a model after the other: written, opened, checked, asked, and deleted again.

A file is looked at as a person would (does it load, what does it answer, how soon) and as `nanokit model verify` does,
alone and beside the good file. Verify's own steps are called one by one, for what a file says of itself need not be
read twice; only its comparison of predictions is left out, which the passes over a longer text replace.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from nanokit.engine.load import load
from nanokit.errors import NanokitError, ParameterError
from nanokit.gguf.faults import inject
from nanokit.lab.experiments.smoke import first_token, greedy_answer
from nanokit.lab.experiments.trap_params import GOOD, TrapFile
from nanokit.lab.quality.texts import text_path
from nanokit.model.fetch import fetch_default_model
from nanokit.model.load import open_model
from nanokit.model.rope import Rope
from nanokit.model.source import GGUFSource
from nanokit.model.verify.behaviour import behaviour
from nanokit.model.verify.report import Check, merged
from nanokit.model.verify.run import inside
from nanokit.model.verify.source_keys import compare_keys
from nanokit.model.verify.source_tensors import compare_tensors, same_model, tensor_checks
from nanokit.model.verify.variants import AS_IS, Head, See, final_states
from nanokit.model.weights import Weights, find_weights

KV_MEMORY = "64MiB"


@dataclass(frozen=True)
class Good:
    """The file that the copies are made of. ids: of the text."""

    path: Path
    source: GGUFSource
    weights: Weights
    ids: Sequence[int]


def good_file(model: str, text: str, tokens: int) -> Good:
    """Raises ParameterError for a model that is not one GGUF file, and what `open_model` raises."""
    source = open_model(model or fetch_default_model())
    if not isinstance(source, GGUFSource) or len(source.files) != 1:
        raise ParameterError("faults are put into one GGUF file", found=source.name, needed="a model in one .gguf file")
    ids = source.tokenizer.encode(text_path(text).read_text("utf-8"))[: min(tokens, source.config.max_context)]
    return Good(source.files[0], source, find_weights(source.config, source), ids)


@dataclass(frozen=True)
class Looked:
    """A file, but for what it predicts: its model, None where it cannot be run; own_weights: whether they are other
    weights than the good file's (and the rope may be another)."""

    file: TrapFile
    source: GGUFSource | None
    weights: Weights | None
    own_weights: bool

    @property
    def rope(self) -> Rope:
        assert self.source is not None
        return self.source.config.rope


def look(good: Good, name: str, folder: Path, text: str, answer: int, repeats: int) -> Looked:
    """Write the copy with this fault into `folder` (GOOD: nothing is written) and look at it. The copy has to stay
    until what it predicts has been computed."""
    if name == GOOD:
        path, said = good.path, "nothing"
    else:
        path = folder / f"{name}.gguf"
        said = inject(name, good.path, path).said
    alone, beside, source, weights, own_weights = checked(path, good)
    told: tuple[str, dict[str, float]] = ("", {})
    refused = ""
    try:
        engine = load(str(path), prefix_cache=False, kv_memory=KV_MEMORY)
        told = greedy_answer(engine, text, answer)
        told[1].update(first_token(engine, text, repeats))
    except NanokitError as error:
        refused = f"{_without(path, error.what)}; found {error.found}"
    file = TrapFile(
        name, said, refused, alone, beside, told[0],
        told[1].get("first_token_ms", math.nan), told[1].get("circle_from", math.inf),
    )  # fmt: skip
    return Looked(file, source, weights, own_weights)


def _without(path: Path, said: str) -> str:
    """A message that does not name the copy's place."""
    return said.removeprefix(f"{path}: ").removeprefix(f"{path.name}: ").replace(str(path), path.name)


Checked = tuple[tuple[Check, ...], tuple[Check, ...], GGUFSource | None, Weights | None, bool]


def checked(path: Path, good: Good) -> Checked:
    """The checks of a file alone and beside the good one, the model where it can be run, and whether any of its weights
    is not the good file's."""
    own, source, weights = inside(path)
    if source is None or weights is None:
        every = merged(own)
        return every, every, None, None, False
    alone = merged([*own, *behaviour(source, weights)])
    more = compare_keys(source, good.source)
    other = not same_model(source, good.source)
    if not other:
        found = compare_tensors(source.config, weights, good.weights)
        more += tensor_checks(found)
        other = any(each.error > 0 for each in found)
    return alone, merged([*own, *more]), source, weights, other


def predicted(source: GGUFSource, weights: Weights, ids: Sequence[int], see: See | None = None) -> Tensor:
    """Losses of a text, nats, fp64 [len(ids) - 1]."""
    return Head(weights).losses(final_states(source.config, weights, ids, see=see)[AS_IS], ids)
