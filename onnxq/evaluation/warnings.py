"""Warnings about samples that may not be representative, as far as they and the float model's outputs show it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.calibration.accumulators import Range
from onnxq.calibration.methods import find_doubtful_masks
from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.dataset import Subset
from onnxq.data.inputs import Sample, SampleSource, is_floating
from onnxq.data.samples import evenly
from onnxq.errors import DataError, ModelError
from onnxq.evaluation.agreement import OutputAgreement
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.outputs import OutputPart
from onnxq.evaluation.probabilities import are_shares
from onnxq.evaluation.reference import ReferenceModel
from onnxq.ir.stored_tensors import is_large
from onnxq.numerics.affine import decibels
from onnxq.runtime.sessions import Array

# Fewer samples cannot be split into calibration and holdout sets.
_FEW = 8
INSPECTED_SAMPLES = 64
"""Number of samples that are read for warnings."""
RUN_SAMPLES = 8
"""Number of samples that are run for warnings."""
_SHOWN = 3


def find_sample_warnings(model: Path, looked: Sequence[Sample], count: int) -> tuple[str, ...]:
    """Return in sentences why results on some samples may not hold for others.

    Args:
        model: file of the float model; one above 1 GiB is not run.
        looked: the samples, or some from all over, of which at most 8 are run.
        count: number of all samples.

    Raises:
        DataError: A sample cannot be read, or a run fails.
        ModelError: All outputs of the float model are NaN or infinite, so no other model can be compared with it.
    """
    warnings = [*_of_inputs(looked, count)]
    if not is_large(model):
        warnings += _of_outputs(model, list(evenly(looked, RUN_SAMPLES)))
    return tuple(warnings)


def reject_constant_samples(looked: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples, unless each holds a single value in each input, such as zeros.

    Raises:
        DataError: Each sample has float inputs of several elements, each holds a single value, and other inputs do not
            vary.
    """
    if not looked or not all(map(_is_silent, looked)) or _differ_otherwise(looked):
        return looked
    raise DataError(
        f"{f'all {len(looked)} inspected samples hold' if len(looked) > 1 else 'the only sample holds'} a single value "
        "in each input, such as zeros, expected values that the model will see; give some 50 of its real inputs"
    )


def drop_equal_samples(samples: SampleSource, looked: Sequence[Sample]) -> SampleSource:
    """Return the samples without repetitions, as equal samples do not confirm each other.

    Args:
        samples: all of them; read only if some are equal.
        looked: some of them from all over; if no two of these are equal, none are assumed to be.
    """
    if len({sample_digest(sample) for sample in looked}) == len(looked):
        return samples
    first: dict[str, int] = {}
    for place, sample in enumerate(samples):
        first.setdefault(sample_digest(sample), place)
    return Subset(samples, sorted(first.values()))


def warn_unmeasured_nodes(views: ComparisonSpec) -> Iterator[str]:
    """Warn of nodes whose quantization error does not show in the compared tensors; see `ComparisonSpec`."""
    if views.unseen:
        nodes = ", ".join(views.unseen[:_SHOWN]) + (", ..." if len(views.unseen) > _SHOWN else "")
        yield (
            f"the quantization error of {nodes} is not measured, because {', '.join(views.decided)} depend on choices "
            "of the model; evaluate with --metric"
        )


def warn_mask_values(statistics: CalibrationStatistics, tensors: Iterable[str]) -> Iterator[str]:
    """Warn of tensors with values that get no range, as they look like the constants of attention masks."""
    seen = {tensor: statistics.of(tensor).find(Range) for tensor in tensors}
    masks = find_doubtful_masks({tensor: span for tensor, span in seen.items() if span is not None})
    if masks:
        tensor, value = next(iter(masks.items()))
        others = f", as in {len(masks) - 1} other tensors" if len(masks) > 1 else ""
        yield (
            f"values of {tensor} such as {value:g} look like an attention mask{others}, so its range leaves them out; "
            "if they are data, use --range extremes"
        )


