"""What the products of a model see of several texts, beside a profile of the calibration text; and two rules for alarm.

One text is of the calibration's own kind (prose beside prose): the model is as healthy there as it was. A rule that
raises alarms on it is no rule. The rule under test is absolute: a std of .6 to 1.0 is normal, 1.5 is an alarm. Beside
it stand ratios to the profile (quant/drift.py).

Everything runs in fp32 activations on the reference kernels, so that what is seen is the model's own and not what
static scales have made of it. Clipping is what they would do.
"""

import statistics
import threading
from dataclasses import dataclass, field

from nanokit.kernels.activations import PLACES
from nanokit.lab.bench.timing import Samples
from nanokit.lab.experiments.drift_params import BLOCK, DriftParams, DriftResult, exact_engine, text_start, watch
from nanokit.lab.experiments.kernel_params import matrices, opened
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.table import Table
from nanokit.quant.drift import Drift, DriftMonitor, Profile, Watch

NORMAL, ABNORMAL = (0.6, 1.0), 1.5  # the absolute rule of the account, Q12
SEEN = (*PLACES, BLOCK)


def key(place: str) -> str:
    """A place as part of a figure's name."""
    return place.replace(" ", "_").replace("-", "_")


@dataclass(frozen=True)
class ProfileResult(DriftResult):
    """Series, an entry a layer: `std_<place>`, `peak_<place>` and `first_peak_<place>` of the profile;
    `std_ratio_<text>_<place>`, `clipped_<text>_<place>` and `vanishing_<text>_<place>` of each text."""

    profile: Profile = field(default_factory=lambda: Profile("", "", {}))

    def layers(self, name: str, place: str, text: str = "") -> list[float]:
        """A series by place: std, peak, first_peak, or of a text std_ratio, clipped, vanishing."""
        return self.samples["_".join([name, *([text] if text else []), key(place)])]

    def table(self) -> Table:
        """A text a row: alarms of both rules, how far std and peak moved, and what static scales do to the values."""
        m, rows = self.metrics, []
        for text in self.asked.texts:
            ratios = [v for place in PLACES for v in self.layers("std_ratio", place, text)]
            shares = [100 * m[f"{name}_{text}"] for name in ("clipped", "vanishing")]
            worst = max(v for place in PLACES for v in self.layers("vanishing", place, text))
            rows.append(
                (
                    text,
                    f"{m[f'alarms_{text}']:.0f}",
                    f"{m[f'absolute_alarms_{text}']:.0f}",
                    f"{min(ratios):.2f} / {statistics.median(ratios):.2f} / {max(ratios):.2f}",
                    f"{m[f'peak_ratio_largest_{text}']:.2f}",
                    f"{shares[0]:.4f} %",
                    f"{shares[1]:.1f} %",
                    f"{worst:.1%}",
                )
            )
        columns = (
            "text", "alarms by ratio", "std outside .6-1.0", "std ratio: least / median / most", "largest peak ratio",
            "clipped by static", "code 0 under static", "worst place",
        )  # fmt: skip
        return Table(columns, rows, right=columns[1:])

    def rule(self) -> Table:
        """A place a row: what std is in a healthy model, and how many of its layers the absolute rule calls ill."""
        rows = []
        for place in SEEN:
            std, first = self.layers("std", place), self.layers("first_peak", place)
            inside = sum(NORMAL[0] <= value <= NORMAL[1] for value in std)
            most = max(a / b for a, b in zip(first, self.layers("peak", place), strict=True))
            rows.append(
                (
                    place,
                    f"{min(std):.2f} to {max(std):.2f}",
                    f"{inside} of {len(std)}",
                    f"{sum(value > ABNORMAL for value in std)} of {len(std)}",
                    f"{most:,.1f}",
                )
            )
        columns = (
            "place",
            "std of a layer",
            "within .6-1.0",
            "above 1.5",
            "position 0: peak over the others', at most",
        )
        return Table(columns, rows, right=columns[1:])


