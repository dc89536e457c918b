"""Blocks one after the other: each learns, is kept where held-out samples say that it is better, and feeds the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from onnxq.calibration.activations import Activations
from onnxq.errors import DataError
from onnxq.system.resources import Progress, silent
from onnxq.training.blocks import Block, Flow, blocks
from onnxq.training.checkpoints import Checkpoint
from onnxq.training.learning import learn
from onnxq.training.lessons import Batch, Lessons
from onnxq.training.losses import Distillation, Task
from onnxq.training.module import FakeQuantized
from onnxq.training.rates import usual_batch
from onnxq.training.settings import Standing, Training


@dataclass(eq=False)
class Sequence:
    """How far a module's blocks have learned.

    Attributes:
        done: how many came to their turn.
        better: how many of them are better than they were.
        undone: sentences about steps whose loss was no number.
    """

    done: int = 0
    better: int = 0
    undone: list[str] = field(default_factory=list)


def learn_blocks(
    module: FakeQuantized,
    task: Task,
    training: Training,
    keep: Checkpoint,
    progress: Progress,
) -> Sequence:
    """Let the blocks of a module learn one after the other what the float model gives behind them.

    Args:
        module: whose blocks they are.
        task: with the samples; its loss and noise are not looked at.
        training: how each learns.
        keep: where it stands after each block is kept, and what was kept is gone on with.
        progress: told of the stage ``blocks``.
    """
    found, kept = blocks(module), keep.load()
    so_far = Sequence(**kept["sequence"]) if kept is not None else Sequence()
    if kept is not None:
        module.load_state_dict(kept["module"])
    if so_far.done == len(found):
        return so_far
    size = training.batch or usual_batch(len(task.lessons))
    # Samples are stacked as they enter, for behind that nothing says which axis tells them apart.
    minutes = None if training.minutes is None else training.minutes / len(found)
    alone = replace(training, batch=1 if task.lessons.stacked else size, minutes=minutes)
    with ExitStack() as held:
        flow = Flow(module, *(held.enter_context(Activations(training.memory // 4)) for _ in range(2)))
        learned, judged = (flow.enter(_entering(lessons, size)) for lessons in (task.lessons, task.held))
        for number, block in enumerate(found):
            progress("blocks", number, len(found))
            flow.expect(block)
            if number >= so_far.done:
                one = replace(alone, told=_numbered(training.told, progress, number, len(found)))
                _learn(block, flow.lessons(block, learned), flow.lessons(block, judged), one, so_far)
                keep.save({"sequence": vars(so_far), "module": module.state_dict()})
            flow.advance(block, {name for later in found[number + 1 :] for name in later.inputs})
        progress("blocks", len(found), len(found))
    return so_far


def _numbered(
    told: Callable[[Standing], None] | None, progress: Progress, number: int, count: int
) -> Callable[[Standing], None]:
    """Return what is told where a block stands."""

    def tell(standing: Standing) -> None:
        if told is not None:
            told(replace(standing, block=number + 1, blocks=count))
        progress("blocks", number, count)

    return tell


def _entering(lessons: Lessons, size: int) -> Iterator[Batch]:
    for some in lessons.batches(range(len(lessons)), size if lessons.stacked else 1):
        yield from some


def _learn(block: Block, lessons: Lessons, held: Lessons, training: Training, so_far: Sequence) -> None:
    """Let a block learn, and note what became of it."""
    so_far.done += 1
    try:
        noise = Distillation.of(lessons.single)
    except DataError:
        # It gives no floats that something could be learned from.
        return
    if noise.signals and any(one.requires_grad for one in block.parameters()):
        found = learn(block, Task(noise, lessons, held, noise), training, Checkpoint(None), silent)
        so_far.better += found.best > 0
        so_far.undone += (f"block {so_far.done}: {one}" for one in found.undone)
