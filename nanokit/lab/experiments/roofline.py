"""The roofline's experiment: decoding, verification and prefill between the two things that can hold them up.

A forward reads every weight once, whatever its number of rows, and does two operations (a multiplication and an
addition) with each weight for each row. So rows are the arithmetic intensity, and a forward of n rows can be held up by

    memory        bytes of the weights / streaming speed             the same for any n
    arithmetic    2 * weights * n / speed of the products            grows with n

The streaming speed is that of the engine's own weights, read by its own threads, in turns with the decoded tokens it is
compared with. The speed of the products is measured on one matrix of the model's shape that stays in the core's cache,
the fastest of many: what the kernel does when it never waits for memory. Attention, norms and sampling are in the times
but not in the operations. Rejected: the arithmetic peak of a data sheet (clock times lanes), which no product with
scales reaches.
"""

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass

from nanokit.engine.load import LoadedEngine
from nanokit.kernels.activations import MODES
from nanokit.kernels.cpu.bound import KV_FORMATS
from nanokit.lab.bench.limit import doubts, reader
from nanokit.lab.bench.prefill import PrefillParams, prefill
from nanokit.lab.bench.timing import Rounds, Samples, Visit, in_turns
from nanokit.lab.bench.verify_cost import VerifyCostParams, verify_cost
from nanokit.lab.bench.workload import Session
from nanokit.lab.engines import engine_for
from nanokit.lab.experiments.ceiling import ceiling_of, weights_of
from nanokit.lab.experiments.reading import reading_speed
from nanokit.lab.lock import measuring
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.result import Result
from nanokit.lab.steadiness import remarks
from nanokit.lab.table import Table

# Seconds after which no further round of decoding is begun; prefill and verification keep the same budget each.
BUDGET_S = {"smoke": 3.0, "quick": 15.0, "full": float("inf")}
STEPS = 16  # decoded tokens of a round, each beside one reading of the weights
READINGS = 15  # of each size in the sweep


