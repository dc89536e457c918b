"""Training of the encodings of a plan: ranges are widened, blocks are trained, then the whole model."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onnxq.algorithms.encodings import Encodings
from onnxq.data.dataset import split
from onnxq.data.inputs import SampleSource
from onnxq.errors import DataError, ModelError, SchemeError
from onnxq.ir import Graph, Node
from onnxq.numerics.affine import QuantParams, sqnr_of_ratio
from onnxq.planning.plan import Plan
from onnxq.search.results import TRAINING, MethodGain
from onnxq.system.resources import Progress
from onnxq.training.blocks import train_blocks
from onnxq.training.learning import copy_state, parameter_groups, train_module
from onnxq.training.losses import CrossEntropy, Distillation, Loss, Task, load_loss
from onnxq.training.module import FakeQuantizedModel
from onnxq.training.program import Subgraph
from onnxq.training.quantizers import FakeQuantize, FakeQuantizedWeight, SharedChannelScales
from onnxq.training.settings import Training
from onnxq.training.training_set import Batch, TrainingSet, can_stack, run_float_model


@dataclass(frozen=True, eq=False)
class TrainedEncodings:
    """The result of training.

    Attributes:
        encodings: encodings of the best state; the initial ones if training did not help.
        gain: the gain in dB on the holdout.
        warnings: warnings about parts that were not trained.
    """

    encodings: Encodings
    gain: MethodGain
    warnings: tuple[str, ...] = ()


def train_encodings(
    graph: Graph,
    plan: Plan,
    encodings: Encodings,
    reference: Path,
    samples: SampleSource,
    training: Training,
    progress: Progress,
) -> TrainedEncodings:
    """Train the encodings of a plan.

    Every fourth sample is held out to choose the best state. Fewer than 8 samples are used for both.

    Args:
        graph: the prepared float graph.
        plan: the plan of `graph`.
        encodings: initial encodings.
        reference: file of the float model.
        samples: samples for training and holdout.
        training: the settings.
        progress: called for the stages ``blocks`` and ``train``.

    Raises:
        ModelError: no parameter of the model can be trained.
        SchemeError: the device does not exist.
        DataError: samples or labels do not fit, or the loss is not finite from the first step on.
        OutputError: the disk has no space for samples.
    """
    module = FakeQuantizedModel(graph, plan, encodings)
    # Few samples look up few rows, and embeddings have more values than all other weights.
    for embedding in module.embeddings:
        embedding.requires_grad_(requires_grad=False)
    if not any(True for _ in parameter_groups(module, training)):
        raise ModelError(
            f"no {' or '.join(training.learn)} of the model are quantized, so training changes nothing; quantize it"
        )
    device = torch_device(training.device)
    module.to(device)
    with ExitStack() as stack:
        task = _open_task(module, reference, samples, training, stack)
        task = task.on(module.device).held(training.memory // 4)
        done = _train(module, encodings, task, training, progress)
    # The processor is worth a word only where it was asked for.
    name = training.device or ("" if device.type == "cpu" else str(device))
    return replace(done, gain=replace(done.gain, device=name))


def torch_device(name: str) -> torch.device:
    """Return the device of a name; of an empty one, the GPU if torch has one, else the processor.

    Raises:
        SchemeError: torch has no such device.

    >>> torch_device("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        # A device without memory, such as meta, returns no values.
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SchemeError(f"torch has no device {name!r} here ({reason}); take cpu, or leave it out") from error
    return device


def _train(
    module: FakeQuantizedModel, encodings: Encodings, task: Task, training: Training, progress: Progress
) -> TrainedEncodings:
    start = time.perf_counter()
    score, before = task.evaluate(module)
    if math.isnan(score):
        raise _no_number(training)
    # Steps that go too far overflow; they are undone and reported.
    with np.errstate(over="ignore", invalid="ignore"):
        kept, undone = _train_in_turn(module, task, training, progress)
    better, after = task.evaluate(module)
    worth = bool(kept) and better < score
    gain = MethodGain(
        TRAINING,
        sqnr_of_ratio(before),
        sqnr_of_ratio(after if worth else before),
        ", ".join(kept) if worth else "",
        time.perf_counter() - start,
        "" if worth else "no lower error",
    )
    without_gradient = module.nodes_without_gradient
    warnings = (
        (f"no gradient passes {', '.join(without_gradient)}, which torch has no function for here",)
        if without_gradient
        else ()
    )
    return TrainedEncodings(module.encodings() if worth else encodings, gain, (*dict.fromkeys(undone), *warnings))


def _train_in_turn(
    module: FakeQuantizedModel, task: Task, training: Training, progress: Progress
) -> tuple[list[str], list[str]]:
    """Widen ranges, train blocks, then the whole model; return sentences about improvements and undone steps."""
    moves = {"scales", "zero-points"} <= set(training.learn)
    kept, undone = ["wider ranges"] if moves and widen_ranges(module, task) else [], list[str]()
    if training.blocks == "first" and training.minutes is not None:
        training = replace(training, minutes=training.minutes / 2)
    if training.blocks == "only" or (training.blocks == "first" and len(module.subgraphs) > 1):
        blocks = train_blocks(module, task, training, progress)
        undone += blocks.undone
        kept += [f"{blocks.better} of {blocks.done} blocks"] if blocks.better else []
    if training.blocks != "only":
        result = train_module(module, task, training, progress)
        if result.undone and not result.epochs:
            raise _no_number(training, f"; or give a smaller rate than {training.rate:g}" if training.rate else "")
        undone += result.undone
        kept += [f"epoch {result.best} of {result.epochs}"] if result.best else []
    return kept, undone


def _no_number(training: Training, advice: str = "") -> DataError:
    """Return the error for a loss or gradient that is not finite."""
    what = "the error beside the float model"
    if training.labels is not None:
        what = f"the cross entropy of the labels {training.labels}"
    elif training.loss:
        what = f"loss {training.loss!r}"
    return DataError(
        f"{what} or its gradient is not finite at the first step; look for a logarithm, root or division of zero "
        f"there or in the model{advice}"
    )


def _open_task(
    module: FakeQuantizedModel, reference: Path, samples: SampleSource, training: Training, stack: ExitStack
) -> Task:
    """Read the samples once, keep them until the stack closes, and choose the loss."""
    train, holdout = split(samples)
    labelled = Path(training.labels) if training.labels is not None else None
    # Half of the memory is for the activations between blocks.
    first, *splits = (
        stack.enter_context(closing(run_float_model(reference, some, labelled, training.memory // 4)))
        for some in ((train,) if holdout is train else (train, holdout))
    )
    rest = splits[0] if splits else first
    # Dynamic quantization takes one scale for all stacked samples.
    stacked = not module.is_dynamic and can_stack(module, first)
    distillation = Distillation.of(first)
    loss: Loss = distillation
    if labelled is not None:
        loss = CrossEntropy.of(first, rest)
    elif training.loss:
        loss = load_loss(training.loss)
    training_set, evaluated_on = (TrainingSet(some, stacked, module.device) for some in (first, rest))
    return Task(loss, training_set, evaluated_on, distillation)


# Wider ranges for channel scales. A Gelu's least value is -0.17 in every channel: with a range from there to 14, 3
# quantized values lie below zero, so no channel can have a finer scale. With a few more below zero, it can.

# Least channel scale: a channel keeps at least 4 of 8 bits.
_MIN_SCALE = 1 / 16
# Margin for other samples, on the largest value of a channel.
_RANGE_MARGIN = 1.1
# A smaller reduction of the error may be chance on few samples.
_MAX_ERROR_RATIO = 0.9
_TINY = 1e-9


@dataclass(frozen=True)
class RangeWidening:
    """How ranges are widened and channel scales chosen.

    Attributes:
        min_side: least share of the quantized values on either side of zero.
        power: a channel that uses a share of its side gets that share to this power as scale.
    """

    min_side: float
    power: float


_WIDENINGS = (RangeWidening(0.07, 0.7), RangeWidening(0.15, 0.7), RangeWidening(0.07, 0.5))
_Ends = tuple[Tensor, Tensor]


def widen_ranges(module: FakeQuantizedModel, task: Task) -> bool:
    """Take wider ranges and other channel scales if they clearly lower the error on the holdout; return True if taken.

    Only trainable channel scales change, and only ranges that are not fixed and include zero. Models of several float
    inputs are left alone: one input is most often a state, which goes further than few samples show.
    """
    if sum(tensor.is_floating_point() for tensor in task.training_set.samples[0].inputs.values()) > 1:
        return False
    if not any(own.shared.log_channel_scales.requires_grad for own in module.channels.by_tensor.values()):
        return False
    before, ends = copy_state(module), _ends(module, task.training_set.samples)
    best, (_, least) = before, task.evaluate(module)
    for widening in _WIDENINGS:
        _apply_widening(module, ends, widening)
        _, nsr = task.evaluate(module)
        if nsr < _MAX_ERROR_RATIO * least:
            best, least = copy_state(module), nsr
        module.load_state_dict(before)
    module.load_state_dict(best)
    return best is not before


def _ends(module: FakeQuantizedModel, batches: Sequence[Batch]) -> dict[str, _Ends]:
    """Return the range of each channel with scales in the float model, zero included."""
    ends: dict[str, _Ends] = {}

    def note(node: Node, index: int, value: Tensor) -> Tensor:
        name = node.inputs[index].name
        if (own := module.channels.by_tensor.get(name)) is not None:
            rows = value.movedim(own.axis, 0).flatten(1)
            low, high = ends.get(name, (rows.new_zeros(()), rows.new_zeros(())))
            ends[name] = low.minimum(rows.amin(1)), high.maximum(rows.amax(1))
        return value

    with torch.no_grad():
        for batch in batches:
            module.float_outputs(batch.to(module.device).inputs, Subgraph.whole(module.graph), note)
    return ends


def _apply_widening(module: FakeQuantizedModel, ends: Mapping[str, _Ends], widening: RangeWidening) -> None:
    """Widen ranges, set the channel scales that fit, and then the scales of the weights."""
    owns, wanted = module.channels.by_tensor, dict[SharedChannelScales, Tensor]()
    for quantizer in dict.fromkeys(module.quantizer_of(name) for name in ends):
        _widen(quantizer, widening.min_side)
    with torch.no_grad():
        for name, (low, high) in ends.items():
            own, quantizer = owns[name], module.quantizer_of(name)
            least, greatest = _range(quantizer)
            used = (low / min(least, -_TINY)).maximum(high / max(greatest, _TINY)) * _RANGE_MARGIN
            factors = wanted.setdefault(own.shared, torch.zeros_like(own.shared.base))
            factors.scatter_reduce_(0, own.places.to(used.device), used.clamp(_MIN_SCALE, 1) ** widening.power, "amax")
        for shared, factors in wanted.items():
            shared.start_from(factors)
        for weight in module.modules():
            if isinstance(weight, FakeQuantizedWeight) and weight.channel_scales is not None:
                weight.observe(weight.product)


def _range(quantizer: FakeQuantize) -> tuple[float, float]:
    """Return the least and greatest values that a quantizer represents."""
    now = quantizer.parameters_now()
    zero = 0.0 if now.zero_point is None else float(now.zero_point)
    least, greatest = ((end - zero) * float(now.scale) for end in (quantizer.format.minimum, quantizer.format.maximum))
    return least, greatest


def _widen(quantizer: FakeQuantize, min_side: float) -> None:
    """Give either side of zero at least a share of the quantized values, if the range is free."""
    if not quantizer.is_range_free:
        return
    least, greatest = _range(quantizer)
    short = min_side * (greatest - least)
    least, greatest = min(least, -short), max(greatest, short)
    scale = (greatest - least) / (quantizer.format.maximum - quantizer.format.minimum)
    zero = np.array(round(quantizer.format.minimum - least / scale), quantizer.format.dtype)
    quantizer.start_from(QuantParams(np.array(scale, np.float32), zero))
