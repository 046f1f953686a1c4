"""Handwritten digits and a small residual network that reads them: what experiments/digits.py trains.

The data is data/digits.npz, 1797 pictures of 8 x 8 (data/README.md says whose). It is loaded without pickle. The last
`TESTED` of them, in the file's order, are only ever tested on. They were written one person after another, so that the
test is largely of hands that training did not see.
"""

import copy
import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nanokit.paths import data_dir

TESTED = 600
DIGITS = 10


class Digits(NamedTuple):
    """Pictures fp32 [n, 1, 8, 8] of 0 to 1, labels int64 [n]."""

    pictures: Tensor
    labels: Tensor


@lru_cache(maxsize=1)
def digits_data() -> tuple[Digits, Digits]:
    """To train on, and to test on."""
    with np.load(data_dir() / "digits.npz", allow_pickle=False) as stored:
        pictures = torch.from_numpy(stored["images"].astype(np.float32) / 16)[:, None]
        labels = torch.from_numpy(stored["labels"].astype(np.int64))
    return Digits(pictures[:-TESTED], labels[:-TESTED]), Digits(pictures[-TESTED:], labels[-TESTED:])


class Residual(nn.Module):
    """Two convolutions of 3 x 3 beside what came in (He et al. 2016); a stride or more channels make the way beside
    them a convolution of 1 x 1."""

    def __init__(self, channels: int, made: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, made, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(made)
        self.second = nn.Conv2d(made, made, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(made)
        self.beside = nn.Identity() if channels == made and stride == 1 else nn.Conv2d(channels, made, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first_norm(self.first(x)).relu()
        return (self.beside(x) + self.second_norm(self.second(inner))).relu()


def residual_network(width: int, seed: int) -> nn.Sequential:
    """Pictures [n, 1, 8, 8] to [n, 10], before softmax. width: channels of the first half, twice as many in the
    second."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            Residual(width, width), Residual(width, 2 * width, stride=2), Residual(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, DIGITS),
        )  # fmt: skip


class Course:
    """AdamW whose rate falls to zero on half a cosine; batches are drawn anew in every epoch."""

    def __init__(self, model: nn.Module, data: Digits, batch: int, seed: int) -> None:
        self.model, self.data, self.batch = model, data, batch
        self._order = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def train(self, epochs: int, rate: float, each: Callable[[], None]) -> nn.Module:
        """Train, and return the model ready for use. each: called after every epoch. An incomplete batch at the end of
        an epoch is left out."""
        self.model.train()
        steps = len(self.data.labels) // self.batch
        for epoch in range(epochs):
            order = torch.randperm(len(self.data.labels), generator=self._order)
            for step, chosen in enumerate(order[: steps * self.batch].view(steps, self.batch)):
                self.step(chosen, rate * (1 + math.cos(math.pi * (epoch + step / steps) / epochs)) / 2)
            each()
        return self.model.eval()

    def step(self, chosen: Tensor, rate: float) -> None:
        """One step on these pictures."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        cross_entropy(self.model(self.data.pictures[chosen]), self.data.labels[chosen]).backward()
        self._optimizer.step()


def copied(model: nn.Module) -> nn.Module:
    """A model of the same numbers that goes its own way."""
    return copy.deepcopy(model)


@torch.no_grad()
def normalized_anew(model: nn.Module, data: Digits) -> nn.Module:
    """The model, ready for use, with the mean and variance of its normalizations taken over all of these pictures."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # plain means
    model.train()(data.pictures)
    return model.eval()


@torch.no_grad()
def right(model: nn.Module, data: Digits) -> np.ndarray:
    """Which pictures it reads right, bool [n]."""
    return (model(data.pictures).argmax(dim=1) == data.labels).numpy()
