"""Warnings about samples that may not be representative, as far as they and the float model's outputs show it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.accumulators import Range
from onnxq.calibration.instrument import tensor_types
from onnxq.calibration.methods import find_doubtful_masks
from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.segments import Stage, read_without_data, stages
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
from onnxq.ir import Graph, Node, Tensor, Variable, is_constant, optional_input
from onnxq.ir.protos import is_large
from onnxq.numerics.affine import decibels
from onnxq.ops import Role, operator_of
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
    found = [*_of_inputs(looked, count)]
    if not is_large(model):
        found += _of_outputs(model, list(evenly(looked, RUN_SAMPLES)))
    return tuple(found)


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
    found = find_doubtful_masks({tensor: one for tensor, one in seen.items() if one is not None})
    if found:
        tensor, value = next(iter(found.items()))
        others = f", as are those of {len(found) - 1} other tensors" if len(found) > 1 else ""
        yield (
            f"values of {tensor} such as {value:g} are taken for an attention mask{others}, so no range includes them; "
            "if they are data, use --range extremes"
        )


def warn_weak_slices(outputs: Iterable[OutputAgreement], wanted: float) -> tuple[str, ...]:
    """Warn of parts of outputs below the wanted SQNR, if the whole output hides them.

    Args:
        outputs: of a model, with the SQNR of their parts.
        wanted: SQNR in decibels.
    """
    return tuple(
        f"output {output.name} has {decibels(part.sqnr)} in {_entries(part)} of axis {part.axis}, from {part.made_by}, "
        f"and {decibels(output.sqnr)} in all; evaluate with --metric" + _asking_for(output.sqnr + wanted - part.sqnr)
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
        many = f"there are only {count} samples, which show" if count > 1 else "there is only one sample, which shows"
        rows = {len(array) if array.ndim else 1 for sample in looked for array in sample.values()}
        apart = ", or --batch 1 if their rows are samples" if 1 not in rows else ""
        yield f"{many} little of others; give 50 or more{apart}"
    of = f"of {len(looked)} samples" if count <= len(looked) else f"of {len(looked)} inspected samples (of {count})"
    if equal := len(looked) - len({sample_digest(sample) for sample in looked}):
        yield f"{equal} {of} are the same as others, which count once; give different ones"
    if silent := sum(map(_is_silent, looked)):
        yield f"{silent} {of} hold a single value in all their inputs of floats; such ones set no ranges"


def _is_silent(sample: Sample) -> bool:
    arrays = [array for array in sample.values() if is_floating(array.dtype) and array.size > 1]
    return bool(arrays) and all(bool((array == array.flat[0]).all()) for array in arrays)


def _differ_otherwise(looked: Sequence[Sample]) -> bool:
    """Return whether inputs that are not float, such as tokens beside a mask, have several values."""
    others = [{name: one for name, one in sample.items() if not is_floating(one.dtype)} for sample in looked]
    hold = any(one.size > 1 and bool((one != one.flat[0]).any()) for sample in others for one in sample.values())
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
            yield f"output {name} of the float model {finding} in all {len(samples)} samples that it was run on"


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
        classes = {int(one) for array in arrays for one in array.argmax(-1).flat}
        if len(classes) == 1:
            yield f"says class {classes.pop()}"


def _same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool((one == other).all())


# Whether the samples have the unit of the training data, as the first layers of the model show.

# Factor above which the unit is wrong. In twelve networks of images, sound and text, the first sums are 0.8 to 3 times
# as large as their biases. If samples are in 0..255 instead of 0..1, or the other way round, they are 200 to 900 times
# or 0.003 to 0.01 times as large.
_MANY = 40.0
# Number of terms of most first layers. Without training, sums grow with the root of it in comparison to biases.
_USUAL_TERMS = 27
_SHIFTS = frozenset({"Add", "Sub"})
_AFFINE = _SHIFTS | {"Div", "Mul"}
# Number of values that suffice to measure the size of a tensor.
_TELLING = 1 << 16
# A smaller shift only keeps logarithms and divisors from zero.
_SMALLEST_SHIFT = 0.01


class _Probe(NamedTuple):
    """A tensor behind an input whose size the model's parameters predict.

    Attributes:
        input: name of the input.
        node: that outputs the tensor.
        tensor: its name.
        offset: subtracted from its values.
        size: about the root mean square of these differences in training.
        terms: number of terms of each sum.
        centred: whether each channel, the second axis, has a mean of about 0 in training.
    """

    input: str
    node: str
    tensor: str
    offset: NDArray[Any]
    size: float
    terms: int = 1
    centred: bool = False

    @property
    def most(self) -> float:
        """Factor above which values are too large beyond doubt."""
        return _MANY * math.sqrt(max(1.0, self.terms / _USUAL_TERMS))

    def factor(self, arrays: Sequence[NDArray[Any]]) -> float:
        """Return the size of values over the expected size; for a mean of 0, their spread over it."""
        # Infinite values have no size and cause no warning.
        with np.errstate(invalid="ignore"):
            values = [_thinned(array - self.offset.astype(array.dtype)) for array in arrays if array.size]
        if not values:
            return 0.0
        size = math.sqrt(float(np.mean([np.square(one).mean() for one in values]))) / self.size
        if not self.centred or size >= self.most:
            return size
        channels = np.concatenate([np.moveaxis(one, 1, 0).reshape(one.shape[1], -1) for one in values], axis=1)
        return math.sqrt(float(channels.var(axis=1).mean())) / self.size


def _thinned(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return a large array thinned along its last axis."""
    return np.asarray(array[..., :: math.ceil(array.size / _TELLING)] if array.ndim else array, np.float64)


