"""transformers as a peer: the same file in fp32, by its own dequantization, with its own cache.

`logits_to_keep=1` spares it the logits of a prompt's other rows, which nobody needs. Decoding keeps one cache a context
length and crops it, so that only the first visit has to compute the prompt.
"""

import inspect
import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nanokit.lab.bench.limit import BenchError


class TransformersPeer:
    """See `peers.Peer`. file: a .gguf file or a folder of safetensors. Raises BenchError when it cannot read it."""

    name = "transformers"

    def __init__(self, file: Path, threads: int) -> None:
        from transformers import AutoModelForCausalLM

        if not file.is_dir() and find_spec("accelerate") is None:
            raise BenchError(
                "transformers cannot read GGUF files here",
                found="the package accelerate is missing",
                needed="accelerate, which transformers' reader of GGUF asks for",
                do="pip install accelerate",
            )
        torch.set_num_threads(threads)
        where, which = (file, None) if file.is_dir() else (file.parent, file.name)
        try:
            with redirect_stderr(io.StringIO()):  # bars of progress that no switch turns off
                model: Any = AutoModelForCausalLM.from_pretrained(where, gguf_file=which, dtype=torch.float32)
        except (ValueError, OSError, NotImplementedError, ImportError) as error:
            raise BenchError(
                "transformers cannot load this model",
                found=str(error).splitlines()[0],
                needed="a model that it supports",
                do="leave out --peer transformers",
            ) from error
        self._model = model.eval()
        # the argument got another name within version 5
        known = inspect.signature(type(model).forward).parameters
        self._argument = "cache" if "cache" in known else "past_key_values"
        self._caches: dict[tuple[int, ...], tuple[Any, torch.Tensor]] = {}
        self._cache: Any = None
        self._last = torch.zeros(1, 1, dtype=torch.int64)

    def prefill(self, ids: Sequence[int]) -> None:
        self._prompt(ids)

    def begin(self, ids: Sequence[int]) -> None:
        key = tuple(ids)
        if key not in self._caches:
            self._caches[key] = self._prompt(ids)
        self._cache, self._last = self._caches[key]
        surplus = self._cache.get_seq_length() - len(key)
        if surplus:
            self._cache.crop(-surplus)

    def step(self) -> None:
        self._last = self._forward(self._last, self._cache)

    def _prompt(self, ids: Sequence[int]) -> tuple[Any, torch.Tensor]:
        """The cache of a prompt and its next id."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        return cache, self._forward(torch.tensor([list(ids)]), cache)

    def _forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """The next id [1, 1]; the cache grows by ids."""
        with torch.inference_mode():
            out = self._model(ids, **{self._argument: cache}, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(dim=-1, keepdim=True)

    def close(self) -> None:
        self._caches.clear()
        self._cache = None
