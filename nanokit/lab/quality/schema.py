"""The JSON of a quality measurement.

    {"schema": "nanokit.quality/1",
     "params": {...},                     what was asked, presets resolved
     "setting": {...},                    what held meanwhile: model, activations, kv_format, kernels, threads, ctx,
                                          batch, layout, scored_tokens, the context at which a token was timed
     "reference": "...",                  what every divergence is against, on which windows of which text
     "reference_floor_kl": ...,           the reference against itself, computed in other chunks
     "policies": [{"policy": "int4-sym-g64",
                   "metrics": {"kl_mean": ..., "kl_mean_se": ..., "kl_median", "kl_p99", "kl_largest",
                               "top1": ..., "top1_low", "top1_high",
                               "ppl_ratio": ..., "ppl_ratio_se", "ppl", "scored_tokens",
                               "noise_floor_kl": ..., "bits_per_weight", "stored_bytes", "bytes_per_token",
                               "ms_per_token": ..., "points_<task>", "points_<task>_low", "points_<task>_high"},
                   "positions": {"256-319": {...}},       the summary of the tokens there
                   "tasks": {"chat": {"q-1": true, ...}}  items that were right
                  }, ...],
     "samples": {"ms_per_token_of_<policy>": [...]},
     "remarks": [...],
     "machine": {...}, "versions": {...}, "git": {...} | null, "code_sha256": ..., "started": ..., "duration_s": ...}

Divergences in nats, shares from 0 to 1, points per hundred items; `_low` and `_high` are 95 % intervals, `_se` standard
errors; see nanokit/lab/quality/divergence.py for the formulas. Every figure is a finite number: JSON has no other.
"""

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from nanokit.errors import NanokitError
from nanokit.lab.quality.measure import QualityResult

SCHEMA = "nanokit.quality/1"


def document(
    result: QualityResult, provenance: Mapping[str, Any], started: datetime, duration_s: float
) -> dict[str, Any]:
    """The result as JSON values. provenance: of `lab.provenance`, taken before the measurement. Raises NanokitError
    for figures that are not finite, with their names."""
    record = result.to_record()
    made = {
        "schema": SCHEMA,
        "params": record["params"],
        "setting": {name: value for name, value in record["settings"].items() if name != "reference"},
        "reference": result.reference,
        "reference_floor_kl": result.metrics["reference_floor_kl"],
        "policies": [
            {
                "policy": each.policy,
                "metrics": dict(each.metrics),
                "positions": dict(each.positions),
                "tasks": {task: dict(scored.right) for task, scored in each.tasks.items()},
            }
            for each in result.policies
        ],
        "samples": record["samples"],
        "remarks": record["remarks"],
        **provenance,
        "started": started.isoformat(timespec="seconds"),
        "duration_s": round(duration_s, 2),
    }
    if broken := list(_not_finite(made)):
        raise NanokitError(
            "figures of this measurement are not finite, and JSON has no numbers for them",
            found=", ".join(broken[:5]),
            do="measure on longer or more windows; if the policy is at fault, its table shows it",
        )
    return made


def _not_finite(value: Any, name: str = "") -> Iterator[str]:
    """The names of the numbers inside that are not finite."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _not_finite(inside, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for at, inside in enumerate(value):
            yield from _not_finite(inside, f"{name}[{at}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield name
