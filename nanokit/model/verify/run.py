"""Every check of a file, in order: each part needs what the one before has opened."""

from pathlib import Path
from typing import NamedTuple

from nanokit.model.calibrate import Progress
from nanokit.model.source import GGUFSource, ModelSource
from nanokit.model.verify.behaviour import behaviour, unasked
from nanokit.model.verify.divergence import divergence
from nanokit.model.verify.meaning import VOCABULARY, meaning
from nanokit.model.verify.numbers import numbers
from nanokit.model.verify.report import Check, Report, merged
from nanokit.model.verify.source_keys import compare_keys
from nanokit.model.verify.source_tensors import TENSORS, compare_tensors, noise, same_model, tensor_checks
from nanokit.model.verify.structure import structure
from nanokit.model.weights import Weights, find_weights


def verify(
    path: str | Path,
    against: ModelSource | None = None,
    *,
    long: bool = True,
    name: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check a GGUF file, alone or against the model that it was made from.

    against: the opened source, a directory or another file; without it, what only a source can tell is "not checked".
    long: whether predictions are compared on the long text too. name: what the report calls the file. progress: called
    as (done, in all, what).

    Raises ModelFileError for a path that leads to no file and for a source that does not load; everything else that is
    wrong with the file is in the report.
    """
    path = Path(path).expanduser()
    their_weights = None if against is None else find_weights(against.config, against)
    checks, source, weights = inside(path, progress)
    if source is not None and weights is not None:
        known = any(check.name == VOCABULARY and check.verdict == "ok" for check in checks)
        if against is not None and their_weights is not None:
            checks += _compared(source, weights, against, their_weights, long, known, progress)
        elif known:
            checks += behaviour(source, weights, progress)
        else:
            checks += unasked("the vocabulary cannot be read here, so no text can be run")
    elif against is not None:
        checks.append(Check("source", TENSORS, "not checked", "the file cannot be read as a model, see above"))
    return Report(name or path.name, None if against is None else against.name, merged(checks))


class Inside(NamedTuple):
    """checks: what a file says of itself, without running it; source, weights: None where that fails, and where a
    weight is no number."""

    checks: list[Check]
    source: GGUFSource | None
    weights: Weights | None


def inside(path: Path, progress: Progress | None = None) -> Inside:
    """Structure, meaning and numbers, as far as each can be opened. Raises ModelFileError for a path that leads to no
    file."""
    checks, file = structure(path)
    if file is None:
        return Inside(checks, None, None)
    more, source, weights = meaning(file)
    counted = numbers(file, progress)
    sound = source is not None and weights is not None and counted[0].verdict == "ok"
    return Inside([*checks, *more, *counted], source if sound else None, weights if sound else None)


def _compared(
    file: GGUFSource,
    weights: Weights,
    source: ModelSource,
    theirs: Weights,
    long: bool,
    known: bool,
    progress: Progress | None,
) -> list[Check]:
    """known: whether the vocabulary of the file can be read; the source's stands in for one that cannot."""
    keys = compare_keys(file, source, vocabulary=known)
    if not same_model(file, source):
        return [*keys, Check("source", TENSORS, "not checked", "the sizes are not the source's")]
    found = compare_tensors(file.config, weights, theirs, progress)
    tokenizer = file.tokenizer if known else source.tokenizer
    models = (file.config, weights), (source.config, theirs)
    predictions = divergence(tokenizer, *models, noise(found), long=long, progress=progress)
    return [*keys, *tensor_checks(found), *predictions]
