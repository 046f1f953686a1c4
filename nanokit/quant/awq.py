"""AWQ: input columns that matter are multiplied before rounding and divided again where the inputs come from.

Lin et al. 2023, arXiv:2306.00978. Rounding errs by a share of a group's scale, whatever the column. If column c of
the weights is multiplied by s_c, and its input divided by s_c, the product is what it was, the error at c is 1 / s_c of
what it was, and others pay as far as the group's peak grew. s = activity ^ alpha, with one alpha for all matrices that
read the same input: the one of some that gives the least output error on second moments H of the inputs,

    error = trace of (W - Q(W s) / s) H (W - Q(W s) / s)^T

activity: the size of each input column. Dividing the inputs is not this file's affair: nanokit.model.calibrate folds
1 / s into what makes them, so that nothing more is computed when the model runs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanokit.quant.weight_format import WeightFormat

ALPHAS = tuple(np.linspace(0.0, 1.0, 11).tolist())
_ROWS = 256  # of each matrix that the choice looks at
_SPREAD = 1e-4  # of activity: a column that was never active is not divided by nothing


def column_scales(
    matrices: Sequence[tuple[Tensor, WeightFormat]], moments: Tensor, activity: Tensor, alphas: Sequence[float] = ALPHAS
) -> Tensor:
    """Factors fp32 [columns] for the columns of all the fp32 matrices [rows, columns], which read the same input.

    moments: its second moments [columns, columns]; activity: [columns], none below zero. A factor of one everywhere is
    among the choices; the factors' geometric mean is one.
    """
    some = [(weights[:: -(-len(weights) // _ROWS)], fmt) for weights, fmt in matrices]
    best, least = torch.ones(len(activity)), torch.inf
    for alpha in alphas:
        factors = _factors(activity, alpha)
        error = sum(_error(weights, fmt, factors, moments) for weights, fmt in some)
        if error < least:
            best, least = factors, error
    return best


def _factors(activity: Tensor, alpha: float) -> Tensor:
    sizes = activity.double().clamp(min=float(activity.max()) * _SPREAD or 1.0).log() * alpha
    return (sizes - sizes.mean()).exp().float()


def _error(weights: Tensor, fmt: WeightFormat, factors: Tensor, moments: Tensor) -> float:
    rounded = torch.from_numpy(fmt.quantize((weights * factors).contiguous().numpy()).dequantize())
    off = rounded / factors - weights
    return float(((off @ moments) * off).sum(dtype=torch.float64))
