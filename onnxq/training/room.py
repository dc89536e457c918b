"""Room for factors of channels: where zero lies close to one end of the codes, no channel could be finer.

A Gelu's least value is -0.17 in every channel, so that codes from there to 14 leave all channels 3 codes below zero,
however little of the others they use. With a few more codes below zero, factors make each channel as fine as it can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onnxq.ir import Node
from onnxq.numerics.affine import Parameters
from onnxq.training.factors import Shared
from onnxq.training.lessons import Batch
from onnxq.training.losses import Task
from onnxq.training.module import FakeQuantized
from onnxq.training.parts import Part
from onnxq.training.quantizers import FakeQuantize, FakeQuantizedWeight
from onnxq.training.rates import copied

# What a channel uses of its side, at least: 4 bits of the codes of 8.
_SMALLEST = 1 / 16
# In other samples channels go so much further.
_BEYOND = 1.1
# What takes off less noise on few samples may be luck.
_WORTH = 0.9
_TINY = 1e-9


@dataclass(frozen=True)
class Room:
    """How ranges and factors are chosen.

    Attributes:
        side: the part of the codes that either side of zero has at least.
        power: of the part of its side that a channel uses, which is its factor then.
    """

    side: float
    power: float


_TRIED = (Room(0.07, 0.7), Room(0.15, 0.7), Room(0.07, 0.5))
_Ends = tuple[Tensor, Tensor]


def make_room(module: FakeQuantized, task: Task) -> bool:
    """Take other ranges and factors where these have plainly less noise on held samples; return whether it did.

    Only factors that learn become others, and only ranges that are open and have zero inside. Of several inputs of
    floats one is most often a state, by which channels go further than few samples show: it stays as it is.
    """
    if sum(one.is_floating_point() for one in task.lessons.single[0].inputs.values()) > 1:
        return False
    if not any(own.shared.log_factors.requires_grad for own in module.channels.own.values()):
        return False
    before, ends = copied(module), _ends(module, task.lessons.single)
    best, (_, least) = before, task.measured(module)
    for room in _TRIED:
        _take(module, ends, room)
        _, noise = task.measured(module)
        if noise < _WORTH * least:
            best, least = copied(module), noise
        module.load_state_dict(before)
    module.load_state_dict(best)
    return best is not before


def _ends(module: FakeQuantized, lessons: Sequence[Batch]) -> dict[str, _Ends]:
    """Return the least and greatest values that channels with factors have in the float model, zero among them."""
    found: dict[str, _Ends] = {}

    def note(node: Node, index: int, value: Tensor) -> Tensor:
        name = node.inputs[index].name
        if (own := module.channels.own.get(name)) is not None:
            rows = value.movedim(own.axis, 0).flatten(1)
            low, high = found.get(name, (rows.new_zeros(()), rows.new_zeros(())))
            found[name] = low.minimum(rows.amin(1)), high.maximum(rows.amax(1))
        return value

    with torch.no_grad():
        for batch in lessons:
            module.exact(batch.on(module.device).inputs, Part.whole(module.graph), note)
    return found


def _take(module: FakeQuantized, ends: Mapping[str, _Ends], room: Room) -> None:
    """Give ranges room and channels the factors that follow, and weights the scales that they need then."""
    owns, wanted = module.channels.own, dict[Shared, Tensor]()
    for quantizer in dict.fromkeys(module.quantizer_of(name) for name in ends):
        _widen(quantizer, room.side)
    with torch.no_grad():
        for name, (low, high) in ends.items():
            own, quantizer = owns[name], module.quantizer_of(name)
            least, greatest = _range(quantizer)
            used = (low / min(least, -_TINY)).maximum(high / max(greatest, _TINY)) * _BEYOND
            factors = wanted.setdefault(own.shared, torch.zeros_like(own.shared.base))
            factors.scatter_reduce_(0, own.places, used.clamp(_SMALLEST, 1) ** room.power, "amax")
        for shared, factors in wanted.items():
            shared.start_from(factors)
        for weight in module.modules():
            if isinstance(weight, FakeQuantizedWeight) and weight.times is not None:
                weight.observe(weight.product)


def _range(quantizer: FakeQuantize) -> tuple[float, float]:
    """Return the least and greatest values that its codes stand for."""
    now = quantizer.parameters_now()
    zero = 0.0 if now.zero_point is None else float(now.zero_point)
    least, greatest = ((end - zero) * float(now.scale) for end in (quantizer.format.minimum, quantizer.format.maximum))
    return least, greatest


def _widen(quantizer: FakeQuantize, side: float) -> None:
    """Give either side of zero so many codes at least, where that is open."""
    if not quantizer.moves:
        return
    least, greatest = _range(quantizer)
    short = side * (greatest - least)
    least, greatest = min(least, -short), max(greatest, short)
    scale = (greatest - least) / (quantizer.format.maximum - quantizer.format.minimum)
    zero = np.array(round(quantizer.format.minimum - least / scale), quantizer.format.dtype)
    quantizer.start_from(Parameters(np.array(scale, np.float32), zero))
