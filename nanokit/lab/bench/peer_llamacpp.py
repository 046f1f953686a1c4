"""llama.cpp as a peer, through the low-level functions of llama-cpp-python 0.3.

Its high-level class adds a sampler and Python around every token; what is timed here is `llama_decode`, the wait for
its result, and an argmax over the logits. `n_ubatch` 512 lets it compute a prompt in one piece; the file is mapped, and
its own default decides about flash attention and repacking, as a person who runs it would have it. One context for
every length that is decoded, so that only the first visit has to compute the prompt.

A trial in a process of its own comes first. A native build uses the matrix unit (AMX) of a virtual machine that shows
one and forbids its use, and then dies of a signal, which no `except` catches.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanokit.lab.bench.limit import BenchError

BATCH = 512


class LlamaCppPeer:
    """See `peers.Peer`. type_name: of the weights, for the name; longest: tokens of context."""

    def __init__(self, file: Path, type_name: str, threads: int, longest: int) -> None:
        _try(file)
        from llama_cpp import llama_cpp  # the bindings, without the class on top

        self.name = f"llama_cpp_{type_name.lower()}"
        self._api: Any = llama_cpp
        self._threads, self._longest = threads, longest
        self._silence = llama_cpp.llama_log_callback(
            lambda *_: None
        )  # kept: the library calls it for as long as it lives
        llama_cpp.llama_log_set(self._silence, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not self._model:
            raise _failed("load this model", file.name)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts: dict[tuple[int, ...], tuple[Any, int]] = {}
        self._context: Any = None
        self._last = 0
        self._prompts = self._new_context()

    def _new_context(self) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = self._longest
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise _failed("make a context", f"{self._longest} tokens")
        return context

    def prefill(self, ids: Sequence[int]) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._prompts), False)
        self._compute(self._prompts, ids)

    def begin(self, ids: Sequence[int]) -> None:
        key = tuple(ids)
        if key not in self._contexts:
            context = self._new_context()
            self._contexts[key] = context, self._compute(context, ids)
        self._context, self._last = self._contexts[key]
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._context), 0, len(key), -1)

    def step(self) -> None:
        self._last = self._compute(self._context, [self._last])

    def _compute(self, context: Any, ids: Sequence[int]) -> int:
        """Append ids to the context's sequence; the most likely next id."""
        api = self._api
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            tokens = (api.llama_token * len(part))(*part)
            if api.llama_decode(context, api.llama_batch_get_one(tokens, len(part))) != 0:
                raise _failed("decode", f"{len(ids)} tokens")
        logits = api.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def close(self) -> None:
        for context in (self._prompts, *(context for context, _ in self._contexts.values())):
            self._api.llama_free(context)
        self._contexts.clear()
        self._api.llama_model_free(self._model)


TRIAL = """
import sys
from llama_cpp import Llama
Llama(sys.argv[1], n_ctx=64, verbose=False).eval(list(range(32)))
"""


def _try(file: Path) -> None:
    """Raise BenchError when llama.cpp does not survive a prompt of this file."""
    done = subprocess.run([sys.executable, "-c", TRIAL, str(file)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        died = f"it died of signal {-done.returncode}" if done.returncode < 0 else said[-1]
        raise BenchError(
            "llama.cpp does not run on this machine",
            found=died,
            needed="a build of llama-cpp-python that fits the machine and reads the file",
            do="build it without the matrix unit: set CFLAGS and CXXFLAGS to "
            "'-mno-amx-tile -mno-amx-int8 -mno-amx-bf16', and install with --no-cache-dir",
        )


def _failed(what: str, found: str) -> BenchError:
    return BenchError(f"llama.cpp could not {what}", found=found, do="leave out --peer llama-cpp")
