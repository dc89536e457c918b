"""Steps of the optimiser, relative to the size of what learns, and how large the first ones may be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from onnxq.training.lessons import Batch
from onnxq.training.losses import Learner, Loss, Task
from onnxq.training.quantizers import FakeQuantizedBias, FakeQuantizedWeight
from onnxq.training.settings import RATE, Training

_BATCH = 32
# Of few samples, a step takes so small a part.
_PART = 8
# What else learns as what, and how much larger its rate is.
_OTHERS = {"log_scale": ("scales", 1.0), "zero_point": ("zero-points", 10.0), "log_factors": ("scales", 30.0)}
# A weight of so few codes that this many steps between two are more than its values changes as if they were as large:
# otherwise training of 2 bits would end before a code is another.
_CODES = 4.0
# A tensor of zeros changes as if its values were of this size.
_SMALLEST = 1e-3
_NORM = 1.0
# Parts of the usual rate that are tried first, each for so many steps. What is far from faithful learns best in large
# steps, of which a few are the end of a deep network that is faithful already.
_SHARES, _TRIED = (1.0, 1 / 3, 1 / 9, 1 / 27), 12


def usual_batch(count: int) -> int:
    """Return how many samples of so many a step takes."""
    return min(_BATCH, max(count // _PART, 1))


def parameter_groups(module: Learner, training: Training) -> Iterator[dict[str, Any]]:
    """Yield the parameters that learn, each with its own rate, as optimisers of torch take them."""
    biases = {id(one.values) for one in module.modules() if isinstance(one, FakeQuantizedBias)}
    steps = {id(one.values): one.step for one in module.modules() if isinstance(one, FakeQuantizedWeight)}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = name.rpartition(".")[2]
        if kind == "values":
            what = "biases" if id(parameter) in biases else "weights"
            size = float(parameter.detach().square().mean().sqrt())
            rate = max(size, _CODES * steps.get(id(parameter), 0.0), _SMALLEST)
        else:
            what, rate = _OTHERS[kind]
        if what in training.learn:
            yield {"params": [parameter], "lr": 0.0, "largest": rate * (training.rate or RATE)}


def order_of(task: Task, training: Training, epoch: int) -> list[int]:
    """Return the order in which an epoch sees the samples."""
    random = torch.Generator().manual_seed(training.seed * 1_000_003 + epoch)
    found: list[int] = torch.randperm(len(task.lessons), generator=random).tolist()
    return found


def step(module: Learner, optimizer: torch.optim.Optimizer, loss: Loss, some: list[Batch], rate: float) -> float:
    """Take a step and return the loss, or take none where that, or the gradient, is no number, and return which."""
    optimizer.zero_grad()
    count, total = sum(batch.count for batch in some), 0.0
    weights = [one for one in module.modules() if isinstance(one, FakeQuantizedWeight)]
    for weight in weights:
        weight.once = len(some) > 1
    for batch in some:
        found = loss(module.outputs(batch.inputs), batch) * (batch.count / count)
        total += float(found.detach())
        if math.isfinite(total) and found.requires_grad:
            found.backward()
    for weight in weights:
        weight.release()
    if not math.isfinite(total):
        return total
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not math.isfinite(float(nn.utils.clip_grad_norm_(parameters, _NORM))):
        return math.nan
    for group in optimizer.param_groups:
        group["lr"] = group["largest"] * rate
    optimizer.step()
    return total


def first_share(module: Learner, task: Task, training: Training) -> float:
    """Return the part of the usual rate that does best in a few steps, on what nothing is learned from.

    From the largest on, until a smaller one does worse. The module is left as it was.
    """
    before, best, least = copied(module), _SHARES[0], math.inf
    for share in _SHARES:
        score = _tried(module, task, training, share)
        module.load_state_dict(before)
        if score > least:
            break
        if score < least:
            best, least = share, score
    return best


def _tried(module: Learner, task: Task, training: Training, share: float) -> float:
    """Return what a module is compared by after a few steps, whose rate falls to nothing; infinity if one fails."""
    optimizer = torch.optim.Adam(list(parameter_groups(module, training)))
    size = training.batch or usual_batch(len(task.lessons))
    count = min(_TRIED, -(-len(task.lessons) // size))
    steps = islice(task.lessons.batches(order_of(task, training, 0), size), count)
    for number, some in enumerate(steps):
        if not math.isfinite(step(module, optimizer, task.loss, some, share * falling(number / count))):
            return math.inf
    score, _ = task.measured(module)
    return math.inf if math.isnan(score) else score


def falling(share: float) -> float:
    """Return how large a rate still is, in units of the first, when so much of the training is over: along a cosine.

    >>> falling(0.5)
    0.5
    """
    return (1 + math.cos(math.pi * min(share, 1))) / 2


def copied(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module, which does not change with it."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
