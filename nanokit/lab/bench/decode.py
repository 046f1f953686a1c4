"""Decoding: the time of `engine.step`, greedy, one sequence, scheduler and sampler included, against the limit.

In one run, in turns: several context lengths (their ratio says what attention costs), the forward and head alone (the
difference is what the engine adds), the weights streamed without computing (the limit), another sampling, busy
neighbours, and peers. Streaming alternates with the steps of the first context length, step by step, because the
share is only as good as the weather was equal.
"""

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from nanokit.engine.load import LoadedEngine
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError
from nanokit.lab.bench.common import Bench, BenchResult, PeerParams, prepared, settings
from nanokit.lab.bench.limit import doubts, reader, share_of_limit
from nanokit.lab.bench.neighbours import neighbours
from nanokit.lab.bench.peers import Rival, against_peers, decode_visit
from nanokit.lab.bench.timing import Samples, Visit, in_turns
from nanokit.lab.bench.workload import GREEDY, Session, context_for, prompt_ids, start_of
from nanokit.lab.params import experiment_params, knob
from nanokit.lab.progress import Progress
from nanokit.lab.steadiness import disturbance, remarks


@experiment_params
class DecodeParams(PeerParams):
    """Context lengths, and what else is compared with greedy decoding on a quiet machine."""

    ctx: list[int] = knob(
        [], "context lengths, the first is the reference", unit="tokens", low=16, high=1 << 20,
        by_preset={"smoke": [64], "quick": [64], "full": [64, 2048]},
    )  # fmt: skip
    steps: int = knob(16, "timed steps of a context length in each round", unit="steps", low=2, high=512)
    temperature: float = knob(0.0, "also decode at this temperature; 0 for greedy only", low=0.0, high=100.0, step=0.1)
    top_p: float = knob(1.0, "with this top-p", low=0.0, high=1.0, step=0.05)
    neighbours: int = knob(0, "also decode beside so many busy processes", unit="processes", low=0, high=256)

    def check(self) -> None:
        if len(set(self.ctx)) < len(self.ctx):
            raise ParameterError("a context length stands twice", found=self.ctx, needed="different lengths")
        if self.top_p < 1.0 and self.temperature == 0.0:
            raise ParameterError("top_p has no effect on greedy decoding", found=self.top_p, do="give a temperature")


@dataclass(frozen=True)
class DecodeResult(BenchResult):
    """Series `step_ms_at_<ctx>`, `c_step_ms_at_<ctx>`, `stream_gb_s` and those of what was compared."""

    kind: ClassVar[str] = "decode"


