"""Choose which constants of a node are quantized, along which axes they have scales, and how they are decoded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Final, TypeGuard

import numpy as np
from onnx import TensorProto

from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec, Rule, Storage, check_method
from onnxq.errors import SchemeError
from onnxq.ir import Constant, Node, Tensor, is_constant, onnx_dtype, optional_input
from onnxq.lowering import AllowedOps, is_kernel_block, minimum_opset, should_use_kernel
from onnxq.numerics.blocks import block_shape, grid_shape
from onnxq.numerics.burn import check as check_burn
from onnxq.numerics.formats import format_named, scale_format_named
from onnxq.numerics.ort_packing import unfilled_rows
from onnxq.numerics.pairs import Pairs, may_be_paired
from onnxq.ops import facts_of
from onnxq.planning.experts import experts_obstacle, is_moe, weights_of_experts
from onnxq.planning.obstacles import changing_weight, scales_its_terms, volume
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.runtime.targets import Target, target_named

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})

# Values; a smaller weight saves fewer bytes than the nodes that dequantize it take.
_SMALLEST_STORED_WEIGHT = 256

# With fewer bits, one scale for a whole weight is too coarse.
_FINE_BITS = 8

# Values; a smaller constant that is not a weight saves very little.
_SMALLEST_STORED_CONSTANT = 4096
_VALUES_PER_SCALE = 32
# Number of inspected values, and a power of two that turns short fractions into integers.
_SAMPLED_VALUES, _SHORT_FRACTION = 4096, 64.0


def weight_at(node: Node, index: int, spec: QuantSpec) -> Weight:
    """Return the weight at an input of a node; the spec is per tensor if finer scales would outweigh the saving."""
    axes, tensor = facts_of(node).weights[index], node.inputs[index]
    weight = Weight(index, tensor.name, spec, axes.channels(node), volume(tensor.shape), axes.reduction(node))
    return replace(weight, spec=_worthwhile(weight, tensor) or spec)


def large_weights(node: Node, spec: QuantSpec) -> Iterator[Weight]:
    """Yield the weights of a node, and other learned constants, that are large enough to be quantized."""
    operator = facts_of(node)
    for index, axis_of in operator.weights.items():
        tensor = optional_input(node, index)
        if not _is_table(tensor, _SMALLEST_STORED_WEIGHT):
            continue
        axes = axis_of.channels(node), axis_of.reduction(node)
        rank = len(tensor.shape)
        # The weight of a damaged model may lack an axis that its operator needs.
        if all(-rank <= axis < rank for axis in axes):
            full = _with_full_blocks(spec, tensor.shape, axes[1])
            yield from _saving(Weight(index, tensor.name, full, axes[0], volume(tensor.shape), axes[1]), tensor)
    if operator.precision_sensitive or node.subgraphs():
        return
    weights_and_bias = {*operator.weights, operator.bias}
    for index, tensor in enumerate(node.inputs):
        if index not in weights_and_bias and _is_table(tensor, _SMALLEST_STORED_CONSTANT) and _is_learned(tensor):
            axis = _finest_axis(tensor.shape)
            weight = Weight(index, tensor.name, spec, axis, volume(tensor.shape), len(tensor.shape) - 1)
            yield from _saving(weight, tensor)


def _is_table(tensor: Tensor | None, least: int) -> TypeGuard[Constant]:
    return (
        is_constant(tensor)
        and onnx_dtype(tensor) in _FLOATS
        and volume(tensor.shape) >= least
        and len(tensor.shape) >= 2
    )


def _is_learned(tensor: Constant) -> bool:
    # Grids, anchors and masks hold short fractions. They are positions, and rounding would move them.
    values = tensor.values.astype(np.float32, copy=False).reshape(-1)
    if not np.isfinite(values).all():
        return False
    sample = values[:: max(1, values.size // _SAMPLED_VALUES)].astype(np.float64)
    return bool(np.mod(sample * _SHORT_FRACTION, 1).any())


def _finest_axis(shape: Sequence[int]) -> int:
    elements = volume(shape)
    axes = [axis for axis, extent in enumerate(shape) if elements >= _VALUES_PER_SCALE * extent]
    return max(axes, key=lambda axis: shape[axis], default=0)


def lacking_weight(node: Node) -> str:
    """Return why a node has no weight that can be quantized."""
    if any(is_constant(tensor) and onnx_dtype(tensor) in _FLOATS for tensor in node.inputs):
        return "its constants are too small to quantize, or not learned weights"
    weights = facts_of(node).weights
    weight = optional_input(node, max(weights)) if weights else None
    if weight is None:
        return f"{node.op} has no weight"
    if is_constant(weight):
        return f"its weight is {TensorProto.DataType.Name(onnx_dtype(weight)).lower()}, not a float"
    return changing_weight(node, weight)


def every_weight(node: Node, spec: QuantSpec) -> Iterator[Weight]:
    """Yield all constant float inputs of any operator that can be parameters: with axes, finite, no settings."""
    if facts_of(node).precision_sensitive or node.subgraphs():
        return
    for index, tensor in enumerate(node.inputs):
        if (
            is_constant(tensor)
            and onnx_dtype(tensor) in _FLOATS
            and volume(tensor.shape)
            and tensor.shape
            and np.isfinite(tensor.values.astype(np.float32)).all()
        ):
            # Blocks always lie along the last axes, not along the reduction axis of the operator.
            yield Weight(index, tensor.name, spec, 0, volume(tensor.shape), -1)


def _saving(weight: Weight, tensor: Constant) -> Iterator[Weight]:
    if spec := _worthwhile(weight, tensor):
        yield replace(weight, spec=spec)


def _worthwhile(weight: Weight, tensor: Constant) -> QuantSpec | None:
    # The spec, or one scale for the whole tensor, or None if neither saves bytes. Scales per channel are too many if
    # they take as much as 8-bit values: values of twice the bits with one scale would be as small.
    # The arithmetic of another toolkit is kept, and so is the granularity of small weights.
    spec = weight.spec
    shape = tuple(tensor.shape)
    misfit = isinstance(spec.granularity, tuple) and len(spec.granularity) > len(shape)
    if spec.is_followed or misfit or weight.elements < _SMALLEST_STORED_WEIGHT:
        return spec
    # The scale format of blocks may have a small range, which one scale for the whole tensor may exceed.
    scale = "float32" if spec.two_level else spec.scale
    single = replace(spec, granularity=Granularity.TENSOR, two_level=False, scale=scale)
    for candidate in (spec, single):
        value_bytes, scales = stored_bytes(replace(weight, spec=candidate), shape)
        few = format_named(candidate.format).bits < _FINE_BITS
        fine = candidate.granularity is not Granularity.CHANNEL or few or scales < value_bytes
        if fine and value_bytes + scales < weight.elements * tensor.dtype.itemsize:
            return candidate
    return None


def stored_bytes(weight: Weight, shape: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of the quantized values of a weight, and the bytes of its scales and zero points.

    >>> stored_bytes(Weight(0, "table", QuantSpec("int8", Granularity.CHANNEL), axis=0, reduction_axis=-1), (1000, 16))
    (16000, 4000)
    """
    spec, format = weight.spec, format_named(weight.spec.format)
    block = block_shape(spec.granularity, shape, channel_axis=weight.axis, reduction_axis=weight.reduction_axis)
    each = scale_format_named(spec.scale).dtype.itemsize + (0 if spec.symmetric else format.bits / 8)
    return math.ceil(volume(shape) * format.bits / 8), math.ceil(volume(grid_shape(shape, block)) * each)


