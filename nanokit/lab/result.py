"""What an experiment returns: figures with their units in their names, raw samples, settings, texts, one
table.

A Result is the single thing that a notebook shows, a panel draws, a test compares and a record keeps.

Timing or not: a figure with a unit of time among the parts of its name (`ttft_ms`, `tok_per_s`, `read_gb_s`,
`ms_per_token`), a word that only speeds have (`ratio`, `vs`, `limit`; a ratio of counts is a `rate`), or one that ends
in `_share` or `_speedup`, depends on the clock and may differ between two runs with the same parameters; every other
figure, and every text, must be equal. The rule is in the name, not in a list beside it, so that records can be
compared years later without the code that wrote them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanokit.lab.params import Params
from nanokit.lab.table import Table

TIME_UNITS = frozenset({"s", "ms", "us", "ns"})
TIME_WORDS = frozenset({"ratio", "vs", "limit"})
TIME_RATIOS = frozenset({"share", "speedup"})


def is_timing(name: str) -> bool:
    """True when a metric or sample of this name may differ from run to run."""
    parts = name.split("_")
    return not (TIME_UNITS | TIME_WORDS).isdisjoint(parts) or parts[-1] in TIME_RATIOS


@dataclass(frozen=True)
class Result:
    """The outcome of one experiment; subclass it (frozen) to add structured fields for a plot.

    params: what was asked, presets resolved. metrics: one number a name, the unit is the name's suffix
    (`decode_tok_per_s`, `ttft_ms`, `read_gb_s`, `weight_bytes`). samples: the raw numbers behind a metric, in
    order. settings: what held during the measurement without being a parameter (threads, model file, kv
    blocks). texts: what a model said. remarks: why a reader should not trust some of this, one sentence each.
    Timing figures are told by name (`is_timing`); the rest is equal on repetition.
    """

    params: Params
    metrics: dict[str, float]
    samples: dict[str, list[float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def to_record(self) -> dict[str, Any]:
        """The result's part of a run record: params, metrics, samples, settings, texts, remarks."""
        return {
            "params": self.params.to_dict(),
            "metrics": dict(self.metrics),
            "samples": {name: list(values) for name, values in self.samples.items()},
            "settings": dict(self.settings),
            "texts": dict(self.texts),
            "remarks": list(self.remarks),
        }

    def table(self) -> Table:
        """Figure, value, and the spread of its samples where there are any: one row a metric."""
        rows = []
        for name, value in self.metrics.items():
            values = self.samples.get(name, [])
            spread = f"{figure(min(values))} to {figure(max(values))} of {len(values)}" if values else ""
            rows.append((name, figure(value), spread))
        return Table(("figure", "value", "samples"), rows, right=("value",))


def figure(value: float) -> str:
    """A number for a person: whole numbers in full, others with four significant digits; "nan", "inf" as
    such.
    """
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def together(*results: Result) -> Result:
    """Several results of one notebook as one, for its record. Remarks that repeat are kept once.

    Raises ValueError when they have other parameters, or one name for two things: a record holds one of each.
    """
    first = results[0]
    if any(result.params != first.params for result in results):
        raise ValueError("results of different parameters are no one run")
    return Result(
        first.params,
        _joined(*(result.metrics for result in results)),
        _joined(*(result.samples for result in results)),
        _joined(*(result.settings for result in results), same=True),
        _joined(*(result.texts for result in results)),
        list(dict.fromkeys(remark for result in results for remark in result.remarks)),
    )


def _joined(*parts: Mapping[str, Any], same: bool = False) -> dict[str, Any]:
    """All entries; a name may come twice only if `same` and with one value."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in found and not (same and found[name] == value):
                raise ValueError(f"two results have something of the name {name!r}")
            found[name] = value
    return found
