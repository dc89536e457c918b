"""Training of blocks one after the other, with the activations between them on disk.

A block gets the activations of the quantized blocks before it and learns those of the float model, so it compensates
for their errors (as in BRECQ, Li et al. 2021, and QDrop, Wei et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from onnxq.errors import DataError
from onnxq.system.resources import Progress, silent
from onnxq.training.activations import Activations
from onnxq.training.learning import default_batch_size, train_module
from onnxq.training.losses import Distillation, Task
from onnxq.training.module import Block, FakeQuantizedModel, blocks_of
from onnxq.training.settings import Training, TrainingProgress
from onnxq.training.training_set import Batch, StoredBatches, Tensors, TrainingSet, as_tensors


class BlockActivations:
    """The activations of all samples between two blocks, of the quantized blocks and of the float model."""

    def __init__(self, module: FakeQuantizedModel, quantized: Activations, exact: Activations) -> None:
        self._module, self._quantized, self._exact = module, quantized, exact
        self._counts: list[int] = []

    def add_samples(self, batches: Iterable[Batch]) -> range:
        """Add samples before the first block, and return their indices."""
        first = len(self._counts)
        for batch in batches:
            self._quantized.put(len(self._counts), _arrays(batch.inputs))
            self._counts.append(batch.count)
        return range(first, len(self._counts))

    def run_float(self, block: Block) -> None:
        """Run a block of the float model."""
        with torch.no_grad():
            for index in range(len(self._counts)):
                names = block.inputs
                fed = {**self._quantized.of(index, names), **self._exact.of(index, names)}
                self._exact.put(index, _arrays(self._module.float_outputs(self._fed(fed), block.subgraph)))

    def run_quantized(self, block: Block, needed: Collection[str]) -> None:
        """Run a quantized block, and keep only the tensors that later blocks need."""
        with torch.no_grad():
            for index in range(len(self._counts)):
                self._quantized.put(index, _arrays(block.outputs(self._fed(self._quantized.of(index, block.inputs)))))
        for held in (self._quantized, self._exact):
            held.keep(needed)

    def training_set(self, block: Block, indices: Sequence[int]) -> TrainingSet:
        """Return the inputs of a block with the float model's outputs, for some samples."""

        def read(index: int) -> Batch:
            fed, expected = self._quantized.of(index, block.inputs), self._exact.of(index, block.output_names)
            return Batch(as_tensors(fed), as_tensors(expected), count=self._counts[index])

        return TrainingSet(StoredBatches(read, indices), device=self._module.device)

    def _fed(self, arrays: Mapping[str, NDArray[Any]]) -> Tensors:
        return {name: tensor.to(self._module.device) for name, tensor in as_tensors(arrays).items()}


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


@dataclass(eq=False)
class BlockResults:
    """The results of the blocks trained so far.

    Attributes:
        done: number of blocks trained.
        better: number of these that improved.
        undone: sentences about steps whose loss was not finite.
    """

    done: int = 0
    better: int = 0
    undone: list[str] = field(default_factory=list)


def train_blocks(module: FakeQuantizedModel, task: Task, training: Training, progress: Progress) -> BlockResults:
    """Train the blocks of a module one after the other towards the float model's activations.

    Args:
        module: the module, which is trained in place.
        task: the samples; its loss is not used.
        training: settings of each block.
        progress: called for the stage ``blocks``.
    """
    blocks, so_far = blocks_of(module), BlockResults()
    size = training.batch or default_batch_size(len(task.training_set))
    # Samples are stacked at the first block: later, the axis of samples is not known.
    minutes = None if training.minutes is None else training.minutes / len(blocks)
    alone = replace(training, batch=1 if task.training_set.stacked else size, minutes=minutes)
    with ExitStack() as stack:
        flow = BlockActivations(module, *(stack.enter_context(Activations(training.memory // 4)) for _ in range(2)))
        trained, held_out = (
            flow.add_samples(
                batch for step in samples.batches(range(len(samples)), size if samples.stacked else 1) for batch in step
            )
            for samples in (task.training_set, task.holdout)
        )
        for number, block in enumerate(blocks):
            progress("blocks", number, len(blocks))
            flow.run_float(block)
            settings = replace(alone, on_progress=_numbered(training.on_progress, progress, number, len(blocks)))
            train, holdout = (flow.training_set(block, indices) for indices in (trained, held_out))
            _train_block(block, train, holdout, settings, so_far)
            flow.run_quantized(block, {name for later in blocks[number + 1 :] for name in later.inputs})
        progress("blocks", len(blocks), len(blocks))
    return so_far


def _numbered(
    on_progress: Callable[[TrainingProgress], None] | None, progress: Progress, number: int, count: int
) -> Callable[[TrainingProgress], None]:
    """Return a callback that adds the number of the block."""

    def report(state: TrainingProgress) -> None:
        if on_progress is not None:
            on_progress(replace(state, block=number + 1, blocks=count))
        progress("blocks", number, count)

    return report


def _train_block(
    block: Block, training_set: TrainingSet, holdout: TrainingSet, training: Training, so_far: BlockResults
) -> None:
    so_far.done += 1
    try:
        loss = Distillation.of(training_set.samples)
    except DataError:
        # The block has no float output that is not zero.
        return
    if any(parameter.requires_grad for parameter in block.parameters()):
        task = Task(loss, training_set, holdout, loss).held(training.memory // 4)
        result = train_module(block, task, training, silent)
        so_far.better += result.best > 0
        so_far.undone += (f"block {so_far.done}: {sentence}" for sentence in result.undone)
