"""A head over any matrix, without a model: with an identity matrix, hidden states are logits."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanokit.kernels import selection
from nanokit.model.head import FullHead, Selection


class Dense:
    """weight: [vocab_size, hidden_size] fp32; bias: [vocab_size]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, answers: Selection) -> None:
        self.weight, self.bias, self.selection = weight, bias, answers

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        out = linear(hidden.float(), self.weight, self.bias)
        return out if ids is None else out[:, ids]

    def argmax(self, hidden: Tensor) -> Tensor:
        return torch.tensor([self.selection.argmax(row) for row in self.logits(hidden)], dtype=torch.int64)


def dense_head(weight: Tensor, bias: Tensor | None = None, answers: Selection = selection) -> FullHead:
    return FullHead(Dense(weight, bias, answers), len(weight))