def _with_full_blocks(spec: QuantSpec, shape: tuple[int, ...], axis: int) -> QuantSpec:
    # Blocks lie along one axis. In kernels that sum over few channels, each kernel position would have its own scale.
    short = isinstance(spec.granularity, tuple) and len(spec.granularity) == 1 and 2 * shape[axis] < spec.granularity[0]
    return replace(spec, granularity=Granularity.CHANNEL) if short and len(shape) > 2 else spec


# The mode of a node with constant weights: weight-only, storage or float.

AT_LOAD: Final = "weights dequantized at load: "
"""Stands in the reason of a node with such weights, before the reason that it does not compute with integers."""

# Values; the nodes that look up and dequantize rows take as many bytes as a smaller table saves.
_SMALLEST_TABLE = 1024
# The error of a row appears wherever it is looked up. With so few rows, that is a large part of all positions, and it
# does not average out as in a matrix multiplication. The table would save 48 KiB at most.
_FEWEST_ROWS, _FEW_VALUES = 8, 1 << 14
# Values; dequantized at load, a larger table takes 4 MiB and more, and 2 ms for each million values.
_LARGE_TABLE = 1 << 20
_MOST_BITS = 16

# Weight formats between quantized activations; integer kernels read no others.
_INTEGERS: Final = ("int8", "int4")
_BYTE = 8