def warn_weak_slices(outputs: Iterable[OutputAgreement], wanted: float) -> tuple[str, ...]:
    """Warn of parts of outputs below the wanted SQNR, if the whole output hides them.

    Args:
        outputs: of a model, with the SQNR of their parts.
        wanted: SQNR in decibels.
    """
    return tuple(
        f"output {output.name} has {decibels(part.sqnr)} in {_entries(part)} of axis {part.axis} ({part.made_by}), "
        f"but {decibels(output.sqnr)} in all; evaluate with --metric" + _asking_for(output.sqnr + wanted - part.sqnr)
        for output in outputs
        for part in output.parts
        if output.sqnr is not None and part.sqnr is not None and part.sqnr < wanted <= output.sqnr
    )


def _entries(part: OutputPart) -> str:
    count = part.stop - part.start
    return f"entry {part.start}" if count == 1 else f"entries {part.start} to {part.stop - 1}"


def _asking_for(sqnr: float) -> str:
    """Return a higher goal for the whole output that would help the part; "" if the part is silent."""
    return f", or ask for --min-sqnr {math.ceil(sqnr)}" if math.isfinite(sqnr) else ""


def _of_inputs(looked: Sequence[Sample], count: int) -> Iterator[str]:
    if count < _FEW:
        few = f"{count} samples are" if count > 1 else "one sample is"
        rows = {len(array) if array.ndim else 1 for sample in looked for array in sample.values()}
        apart = ", or --batch 1 if their rows are samples" if 1 not in rows else ""
        yield f"{few} too few to represent real inputs; give 50 or more{apart}"
    of = f"of {len(looked)} samples" if count <= len(looked) else f"of {len(looked)} inspected samples (of {count})"
    if equal := len(looked) - len({sample_digest(sample) for sample in looked}):
        yield f"{equal} {of} repeat others and count once; give different samples"
    if silent := sum(map(_is_silent, looked)):
        yield f"{silent} {of} hold a single value in every float input and set no ranges"


def _is_silent(sample: Sample) -> bool:
    arrays = [array for array in sample.values() if is_floating(array.dtype) and array.size > 1]
    return bool(arrays) and all(bool((array == array.flat[0]).all()) for array in arrays)


def _differ_otherwise(looked: Sequence[Sample]) -> bool:
    """Return whether inputs that are not float, such as tokens beside a mask, have several values."""
    others = [{name: array for name, array in sample.items() if not is_floating(array.dtype)} for sample in looked]
    hold = any(
        array.size > 1 and bool((array != array.flat[0]).any()) for sample in others for array in sample.values()
    )
    return hold or len(set(map(sample_digest, others))) > 1


def _of_outputs(model: Path, samples: Sequence[Sample]) -> Iterator[str]:
    reference = ReferenceModel(model, ComparisonSpec.whole(model))
    names = reference.views.names
    answers = [answer.outputs for answer in reference.answer_each(samples)]
    if answers and all(_is_no_number(array) for answer in answers for array in answer):
        raise ModelError(
            f"every value of {'all outputs' if len(names) > 1 else f'output {names[0]}'} of the float model is NaN or "
            f"infinite on all {len(samples)} samples; find the first node with NaN, such as a division by zero"
        )
    for place, name in enumerate(names):
        arrays = [answer[place] for answer in answers if isinstance(answer[place], np.ndarray)]
        for finding in _of_output(arrays):
            yield f"output {name} of the float model {finding} in all {len(samples)} samples that were run"


def _is_no_number(array: Any) -> bool:
    floats = isinstance(array, np.ndarray) and array.size > 0 and is_floating(array.dtype)
    return floats and not bool(np.isfinite(array.astype(np.float64)).any())


def _of_output(arrays: Sequence[Array]) -> Iterator[str]:
    if not arrays:
        return
    if not any(array.size for array in arrays):
        yield "is empty"
        return
    if all(is_floating(array.dtype) and np.isnan(array.astype(np.float32)).any() for array in arrays):
        yield "holds NaN"
        return
    if len(arrays) < 2:
        return
    if all(_same(arrays[0], array) for array in arrays[1:]):
        yield "is the same"
    elif all(is_floating(array.dtype) and are_shares(array) for array in arrays):
        classes = {int(index) for array in arrays for index in array.argmax(-1).flat}
        if len(classes) == 1:
            yield f"has class {classes.pop()}"


def _same(first: Any, second: Any) -> bool:
    return first.shape == second.shape and bool((first == second).all())