@experiment_params
class RooflineParams(Params):
    """How the engine runs, and how much of it is measured."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    activations: str = knob("", "activation mode; empty is the engine's own choice")
    kv_format: str = knob("fp16", "format of the KV pages", choices=tuple(KV_FORMATS))
    rows: list[int] = knob(
        [], "rows of a forward", unit="rows", low=1, high=512,
        by_preset={"smoke": [1, 2, 4, 8], "quick": [1, 2, 3, 4, 6, 8, 12, 16, 32],
                   "full": [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64]},
    )  # fmt: skip
    ctx: list[int] = knob(
        [], "context lengths, the first is the reference", unit="tokens", low=16, high=4096,
        by_preset={"smoke": [64], "quick": [64, 512], "full": [64, 512, 2048]},
    )  # fmt: skip
    prompt_tokens: int = knob(
        0, "length of the timed prompts", unit="tokens", low=16, high=4096, step=16,
        by_preset={"smoke": 128, "quick": 512, "full": 512},
    )  # fmt: skip
    buffers: list[int] = knob(
        [], "memory read in the sweep over sizes", unit="MiB", low=1, high=4096,
        by_preset={"smoke": [1, 16, 64], "quick": [1, 4, 16, 64, 256], "full": [1, 4, 16, 64, 256, 1024]},
    )  # fmt: skip
    same_steps: int = knob(
        0, "repetitions of one and the same step", unit="steps", low=40, high=20000,
        by_preset={"smoke": 120, "quick": 400, "full": 4000},
    )  # fmt: skip
    modes: list[str] = knob(
        [], "activation modes to compare with fp32", choices=MODES[1:],
        by_preset={"smoke": ["a16", "a8g32"], "quick": list(MODES[1:]), "full": list(MODES[1:])},
    )  # fmt: skip
    text_tokens: int = knob(
        0, "length of the text whose logits are compared", unit="tokens", low=16, high=512,
        by_preset={"smoke": 96, "quick": 512, "full": 512},
    )  # fmt: skip
    prompts: int = knob(
        0, "questions answered greedily by each mode", unit="prompts", low=1, high=12,
        by_preset={"smoke": 2, "quick": 6, "full": 12},
    )  # fmt: skip
    answer_tokens: int = knob(
        0, "tokens of each answer", unit="tokens", low=4, high=256,
        by_preset={"smoke": 12, "quick": 40, "full": 60},
    )  # fmt: skip
    repeats: int = knob(0, "rounds", low=2, high=200, by_preset={"smoke": 2, "quick": 4, "full": 15})

    def check(self) -> None:
        VerifyCostParams.from_mapping({"rows": self.rows, "ctx": self.ctx})  # refuses what it could not measure


@dataclass(frozen=True)
class RooflineResult(Result):
    """Times and speeds; `points` are the forwards in the roofline's figure."""

    @property
    def points(self) -> dict[int, tuple[float, float]]:
        """Rows -> (operations per byte, 1e9 operations a second) of a forward at the first context length."""
        p, m = self.params, self.metrics
        assert isinstance(p, RooflineParams)
        found = {}
        for rows in p.rows:
            seconds = m[f"ms_of_{rows}_rows_at_{p.ctx[0]}"] / 1e3
            operations = 2 * m["weights_per_token"] * rows
            found[rows] = (operations / m["bytes_per_token"], operations / seconds / 1e9)
        return found

    @property
    def v(self) -> dict[int, dict[int, float]]:
        """Context length -> rows -> time of a forward of so many rows over that of one."""
        p, m = self.params, self.metrics
        assert isinstance(p, RooflineParams)
        return {ctx: {rows: m[f"v_ratio_of_{rows}_at_{ctx}"] for rows in p.rows} for ctx in p.ctx}

    @property
    def held_up_by(self) -> dict[str, str]:
        """Phase -> memory or arithmetic: of which of the two it uses the larger share."""
        m = self.metrics
        shares = {
            "prefill": (m["prefill_memory_share"], m["prefill_arithmetic_share"]),
            "decode": (m["share_of_limit"], m["decode_arithmetic_share"]),
        }
        return {phase: "memory" if memory > work else "arithmetic" for phase, (memory, work) in shares.items()}

    @property
    def verdict_p12(self) -> str:
        """Of the claim that prefill wants memory and decode wants arithmetic."""
        claimed = {"prefill": "memory", "decode": "arithmetic"}
        right = [phase for phase, roof in claimed.items() if self.held_up_by[phase] == roof]
        if len(right) == len(claimed):
            return "holds here"
        return f"holds here for {right[0]} only" if right else "does not hold here: it is the other way round"

    def phases(self) -> Table:
        """Decode and prefill: speed, and the shares of both limits."""
        m = self.metrics
        columns = ("phase", "tok/s", "share of memory's limit", "share of arithmetic's")
        decode = ("decode", m["tok_per_s"], m["share_of_limit"], m["decode_arithmetic_share"])
        prefill = ("prefill", m["prefill_tok_per_s"], m["prefill_memory_share"], m["prefill_arithmetic_share"])
        rows = [(name, f"{speed:.1f}", f"{a:.1%}", f"{b:.1%}") for name, speed, a, b in (decode, prefill)]
        return Table(columns, rows, right=columns[1:])


