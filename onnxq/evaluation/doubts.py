"""What keeps samples from being representative, as far as they and the float model's answers show it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.calibration.evidence import Evidence
from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.sentinels import doubtful_masks
from onnxq.calibration.value_range import Range
from onnxq.data.dataset import Selection
from onnxq.data.inputs import Sample, SampleSource, is_floating
from onnxq.data.samples import evenly
from onnxq.errors import DataError, ModelError
from onnxq.evaluation.agreement import OutputAgreement
from onnxq.evaluation.probabilities import are_probabilities
from onnxq.evaluation.reference import Reference
from onnxq.evaluation.views import Views
from onnxq.ir.large_models import is_large
from onnxq.runtime.sessions import Array

# Of fewer, none can be kept for judging.
_FEW = 8
LOOKED_AT = 64
"""How many samples are read to find that out."""
DOUBTED_SAMPLES = 8
"""How many samples are run to find out whether they are representative."""
_SHOWN = 3


def doubts(model: Path, looked: Sequence[Sample], count: int) -> tuple[str, ...]:
    """Say in sentences why figures on some samples may not hold for others.

    Args:
        model: file of the float model; one above 1 GiB is not run.
        looked: the samples, or some from all over, of which at most 8 are run.
        count: how many there are.

    Raises:
        DataError: a sample cannot be read, or a run fails.
        ModelError: no output of the float model is ever a number, so that nothing could be said of another model.
    """
    found = [*_of_inputs(looked, count)]
    if not is_large(model):
        found += _of_outputs(model, list(evenly(looked, DOUBTED_SAMPLES)))
    return tuple(found)


def heard(looked: Sequence[Sample]) -> Sequence[Sample]:
    """Return samples as they are, unless each of them holds a single value in all its inputs, as zeros do.

    Raises:
        DataError: there is nothing else to set ranges and to judge by, though there are inputs of several floats.
    """
    if not looked or not all(map(_is_silent, looked)) or _differ_otherwise(looked):
        return looked
    raise DataError(
        f"{f'all {len(looked)} samples looked at hold' if len(looked) > 1 else 'the only sample holds'} a single value "
        "in each input, as zeros do, which tells nothing of the values that the model will see, expected samples of "
        "those; give some 50 of its real inputs"
    )


def distinct(samples: SampleSource, looked: Sequence[Sample]) -> SampleSource:
    """Return samples no two of which are equal: what one shows, others of its kind do not confirm.

    Args:
        samples: all of them, which are read where some are equal.
        looked: some of them from all over; where no two of these are equal, none are taken to be.
    """
    if len({sample_digest(sample) for sample in looked}) == len(looked):
        return samples
    first: dict[str, int] = {}
    for place, sample in enumerate(samples):
        first.setdefault(sample_digest(sample), place)
    return Selection(samples, sorted(first.values()))


def unseen(views: Views) -> Iterator[str]:
    """Say which noise does not show in what stands for outputs; see `Views`."""
    if views.unseen:
        nodes = ", ".join(views.unseen[:_SHOWN]) + (", ..." if len(views.unseen) > _SHOWN else "")
        yield (
            f"the noise of {nodes}, which compute with what the data has decided, is not seen by what judges "
            f"{', '.join(views.decided)}; judge by --metric"
        )


def masked(evidence: Evidence, tensors: Iterable[str]) -> Iterator[str]:
    """Say which of some tensors have values that get no range, as they look like the constants of attention masks."""
    seen = {tensor: evidence.of(tensor).find(Range) for tensor in tensors}
    found = doubtful_masks({tensor: one for tensor, one in seen.items() if one is not None})
    if found:
        tensor, value = next(iter(found.items()))
        others = f", as are those of {len(found) - 1} other tensors" if len(found) > 1 else ""
        yield (
            f"values of {tensor} such as {value:g} are far from all its others and taken for an attention mask"
            f"{others}, so that no range holds them; where they are data, say --range extremes"
        )


def hidden(outputs: Iterable[OutputAgreement], wanted: float) -> tuple[str, ...]:
    """Say in sentences which parts of outputs are less faithful than is wanted, where the whole hides them.

    Args:
        outputs: of a model, with the SQNR of their parts.
        wanted: decibels.
    """
    return tuple(
        f"entries {part.start} to {part.stop - 1} of axis {part.axis} of output {output.name}, which {part.made_by} "
        f"makes, have {part.sqnr:.1f} dB, which the {output.sqnr:.1f} dB of all do not show; judge by --metric"
        + _asking_for(output.sqnr + wanted - part.sqnr)
        for output in outputs
        for part in output.parts
        if output.sqnr is not None and part.sqnr is not None and part.sqnr < wanted <= output.sqnr
    )


def _asking_for(sqnr: float) -> str:
    """Return what else to do, where a goal for the whole would help a part that is not silent."""
    return f", or ask for --min-sqnr {math.ceil(sqnr)}" if math.isfinite(sqnr) else ""


def _of_inputs(looked: Sequence[Sample], count: int) -> Iterator[str]:
    if count < _FEW:
        many = f"there are only {count} samples, which tell" if count > 1 else "there is only one sample, which tells"
        rows = {len(array) if array.ndim else 1 for sample in looked for array in sample.values()}
        apart = ", or --batch 1 if their rows are samples" if 1 not in rows else ""
        yield f"{many} little of others; give 50 or more{apart}"
    of = f"of {len(looked)} samples" + (f" looked at out of {count}" if count > len(looked) else "")
    if equal := len(looked) - len({sample_digest(sample) for sample in looked}):
        yield f"{equal} {of} are the same as others, which count once; give different ones"
    if silent := sum(map(_is_silent, looked)):
        yield f"{silent} {of} hold a single value in all their inputs of floats; such ones set no ranges"


def _is_silent(sample: Sample) -> bool:
    arrays = [array for array in sample.values() if is_floating(array.dtype) and array.size > 1]
    return bool(arrays) and all(bool((array == array.flat[0]).all()) for array in arrays)


def _differ_otherwise(looked: Sequence[Sample]) -> bool:
    """Return whether inputs of no floats, such as tokens beside a mask, hold or have several values."""
    others = [{name: one for name, one in sample.items() if not is_floating(one.dtype)} for sample in looked]
    hold = any(one.size > 1 and bool((one != one.flat[0]).any()) for sample in others for one in sample.values())
    return hold or len(set(map(sample_digest, others))) > 1


def _of_outputs(model: Path, samples: Sequence[Sample]) -> Iterator[str]:
    reference = Reference(model, Views.whole(model))
    names = reference.views.names
    answers = [answer.outputs for answer in reference.answer_each(samples)]
    if answers and all(_is_no_number(array) for answer in answers for array in answer):
        raise ModelError(
            f"every value of {'all outputs' if len(names) > 1 else f'output {names[0]}'} of the float model is NaN or "
            f"infinite, in all {len(samples)} samples that it was run on, so that no other model can be compared with "
            "it; see which node first computes such values, as by a division by zero"
        )
    for place, name in enumerate(names):
        arrays = [answer[place] for answer in answers if isinstance(answer[place], np.ndarray)]
        for told in _of_output(arrays):
            yield f"output {name} of the float model {told} in all {len(samples)} samples that it was run on"


def _is_no_number(array: Any) -> bool:
    """Return whether an output is floats none of which is finite."""
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
    elif all(is_floating(array.dtype) and are_probabilities(array) for array in arrays):
        classes = {int(one) for array in arrays for one in array.argmax(-1).flat}
        if len(classes) == 1:
            yield f"says class {classes.pop()}"


def _same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool((one == other).all())