def drift_profile(
    p: DriftParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> ProfileResult:
    """Profile the calibration text, then watch each text.

    Raises StoppedError when cancelled, BusyError, ParameterError for a text too short, and what `nanokit.load` raises.
    """
    progress = progress or Silent()
    with measuring("activation drift"):
        progress.start(len(p.texts) + 2, "loading the model")
        engine = exact_engine(p.model)
        name, layers = engine.model.name, engine.model.config.num_layers
        progress.step(f"profile of {p.calibration}.txt")
        outputs = [matrix.dense() for matrix in matrices(opened(p.model)[1], "o", layers)]
        seen = watch(engine, text_start(engine, p.calibration, p.tokens), Watch(name), outputs)
        profile = seen.profile(f"{p.calibration}.txt, {p.tokens} tokens")
        samples, metrics = _of_profile(profile, layers), dict[str, float]()
        for text in p.texts:
            stop_if(cancel)
            progress.step(f"{text}.txt")
            monitor = DriftMonitor(profile, p.std_ratio, peak_ratio=p.peak_ratio, model=name)
            watch(engine, text_start(engine, text, p.tokens), monitor, outputs)
            rows = {row.place: row for row in monitor.report() if row.positions == "later"}
            samples |= _of_text(rows, text, layers)
            metrics |= _figures(monitor, rows, text)
    std = [v for place in SEEN for v in samples[f"std_{key(place)}"]]
    metrics |= {
        "places": len(std),
        "profile_places_normal": sum(NORMAL[0] <= value <= NORMAL[1] for value in std),
        "profile_places_abnormal": sum(value > ABNORMAL for value in std),
        "first_peak_over_later": max(
            a / b
            for place in PLACES
            for a, b in zip(samples[f"first_peak_{key(place)}"], samples[f"peak_{key(place)}"], strict=True)
        ),
    }
    settings = {"model": name, "profile": profile.text, "profiled_by": engine.model.kernels}
    return ProfileResult(p, metrics, samples, settings, profile=profile)


def _of_profile(profile: Profile, layers: int) -> Samples:
    found: Samples = {}
    for place in SEEN:
        kinds = [profile.places[f"layer {layer}, {place}"] for layer in range(layers)]
        found[f"std_{key(place)}"] = [each["later"].std for each in kinds]
        found[f"peak_{key(place)}"] = [each["later"].absmax for each in kinds]
        found[f"first_peak_{key(place)}"] = [each["first"].absmax for each in kinds]
    return found


def _of_text(rows: dict[str, Drift], text: str, layers: int) -> Samples:
    found: Samples = {}
    for place in SEEN:
        each = [rows[f"layer {layer}, {place}"] for layer in range(layers)]
        found[f"std_ratio_{text}_{key(place)}"] = [row.ratios["std"] for row in each]
        found[f"clipped_{text}_{key(place)}"] = [row.found.clipped for row in each]
        found[f"vanishing_{text}_{key(place)}"] = [row.found.vanishing for row in each]
    return found


def _figures(monitor: DriftMonitor, rows: dict[str, Drift], text: str) -> dict[str, float]:
    """clipped, vanishing: shares of all values that products see. peak ratio: up or down, whichever is farther."""
    inputs = [row for place, row in rows.items() if BLOCK not in place]
    values = sum(row.found.count for row in inputs)
    peaks = [max(row.ratios["absmax"], 1 / row.ratios["absmax"]) for row in rows.values()]
    return {
        f"alarms_{text}": len(monitor.alarms()),
        f"absolute_alarms_{text}": sum(not NORMAL[0] <= row.found.std <= NORMAL[1] for row in rows.values()),
        f"clipped_{text}": sum(row.found.clipped * row.found.count for row in inputs) / values,
        f"vanishing_{text}": sum(row.found.vanishing * row.found.count for row in inputs) / values,
        f"peak_ratio_largest_{text}": max(peaks),
    }