def decode(
    p: DecodeParams,
    *,
    engine: LoadedEngine | None = None,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> DecodeResult:
    """Time decoding. engine: instead of the one that p names (then only its timing parameters and peers count).

    Raises BenchError when decoding looks faster than memory allows (see `limit`) or a peer is not there, StoppedError
    when cancelled, BusyError while something else is measured, and what `nanokit.load` raises.
    """
    longest = context_for(max(p.ctx), 2 * p.steps)
    with prepared("decode", p, engine, ctx=longest, peer=tuple(p.peer), progress=progress, cancel=cancel) as bench:
        turns = bench.rounds.run(_visits(bench, p))
        metrics = figures(p, turns.samples, bench.engine.model.bytes_per_token)
        held = dict(settings(bench))
    quiet = {name: values for name, values in turns.samples.items() if not name.startswith("disturbed")}
    notes = [*turns.remarks, *remarks(quiet), *doubts(metrics["share_of_limit"], metrics["c_step_share_of_limit"])]
    return DecodeResult(p, metrics, turns.samples, held, remarks=notes)


def _visits(bench: Bench, p: DecodeParams) -> dict[str, Visit]:
    first = p.ctx[0]
    visits: dict[str, Visit] = {f"ctx {ctx}": _own(bench.engine, p, ctx, compared=ctx == first) for ctx in p.ctx}
    if p.neighbours:
        visits[f"beside {p.neighbours} busy processes"] = _disturbed(bench.engine, p)
    for rival in bench.rivals:
        for ctx in p.ctx:
            visits[f"{rival.peer.name}, ctx {ctx}"] = _peer(bench.engine, rival, p, ctx)
            if rival.engine is not None:
                visits[f"nanokit beside {rival.peer.name}, ctx {ctx}"] = _beside(rival.engine, rival, p, ctx)
    return visits


def _own(engine: LoadedEngine, p: DecodeParams, ctx: int, *, compared: bool) -> Visit:
    """Steps, the forward alone and, at the context length that is compared, streaming and the other sampling."""
    session = Session(engine, ctx)
    actions: dict[str, Callable[[], float]] = {
        f"step_ms_at_{ctx}": session.step,
        f"c_step_ms_at_{ctx}": session.forward,
    }
    sampled = compared and p.temperature > 0
    if compared:
        actions["stream_gb_s"] = reader(engine)
    if sampled:
        other = Sampling(temperature=p.temperature, top_p=p.top_p)
        actions[f"step_ms_at_{ctx}"] = _drawn(session, GREEDY)
        actions[f"sampled_ms_at_{ctx}"] = _drawn(session, other)

    def visit() -> Samples:
        with session.filled(p.steps * (1 + sampled)):
            return in_turns(actions, p.steps)

    return visit


def _drawn(session: Session, sampling: Sampling) -> Callable[[], float]:
    def step() -> float:
        session.use(sampling)
        return session.step()

    return step


def _disturbed(engine: LoadedEngine, p: DecodeParams) -> Visit:
    session = Session(engine, p.ctx[0])

    def visit() -> Samples:
        with neighbours(p.neighbours), session.filled(p.steps):
            return {f"disturbed_ms_at_{p.ctx[0]}": [session.step() for _ in range(p.steps)]}

    return visit


def _peer(engine: LoadedEngine, rival: Rival, p: DecodeParams, ctx: int) -> Visit:
    ids = prompt_ids(engine, start_of(ctx, p.steps))
    return lambda: {f"peer_{rival.peer.name}_ms_at_{ctx}": decode_visit(rival.peer, ids, p.steps)}


def _beside(engine: LoadedEngine, rival: Rival, p: DecodeParams, ctx: int) -> Visit:
    """nanokit on the peer's file."""
    session = Session(engine, ctx)

    def visit() -> Samples:
        with session.filled(p.steps):
            return {f"beside_{rival.peer.name}_ms_at_{ctx}": [session.step() for _ in range(p.steps)]}

    return visit


def figures(p: DecodeParams, samples: Samples, token_bytes: int) -> dict[str, float]:
    """The metrics of the samples; see `schema` for their names. Raises BenchError as `share_of_limit` does."""
    median = {name: statistics.median(values) for name, values in samples.items()}
    first = p.ctx[0]
    step, alone, stream = median[f"step_ms_at_{first}"], median[f"c_step_ms_at_{first}"], median["stream_gb_s"]
    fold = disturbance(*(samples[name] for name in (f"step_ms_at_{first}", f"c_step_ms_at_{first}", "stream_gb_s")))
    metrics: dict[str, float] = {
        "tok_per_s": 1e3 / step,
        "ms_per_token": step,
        "c_step_ms": alone,
        "c_step_share": alone / step,
        "bytes_per_token": token_bytes,
        "stream_gb_s": stream,
        "share_of_limit": share_of_limit(1e3 / step, token_bytes, stream, disturbance=fold),
        "c_step_share_of_limit": share_of_limit(
            1e3 / alone, token_bytes, stream, "the forward alone", disturbance=fold
        ),
    }
    for ctx in p.ctx:
        metrics[f"tok_per_s_at_{ctx}"] = 1e3 / median[f"step_ms_at_{ctx}"]
    for ctx in p.ctx[1:]:
        metrics[f"ratio_to_first_at_{ctx}"] = step / median[f"step_ms_at_{ctx}"]
    if f"sampled_ms_at_{first}" in median:
        metrics["sampled_vs_greedy"] = step / median[f"sampled_ms_at_{first}"]
    if f"disturbed_ms_at_{first}" in median:
        metrics["neighbour_ratio"] = step / median[f"disturbed_ms_at_{first}"]
        metrics["neighbour_mean_ratio"] = statistics.fmean(samples[f"step_ms_at_{first}"]) / statistics.fmean(
            samples[f"disturbed_ms_at_{first}"]
        )
    return metrics | against_peers(samples, "step", first)
