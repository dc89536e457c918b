"""The table of encoders: how a weight is quantized, and which statistics an encoder needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from onnxq.algorithms.gptq import GemmView, Gptq, HessianInfo, gemm_view_of, round_by_gptq, within
from onnxq.calibration.accumulators import Request
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.config.scheme import Mode, packaged_encoder
from onnxq.errors import ModelError, SchemeError
from onnxq.ir import Graph, Node, all_nodes, is_constant
from onnxq.numerics import burn, torch_observers
from onnxq.numerics.affine import QTensor, QuantParams, block_range, quantize
from onnxq.numerics.block_encoding import NotFiniteError, are_finite, quantize_blocks
from onnxq.numerics.blocks import block_shape, grid_shape
from onnxq.numerics.formats import QuantDType, format_named, scale_format_named
from onnxq.numerics.pairs import Pairs, fit_pairs, search_pair_scales
from onnxq.numerics.spec import Method, QuantSpec
from onnxq.ops import facts_of
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.planning.weights import look_of
from onnxq.system.plugins import wrap_plugin_errors

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Encoder:
    """A method that quantizes a weight.

    Installed packages register encoders as entry points of the group `onnxq.encoders`.

    Attributes:
        name: the `method` of a spec, and the name of the entry point.
        encode: takes finite values, their planned weight, given parameters and the Gram matrices. If parameters are
            given, because an accumulator needs larger scales or another encoder chose them, `encode` must use them. It
            returns values of the same shape, and scales of the same rank with one entry for each block.
        sums: takes a node, the index and shape of its weight, and the rows of activations of each sample. It returns
            the matrix view with its request, or None if unknown. Encoders without `sums` use no activations.
    """

    name: str
    encode: Callable[[Array, Weight, QuantParams | None, HessianInfo | None], QTensor]
    sums: Callable[[Node, int, tuple[int, ...], int], GemmView | None] | None = None


def _searched(values: Array, weight: Weight, parameters: QuantParams | None, _: HessianInfo | None) -> QTensor:
    if parameters is None:
        return quantize_blocks(values, weight.spec, _block(values, weight))
    return quantize(values, parameters, format_named(weight.spec.format))


def _gptq(values: Array, weight: Weight, parameters: QuantParams | None, terms: HessianInfo | None) -> QTensor:
    nearest = _searched(values, weight, parameters, None)
    if terms is None:
        return nearest
    return round_by_gptq(values, nearest.parameters, nearest.format, terms.moments, terms.matrices, terms.damping)


def _burn(values: Array, weight: Weight, parameters: QuantParams | None, _: HessianInfo | None) -> QTensor:
    """Quantize as Burn does. Burn has no integer kernel whose accumulator could need larger scales."""
    assert parameters is None, "what Burn quantizes is decoded, not multiplied"
    return burn.encode(values, weight.spec)


def _torch(values: Array, weight: Weight, parameters: QuantParams | None, _: HessianInfo | None) -> QTensor:
    """Quantize as PyTorch's MinMaxObserver and kernel do; channels may lie along any axis."""
    if parameters is not None:
        return _searched(values, weight, parameters, None)
    low, high = block_range(values, _block(values, weight))
    format = format_named(weight.spec.format)
    observed = torch_observers.Observer(format.name, weight.spec.symmetric).parameters(low, high)
    return torch_observers.quantize(values, observed, format)


ENCODERS: Mapping[str, Encoder] = MappingProxyType(
    {
        encoder.name: encoder
        for encoder in (
            Encoder(Method.MINMAX, _searched),
            Encoder(Method.MSE, _searched),
            Encoder(Method.HQQ, _searched),
            Encoder(Method.GPTQ, _gptq, gemm_view_of),
            Encoder(Method.BURN, _burn),
            Encoder(Method.TORCH, _torch),
        )
    }
)
"""The built-in encoders by method."""


def encoder_named(method: str) -> Encoder:
    """Return the encoder of a method, built-in or from an installed package.

    Raises:
        SchemeError: there is none, or the registered object cannot be loaded or is no `Encoder`.
    """
    if (ours := ENCODERS.get(method)) is not None:
        return ours
    found = packaged_encoder(method)
    if not isinstance(found, Encoder) or found.name != method:
        expected = "expected an onnxq.algorithms.encoders.Encoder of that name; correct its package, or uninstall it"
        raise SchemeError(f"Encoder {method!r} is none, {expected}")
    return found


