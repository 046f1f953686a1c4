"""One engine a model for everything in a notebook: a cell, a panel and a repeat must not load it three times."""

from functools import lru_cache
from typing import TYPE_CHECKING

from nanokit.errors import ParameterError

if TYPE_CHECKING:
    from nanokit.engine.load import LoadedEngine


@lru_cache(maxsize=2)
def engine_for(model: str = "", activations: str = "", kv_format: str = "") -> "LoadedEngine":
    """The engine of a model, loaded at first use and kept; the two used last stay in memory.

    model: as for `nanokit.load`; empty is the default model, fetched if it is not in the cache. activations,
    kv_format: how inputs of products and cached tokens are kept; empty leaves the choice to `nanokit.load`. Without a
    prefix cache: pressing Run twice would else time the second prompt as if it cost nothing.
    """
    from nanokit.engine.load import load

    return load(model or None, activations=activations or None, kv_format=kv_format or None, prefix_cache=False)


def in_mode(engine: "LoadedEngine", mode: str) -> "LoadedEngine":
    """The same weights and pages as an engine whose requests all run in this activation mode, for code that asks an
    engine and knows of no modes. One at a time: each believes that the pages are its own. Raises ParameterError for a
    mode that the model cannot run, or cannot run yet, and for an engine whose pages hold something: a prefix cache, or
    requests that wait or run."""
    from nanokit.engine.load import LoadedEngine

    if engine.config.prefix_cache:
        raise ParameterError(
            "a second engine would overwrite the pages that the first has cached",
            found="an engine with a prefix cache",
            do="load it with prefix_cache=False",
        )
    if engine.has_work:
        raise ParameterError(
            "a second engine would overwrite the pages of what the first computes",
            found="requests that wait or run",
            do="finish or abort them first",
        )
    return LoadedEngine(engine.model.in_mode(mode), engine.tokenizer, engine.config, kv=engine.kv)