# onnxruntime 1.31.1 fuses DequantizeLinear of these bits and MatMul into MatMulNBits.
_MULTIPLIED_BITS = frozenset({2, 4, 8})
_TWO_BITS, _VALUES_IN_BYTE = 2, 4


def weight_spec(rule: Rule, target: Target) -> QuantSpec:
    """Return the weight spec of a rule, or else the target's default, with scales that the target reads."""
    return readable(rule.weight or target.weight, target)


def readable(spec: QuantSpec, target: Target) -> QuantSpec:
    """Return a weight spec with positive scales if the target reads no others."""
    return spec if target.reads.negative_scales else spec.with_positive_scales


def check_weight_spec(spec: QuantSpec, mode: Mode, target: Target) -> None:
    """Check that weights of a rule or plan can have this spec in this mode.

    Raises:
        SchemeError: the quantized values take as many bytes as floats, integer kernels do not multiply them, the target
            cannot read them, or no installed package has their encoder.
    """
    check_method(spec.method)
    if spec.storage is Storage.WORDS and not target.reads.words:
        raise SchemeError(f"weights in uint32 words are decoded wrongly by {target.name}; use another storage")
    if readable(spec, target) != spec:
        narrow = spec.with_positive_scales.format
        raise SchemeError(f"{target.name} reads no negative scales, which blocks of {spec.format} have; use {narrow}")
    if format_named(spec.format).bits < target.reads.fewest_bits:
        least = target.reads.fewest_bits
        raise SchemeError(f"{target.name} does not read weights as {spec.format}, expected {least} bits or more")
    if format_named(spec.format).bits > _MOST_BITS:
        raise SchemeError(f"weights as {spec.format} are no smaller than floats; use int16 or fewer bits")
    if spec.method is Method.BURN:
        check_burn(spec)
        if mode not in (Mode.STORAGE, Mode.FLOAT):
            raise SchemeError(f'method = "burn" has mode {mode}, expected storage or float; set mode = "storage"')
    if mode not in (Mode.STATIC, Mode.DYNAMIC):
        return
    fewest = target.reads.static_bits if mode is Mode.STATIC else _BYTE
    formats = tuple(name for name in _INTEGERS if format_named(name).bits >= fewest)
    plain = spec == QuantSpec(spec.format, spec.granularity, spec.symmetric, method=spec.method)
    if not plain or isinstance(spec.granularity, tuple) or not spec.symmetric or not spec.format.startswith(formats):
        kind = "symmetric" if spec.symmetric else "affine"
        granularity = (
            spec.granularity if isinstance(spec.granularity, Granularity) else f"block of {list(spec.granularity)}"
        )
        raise SchemeError(
            f"weights as {kind} {spec.format} per {granularity} have no fast integer kernel on {target.name}; "
            "use symmetric int8 per tensor or channel, or mode weight-only"
        )


def is_large_table(node: Node) -> bool:
    """Return whether a node looks up rows of a table with at least 2**20 values."""
    operator = facts_of(node)
    table = next((node.inputs[index] for index in operator.weights), None) if operator.looks_up else None
    return isinstance(table, Constant) and volume(table.shape) >= _LARGE_TABLE


