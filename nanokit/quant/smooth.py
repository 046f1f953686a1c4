"""SmoothQuant: outliers of the inputs are moved into the weights, where a scale of their own meets them.

Xiao et al. 2022, arXiv:2211.10438. One scale for all columns of an input is as large as its largest column asks for,
and leaves few codes to the others. If column j of the inputs is divided by s_j and column j of the weights multiplied
by it, the product is what it was, and

    s_j = max|x_j| ^ alpha / max|w_j| ^ (1 - alpha)

makes both equally large at alpha = 1/2: each gets the geometric mean of the two. Weights have a scale for each row and
bear it better. Nothing is searched for, and nothing here depends on the format that weights are rounded to. Dividing
the inputs is not this file's affair: nanokit.model.calibrate folds 1 / s into what makes them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALPHA = 0.5
_SPREAD = 1e-4  # of the largest: a column of zeros is neither divided by nothing nor made infinite


def migration(matrices: Sequence[Tensor], peaks: Tensor, alpha: float = ALPHA) -> Tensor:
    """Factors fp32 [columns] for the columns of all the fp32 matrices [rows, columns], which read the same input.

    peaks: largest magnitude of each column of that input, [columns], none below zero. alpha: 0 looks at weights alone,
    1 at inputs alone.
    """
    weights = torch.stack([each.abs().amax(dim=0) for each in matrices]).amax(dim=0)
    return (_bounded(peaks) ** alpha / _bounded(weights) ** (1 - alpha)).float()


def _bounded(peaks: Tensor) -> Tensor:
    peaks = peaks.double()
    return peaks.clamp(min=float(peaks.max()) * _SPREAD or 1.0)
