"""Activation drift: what the inputs of a model's products look like, against a profile of the same model when healthy.

A `Profile` keeps, for each place (the input of a product), a `Spread` of what was seen there: std, largest magnitude,
how far a token's largest value stands out of that token (its largest over its median magnitude, after Sun et al. 2024,
arXiv:2402.17762), and kurtosis. A `DriftMonitor` sees the same places of a running model and reports ratios to it.

    collect    Watch(model).observe(place, x, positions) …  .profile() ─▶ JSON
    compare    DriftMonitor(profile).observe(…) …           .report(), .alarms()
    hook       with monitor.attach(module): …                       any torch module with Linear layers
               with engine.model.observing(monitor.observe): …      the kit's own, on the reference kernels

The first position stands apart: where attention has nothing else to look at, a healthy model's activations may be a
thousand times what they are elsewhere, and one such row would be all that std and peak say.

An alarm is a ratio to the profile, never an absolute number: what is normal for one layer of a healthy model is an
alarm in another, see notebooks/13_activation_drift. Std and peak have a bound each: a peak is the largest of a hundred
thousand values and moves from text to text by more than a std does.

A monitor also counts what static scales of the profile's peaks would do to what it sees: `clipped`, the share of values
beyond the peak; and `vanishing`, the share of values other than zero whose code would be 0. The second is the failure
that no peak shows: a scale that one row needs leaves no codes to the others.

Rejected: keeping histograms (a profile of a model is then megabytes, and nobody reads them), and alarms on kurtosis or
on the ratio within a token: both are ratios already, and a single value moves them.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from nanokit.errors import ParameterError
from nanokit.kernels.activations import LIMIT

VERSION = 1
KINDS = ("later", "first")  # positions: all but 0, and 0
LEAST_TOKENS = 32  # seen at a place before its ratios may raise an alarm: fewer say more of the text than of the model


@dataclass(frozen=True)
class Spread:
    """What was seen at a place. tokens: rows; count: values. token_ratio_max, _median: over the rows, of a row's
    largest magnitude over its median one (of an even number, the lower in the middle). kurtosis: the fourth central
    moment over the square of the second, 3 for a normal distribution. clipped, vanishing: shares of values, by the
    limits of whoever watched; 0 without."""

    tokens: int
    count: int
    std: float
    absmax: float
    token_ratio_max: float
    token_ratio_median: float
    kurtosis: float
    clipped: float = 0.0
    vanishing: float = 0.0


class _Sums:
    """Sums from which a Spread is made, in fp64; moments are taken about zero and moved to the mean at the end."""

    def __init__(self) -> None:
        self.tokens = self.count = self.clipped = self.vanishing = 0
        self.powers = torch.zeros(4, dtype=torch.float64)
        self.absmax = 0.0
        self.ratios: list[float] = []

    def add(self, x: Tensor, limit: float | None) -> None:
        magnitude = x.abs()
        peaks, medians = magnitude.amax(dim=1), magnitude.median(dim=1).values
        self.tokens, self.count = self.tokens + x.shape[0], self.count + x.numel()
        flat = x.flatten()
        squares = flat * flat
        self.powers += torch.stack([flat.sum(), squares.sum(), squares @ flat, squares @ squares]).cpu()
        self.absmax = max(self.absmax, float(peaks.max()))
        self.ratios += (peaks / medians.clamp(min=torch.finfo(torch.float32).tiny)).tolist()
        if limit is not None:
            self.clipped += int((magnitude > limit).sum())
            self.vanishing += int(((magnitude > 0) & (magnitude < limit / (2 * LIMIT))).sum())

    def spread(self) -> Spread:
        mean, second, third, fourth = (self.powers / self.count).tolist()
        variance = max(second - mean**2, 0.0)
        centred = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        return Spread(
            tokens=self.tokens,
            count=self.count,
            std=variance**0.5,
            absmax=self.absmax,
            token_ratio_max=max(self.ratios),
            token_ratio_median=median(self.ratios),
            kurtosis=max(centred, 0.0) / variance**2 if variance else 0.0,
            clipped=self.clipped / self.count,
            vanishing=self.vanishing / self.count,
        )


@dataclass(frozen=True)
class Profile:
    """places: by name, the Spread of "later" positions and of the "first", where there were any. text: what it was
    collected on, to be shown."""

    model: str
    text: str
    places: Mapping[str, Mapping[str, Spread]]

    def peak(self, place: str) -> float | None:
        """The largest magnitude at a place, position 0 included: what a static scale would be calibrated to. None where
        the place was not seen."""
        return max((spread.absmax for spread in self.places.get(place, {}).values()), default=None)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        places = {name: {kind: asdict(spread) for kind, spread in kinds.items()} for name, kinds in self.places.items()}
        content = {"version": VERSION, "model": self.model, "text": self.text, "places": places}
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read what `save` wrote. Raises ParameterError, naming the file, for anything else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise ParameterError(f"{path.name} is a profile of another version", found=content["version"],
                                     needed=VERSION, do="collect it again")  # fmt: skip
            places = {
                str(name): {kind: _spread(values) for kind, values in kinds.items() if KINDS.index(kind) >= 0}
                for name, kinds in content["places"].items()
            }
            return cls(str(content["model"]), str(content["text"]), places)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ParameterError):
                raise
            raise ParameterError(
                f"{path.name} is no profile of activations",
                found=f"{type(error).__name__}: {error}",
                needed="a file that Profile.save wrote",
            ) from error


def _spread(values: Mapping[str, Any]) -> Spread:
    spread = Spread(**values)
    for name, value in asdict(spread).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise ValueError(f"{name} is {value!r}")
    return spread


class Watch:
    """Collects spreads by place. limits: by place, the magnitude at which a static scale would clip."""

    def __init__(self, model: str, limits: Mapping[str, float] | None = None) -> None:
        self.model, self._limits = model, limits or {}
        self._sums: dict[tuple[str, str], _Sums] = {}

    def observe(self, place: str, x: Tensor, positions: Tensor | None = None) -> None:
        """Take note of rows x [rows, columns]. positions: of each row in its sequence, int [rows]; None where rows have
        none, and then none is the first. Raises ParameterError for what is not a number: no ratio to it is an alarm."""
        x = x.detach().double()
        if not bool(x.isfinite().all()):
            raise ParameterError(
                f"the activations at {place} are not finite", needed="numbers", do="find the layer before"
            )
        first = torch.zeros(len(x), dtype=torch.bool) if positions is None else positions == 0
        for kind, rows in (("later", x[~first.to(x.device)]), ("first", x[first.to(x.device)])):
            if rows.numel():
                self._sums.setdefault((place, kind), _Sums()).add(rows, self._limits.get(place))

    def profile(self, text: str = "") -> Profile:
        """What was seen so far. text: a name for what it was seen on."""
        places: dict[str, dict[str, Spread]] = {}
        for (place, kind), sums in self._sums.items():
            places.setdefault(place, {})[kind] = sums.spread()
        return Profile(self.model, text, places)

    @contextmanager
    def attach(self, module: nn.Module) -> Iterator[None]:
        """Observe the input of every Linear layer of a module, under its name, as long as the context lasts.

        An input [sequences, tokens, columns] has positions: those of the keyword argument `position_ids` of the
        module's call, or else counted from the length of its `past_key_values` (`cache`, in later transformers). Rows
        of [rows, columns] have none.
        """
        starts: list[Any] = [None, 0]

        def called(_: nn.Module, __: Any, options: dict[str, Any]) -> None:
            past = next((options[name] for name in ("past_key_values", "cache") if options.get(name) is not None), None)
            starts[:] = options.get("position_ids"), 0 if past is None else past.get_seq_length()

        def hook(name: str) -> Any:
            def seen(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                x = inputs[0]
                positions = None
                if x.ndim == 3:
                    own = starts[1] + torch.arange(x.shape[1], device=x.device)
                    positions = (own if starts[0] is None else starts[0]).expand(x.shape[:2]).flatten()
                self.observe(name, x.reshape(-1, x.shape[-1]), positions)

            return seen

        linears = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        handles = [part.register_forward_pre_hook(hook(name or "the module")) for name, part in linears]
        handles.append(module.register_forward_pre_hook(called, with_kwargs=True, prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True)
class Drift:
    """A row of a report. ratios: found over reference, by quantity; infinite where the reference is zero."""

    place: str
    positions: str
    found: Spread
    reference: Spread
    ratios: Mapping[str, float]


class DriftMonitor(Watch):
    """A Watch that compares with a profile. ratio, peak_ratio: how far, up or down, std and absmax may move before it
    is an alarm. model: of what is watched.

    Raises ParameterError for another model than the profile's, and a ratio that is not above 1.
    """

    def __init__(
        self, profile: Profile, ratio: float = 1.5, *, peak_ratio: float = 3.0, model: str | None = None
    ) -> None:
        for each in (ratio, peak_ratio):
            if not (isfinite(each) and each > 1):
                raise ParameterError("an alarm needs a ratio", found=each, needed="a number above 1")
        if model is not None and model != profile.model:
            raise ParameterError(
                "the profile is of another model", found=profile.model, needed=model, do="collect one of this model"
            )
        super().__init__(profile.model, {place: profile.peak(place) or 0.0 for place in profile.places})
        self.reference, self.bounds = profile, {"std": ratio, "absmax": peak_ratio}

    def report(self) -> list[Drift]:
        """What was seen at the places of the profile, later positions before the first. Places that the profile lacks
        have no ratio and are left out; `unknown` names them."""
        rows = []
        for kind in KINDS:
            for place, kinds in self.profile().places.items():
                reference = self.reference.places.get(place, {}).get(kind)
                if kind in kinds and reference is not None:
                    rows.append(Drift(place, kind, kinds[kind], reference, _ratios(kinds[kind], reference)))
        return rows

    def alarms(self) -> list[Drift]:
        """The rows whose std or absmax moved by its bound or more, up or down. Only of later positions, with enough
        tokens of them: what stands at the first position depends on its one token."""
        return [
            row
            for row in self.report()
            if row.positions == "later"
            and row.found.tokens >= LEAST_TOKENS
            and any(not 1 / bound < row.ratios[name] < bound for name, bound in self.bounds.items())
        ]

    def unknown(self) -> list[str]:
        """Places that were seen and that the profile does not have."""
        return sorted({place for place, _ in self._sums} - set(self.reference.places))


def _ratios(found: Spread, reference: Spread) -> dict[str, float]:
    names = ("std", "absmax", "token_ratio_max", "token_ratio_median", "kurtosis")
    pairs = {name: (getattr(found, name), getattr(reference, name)) for name in names}
    return {name: a / b if b else (1.0 if a == b else float("inf")) for name, (a, b) in pairs.items()}