def decide_weights(
    node: Node,
    mode: Mode,
    spec: QuantSpec,
    reason: str,
    emit: AllowedOps = AllowedOps.QDQ,
    *,
    in_body: bool,
    whole_blocks: bool = False,
) -> Decision:
    """Choose a mode for a node that does not run as an integer kernel: float, weight-only or storage.

    Args:
        node: of a prepared graph.
        mode: the requested mode; any mode but weight-only stores the weights.
        spec: the requested weight spec.
        reason: why the node does not run as an integer kernel.
        emit: operators that the written model may contain.
        in_body: whether the node is in a control-flow subgraph.
        whole_blocks: whether the target reads blocks only if all blocks are full.
    """
    weights = tuple((every_weight if spec.method is Method.BURN else large_weights)(node, spec))
    if not weights:
        return Decision(node.name, node.op, Mode.FLOAT, reason)
    if problem := next(filter(None, (_misfit(node, weight) for weight in weights)), ""):
        return Decision(node.name, node.op, Mode.FLOAT, problem)
    rows = node.inputs[weights[0].index].shape[0] if facts_of(node).looks_up else _FEWEST_ROWS
    if rows < _FEWEST_ROWS and weights[0].elements <= _FEW_VALUES and not spec.is_followed:
        reason = f"a {rows}-row table, too small to be worth the error"
        return Decision(node.name, node.op, Mode.FLOAT, reason)
    if mode is Mode.WEIGHT_ONLY and node.op == "Gather" and weights[0].elements < _SMALLEST_TABLE:
        return Decision(
            node.name,
            node.op,
            Mode.FLOAT,
            f"a table of {weights[0].elements} values, too small to save bytes",
        )
    if mode is Mode.WEIGHT_ONLY:
        has_own = should_use_kernel(spec, node.op, emit, in_body=in_body)
        multiplied = weights_of_experts(weights) if is_moe(node) else weights
        if is_moe(node):
            reason = experts_obstacle(node, multiplied, emit, in_body=in_body)
        else:
            reason = _value_obstacle(node, weights[0], decoded_in_body=in_body and not has_own)
        reason = reason or (_unfilled_rows(node, weights[0]) if has_own and node.op == "Gather" else "")
        reason = reason or (_part_of_a_block(node, weights[0]) if whole_blocks else "")
        if not reason:
            use = "looks up {} rows" if node.op == "Gather" else "multiplies by {} weights"
            typed = tuple(replace(weight, spec=_typed_spec(node, weight)) for weight in multiplied)
            return Decision(node.name, node.op, Mode.WEIGHT_ONLY, use.format(spec.format), typed)
    return Decision(node.name, node.op, Mode.STORAGE, f"computes in float, {spec.format} {AT_LOAD}{reason}", weights)


def format_opset(plan: Plan, emit: AllowedOps) -> int:
    """Return the lowest default-domain opset in which a plan's weights and activations can be dequantized.

    It is 0 if nothing is quantized. Models are prepared for the opset of 8-bit integer kernels before they are planned,
    so these count nothing.

    Raises:
        SchemeError: a dynamic node needs an operator that may not be written or that the target lacks.
    """
    for decision in plan.decisions:
        if decision.mode is Mode.DYNAMIC:
            _check_dynamic(decision, target_named(plan.target), emit)
    weights = (
        _opset_of(weight, decision, emit)
        for decision in plan.decisions
        if decision.mode in (Mode.STATIC, Mode.STORAGE, Mode.WEIGHT_ONLY)
        for weight in decision.weights
    )
    return max([0, *weights, *(_kernel_opset(activation.spec) for activation in plan.activations)])


def _kernel_opset(spec: QuantSpec) -> int:
    format = format_named(spec.format)
    return 0 if format.bits == _BYTE else format.opset


def _opset_of(weight: Weight, decision: Decision, emit: AllowedOps) -> int:
    if decision.mode is Mode.STATIC:
        return _kernel_opset(weight.spec)
    return minimum_opset(weight.spec, decision.op_type, emit, folded=decision.mode is Mode.STORAGE)


def _check_dynamic(decision: Decision, target: Target, emit: AllowedOps) -> None:
    own = decision.op_type in target.kernels.own_dynamic
    if decision.op_type not in target.kernels.dynamic and not (own and emit.has_own):
        advice = "say --emit ort" if own else "give it another mode in the plan"
        raise SchemeError(
            f"node {decision.node} is dynamic, and {decision.op_type} has no dynamic integer kernel in "
            f"{'standard ONNX' if own else target.name}; {advice}"
        )


def _misfit(node: Node, weight: Weight) -> str:
    granularity, rank = weight.spec.granularity, len(node.inputs[weight.index].shape)
    if isinstance(granularity, tuple) and len(granularity) > rank and any(extent > 1 for extent in granularity[:-rank]):
        return f"its weight has rank {rank}, too few for blocks of {len(granularity)} axes"
    return ""


# Quantized weights that are multiplied or looked up.