def encoder_of(spec: QuantSpec, gptq: Gptq | None) -> Encoder:
    """Return the encoder for weights of a spec: GPTQ if `gptq` covers it."""
    is_covered = gptq is not None and gptq.covers(spec)
    return encoder_named(Method.GPTQ if is_covered else spec.method)


def weight_gemm_view(node: Node, weight: Weight, gptq: Gptq) -> GemmView | None:
    """Return the matrix view of a weight whose encoder uses activations; None for other weights."""
    source, encoder = node.inputs[weight.index], encoder_of(weight.spec, gptq)
    # A shared weight is stored once, so it would need the activations of all its readers.
    if encoder.sums is None or not is_constant(source) or len(source.outputs) != 1:
        return None
    with _blamed(encoder, weight):
        found = encoder.sums(node, weight.index, tuple(source.shape), gptq.rows)
        if found is not None and not (isinstance(found, GemmView) and found.request.kind == HessianAccumulator.kind):
            raise TypeError(
                f"it asks for {found!r} of data, expected Sums whose request is of kind {HessianAccumulator.kind!r}"
            )
    return found


def weight_requests(plan: Plan, graph: Graph, gptq: Gptq) -> tuple[Request, ...]:
    """Return the statistics that the weights of a plan need: the smallest that fit `compensation.memory`.

    A weight that is tied to a table needs none: both have the same quantized values, so that the file holds them once.
    """
    sizes: dict[Request, int] = {}
    tied, main = tied_to_tables(graph, plan), set(graph.nodes)
    for node, decision in quantized_nodes(graph, plan):
        if node not in main:
            continue
        for weight in decision.weights:
            sums = weight_gemm_view(node, weight, gptq)
            if sums is not None and (node.name, weight.index) not in tied:
                sizes[sums.request] = sums.gram_bytes
    return tuple(within(sizes, gptq.memory))


def quantized_nodes(graph: Graph, plan: Plan) -> Iterator[tuple[Node, Decision]]:
    """Yield the nodes of all graphs that a plan quantizes, with their decisions."""
    for _, node in all_nodes(graph):
        decision = plan.by_node.get(node.name)
        if decision is not None and decision.mode is not Mode.FLOAT:
            yield node, decision


def tied_to_tables(graph: Graph, plan: Plan) -> Mapping[tuple[str, int], frozenset[tuple[str, int]]]:
    """Return the weights that are tied: a lookup table, and others that hold its values, transposed or not.

    A file holds tied weights once if their quantized values are equal, so no method may change one of them alone.

    Returns:
        By node name and index of the input, all that this weight is tied with, itself included.
    """
    weights = [(node, weight) for node, decision in quantized_nodes(graph, plan) for weight in decision.weights]
    tables = [(node, weight) for node, weight in weights if facts_of(node).looks_up]
    sizes = {(weight.spec, weight.elements) for _, weight in tables}
    alike: dict[Hashable, set[tuple[str, int]]] = defaultdict(set)
    for node, weight in weights:
        if (weight.spec, weight.elements) in sizes:
            alike[look_of(weight, node.inputs[weight.index])].add((node.name, weight.index))
    groups = (frozenset(alike[look_of(weight, node.inputs[weight.index])]) for node, weight in tables)
    return {use: group for group in groups if len(group) > 1 for use in group}


