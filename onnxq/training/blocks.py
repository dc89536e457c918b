"""Blocks: parts of a module that learn one after the other, with what flows between them on disk.

Each learns to give what the float model gives behind it, from what the quantized blocks before it give, so that it
makes up for their errors (as in BRECQ, Li et al. 2021, and QDrop, Wei et al. 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onnxq.calibration.activations import Activations
from onnxq.training.lessons import Batch, Entries, Lessons, Tensors, as_tensors
from onnxq.training.module import FakeQuantized
from onnxq.training.parts import Part


class Block(nn.Module):
    """A part of a module, to be trained by itself."""

    def __init__(self, whole: FakeQuantized, part: Part, learners: Collection[nn.Module]) -> None:
        """Take a part, and what learns in it; what else it computes with stays."""
        super().__init__()
        self.learners = nn.ModuleList(learners)
        self.part = part
        # Other parameters of it are not this block's.
        self._around = (whole,)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors that it is fed."""
        return tuple(one.name for one in self.part.inputs)

    @property
    def outcome(self) -> tuple[str, ...]:
        """Names of the tensors that it gives."""
        return tuple(one.name for one in self.part.outputs)

    def outputs(self, fed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by output for tensors by input."""
        return self._around[0].outputs(fed, self.part)


def blocks(module: FakeQuantized) -> tuple[Block, ...]:
    """Return the parts of a module, in each of which learns what no part before it computes with."""
    taken, found = set[nn.Module](), []
    for part in module.parts:
        learners = dict.fromkeys(one for node in part.nodes for one in module.learners(node))
        found.append(Block(module, part, [one for one in learners if one not in taken]))
        taken |= learners.keys()
    return tuple(found)


class Flow:
    """Samples on their way through the blocks: what the quantized ones made of them, and the float model."""

    def __init__(self, module: FakeQuantized, coded: Activations, exact: Activations) -> None:
        """Take where both are held; nothing flows yet."""
        self._module, self._coded, self._exact = module, coded, exact
        self._counts: list[int] = []

    def enter(self, batches: Iterable[Batch]) -> range:
        """Add samples before the first block, and return by which places they are known."""
        first = len(self._counts)
        for batch in batches:
            self._coded.put(len(self._counts), _arrays(batch.inputs))
            self._counts.append(batch.count)
        return range(first, len(self._counts))

    def expect(self, block: Block) -> None:
        """Let the float model run a block."""
        with torch.no_grad():
            for place in range(len(self._counts)):
                names = block.inputs
                fed = {**self._coded.of(place, names), **self._exact.of(place, names)}
                self._exact.put(place, _arrays(self._module.exact(self._fed(fed), block.part)))

    def advance(self, block: Block, needed: Collection[str]) -> None:
        """Let the quantized model run a block, and forget all but what is needed from then on."""
        with torch.no_grad():
            for place in range(len(self._counts)):
                self._coded.put(place, _arrays(block.outputs(self._fed(self._coded.of(place, block.inputs)))))
        for held in (self._coded, self._exact):
            held.keep(needed)

    def lessons(self, block: Block, places: Sequence[int]) -> Lessons:
        """Return what a block learns from some of the samples, or is judged by."""
        entries = _Entries([(one, self._counts[one]) for one in places], self._coded, self._exact, block)
        return Lessons(entries, device=self._module.device)

    def _fed(self, arrays: Mapping[str, NDArray[Any]]) -> Tensors:
        return {name: one.to(self._module.device) for name, one in as_tensors(arrays).items()}


@dataclass(frozen=True, eq=False)
class _Entries(Entries[tuple[int, int]]):
    """What a block is fed and what is expected of it, by place and how many samples are there."""

    coded: Activations
    exact: Activations
    block: Block

    def at(self, place: tuple[int, int]) -> Batch:
        """Return the samples of one place."""
        held, count = place
        fed, expected = self.coded.of(held, self.block.inputs), self.exact.of(held, self.block.outcome)
        return Batch(as_tensors(fed), as_tensors(expected), count=count)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: one.detach().cpu().numpy() for name, one in tensors.items()}