def _value_obstacle(node: Node, weight: Weight, *, decoded_in_body: bool) -> str:
    if node.op == "Gather":
        return _lookup_obstacle(node, weight)
    if not facts_of(node).product:
        return f"no kernel of {node.op} takes quantized weights"
    return _product_obstacle(node, weight, decoded_in_body=decoded_in_body)


def _part_of_a_block(node: Node, weight: Weight) -> str:
    granularity, extent = weight.spec.granularity, node.inputs[weight.index].shape[weight.reduction_axis]
    if not isinstance(granularity, tuple) or extent % granularity[-1] == 0:
        return ""
    return f"{extent} values do not fill blocks of {granularity[-1]}"


def _unfilled_rows(node: Node, weight: Weight) -> str:
    spec, extent = weight.spec, node.inputs[weight.index].shape[-1]
    blocks = -(-extent // spec.granularity[-1]) if isinstance(spec.granularity, tuple) and not spec.symmetric else 0
    return unfilled_rows(format_named(spec.format).bits, extent, blocks)


def _lookup_obstacle(node: Node, weight: Weight) -> str:
    table, indices = node.inputs[0], node.inputs[1]
    if len(table.shape) != 2 or node.attrs.get("axis", 0):
        return "only rows of a rank-2 table are looked up quantized"
    if indices.shape is None:
        return "the rank of its indices is unknown"
    if isinstance(weight.spec.granularity, tuple) and len(weight.spec.granularity) > 1:
        return "blocks of several rows are not looked up quantized"
    return ""


def _product_obstacle(node: Node, weight: Weight, *, decoded_in_body: bool) -> str:
    spec, format, tensor = weight.spec, format_named(weight.spec.format), node.inputs[weight.index]
    dtype = onnx_dtype(tensor)
    if decoded_in_body:
        return "onnxruntime cannot multiply by quantized weights in a subgraph"
    if weight.index != 1 or len(tensor.shape) != 2:
        return "only a second operand of rank 2 can stay quantized"
    if sum(facts_of(reader).product for reader in set(tensor.outputs)) > 1:
        return "onnxruntime cannot multiply by quantized weights that several nodes share"
    if format.is_float or format.bits not in _MULTIPLIED_BITS:
        return f"no kernel takes {spec.format} weights"
    if format.bits == _TWO_BITS and spec.storage is Storage.WORDS:
        return "onnxruntime cannot multiply by 2-bit weights in words"
    if format.bits == _TWO_BITS and tensor.shape[weight.axis] % _VALUES_IN_BYTE:
        return "onnxruntime multiplies 2-bit weights wrongly when their columns do not fill bytes"
    if isinstance(spec.granularity, tuple) and not is_kernel_block(spec.granularity):
        return f"kernels take blocks of 16, 32, 64 and so on along the reduction axis, not {list(spec.granularity)}"
    if dtype == TensorProto.BFLOAT16:
        return "no kernel takes quantized weights with bfloat16 activations"
    if dtype == TensorProto.FLOAT16 and (spec.two_level or spec.scale not in ("float32", "float16")):
        return "with float16 activations, weights need float16 scales"
    if scales_its_terms(node):
        return "no kernel of a Gemm with alpha, beta or transA takes quantized weights"
    bias = optional_input(node, 2) if node.op == "Gemm" else None
    channels = tensor.shape[weight.axis]
    if bias is not None and (bias.shape is None or tuple(bias.shape) != (channels,)):
        return f"its bias is not a vector of {channels} values"
    return ""


def _typed_spec(node: Node, weight: Weight) -> QuantSpec:
    multiplied = node.op != "Gather" and onnx_dtype(node.inputs[weight.index]) == TensorProto.FLOAT16
    return replace(weight.spec, scale="float16") if multiplied else weight.spec


def needed_opset(plan: Plan, emit: AllowedOps) -> int:
    """Return the lowest opset that has all operators that a plan inserts, see `format_opset`."""
    integers = plan.count(Mode.STATIC) or plan.count(Mode.DYNAMIC)
    return max(target_named(plan.target).kernels.opset if integers else 0, format_opset(plan, emit))


# Weights that several nodes read along different axes, so that one set of quantized values is not enough.

# Values; a second copy of a smaller weight is not reported.
_LARGE: Final = 1 << 14


def with_second_layouts(nodes: Sequence[Node], decisions: Sequence[Decision]) -> Iterator[Decision]:
    """Yield the decisions; if a weight is stored a second time, the reason names the node of the first copy.

    Args:
        nodes: of a prepared graph.
        decisions: one for each node.
    """
    stored: dict[Constant, dict[Weight, Node]] = defaultdict(dict)
    for node, decision in zip(nodes, decisions, strict=True):
        for weight in decision.weights:
            if weight.elements < _LARGE:
                continue
            tensor = node.inputs[weight.index]
            kind, layouts = weight.of_rank(len(tensor.shape)), stored[tensor]
            # Quantized values that are fitted in pairs depend on the axis even with one scale.
            if kind.spec.granularity is Granularity.TENSOR and kind.pairs is Pairs.NONE:
                kind = replace(kind, axis=0, reduction_axis=0)
            if layouts and kind not in layouts:
                first = next(iter(layouts.values())).name
                note = f"its weight is stored a second time, because {first} reads it along another axis"
                decision = replace(decision, reason=f"{decision.reason}; {note}")
            layouts.setdefault(kind, node)
        yield decision


# Weights whose products an integer kernel may add in pairs, in 16 bits.

_INTEGER_MODES = frozenset({Mode.STATIC, Mode.DYNAMIC})
# Largest rank of the weights of 1-D and 2-D convolutions.
_MOST_AXES = 4
# Values along each axis by which two weights are compared; weights that differ elsewhere get the same pairs.
_SAMPLED_PLACES = 16


def with_pairs(
    nodes: Iterable[Node], decisions: Iterable[Decision], target: Target, wide: Set[str] = frozenset()
) -> Iterator[Decision]:
    """Yield the decisions, with `pairs` set on weights for which the target's kernels add pairs of products.

    Equal weights, or transposes of each other, are stored once. If one of them is multiplied in pairs, all take its
    quantized values.

    Args:
        nodes: in the order of the decisions.
        decisions: for these nodes.
        target: the runtime.
        wide: names of the nodes whose activations have 16 bits.
    """
    planned = list(zip(nodes, decisions, strict=True))
    own = {
        (node, weight): Pairs.NONE if node.name in wide else _pairs(node, decision, weight, target)
        for node, decision in planned
        for weight in decision.weights
    }
    paired, plain = (
        {_size(*use) for use, pairs in own.items() if (pairs is Pairs.NONE) == way} for way in (False, True)
    )
    both = paired & plain
    looks = {use: _look(*use) for use in own if _size(*use) in both}
    shared = {looks[use]: own[use] for use in looks if own[use] is not Pairs.NONE}
    for node, decision in planned:
        pairs = [shared.get(looks.get((node, weight)), own[node, weight]) for weight in decision.weights]
        if any(kind is not Pairs.NONE for kind in pairs):
            weights = (replace(weight, pairs=kind) for weight, kind in zip(decision.weights, pairs, strict=True))
            decision = replace(decision, weights=tuple(weights))
        yield decision


def _pairs(node: Node, decision: Decision, weight: Weight, target: Target) -> Pairs:
    paired = may_be_paired(format_named(weight.spec.format))
    if decision.mode not in _INTEGER_MODES or not paired or weight.spec.is_followed or _is_depthwise(node):
        return Pairs.NONE
    return target.kernels.pairs if node.op == "Conv" else Pairs.TAP


def _is_depthwise(node: Node) -> bool:
    # Kernels of depthwise convolutions add products in 32 bits.
    if node.op != "Conv":
        return False
    shape = tuple(node.inputs[1].shape)
    return len(shape) <= _MOST_AXES and shape[:2] == (node.attrs.get("group", 1), 1)


def _size(node: Node, weight: Weight) -> tuple[QuantSpec, int, int]:
    return weight.spec, weight.elements, node.inputs[weight.index].shape[weight.axis]


def _look(node: Node, weight: Weight) -> Hashable:
    source = node.inputs[weight.index]
    return look_of(weight, source) if len(source.shape) == 2 else weight.of_rank(len(source.shape))


def look_of(weight: Weight, tensor: Constant) -> Hashable:
    """Return a key of a weight that is equal for its transpose, such as that of a tied embedding."""
    rows = np.moveaxis(tensor.values, weight.axis, 0)
    steps = (max(extent // _SAMPLED_PLACES, 1) for extent in rows.shape)
    return weight.spec, rows.shape, rows[tuple(slice(None, None, step) for step in steps)].tobytes()
