"""Task points of a model whose layers are rounded: what a person would notice of a divergence.

The model is written to a file and runs in the engine, packed, on the fast kernels, with activations that add nothing
(a16). So what is scored is what training would hand over, and not the module that trained.
"""

import tempfile
from pathlib import Path

from nanokit.engine.load import load
from nanokit.lab.experiments.gradient_params import GradientParams
from nanokit.lab.experiments.kernel_params import opened
from nanokit.lab.quality.tasks import TaskScore, paired, score
from nanokit.model.trainable import TrainableModel
from nanokit.model.trained import save_trained
from nanokit.quant.policy import parse_policy

ACTIVATIONS = "a16"
Scores = dict[str, TaskScore]


def points_as_stored(p: GradientParams) -> Scores:
    """By task, of the model as its file has it."""
    return _scores(p, p.model or None) if p.tasks else {}


def points_of(p: GradientParams, student: TrainableModel, policy: str) -> Scores:
    """By task, of a model with prepared layers. policy: of these."""
    if not p.tasks:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trained.safetensors"
        save_trained(student, opened(p.model)[0], parse_policy(policy), path)
        return _scores(p, path)


def figures(scores: Scores, way: str) -> dict[str, float]:
    """`points_of_<way>_<task>`, its 95 % interval, and the items that it is of."""
    found: dict[str, float] = {}
    for task, each in scores.items():
        low, high = each.interval
        found |= {f"points_of_{way}_{task}": each.points, f"items_{task}": len(each.right)}
        found |= {f"points_low_of_{way}_{task}": low, f"points_high_of_{way}_{task}": high}
    return found


def gains(before: Scores, after: Scores) -> dict[str, float]:
    """`gained_points_<task>` item by item, with its 95 % interval."""
    found: dict[str, float] = {}
    for task, first in before.items():
        pair = paired(first, after[task])
        found[f"gained_points_{task}"] = pair.difference
        found[f"gained_points_low_{task}"], found[f"gained_points_high_{task}"] = pair.interval
    return found


def _scores(p: GradientParams, model: str | Path | None) -> Scores:
    engine = load(model, activations=ACTIVATIONS, prefix_cache=False)
    return {task: score(engine, task, p.items) for task in p.tasks}