def encode_weight(
    values: Array, weight: Weight, parameters: QuantParams | None = None, terms: HessianInfo | None = None
) -> QTensor:
    """Quantize a weight by its spec.

    Scales are computed in float64 and rounded to the scale format before the division. An all-zero block has scale 1.
    The methods of other frameworks follow their framework instead.

    Args:
        values: float array of any rank.
        weight: its spec and axes.
        parameters: scales and zero points to use; None lets the encoder choose.
        terms: Gram matrices of the activations. If given, an encoder that does not use activations is replaced by GPTQ.

    Returns:
        Quantized values of the weight's shape. Scale and zero point have its rank, with one entry for each block.

    Raises:
        SchemeError: the block has more axes than the weight, or the encoder of a package fails.
        ModelError: the weight holds NaN or infinity.
    """
    own = encoder_named(weight.spec.method)
    encoder = own if terms is None or own.sums is not None else ENCODERS[Method.GPTQ]
    # The search for scales looks at every value itself.
    looks = encoder.encode is _searched and parameters is None
    try:
        if not looks:
            _check_finite(values)
        found = _encoded(encoder, values, weight, parameters, terms)
    except NotFiniteError as error:
        raise ModelError(
            f"{_named(weight)} holds NaN or infinity, which cannot be quantized; exclude its node with --exclude"
        ) from error
    if parameters is None and weight.pairs is not Pairs.NONE:
        scale = found.parameters.scale
        larger = search_pair_scales(values, scale, weight.pairs, weight.axis, weight.reduction_axis)
        if not np.array_equal(larger, scale):
            raised = QuantParams(larger, None, block=_block(values, weight))
            found = _encoded(encoder, values, weight, raised, terms)
    return fit_weight_pairs(found, weight)


def given_parameters(weight: Weight, shape: tuple[int, ...]) -> QuantParams | None:
    """Return the scales that a plan gives a weight of this shape; None if the encoder chooses them."""
    if not weight.scales:
        return None
    spec = weight.spec
    block = block_shape(spec.granularity, shape, channel_axis=weight.axis, reduction_axis=weight.reduction_axis)
    scales = np.array(weight.scales, np.float32).reshape(grid_shape(shape, block))
    return QuantParams(scales, None, block=block)


def _check_finite(values: Array) -> None:
    if not are_finite(values):
        raise NotFiniteError("a value is NaN or infinite")


def _encoded(
    encoder: Encoder, values: Array, weight: Weight, parameters: QuantParams | None, terms: HessianInfo | None
) -> QTensor:
    """Call an encoder; check the result of a package's encoder, and pass it a read-only weight."""
    if encoder.name in ENCODERS:
        return encoder.encode(values, weight, parameters, terms)
    seen = values.view()
    seen.flags.writeable = False
    with _blamed(encoder, weight):
        found = encoder.encode(seen, weight, parameters, terms)
        return check_encoded(found, weight.spec, values.shape, _block(values, weight), parameters)


def fit_weight_pairs(found: QTensor, weight: Weight) -> QTensor:
    """Reduce the quantized values of a weight that would overflow a kernel's 16-bit pairs."""
    if weight.pairs is Pairs.NONE:
        return found
    values = fit_pairs(found.values, weight.pairs, weight.axis, weight.reduction_axis)
    return QTensor(values, found.parameters, found.format)


def encode_array(values: Array, spec: QuantSpec, *, channel_axis: int, reduction_axis: int) -> QTensor:
    """Quantize an array by a spec, without a model; see `encode_weight`.

    >>> tensor = encode_array(np.array([[7.0, -5.0, 0.3]]), QuantSpec("int4-narrow"), channel_axis=0, reduction_axis=1)
    >>> tensor.values, tensor.parameters.scale
    (array([[ 7, -5,  0]], dtype=int8), array([[1.]], dtype=float32))
    """
    return encode_weight(values, Weight(0, "", spec, channel_axis, values.size, reduction_axis))


def _blamed(encoder: Encoder, weight: Weight) -> AbstractContextManager[None]:
    """Report exceptions inside as failures of the encoder, unless it is built-in."""
    return (
        nullcontext()
        if encoder.name in ENCODERS
        else wrap_plugin_errors(f"encoder {encoder.name!r} for {_named(weight)}")
    )


def _named(weight: Weight) -> str:
    return f"weight {weight.tensor}" if weight.tensor else "the weight"


def _block(values: Array, weight: Weight) -> tuple[int, ...]:
    return block_shape(
        weight.spec.granularity, values.shape, channel_axis=weight.axis, reduction_axis=weight.reduction_axis
    )


# --- checks of the result of a package's encoder --------------------------------------------------------------------


