"""transformers as a peer: the same file in fp32, by its own dequantization, with its own cache.

`logits_to_keep=1` spares it the logits of a prompt's other rows, which nobody needs. Decoding keeps one cache a context
length and crops it, so that only the first visit has to compute the prompt.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanokit.lab.bench.limit import BenchError


class TransformersPeer:
    """See `peers.Peer`. file: a .gguf file or a folder of safetensors. Raises BenchError when it cannot read it."""

    name = "transformers"

    def __init__(self, file: Path, threads: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        torch.set_num_threads(threads)
        logging.disable_progress_bar()
        where, which = (file, None) if file.is_dir() else (file.parent, file.name)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(where, gguf_file=which, dtype=torch.float32)
        except (ValueError, OSError, NotImplementedError, ImportError) as error:
            raise BenchError(
                "transformers cannot load this model",
                found=str(error).splitlines()[0],
                needed="a model that it supports",
                do="leave out --peer transformers",
            ) from error
        self._model = model.eval()
        self._caches: dict[tuple[int, ...], tuple[Any, torch.Tensor]] = {}
        self._cache: Any = None
        self._last = torch.zeros(1, 1, dtype=torch.int64)

    def prefill(self, ids: Sequence[int]) -> None:
        self._forward(torch.tensor([list(ids)]), None)

    def begin(self, ids: Sequence[int]) -> None:
        key = tuple(ids)
        if key not in self._caches:
            self._caches[key] = self._forward(torch.tensor([list(ids)]), None)
        self._cache, self._last = self._caches[key]
        self._cache.crop(len(key))

    def step(self) -> None:
        self._cache, self._last = self._forward(self._last, self._cache)

    def _forward(self, ids: torch.Tensor, cache: Any) -> tuple[Any, torch.Tensor]:
        with torch.inference_mode():
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.past_key_values, out.logits[:, -1].argmax(dim=-1, keepdim=True)

    def close(self) -> None:
        self._caches.clear()
        self._cache = None
