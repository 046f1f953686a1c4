"""Prefill: from the arrival of a prompt to its first token, every token of it computed.

A prompt that fits the engine's token budget is one forward; only its last row meets the head, as in every answer. Each
visit first computes a short prompt untimed. Peers get the same ids and also compute one row of logits only.
"""

import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from nanokit.engine.load import LoadedEngine
from nanokit.errors import ParameterError
from nanokit.lab.bench.common import Bench, BenchResult, PeerParams, prepared, settings
from nanokit.lab.bench.peers import SHORT, Rival, against_peers, prefill_visit
from nanokit.lab.bench.timing import Samples, Visit, milliseconds
from nanokit.lab.bench.workload import GREEDY, prompt_ids
from nanokit.lab.params import experiment_params, knob
from nanokit.lab.progress import Progress
from nanokit.lab.steadiness import remarks


@experiment_params
class PrefillParams(PeerParams):
    """Prompt lengths."""

    tokens: list[int] = knob(
        [], "prompt lengths, the first is the reference", unit="tokens", low=1, high=1 << 20,
        by_preset={"smoke": [128], "quick": [512], "full": [512, 128, 2048]},
    )  # fmt: skip

    def check(self) -> None:
        if len(set(self.tokens)) < len(self.tokens):
            raise ParameterError("a prompt length stands twice", found=self.tokens, needed="different lengths")


@dataclass(frozen=True)
class PrefillResult(BenchResult):
    """Series `prefill_ms_at_<tokens>` and those of the peers."""

    kind: ClassVar[str] = "prefill"


def prefill(
    p: PrefillParams,
    *,
    engine: LoadedEngine | None = None,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> PrefillResult:
    """Time prompts. engine: instead of the one that p names. Raises as `decode.decode` does."""
    longest = max(*p.tokens, SHORT) + 1
    with prepared("prefill", p, engine, ctx=longest, peer=tuple(p.peer), progress=progress, cancel=cancel) as bench:
        turns = bench.rounds.run(_visits(bench, p))
        held = dict(settings(bench))
    notes = [*turns.remarks, *remarks(turns.samples)]
    return PrefillResult(p, figures(p, turns.samples), turns.samples, held, remarks=notes)


def _visits(bench: Bench, p: PrefillParams) -> dict[str, Visit]:
    visits: dict[str, Visit] = {}
    for tokens in p.tokens:
        ids = prompt_ids(bench.engine, tokens)
        visits[f"{tokens} tokens"] = _own(bench.engine, ids, f"prefill_ms_at_{tokens}")
        for rival in bench.rivals:
            visits[f"{rival.peer.name}, {tokens} tokens"] = _peer(rival, ids)
            if rival.engine is not None:
                series = f"beside_{rival.peer.name}_ms_at_{tokens}"
                visits[f"nanokit beside {rival.peer.name}, {tokens} tokens"] = _own(rival.engine, ids, series)
    return visits


def _own(engine: LoadedEngine, ids: Sequence[int], series: str) -> Visit:
    once = replace(GREEDY, max_tokens=1)

    def visit() -> Samples:
        engine.generate([ids[:SHORT]], once)
        return {series: [milliseconds(lambda: engine.generate([ids], once))]}

    return visit


def _peer(rival: Rival, ids: Sequence[int]) -> Visit:
    return lambda: {f"peer_{rival.peer.name}_ms_at_{len(ids)}": prefill_visit(rival.peer, ids)}


def figures(p: PrefillParams, samples: Samples) -> dict[str, float]:
    """The metrics of the samples; see `schema` for their names."""
    ttft = {tokens: statistics.median(samples[f"prefill_ms_at_{tokens}"]) for tokens in p.tokens}
    first = p.tokens[0]
    metrics = {"tok_per_s": first / ttft[first] * 1e3, "ttft_ms": ttft[first], "ms_per_token": ttft[first] / first}
    for tokens, ms in ttft.items():
        metrics[f"tok_per_s_at_{tokens}"] = tokens / ms * 1e3
    return metrics | against_peers(samples, "prefill", first)
