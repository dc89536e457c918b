"""Codes of a plan, trained: what the steps of the house ask training for."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from onnxq.algorithms.codes import Codes
from onnxq.data.dataset import split
from onnxq.data.inputs import SampleSource
from onnxq.errors import DataError, ModelError, SchemeError
from onnxq.ir import Graph
from onnxq.numerics.affine import decibels
from onnxq.planning.plan import Plan
from onnxq.search.refinement import TRAINING, Gain
from onnxq.system.resources import Progress
from onnxq.training.checkpoints import Checkpoint, key_of
from onnxq.training.learning import learn
from onnxq.training.lessons import Lessons, read_lessons, stackable
from onnxq.training.losses import CrossEntropy, Distillation, Loss, Task, own_text, user_loss
from onnxq.training.module import FakeQuantized
from onnxq.training.rates import parameter_groups
from onnxq.training.room import make_room
from onnxq.training.sequence import learn_blocks
from onnxq.training.settings import Training


@dataclass(frozen=True, eq=False)
class Fitted:
    """Codes after training, and what that did.

    Attributes:
        codes: of the best state, those to begin with where none was better.
        gain: decibels on samples that nothing was learned from.
        doubts: sentences about what could not be learned.
    """

    codes: Codes
    gain: Gain
    doubts: tuple[str, ...] = ()


def fitted(
    graph: Graph,
    plan: Plan,
    codes: Codes,
    reference: Path,
    samples: SampleSource,
    training: Training,
    state: Path | None,
    progress: Progress,
) -> Fitted:
    """Train the codes of a plan on samples.

    Every fourth sample is held out, and says which state is the best; of fewer than 8 all do both.

    Args:
        graph: the prepared float graph.
        plan: what becomes of it.
        codes: to begin with.
        reference: file of the float model.
        samples: to learn from and to compare by.
        training: how.
        state: a folder that keeps where training stands, so that a killed one is gone on with; None keeps nothing.
        progress: told of the stage ``train``.

    Raises:
        ModelError: nothing of the model can learn.
        SchemeError: there is no such device.
        DataError: samples or labels are none to learn from, or the loss is no number from the first step on.
        OutputError: the disk has no room for samples, or for where training stands.
    """
    module = FakeQuantized(graph, plan, codes)
    # What few samples look up says nothing of the other rows, of which there are more than of all other weights.
    for table in module.tables:
        table.requires_grad_(requires_grad=False)
    if not any(True for _ in parameter_groups(module, training)):
        raise ModelError(f"no {' or '.join(training.learn)} of the model become codes, so nothing learns; quantize it")
    module.to(device_of(training.device))
    with ExitStack() as held:
        task = _task(module, reference, samples, training, held)
        return _fitted(module, codes, task, training, state, progress)


def device_of(name: str) -> torch.device:
    """Return the device of a name; of an empty one a GPU where there is one.

    Raises:
        SchemeError: torch has no such device here.

    >>> device_of("cpu")
    device(type='cpu')
    """
    try:
        found = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        # A device without memory, such as meta, gives nothing back.
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SchemeError(f"device {name!r} is none of torch here ({reason}); take cpu, or leave it out") from error
    return found


def _fitted(
    module: FakeQuantized, codes: Codes, task: Task, training: Training, state: Path | None, progress: Progress
) -> Fitted:
    start = time.perf_counter()
    key = key_of(
        (
            module.plan.effect,
            training,
            *module.state_dict().values(),
            own_text(training.loss),
            *(one for lessons in (task.lessons, task.held) for each in lessons.single for one in each.given),
        )
    )
    score, before = task.measured(module)
    if math.isnan(score):
        raise _no_number(training)
    # Steps that go too far overflow, which is undone and told.
    with np.errstate(over="ignore", invalid="ignore"):
        kept, undone = _learned(module, task, training, (state, key), progress)
    better, after = task.measured(module)
    worth = bool(kept) and better < score
    gain = Gain(
        TRAINING,
        decibels(before),
        decibels(after if worth else before),
        ", ".join(kept) if worth else "",
        time.perf_counter() - start,
        "" if worth else "no less noise",
    )
    frozen = module.frozen
    told = (f"no gradient passes {', '.join(frozen)}, which torch has no function for here",) if frozen else ()
    return Fitted(module.codes() if worth else codes, gain, (*dict.fromkeys(undone), *told))


def _learned(
    module: FakeQuantized, task: Task, training: Training, keep: tuple[Path | None, str], progress: Progress
) -> tuple[list[str], list[str]]:
    """Let blocks and the whole learn; return what is better for it, in words, and what was undone."""
    moves = {"scales", "zero-points"} <= set(training.learn)
    kept, undone = ["room for factors"] if moves and make_room(module, task) else [], list[str]()
    if training.blocks == "first" and training.minutes is not None:
        training = replace(training, minutes=training.minutes / 2)
    if training.blocks == "only" or (training.blocks == "first" and len(module.parts) > 1):
        blocks = learn_blocks(module, task, training, Checkpoint.of("blocks", *keep), progress)
        undone += blocks.undone
        kept += [f"{blocks.better} of {blocks.done} blocks"] if blocks.better else []
    if training.blocks != "only":
        found = learn(module, task, training, Checkpoint.of("whole", *keep), progress)
        if found.undone and not found.epochs:
            raise _no_number(training, f"; or give a smaller rate than {training.rate:g}" if training.rate else "")
        undone += found.undone
        kept += [f"epoch {found.best} of {found.epochs}"] if found.best else []
    return kept, undone


def _no_number(training: Training, advice: str = "") -> DataError:
    """Return what is said of a loss, or of its gradient, that no step can be taken by."""
    what = "the noise beside the float model"
    if training.labels is not None:
        what = f"the cross entropy of the labels {training.labels}"
    elif training.loss:
        what = f"loss {training.loss!r}"
    return DataError(
        f"{what} or its gradient is no finite number from the first step on, so nothing can be learned; look for a "
        f"logarithm, a root or a division of zero there or in the model{advice}"
    )


def _task(module: FakeQuantized, reference: Path, samples: SampleSource, training: Training, held: ExitStack) -> Task:
    """Return what is to be learned, from samples that are read once and held as long as the stack says."""
    learned, other = split(samples)
    labelled = Path(training.labels) if training.labels is not None else None
    # Half of the memory is for what flows between blocks.
    first, *others = (
        held.enter_context(closing(read_lessons(reference, some, labelled, training.memory // 4)))
        for some in ((learned,) if other is learned else (learned, other))
    )
    rest = others[0] if others else first
    # What a run says of all data at once it says otherwise of several samples.
    stacked = not module.is_dynamic and stackable(module, first)
    noise = Distillation.of(first)
    loss: Loss = noise
    if labelled is not None:
        loss = CrossEntropy.of(first, rest)
    elif training.loss:
        loss = user_loss(training.loss)
    lessons, judged = (Lessons(some, stacked, module.device) for some in (first, rest))
    return Task(loss, lessons, judged, noise)
