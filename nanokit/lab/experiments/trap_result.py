"""What became of every broken copy, as one Result: tables for the reader, figures with names for the record."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from nanokit.gguf.faults import FAULTS
from nanokit.lab.experiments.trap_params import GOOD, PARTS, TrapFile, TrapsParams
from nanokit.lab.result import Result
from nanokit.lab.table import Table
from nanokit.model.rope import Rope
from nanokit.model.verify.divergence import by_position
from nanokit.model.verify.report import listed
from nanokit.model.verify.variants import AS_IS, Gain, gain

BEGIN = 72  # characters of an answer or a refusal that a table has room for
BUCKETS = 8  # stretches of positions that KL is told for


@dataclass(frozen=True)
class TrapsResult(Result):
    """Metrics, for each file (GOOD, or the fault's name): `failed_alone_…`, `failed_against_…` (checks of verify),
    `first_token_ms_…`, `circle_from_…` (tokens), `ppl_…`, `ppl_short_…` and `ppl_long_…` (of the first and last quarter
    of the text), `not_finite_…` (tokens), and for each fault that runs `gain_…` and `error_…`: nats a token by which
    the good file makes the text likelier. `gain_rounding`, `error_rounding`: the same over the good file with the
    matrices of its layers rounded to 4 bits again. Series `kl_…`: by position, nats.

    files: in order. ropes, rope_losses: that were tried over the good file's weights; rope_of: files that have these
    weights and one of those ropes. kl: of files with a wrong rope
    and of ROUNDED: first and last position of a stretch, mean KL from the good file."""

    files: Mapping[str, TrapFile] = field(default_factory=dict)
    ropes: Mapping[str, Rope] = field(default_factory=dict)
    rope_losses: Mapping[str, Tensor] = field(default_factory=dict)
    rope_of: Mapping[str, str] = field(default_factory=dict)
    kl: Mapping[str, list[tuple[int, int, float]]] = field(default_factory=dict)
    override: str = ""

    @property
    def asked(self) -> TrapsParams:
        assert isinstance(self.params, TrapsParams)
        return self.params

    @property
    def faulty(self) -> list[TrapFile]:
        """The copies, without the good file."""
        return [file for name, file in self.files.items() if name != GOOD]

    @property
    def running(self) -> list[str]:
        """Names of the faults that run, in order."""
        return [file.name for file in self.faulty if file.losses is not None]

    def undone(self, name: str) -> Gain:
        """How much likelier the good file makes the text than this one, or (GOOD) the best other rope than it."""
        if name == GOOD:
            return max(self.gains(AS_IS).values(), key=lambda each: each.mean)
        return Gain(self.metrics[f"gain_{name}"], self.metrics[f"error_{name}"])

    @property
    def rounding(self) -> Gain:
        """What rounding the layers' matrices to 4 bits again costs."""
        return Gain(self.metrics["gain_rounding"], self.metrics["error_rounding"])

    def gains(self, rope: str) -> dict[str, Gain]:
        """Of every other rope that was tried over this one."""
        own = self.rope_losses[rope]
        return {name: gain(own, losses) for name, losses in self.rope_losses.items() if name != rope}

    def times(self, name: str, part: int | None = None) -> float:
        """Perplexity over the good file's."""
        return self.files[name].perplexity(part) / self.files[GOOD].perplexity(part)

    # -- tables -------------------------------------------------------------------------------------------------------

    def faults(self) -> Table:
        """What was done to each copy."""
        rows = [(file.name, FAULTS[file.name].what, file.said) for file in self.faulty]
        return Table(("fault", "as if", "in this copy"), rows)

    def answers(self) -> Table:
        """What a person sees: the first words of a greedy answer, or the refusal."""
        rows = []
        for file in self.files.values():
            circle = "" if math.isinf(file.circle_from) else f"{file.circle_from:.0f}"
            words = f"refused: {file.refused}" if file.refused else repr(file.answer)[1:-1]
            rows.append((file.name, _begin(words), circle))
        return Table(("file", "answer, or refusal", "circles from token"), rows, right=("circles from token",))

    def perplexities(self) -> Table:
        """Of the files that run: on the first and the last quarter of the text, and what that costs."""
        rows = []
        for name in (GOOD, *self.running):
            file = self.files[name]
            cells = [_short(file.perplexity(part)) for part in (0, PARTS - 1, None)]
            cost = self.undone(name)
            words = "" if name == GOOD else f"{cost.mean:+.3f} ± {cost.error:.3f}"
            rows.append((name, *cells, f"{self.times(name):.3g}", words))
        columns = ("file", "first quarter", "last quarter", "all", "over the good file's", "cost (nats a token)")
        return Table(columns, rows, right=columns[1:])

    def table(self) -> Table:
        """Which check of verify catches each file."""
        rows = [(file.name, _names(file), _names(file, beside=True)) for file in self.files.values()]
        return Table(("file", "verify", "verify --against the good file"), rows)

    def said(self, name: str, *, beside: bool = False) -> Table:
        """What the failed checks of one file say."""
        return Table(("check", "found"), [(each.name, each.said) for each in self.files[name].failed(beside=beside)])

    def rope_table(self) -> Table:
        """Each rope that was tried in turn as the file's own: whether another one is certainly likelier."""
        rows = []
        for name in self.ropes:
            gains = self.gains(name)
            best = max(gains, key=lambda each: gains[each].mean)
            found = gains[best]
            words = "yes" if found.certain else "no"
            own = "the good file's own" if name == AS_IS else name
            rows.append((own, _called(best), f"{found.mean:+.3f} ± {found.error:.3f}", words))
        columns = ("if the file said", "the likeliest other rope", "gain (nats a token)", "certain?")
        return Table(columns, rows, right=("gain (nats a token)",))


def _called(rope: str) -> str:
    return "the model's own" if rope == AS_IS else rope


def _begin(words: str) -> str:
    return words if len(words) <= BEGIN else words[: BEGIN - 2] + " …"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _names(file: TrapFile, *, beside: bool = False) -> str:
    failed = [each.name for each in file.failed(beside=beside)]
    if failed:
        return listed(failed)
    open_ = sum(each.verdict == "not checked" for each in (file.beside if beside else file.alone))
    return f"nothing; {open_} not checked" if open_ else "nothing"


def figures(files: Mapping[str, TrapFile], rounded: Tensor) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The metrics and series of `TrapsResult`, but for KL."""
    metrics: dict[str, float] = {}
    own = files[GOOD].losses
    assert own is not None
    for name, file in files.items():
        metrics[f"failed_alone_{name}"] = len(file.failed())
        metrics[f"failed_against_{name}"] = len(file.failed(beside=True))
        if not file.refused:
            metrics[f"first_token_ms_{name}"] = file.first_token_ms
            if math.isfinite(file.circle_from):
                metrics[f"circle_from_{name}"] = file.circle_from
        if file.losses is None:
            continue
        metrics[f"not_finite_{name}"] = int((~file.losses.isfinite()).sum())
        for key, part in (("ppl", None), ("ppl_short", 0), ("ppl_long", PARTS - 1)):
            metrics[f"{key}_{name}"] = file.perplexity(part)
        if name != GOOD:
            cost = gain(file.losses, own)
            metrics |= {f"gain_{name}": cost.mean, f"error_{name}": cost.error}
    cost = gain(rounded, own)
    return metrics | {"gain_rounding": cost.mean, "error_rounding": cost.error}, {
        f"asymmetry_{part}_{name}": list(getattr(file.asymmetry, part).values())
        for name, file in files.items()
        for part in ("gate", "up")
        if file.asymmetry.gate
    }


def stretches(found: Tensor) -> list[tuple[int, int, float]]:
    """KL by position."""
    return list(by_position(found, BUCKETS))
