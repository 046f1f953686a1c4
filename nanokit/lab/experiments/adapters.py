"""LoRA on quantized weights, with and without rounding in training: does it diverge, and what does merging do?

Both adapters learn the same thing from the same texts in the same steps: to undo what plain rounding did to the model
(the loss is the KL from the model as it is stored). One is added to the quantized weights as they are, as everybody
does it. The other trains on the grid: the stored weights and the adapter are added and rounded together in every step,
so that it begins as the same model. Then both are merged into weights of the format, and measured before and after.
"""

import threading
from dataclasses import dataclass

from nanokit import quant
from nanokit.lab.bench.timing import Samples
from nanokit.lab.experiments.gradient_params import GradientParams, GradientResult
from nanokit.lab.experiments.qat import (
    fresh,
    lesson_for,
    policy_of,
    quality,
    reference_for,
    settings_of,
    trained,
)
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent
from nanokit.lab.quality.intervals import standard_error
from nanokit.lab.table import Table

KINDS = ("free", "on_grid")
CALLED = {"free": "without rounding", "on_grid": "rounded in training"}
DIVERGED = 1.5  # times the first loss


@dataclass(frozen=True)
class AdaptersResult(GradientResult):
    """Metrics: kl_mean and the others of `before`, and of each kind `unmerged` and `merged`
    (`kl_mean_of_free_merged`). Samples: `loss_of_free`, `loss_of_on_grid`."""

    def loss(self, kind: str) -> list[float]:
        return self.samples[f"loss_of_{kind}"]

    def kl(self, kind: str, state: str) -> float:
        """state: unmerged or merged."""
        return self.metrics[f"kl_mean_of_{kind}_{state}"]

    @property
    def lost(self) -> float:
        """Of the KL that the free adapter had taken away, the part that came back when it was merged; above 1 it is
        more than that. NaN where it had taken nothing away."""
        gained = self.metrics["kl_mean_of_before"] - self.kl("free", "unmerged")
        return (self.kl("free", "merged") - self.kl("free", "unmerged")) / gained if gained > 0 else float("nan")

    @property
    def gains(self) -> bool:
        """Whether the free adapter takes away more KL than twice the error of the difference, token by token."""
        won = self.metrics["kl_mean_of_before"] - self.kl("free", "unmerged")
        return won > 2 * self.metrics["kl_se_of_before_less_free"]

    def diverges(self, kind: str) -> bool:
        """Whether the last fifth of the losses lies far above the first loss."""
        losses = self.loss(kind)
        last = losses[-max(1, len(losses) // 5) :]
        return not sum(last) / len(last) < DIVERGED * losses[0]

    @property
    def verdict_q7(self) -> str:
        """Of the claim that LoRA after quantization diverges without QAT."""
        losses = self.loss("free")
        course = f"the loss goes from {losses[0]:.3f} to {losses[-1]:.3f} nats without it"
        lost = f"merging takes the KL from {self.kl('free', 'unmerged'):.3f} to {self.kl('free', 'merged'):.3f}"
        if not self.gains:
            lost += "; what the adapter had gained is within the error"
        if self.diverges("free"):
            kept = "does as well" if self.diverges("on_grid") else "does not"
            return f"holds here: {course}; with it, it {kept}"
        return f"does not hold here: {course}; what fails is another thing: {lost}"

    def table(self) -> Table:
        """KL before, with the adapter, and with the adapter merged."""
        m = self.metrics
        rows: list[tuple[str, ...]] = []
        rows.append(("no adapter", f"{m['kl_mean_of_before']:.3f} ± {m['kl_mean_se_of_before']:.3f}", "-"))
        for kind in KINDS:
            cells = [f"{self.kl(kind, s):.3f} ± {m[f'kl_mean_se_of_{kind}_{s}']:.3f}" for s in ("unmerged", "merged")]
            rows.append((CALLED[kind], *cells))
        columns = ("adapter", "KL beside the weights (nats)", "KL merged into them (nats)")
        return Table(columns, rows, right=columns[1:])


def adapters(
    p: GradientParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> AdaptersResult:
    """Train both adapters, merge them and measure. Raises as `qat` does."""
    progress = progress or Silent()
    with measuring("adapters"):
        progress.start(4 + 2 * p.lora_steps, "the reference")
        ref = reference_for(p)
        progress.step("the model writes texts")
        lesson = lesson_for(p)
        metrics: dict[str, float] = {}
        samples: Samples = {}
        for kind in KINDS:
            model = fresh(p)
            if kind == "free":
                quant.apply(model, policy_of(p))
                found, before = quality(model, ref, "before")
                metrics |= found
            else:
                quant.prepare(model, policy_of(p))
            parameters = quant.add_lora(model, p.lora_rank, 2.0 * p.lora_rank, seed=p.seed)
            losses, _ = trained(model, parameters, lesson, p, p.lora_steps, p.lora_learning_rate, progress, cancel)
            samples |= {f"{name}_of_{kind}": values for name, values in losses.items()}
            progress.step(f"{CALLED[kind]}: merging")
            found, beside = quality(model, ref, f"{kind}_unmerged")
            metrics |= found | quality(quant.merge(model), ref, f"{kind}_merged")[0]
            if kind == "free":
                metrics["kl_se_of_before_less_free"] = standard_error(before - beside)
    return AdaptersResult(p, metrics, samples, settings_of(p, ref, lesson))
