"""Factors of channels that learn: what codes are finer by, which the weights on both sides make up for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onnxq.algorithms.migration import Around, Factors
from onnxq.ir import Node


class Shared(nn.Module):
    """The factors that the tensors of a site share.

    Each is what was found times the exponential of a parameter, and none grows beyond 1, so that codes that stand for a
    clamp never reach further than it.

    Attributes:
        log_factors: parameter of shape (factors,), 0 to begin with.
    """

    base: Tensor
    free: Tensor

    def __init__(self, factors: NDArray[np.floating], free: NDArray[np.bool_]) -> None:
        """Take the factors to begin with, and which of them learn."""
        super().__init__()
        self.register_buffer("base", torch.from_numpy(factors.astype(np.float32)))
        self.register_buffer("free", torch.from_numpy(free.astype(np.float32)))
        self.log_factors = nn.Parameter(torch.zeros_like(self.base), bool(free.any()))

    def forward(self) -> Tensor:
        """Return the factors."""
        return (self.base * torch.exp(self.log_factors * self.free)).minimum(self.base.clamp(min=1))

    def start_from(self, factors: Tensor) -> None:
        """Take other factors where these learn."""
        self.base.copy_(torch.where(self.free > 0, factors, self.base))
        self.log_factors.zero_()


@dataclass(frozen=True, eq=False)
class Own:
    """The factors of one tensor's channels.

    Attributes:
        shared: those of its site.
        places: which of these each channel has, or, in a weight, what lies along it.
        axis: of the channels in the tensor.
    """

    shared: Shared
    places: Tensor
    axis: int

    def __call__(self) -> Tensor:
        """Return a factor for each place."""
        found: Tensor = self.shared()[self.places]
        return found

    def now(self) -> Factors:
        """Return them as they are written."""
        return Factors(self.axis, self().detach().cpu().numpy().astype(np.float64))

    def in_weight(self, node: Node, index: int, *, read: bool) -> Own:
        """Return them as they lie along the weight of a product that reads the tensor, or makes it."""
        # Numbers from 1 in their place tell which one each weight is multiplied with, or divided by.
        count = len(self.places)
        numbers, ones = Factors(self.axis, np.arange(1.0, count + 1)), np.ones(node.inputs[index].shape)
        found = (
            Around(numbers).weight(node, index, ones) if read else 1 / Around(made=numbers).weight(node, index, ones)
        )
        for axis in range(found.ndim):
            if (first := found.take([0], axis)).size and (found == first).all():
                found = first
        return replace(self, places=self.places[torch.from_numpy(np.rint(found).astype(np.int64) - 1)])


@dataclass(frozen=True, eq=False)
class Times:
    """What codes of a weight are of, in units of the weight, which it broadcasts with.

    Attributes:
        read: the factors of its data, which its columns make up for.
        made: those of what it makes, which its rows are divided by.
    """

    read: Own | None = None
    made: Own | None = None

    def __call__(self) -> Tensor:
        """Return the product of both."""
        found = torch.ones(()) if self.read is None else self.read()
        return found if self.made is None else found / self.made()

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What they depend on."""
        return tuple(one for own in (self.read, self.made) if own for one in (own.shared.log_factors, own.shared.base))