def check_encoded(
    found: object, spec: QuantSpec, shape: Sequence[int], block: tuple[int, ...], given: QuantParams | None
) -> QTensor:
    """Check the result of an encoder against the spec.

    Args:
        found: the encoder's result.
        spec: spec of the weight.
        shape: shape of the weight.
        block: extents of the values that share a scale, one for each axis.
        given: scales and zero points that the encoder had to use; None if it chooses its own.

    Raises:
        TypeError: the result is no `QTensor`.
        ValueError: shape, type, values or parameters are wrong.
    """
    if not isinstance(found, QTensor):
        raise TypeError(f"it returned {type(found).__name__}, expected an onnxq.numerics.affine.QTensor")
    for sentence in _faults(found, spec, shape, block):
        raise ValueError(sentence)
    if given is not None and not _are_same(found.parameters, given):
        raise ValueError("it changed the given scales, which a kernel needs as they are")
    return found


def _faults(found: QTensor, spec: QuantSpec, shape: Sequence[int], block: tuple[int, ...]) -> Iterator[str]:
    """Yield error messages; each check relies on the checks before it."""
    format, parameters = format_named(spec.format), found.parameters
    if found.format != format or found.values.dtype != format.dtype:
        expected = f"expected {format.name} in {format.dtype}"
        yield f"its quantized values are {found.format.name} in {found.values.dtype}, {expected}"
    if found.values.shape != tuple(shape):
        yield f"its quantized values have shape {list(found.values.shape)}, expected that of the weight, {list(shape)}"
    if not _are_values_of(found.values, format):
        yield f"some of its values are none of {format.name}, which are from {format.minimum:g} to {format.maximum:g}"
    yield from _faults_of_scales(parameters, spec, shape, block)
    zero = parameters.zero_point
    if spec.symmetric is not (zero is None):
        yield f"it has {'no ' if zero is None else ''}zero points, expected {'none' if spec.symmetric else 'some'}"
    if zero is not None and (zero.dtype != format.dtype or zero.shape != parameters.scale.shape):
        yield f"its zero points are {zero.dtype} of shape {list(zero.shape)}, expected {format.dtype} like the scales"
    if zero is not None and not _are_values_of(zero, format):
        yield f"some of its zero points are no values of {format.name}"


def _faults_of_scales(
    parameters: QuantParams, spec: QuantSpec, shape: Sequence[int], block: tuple[int, ...]
) -> Iterator[str]:
    scale, whole, grid = parameters.scale, parameters.tensor_scale, grid_shape(shape, block)
    if scale.dtype != np.float32 or scale.shape != grid:
        yield f"its scales are {scale.dtype} of shape {list(scale.shape)}, expected float32 of shape {list(grid)}"
    if _within(parameters.block_in(shape), shape) != _within(block, shape):
        yield f"its scales are of blocks of {list(parameters.block_in(shape))}, expected {list(block)}"
    size = np.abs(scale) if spec.has_signed_scales else scale
    if not (np.isfinite(size) & (size > 0)).all():
        yield "some of its scales are NaN, infinite, zero or negative"
    format = scale_format_named(spec.scale)
    if not np.array_equal(format.round_nearest(size), size):
        yield f"some of its scales are no {format.name}, of {format.smallest:g} to {format.maximum:g}; round them to it"
    if spec.two_level is (whole is None) or (whole is not None and not 0 < whole < np.inf):
        yield f"the scale of its tensor is {whole}, expected {'one above 0' if spec.two_level else 'None'}"


def _within(block: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(length, max(extent, 1)) for length, extent in zip(block, shape, strict=True))


def _are_values_of(quantized: NDArray[Any], format: QuantDType) -> bool:
    if not format.is_float:
        return bool(format.minimum <= quantized.min(initial=0) and quantized.max(initial=0) <= format.maximum)
    # A byte has more patterns than the format.
    patterns = quantized.view(np.uint8)
    return bool((patterns < 2**format.bits).all() and np.isfinite(format.values[patterns]).all())


def _are_same(found: QuantParams, given: QuantParams) -> bool:
    pairs = ((found.scale, given.scale), (found.zero_point, given.zero_point), (found.tensor_scale, given.tensor_scale))
    return all(np.array_equal(one, other) if other is not None else one is None for one, other in pairs)  # type: ignore[arg-type]
