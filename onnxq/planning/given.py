"""Apply the encodings of a file to a plan: formats and ranges of activations, formats and scales of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnxq.config.encodings_file import TensorEncoding
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.errors import SchemeError, did_you_mean
from onnxq.ir import Graph, Node, all_graphs
from onnxq.numerics.affine import params_from_range
from onnxq.numerics.formats import format_named
from onnxq.planning.activations import check_activation_spec
from onnxq.planning.plan import Activation, Decision, Plan, Weight
from onnxq.planning.weights import check_weight_spec
from onnxq.runtime.targets import Target

# Weights whose scales are one for the tensor or for each channel.
_SCALED = frozenset({Mode.STATIC, Mode.STORAGE})


def check_tensors(encodings: Sequence[TensorEncoding], graph: Graph) -> None:
    """Check that a float model has all tensors that a file names.

    Raises:
        SchemeError: it lacks one; the message suggests the nearest name.
    """
    names = {tensor.name for scope in all_graphs(graph) for tensor in scope.inputs} if encodings else set()
    for scope in all_graphs(graph) if encodings else ():
        names |= {tensor.name for node in scope.nodes for tensor in (*node.inputs, *node.outputs)}
        names |= {tensor.name for tensor in scope.initializers}
    for encoding in encodings:
        if encoding.tensor not in names:
            suggestion = did_you_mean(encoding.tensor, names)
            raise SchemeError(
                f"the encodings are of tensor {encoding.tensor!r}, which the model lacks{suggestion}; give its own"
            )


def with_given_ranges(
    activations: Sequence[Activation], encodings: Mapping[str, TensorEncoding], target: Target
) -> tuple[Activation, ...]:
    """Return the activations with the formats and ranges of a file.

    Tensors that share a scale get the widest of their ranges.

    Raises:
        SchemeError: a tensor has several scales, or the target has no kernel for its format.
    """
    if not encodings:
        return tuple(activations)
    specs: dict[str, QuantSpec] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for activation in activations:
        if (encoding := encodings.get(activation.tensor)) is None:
            continue
        if encoding.count > 1:
            raise SchemeError(
                f"tensor {activation.tensor!r} is an activation and has {encoding.count} scales, expected one"
            )
        wanted = encoding.spec(activation.spec)
        spec = replace(activation.spec, format=wanted.format, symmetric=wanted.symmetric)
        try:
            check_activation_spec(spec, target)
        except SchemeError as problem:
            raise SchemeError(f"{problem}, found at tensor {activation.tensor!r} in the encodings") from problem
        specs.setdefault(activation.group, spec)
        for low, high in encoding.ranges_in(spec):
            widest = ranges.get(activation.group, (low, high))
            ranges[activation.group] = min(low, widest[0]), max(high, widest[1])

    def applied(activation: Activation) -> Activation:
        activation = replace(activation, spec=specs.get(activation.group, activation.spec))
        limits = ranges.get(activation.group)
        if limits is None:
            return activation
        # The range of a constant is fixed, see `plan_fit`.
        is_fixed = activation.fixed_range is not None
        return replace(activation, fixed_range=limits) if is_fixed else replace(activation, found_range=limits)

    return tuple(map(applied, activations))


def with_given_scales(
    nodes: Sequence[Node], decisions: Sequence[Decision], encodings: Mapping[str, TensorEncoding], target: Target
) -> Iterator[Decision]:
    """Yield the decisions, with the formats and scales of a file for weights of integer kernels and stored weights.

    Args:
        nodes: in the order of the decisions.
        decisions: for these nodes.
        encodings: by tensor name.
        target: the runtime.

    Raises:
        SchemeError: the scales do not fit a weight.
    """
    for node, decision in zip(nodes, decisions, strict=True):
        if (
            decision.mode not in _SCALED
            or decision.finer
            or not any(weight.tensor in encodings for weight in decision.weights)
        ):
            yield decision
            continue
        weights = (
            _scaled(weight, tuple(node.inputs[weight.index].shape), decision.mode, encodings[weight.tensor], target)
            if weight.tensor in encodings
            else weight
            for weight in decision.weights
        )
        yield replace(decision, weights=tuple(weights))


def _scaled(weight: Weight, shape: tuple[int, ...], mode: Mode, encoding: TensorEncoding, target: Target) -> Weight:
    spec, axis = encoding.spec(weight.spec), weight.axis % len(shape)
    if encoding.count not in (0, 1, shape[axis]) or (
        encoding.count > 1 and encoding.axis not in (None, axis, axis - len(shape))
    ):
        along = "" if encoding.axis is None else f" along axis {encoding.axis}"
        raise SchemeError(
            f"weight {weight.tensor!r} has {encoding.count} scales{along} in the encodings, expected one, or one for "
            f"each of {shape[axis]} channels along axis {axis}"
        )
    scales: tuple[float, ...] = ()
    if encoding.count:
        low, high = np.array(encoding.ranges_in(spec)).T
        parameters = params_from_range(low, high, format_named(spec.format), symmetric=spec.symmetric)
        scales = tuple(float(scale) for scale in parameters.scale)
        if parameters.zero_point is not None:
            spec = _without_zero_points(weight.tensor, spec, parameters.zero_point)
    spec = replace(spec, method=weight.spec.method) if not encoding.count else spec
    try:
        check_weight_spec(spec, mode, target)
    except SchemeError as problem:
        raise SchemeError(f"{problem}, found at weight {weight.tensor!r} in the encodings") from problem
    return replace(weight, spec=spec, scales=scales)


def _without_zero_points(
    tensor: str, spec: QuantSpec, zero_points: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> QuantSpec:
    """Return a symmetric spec for unsigned values whose zero point is their middle."""
    format = format_named(spec.format)
    middle = 0 if format.signed else 2 ** (format.bits - 1)
    if (zero_points != middle).any():
        raise SchemeError(f"weight {tensor!r} has zero points in the encodings, expected {middle} for {format.name}")
    return replace(spec, format=format.name.removeprefix("u"), symmetric=True)


def unapplied(encodings: Sequence[TensorEncoding], plan: Plan) -> tuple[str, ...]:
    """Return a sentence on the tensors of a file whose encodings a plan does not use; nothing if there are none."""
    used = {activation.tensor for activation in plan.activations} | {
        weight.tensor for decision in plan.decisions if decision.mode in _SCALED for weight in decision.weights
    }
    left = [encoding.tensor for encoding in encodings if encoding.tensor not in used]
    if not left:
        return ()
    shown = ", ".join(left[:3]) + (" and others" if len(left) > 3 else "")
    return (
        f"{len(left)} of {len(encodings)} encodings are of tensors that no integer kernel reads or writes: {shown}",
    )