def roofline(
    p: RooflineParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> RooflineResult:
    """Time streaming, decoding, prefill and forwards of several rows.

    Raises StoppedError when cancelled, BusyError while something else is measured, and what `nanokit.load` raises.
    """
    progress = progress or Silent()
    with measuring("the roofline"):
        progress.start(1, "loading the model")
        engine = engine_for(p.model, p.activations, p.kv_format)
        multiply = ceiling_of(engine)
        samples, notes = _decode(engine, p, progress, cancel)
        ceiling = multiply(4 * p.repeats)  # three times in the run: a roof is the fastest that was seen
        asked = {"preset": p.preset, "repeats": p.repeats}
        prompt = PrefillParams.from_mapping({**asked, "tokens": [p.prompt_tokens]})
        prefilled = prefill(prompt, engine=engine, progress=progress, cancel=cancel)
        ceiling += multiply(4 * p.repeats)
        several = VerifyCostParams.from_mapping({**asked, "rows": p.rows, "ctx": p.ctx})
        verified = verify_cost(several, engine=engine, progress=progress, cancel=cancel)
        ceiling += multiply(4 * p.repeats)
        samples |= _sweep(p, cancel)
    samples |= prefilled.samples | verified.samples | {"ceiling_gop_per_s": ceiling}
    metrics = figures(p, engine, samples)
    decoding = {name: samples[name] for name in ("step_ms", "stream_gb_s")}
    notes += [*prefilled.remarks, *verified.remarks, *remarks(decoding), *doubts(metrics["share_of_limit"])]
    settings = {
        "model": engine.model.name,
        "activations": engine.model.activations,
        "kv_format": engine.kv.kv_format,
        "compiled": engine.model.compiled,
        **{name: verified.settings[name] for name in ("kernels", "threads")},
    }
    return RooflineResult(p, metrics, samples, settings, remarks=notes)


def _decode(
    engine: LoadedEngine, p: RooflineParams, progress: Progress, cancel: threading.Event | None
) -> tuple[Samples, list[str]]:
    """Steps of one sequence at the first context length, each beside one reading of the weights."""
    session, read = Session(engine, p.ctx[0]), reader(engine)
    actions: dict[str, Callable[[], float]] = {"step_ms": session.step, "stream_gb_s": read}

    def visit() -> Samples:
        with session.filled(STEPS):
            return in_turns(actions, STEPS)

    visits: dict[str, Visit] = {"decoding": visit}
    turns = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress, cancel=cancel).run(visits)
    return turns.samples, turns.remarks


def _sweep(p: RooflineParams, cancel: threading.Event | None) -> Samples:
    """Speed of reading buffers of several sizes again and again, GB/s."""
    found = {}
    for size in p.buffers:
        stop_if(cancel)
        found[f"read_gb_s_of_{size}_mib"] = reading_speed(size << 20, READINGS)
    return found


def figures(p: RooflineParams, engine: LoadedEngine, samples: Samples) -> dict[str, float]:
    """The metrics of the samples. Shares: of the streaming speed (memory), of the products' speed (arithmetic)."""
    median = {name: statistics.median(values) for name, values in samples.items()}
    layers, head = weights_of(engine.model.config)
    size = engine.model.bytes_per_token
    step, stream, ceiling = median["step_ms"], median["stream_gb_s"], max(samples["ceiling_gop_per_s"])
    ttft = median[f"prefill_ms_at_{p.prompt_tokens}"]
    prefill_gop_per_s = 2 * (layers * p.prompt_tokens + head) / ttft / 1e6
    metrics: dict[str, float] = {
        "weights_per_token": layers + head,
        "bytes_per_token": size,
        "stream_gb_s": stream,
        "ceiling_gop_per_s": ceiling,
        "ms_per_token": step,
        "tok_per_s": 1e3 / step,
        "share_of_limit": size / (step * 1e6) / stream,
        "decode_arithmetic_share": 2 * (layers + head) / (step * 1e6) / ceiling,
        "prefill_tok_per_s": p.prompt_tokens / ttft * 1e3,
        "prefill_gop_per_s": prefill_gop_per_s,
        "prefill_memory_share": size / (ttft * 1e6) / stream,
        "prefill_arithmetic_share": prefill_gop_per_s / ceiling,
        # Where reading the weights and multiplying with them take equally long.
        "ridge_rows_ratio": size / stream * ceiling / (2 * (layers + head)),
    }
    for ctx in p.ctx:
        one = median[f"rows_1_ms_at_{ctx}"]
        for rows in p.rows:
            metrics[f"ms_of_{rows}_rows_at_{ctx}"] = median[f"rows_{rows}_ms_at_{ctx}"]
            metrics[f"v_ratio_of_{rows}_at_{ctx}"] = median[f"rows_{rows}_ms_at_{ctx}"] / one
    for buffer in p.buffers:
        metrics[f"read_gb_s_of_{buffer}_mib"] = median[f"read_gb_s_of_{buffer}_mib"]
    return metrics