def warn_input_units(prepared: Path, graph: Graph, samples: Sequence[Sample]) -> Iterator[str]:
    """Warn of inputs that are far larger or smaller than the inputs that the model was trained with.

    The first sums behind an input are about as large as their biases, which subtract the mean of the training data. So
    are the means that the model subtracts itself, and the outputs of a normalization beside its factors.

    Args:
        prepared: file of the prepared float model, with normalizations folded as far as possible.
        graph: of that model.
        samples: to run.
    """
    # A tensor of a subgraph cannot become an output.
    outside = frozenset(graph.nodes)
    probes = [probe for tensor in graph.inputs for probe in _probes(tensor, outside)]
    model = read_without_data(prepared)
    known = tensor_types(model) if probes else {}
    names = list(dict.fromkeys(probe.tensor for probe in probes if probe.tensor in known))
    if not names or not samples:
        return
    parts = stages(prepared, names)
    found = [_run_until(names, parts, sample) for sample in samples]
    warned = set()
    for probe in (probe for probe in probes if probe.tensor in known):
        factor = probe.factor([values[probe.tensor] for values in found])
        if probe.input in warned or not 0 < factor < math.inf or 1 / _MANY < factor < probe.most:
            continue
        warned.add(probe.input)
        much = f"{factor:.0f} times as large" if factor > 1 else f"only {factor:.2g} times as large"
        wanted = "0..255 where 0..1 is" if factor > 1 else "0..1 where 0..255 is"
        yield (
            f"input {probe.input} makes the values of node {probe.node} {much} as its parameters let expect; check the "
            f"unit of the samples, such as {wanted} wanted"
        )


def _run_until(names: Sequence[str], parts: Sequence[Stage], sample: Sample) -> Mapping[str, NDArray[Any]]:
    """Return a sample and the tensors computed from it, until all of `names` are there."""
    values: dict[str, NDArray[Any]] = dict(sample)
    for part in parts:
        if all(name in values for name in names):
            break
        values |= part.run(values)
    return values


def _probes(given: Tensor, outside: Set[Node]) -> Iterator[_Probe]:
    """Yield the probes of the first layers behind an input, through nodes that move, shift and scale values."""
    if not isinstance(given, Variable) or given.dtype is None or not is_floating(np.dtype(given.dtype)):
        return
    pending: list[Tensor] = [given]
    seen: set[Tensor] = set()
    while pending:
        tensor = pending.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        for reader in filter(outside.__contains__, tensor.outputs):
            if _moves(reader) or (reader.op in _AFFINE and any(map(is_constant, reader.inputs))):
                pending += reader.outputs
            probe = _shift(given.name, reader) if reader.op in _SHIFTS else _layer(given.name, reader)
            if probe is not None and tensor in reader.inputs[:2]:
                yield probe


def _moves(node: Node) -> bool:
    operator = operator_of(node)
    return operator is not None and (operator.role is Role.PASS_THROUGH or node.op in ("Cast", "Identity"))


def _shift(given: str, node: Node) -> _Probe | None:
    """Return the probe of a shift by the mean of the training data."""
    constant = next(filter(is_constant, node.inputs), None)
    if constant is None or sum(extent > 1 for extent in constant.shape) > 1 or not constant.nbytes:
        return None
    shift = constant.values.astype(np.float64) * (-1 if node.op == "Sub" and constant is node.inputs[1] else 1)
    size = float(np.sqrt(np.square(shift).mean()))
    return _Probe(given, node.name, node.outputs[0].name, shift, size) if size >= _SMALLEST_SHIFT else None


def _layer(given: str, node: Node) -> _Probe | None:
    """Return the probe of sums with a bias, or of a normalization."""
    if node.op == "BatchNormalization" and node.inputs[0].shape is not None:
        factors, offset, rank = node.inputs[1], node.inputs[2], len(node.inputs[0].shape)
        return _probe(given, node, factors, offset, rank, centred=True)
    operator = operator_of(node)
    if operator is None or operator.bias is None or operator.channels is None or not is_constant(node.inputs[1]):
        return None
    bias, weight = optional_input(node, operator.bias), node.inputs[1]
    terms = int(np.prod(weight.shape)) // max(weight.shape[operator.weights[1].channels(node)], 1)
    return _probe(given, node, bias, bias, len(weight.shape), terms=terms)


def _probe(
    given: str, node: Node, sizes: Tensor | None, offset: Tensor | None, rank: int, **facts: Any
) -> _Probe | None:
    """Return the probe of a node that adds an offset for each channel, the second axis; `sizes` predict its values."""
    if not is_constant(sizes) or not is_constant(offset) or len(offset.shape) != 1:
        return None
    size = float(np.sqrt(np.square(sizes.values.astype(np.float64)).mean()))
    shape = (1, -1, *[1] * (rank - 2))
    return _Probe(given, node.name, node.outputs[0].name, offset.values.reshape(shape), size, **facts) if size else None
