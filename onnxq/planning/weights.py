"""Which constants of a node are worth storing as codes, and along which axes those have scales."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeGuard

import numpy as np
from onnx import TensorProto

from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec, Rule, Storage, check_method
from onnxq.errors import SchemeError
from onnxq.ir import Constant, Node, Tensor, is_constant, onnx_dtype, operator_key, optional_input
from onnxq.lowering import AllowedOps, is_kernel_block, minimum_opset, should_use_kernel
from onnxq.numerics.blocks import block_shape, grid_shape
from onnxq.numerics.burn import check as check_burn
from onnxq.numerics.formats import format_named, scale_format_named
from onnxq.numerics.ort_packing import unfilled_rows
from onnxq.numerics.pairs import Pairs, may_be_paired
from onnxq.ops import OPERATORS, operator_of
from onnxq.planning.obstacles import scales_its_terms, volume
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.runtime.targets import LARGE_WEIGHT, Target, target_named

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})

# Below this a weight saves less than the nodes that decode it cost.
_SMALLEST_STORED_WEIGHT = 256

# With fewer bits one scale for a whole weight is too coarse.
_FINE_BITS = 8

# A constant that is no weight saves nothing to speak of below this.
_SMALLEST_STORED_CONSTANT = 4096
_VALUES_PER_SCALE = 32
# So many of its values are looked at, times a power of two that makes short fractions whole.
_SAMPLED_VALUES, _SHORT_FRACTION = 4096, 64.0


def weight_at(node: Node, index: int, spec: QuantSpec) -> Weight:
    """Return the weight at an input of a node, with a spec whose scales do not outweigh what its codes save."""
    operator, tensor = OPERATORS[operator_key(node)], node.inputs[index]
    axes = operator.weights[index]
    weight = Weight(index, tensor.name, spec, axes.channels(node), volume(tensor.shape), axes.reduction(node))
    return replace(weight, spec=_worthwhile(weight, tensor) or spec)


def large_weights(node: Node, spec: QuantSpec) -> Iterator[Weight]:
    """Yield the weights of a node, and whatever else it holds of learned numbers that are worth storing as codes."""
    operator = operator_of(node)
    for index, axis_of in operator.weights.items() if operator else ():
        tensor = optional_input(node, index)
        if not _is_table(tensor, _SMALLEST_STORED_WEIGHT):
            continue
        axes = axis_of.channels(node), axis_of.reduction(node)
        rank = len(tensor.shape)
        # A damaged model's weight may lack an axis that its operator speaks of.
        if all(-rank <= axis < rank for axis in axes):
            full = _with_full_blocks(spec, tensor.shape, axes[1])
            yield from _saving(Weight(index, tensor.name, full, axes[0], volume(tensor.shape), axes[1]), tensor)
    if (operator is not None and operator.precision_sensitive) or node.subgraphs():
        return
    named = {*operator.weights, operator.bias} if operator else set()
    for index, tensor in enumerate(node.inputs):
        if index not in named and _is_table(tensor, _SMALLEST_STORED_CONSTANT) and _is_learned(tensor):
            axis = _finest_axis(tensor.shape)
            weight = Weight(index, tensor.name, spec, axis, volume(tensor.shape), len(tensor.shape) - 1)
            yield from _saving(weight, tensor)


def _is_table(tensor: Tensor | None, least: int) -> TypeGuard[Constant]:
    """Whether a tensor is stored floats of two axes or more and at least so many elements."""
    return (
        is_constant(tensor)
        and onnx_dtype(tensor) in _FLOATS
        and volume(tensor.shape) >= least
        and len(tensor.shape) >= 2
    )


def _is_learned(tensor: Constant) -> bool:
    """Whether the values of a constant are finite and not all short fractions, as in grids, anchors and masks.

    Those say where something lies, and coarser ones would name other places.
    """
    values = tensor.values.astype(np.float32, copy=False).reshape(-1)
    if not np.isfinite(values).all():
        return False
    sample = values[:: max(1, values.size // _SAMPLED_VALUES)].astype(np.float64)
    return bool(np.mod(sample * _SHORT_FRACTION, 1).any())


def _finest_axis(shape: Sequence[int]) -> int:
    """Return the longest axis of which each index still has enough values to be worth a scale of its own."""
    elements = volume(shape)
    axes = [axis for axis, extent in enumerate(shape) if elements >= _VALUES_PER_SCALE * extent]
    return max(axes, key=lambda axis: shape[axis], default=0)


def every_weight(node: Node, spec: QuantSpec) -> Iterator[Weight]:
    """Yield the float initializers of any operator that can be parameters: no settings, numbers or masks."""
    operator = operator_of(node)
    if (operator is not None and operator.precision_sensitive) or node.subgraphs():
        return
    for index, tensor in enumerate(node.inputs):
        if (
            is_constant(tensor)
            and onnx_dtype(tensor) in _FLOATS
            and volume(tensor.shape)
            and tensor.shape
            and np.isfinite(tensor.values.astype(np.float32)).all()
        ):
            # Blocks lie along the last axes, whatever the operator sums over.
            yield Weight(index, tensor.name, spec, 0, volume(tensor.shape), -1)


def _saving(weight: Weight, tensor: Constant) -> Iterator[Weight]:
    """Yield a weight with a spec that saves bytes, or nothing where none does."""
    if spec := _worthwhile(weight, tensor):
        yield replace(weight, spec=spec)


def _worthwhile(weight: Weight, tensor: Constant) -> QuantSpec | None:
    """Return the spec of a weight, with one scale for the whole tensor where more take too much, or None where all do.

    Scales of channels take too much where they take as much as codes of 8 bits and more: those of twice the bits and
    one scale would be as small. What a toolkit's arithmetic says stays, and so does the granularity of small weights.
    """
    spec = weight.spec
    shape = tuple(tensor.shape)
    misfit = isinstance(spec.per, tuple) and len(spec.per) > len(shape)
    if spec.is_followed or misfit or weight.elements < _SMALLEST_STORED_WEIGHT:
        return spec
    # Scales of a small range are for several that one more multiplies.
    scale = "float32" if spec.two_level else spec.scale
    single = replace(spec, per=Granularity.TENSOR, two_level=False, scale=scale)
    for one in (spec, single):
        codes, scales = stored_bytes(replace(weight, spec=one), shape)
        few = format_named(one.format).bits < _FINE_BITS
        fine = one.per is not Granularity.CHANNEL or few or scales < codes
        if fine and codes + scales < weight.elements * tensor.dtype.itemsize:
            return one
    return None


def stored_bytes(weight: Weight, shape: Sequence[int]) -> tuple[int, int]:
    """Return how many bytes the codes of a weight take, and its scales and zero points.

    >>> stored_bytes(Weight(0, "table", QuantSpec("int8", Granularity.CHANNEL), axis=0, reduction_axis=-1), (1000, 16))
    (16000, 4000)
    """
    spec, format = weight.spec, format_named(weight.spec.format)
    block = block_shape(spec.per, shape, channel_axis=weight.axis, reduction_axis=weight.reduction_axis)
    each = scale_format_named(spec.scale).dtype.itemsize + (0 if spec.symmetric else format.bits / 8)
    return math.ceil(volume(shape) * format.bits / 8), math.ceil(volume(grid_shape(shape, block)) * each)


def _with_full_blocks(spec: QuantSpec, shape: tuple[int, ...], axis: int) -> QuantSpec:
    """Return the spec per channel where blocks would not be half full, as in kernels that sum over a few channels.

    Blocks lie along one axis, so every place in such a kernel would have scales of its own.
    """
    short = isinstance(spec.per, tuple) and len(spec.per) == 1 and 2 * shape[axis] < spec.per[0]
    return replace(spec, per=Granularity.CHANNEL) if short and len(shape) > 2 else spec


# What becomes of the constant weights of one node: multiplied or looked up as codes, decoded at load, or left.

# The nodes that look up and decode rows take as much as this saves.
_SMALLEST_TABLE = 1024
# The error of a row stands at every place that looks it up, and with so few rows at a large part of all places, where
# it does not average out as the errors of a product do; it saves 48 KiB at most.
_FEWEST_ROWS, _FEW_VALUES = 8, 1 << 14
# Decoded when it is loaded, a table takes 4 MiB and more, and 2 ms of each million values.
_LARGE_TABLE = 1 << 20
_MOST_BITS = 16
# Per-axis scales stand in QuantizeLinear and DequantizeLinear since this opset.
_STATIC_OPSET = 13

# What stands between quantizers of data: what else a spec may say, kernels do not read.
_INTEGERS: Final = ("int8", "int4")
_BYTE = 8

# What onnxruntime 1.31.1 turns into MatMulNBits when a DequantizeLinear stands in front of a product.
_MULTIPLIED_BITS = frozenset({2, 4, 8})
_TWO_BITS, _CODES_IN_BYTE = 2, 4


def weight_spec(rule: Rule, target: Target) -> QuantSpec:
    """Return how a rule wants weights; the target's format per channel where it does not say."""
    return rule.weight or target.weight


def check_weight_spec(spec: QuantSpec, mode: Mode, target: Target) -> None:
    """Check that weights as a rule or a plan wants them can be what its mode says.

    Raises:
        SchemeError: the codes take as much as floats, integer kernels do not multiply them, the target cannot read
            them, or no installed package has their encoder.
    """
    check_method(spec.method)
    if spec.storage is Storage.WORDS and not target.reads.words:
        raise SchemeError(f"weights in uint32 words are decoded wrongly by {target.name}; take others")
    if format_named(spec.format).bits < target.reads.fewest_bits:
        least = target.reads.fewest_bits
        raise SchemeError(f"{target.name} does not read weights as {spec.format}, expected {least} bits or more")
    if format_named(spec.format).bits > _MOST_BITS:
        raise SchemeError(f"weights as {spec.format} are no smaller than floats; use int16 or fewer bits")
    if spec.method is Method.BURN:
        check_burn(spec)
        if mode not in (Mode.STORAGE, Mode.FLOAT):
            raise SchemeError(f'method = "burn" computes in float, so it has no mode {mode}; say mode = "storage"')
    if mode not in (Mode.STATIC, Mode.DYNAMIC):
        return
    fewest = target.reads.static_bits if mode is Mode.STATIC else _BYTE
    formats = tuple(name for name in _INTEGERS if format_named(name).bits >= fewest)
    plain = spec == QuantSpec(spec.format, spec.per, spec.symmetric, method=spec.method)
    if not plain or isinstance(spec.per, tuple) or not spec.symmetric or not spec.format.startswith(formats):
        kind = "symmetric" if spec.symmetric else "affine"
        per = spec.per if isinstance(spec.per, Granularity) else f"block of {list(spec.per)}"
        raise SchemeError(
            f"weights as {kind} {spec.format} per {per} have no fast integer kernel on {target.name}; "
            "use symmetric int8 per tensor or channel, or mode weight-only"
        )


def is_large_table(node: Node) -> bool:
    """Return whether a node looks up rows of a table that is large as floats."""
    operator = operator_of(node)
    table = next((node.inputs[index] for index in operator.weights), None) if operator and operator.looks_up else None
    return isinstance(table, Constant) and volume(table.shape) >= _LARGE_TABLE


def is_large_product(node: Node) -> bool:
    """Return whether a node multiplies a constant weight that is large as floats."""
    weight = optional_input(node, 1) if node.op in ("Gemm", "MatMul") and not node.domain else None
    return isinstance(weight, Constant) and volume(weight.shape) >= LARGE_WEIGHT


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
    """Decide what becomes of the weights of a node that does not run as an integer kernel.

    Args:
        node: of a prepared graph.
        mode: what is wanted; anything but weight-only stores weights.
        spec: how weights are wanted.
        reason: why the node does not run as an integer kernel.
        emit: what may be written.
        in_body: whether it stands in a control-flow body.
        whole_blocks: whether codes in blocks are read only where all blocks are whole.
    """
    weights = tuple((every_weight if spec.method is Method.BURN else large_weights)(node, spec))
    if not weights:
        return Decision(node.name, node.op, Mode.FLOAT, reason)
    if problem := next(filter(None, (_misfit(node, weight) for weight in weights)), ""):
        return Decision(node.name, node.op, Mode.FLOAT, problem)
    operator, table = operator_of(node), node.inputs[weights[0].index]
    rows = table.shape[0] if operator is not None and operator.looks_up else _FEWEST_ROWS
    if rows < _FEWEST_ROWS and weights[0].elements <= _FEW_VALUES and not spec.is_followed:
        reason = f"a table of {rows} rows saves little when it is quantized, and their errors would stand everywhere"
        return Decision(node.name, node.op, Mode.FLOAT, reason)
    if mode is Mode.WEIGHT_ONLY and node.op == "Gather" and weights[0].elements < _SMALLEST_TABLE:
        return Decision(
            node.name,
            node.op,
            Mode.FLOAT,
            f"a table of {weights[0].elements} values saves nothing when it is quantized",
        )
    if mode is Mode.WEIGHT_ONLY:
        has_own = should_use_kernel(spec, node.op, emit, in_body=in_body)
        reason = _code_obstacle(node, weights[0], decoded_in_body=in_body and not has_own)
        reason = reason or (_unfilled_rows(node, weights[0]) if has_own and node.op == "Gather" else "")
        reason = reason or (_part_of_a_block(node, weights[0]) if whole_blocks else "")
        if not reason:
            verb = "looks up" if node.op == "Gather" else "multiplies"
            typed = tuple(replace(weight, spec=_typed_spec(node, weight)) for weight in weights)
            return Decision(node.name, node.op, Mode.WEIGHT_ONLY, f"{verb} {spec.format} codes", typed)
    return Decision(
        node.name, node.op, Mode.STORAGE, f"computes in float from {spec.format} weights: {reason}", weights
    )


def weight_opset(plan: Plan, emit: AllowedOps) -> int:
    """Return the lowest default-domain opset that can express how a plan's weights are decoded; 0 when none are.

    Raises:
        SchemeError: no opset can: a dynamic node needs an operator that may not be written, or that nobody has.
    """
    for decision in plan.decisions:
        if decision.mode is Mode.DYNAMIC:
            _check_dynamic(decision, target_named(plan.target), emit)
    return max(
        (
            _opset_of(weight, decision, emit)
            for decision in plan.decisions
            if decision.mode in (Mode.STATIC, Mode.STORAGE, Mode.WEIGHT_ONLY)
            for weight in decision.weights
        ),
        default=0,
    )


def _opset_of(weight: Weight, decision: Decision, emit: AllowedOps) -> int:
    if decision.mode is Mode.STATIC:
        # Integer kernels of 8 bits have an opset that models are prepared for before they are planned.
        format = format_named(weight.spec.format)
        return format.opset if format.bits < _BYTE else 0
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
    """Return why the blocks of a spec do not fit a weight, or an empty string."""
    per, rank = weight.spec.per, len(node.inputs[weight.index].shape)
    if isinstance(per, tuple) and len(per) > rank and any(extent > 1 for extent in per[:-rank]):
        return f"its weight of rank {rank} has no blocks of {len(per)} axes"
    return ""


# --- codes that are multiplied or looked up -----------------------------------------------------------------------


def _code_obstacle(node: Node, weight: Weight, *, decoded_in_body: bool) -> str:
    """Return why the runtime cannot use the codes of a weight as they are, or an empty string."""
    if node.op == "Gather":
        return _lookup_obstacle(node, weight)
    operator = operator_of(node)
    if operator is None or not operator.product:
        return f"no kernel multiplies quantized weights in {node.op}"
    return _product_obstacle(node, weight, decoded_in_body=decoded_in_body)


def _part_of_a_block(node: Node, weight: Weight) -> str:
    per, extent = weight.spec.per, node.inputs[weight.index].shape[weight.reduction_axis]
    if not isinstance(per, tuple) or extent % per[-1] == 0:
        return ""
    return f"{extent} values are not whole blocks of {per[-1]}"


def _unfilled_rows(node: Node, weight: Weight) -> str:
    """Return why onnxruntime's own operator reads no rows of a table, or an empty string."""
    spec, extent = weight.spec, node.inputs[weight.index].shape[-1]
    blocks = -(-extent // spec.per[-1]) if isinstance(spec.per, tuple) and not spec.symmetric else 0
    return unfilled_rows(format_named(spec.format).bits, extent, blocks)


def _lookup_obstacle(node: Node, weight: Weight) -> str:
    table, indices = node.inputs[0], node.inputs[1]
    if len(table.shape) != 2 or node.attrs.get("axis", 0):
        return "only rows of a table of rank 2 are looked up quantized"
    if indices.shape is None:
        return "the rank of its indices is unknown"
    if isinstance(weight.spec.per, tuple) and len(weight.spec.per) > 1:
        return "blocks of several rows are not looked up quantized"
    return ""


def _product_obstacle(node: Node, weight: Weight, *, decoded_in_body: bool) -> str:
    spec, format, tensor = weight.spec, format_named(weight.spec.format), node.inputs[weight.index]
    dtype = onnx_dtype(tensor)
    if decoded_in_body:
        return "onnxruntime loads no quantized weights that a control-flow body multiplies"
    if weight.index != 1 or len(tensor.shape) != 2:
        return "quantized weights are multiplied only as a second factor of rank 2"
    readers = (operator_of(reader) for reader in set(tensor.outputs))
    if sum(operator is not None and operator.product for operator in readers) > 1:
        return "onnxruntime multiplies no quantized weights that several nodes share"
    if format.is_float or format.bits not in _MULTIPLIED_BITS:
        return f"no kernel multiplies {spec.format} weights"
    if format.bits == _TWO_BITS and spec.storage is Storage.WORDS:
        return "onnxruntime loads no 2-bit weights in words that are multiplied"
    if format.bits == _TWO_BITS and tensor.shape[weight.axis] % _CODES_IN_BYTE:
        return "onnxruntime multiplies 2-bit weights wrongly when their columns do not fill bytes"
    if isinstance(spec.per, tuple) and not is_kernel_block(spec.per):
        return f"only blocks of 16, 32, 64 and so on along the sum are multiplied, not {list(spec.per)}"
    if dtype == TensorProto.BFLOAT16:
        return "no kernel multiplies quantized weights with bfloat16 activations"
    if dtype == TensorProto.FLOAT16 and (spec.two_level or spec.scale not in ("float32", "float16")):
        return "float16 activations are multiplied by weights with float16 scales only"
    if scales_its_terms(node):
        return "no Gemm with alpha, beta or transA multiplies quantized weights"
    bias = optional_input(node, 2) if node.op == "Gemm" else None
    channels = tensor.shape[weight.axis]
    if bias is not None and (bias.shape is None or tuple(bias.shape) != (channels,)):
        return f"its bias is not a vector of {channels} values"
    return ""


def _typed_spec(node: Node, weight: Weight) -> QuantSpec:
    """Return the spec with scales of the type of the data that codes are multiplied with."""
    multiplied = node.op != "Gather" and onnx_dtype(node.inputs[weight.index]) == TensorProto.FLOAT16
    return replace(weight.spec, scale="float16") if multiplied else weight.spec


def needed_opset(plan: Plan, emit: AllowedOps) -> int:
    """Return the lowest opset that can express what a plan inserts, see `weight_opset`."""
    integers = plan.count(Mode.STATIC) or plan.count(Mode.DYNAMIC)
    return max(_STATIC_OPSET if integers else 0, weight_opset(plan, emit))


# Weights that several nodes read along different axes, so that one set of codes does not serve all of them.

# A second copy of fewer values is nothing to tell.
_LARGE: Final = 1 << 14


def with_second_layouts(nodes: Sequence[Node], decisions: Sequence[Decision]) -> Iterator[Decision]:
    """Yield the decisions; one whose weight is stored a second time says for which node it is stored already.

    Args:
        nodes: of a prepared graph.
        decisions: what becomes of each.
    """
    stored: dict[Constant, dict[Weight, Node]] = defaultdict(dict)
    for node, decision in zip(nodes, decisions, strict=True):
        for weight in decision.weights:
            if weight.elements < _LARGE:
                continue
            tensor = node.inputs[weight.index]
            kind, others = weight.of_rank(len(tensor.shape)), stored[tensor]
            # Quantized values that are fitted in pairs depend on the axis even with one scale.
            if kind.spec.per is Granularity.TENSOR and kind.pairs is Pairs.NONE:
                kind = replace(kind, axis=0, reduction_axis=0)
            if others and kind not in others:
                first = next(iter(others.values())).name
                told = f"its weight is stored a second time, as node {first} reads it along another axis"
                decision = replace(decision, reason=f"{decision.reason}; {told}")
            others.setdefault(kind, node)
        yield decision


# Which weights stand for pairs of products that an integer kernel may add in 16 bits.

_INTEGER_MODES = frozenset({Mode.STATIC, Mode.DYNAMIC})
# Of the weights of convolutions over lines and images.
_MOST_AXES = 4
# So many values along each axis tell two tables apart; such as they do not may have the same codes.
_SAMPLED_PLACES = 16


def with_pairs(nodes: Iterable[Node], decisions: Iterable[Decision], target: Target) -> Iterator[Decision]:
    """Yield the decisions, each with the pairs that the target's integer kernels make of its weights.

    Tables that are equal, or the transpose of one another, are stored once, so that all have the codes of one that is
    multiplied in pairs.

    Args:
        nodes: in the order of the decisions.
        decisions: for these nodes.
        target: the runtime.
    """
    found = list(zip(nodes, decisions, strict=True))
    own = {(node, one): _pairs(node, decision, one, target) for node, decision in found for one in decision.weights}
    paired, plain = (
        {_size(*use) for use, pairs in own.items() if (pairs is Pairs.NONE) == way} for way in (False, True)
    )
    both = paired & plain
    looks = {use: _look(*use) for use in own if _size(*use) in both}
    shared = {looks[use]: own[use] for use in looks if own[use] is not Pairs.NONE}
    for node, decision in found:
        pairs = [shared.get(looks.get((node, one)), own[node, one]) for one in decision.weights]
        if any(one is not Pairs.NONE for one in pairs):
            weights = (replace(one, pairs=kind) for one, kind in zip(decision.weights, pairs, strict=True))
            decision = replace(decision, weights=tuple(weights))
        yield decision


def _pairs(node: Node, decision: Decision, weight: Weight, target: Target) -> Pairs:
    paired = may_be_paired(format_named(weight.spec.format))
    if decision.mode not in _INTEGER_MODES or not paired or weight.spec.is_followed or _is_depthwise(node):
        return Pairs.NONE
    return target.kernels.pairs if node.op == "Conv" else Pairs.TAP


def _is_depthwise(node: Node) -> bool:
    """Whether a convolution has one channel in each group, whose products its kernels add in 32 bits."""
    if node.op != "Conv":
        return False
    shape = tuple(node.inputs[1].shape)
    return len(shape) <= _MOST_AXES and shape[:2] == (node.attrs.get("group", 1), 1)


def _size(node: Node, weight: Weight) -> tuple[QuantSpec, int, int]:
    """Return what weights that share codes have in common."""
    return weight.spec, weight.elements, node.inputs[weight.index].shape[weight.axis]


def _look(node: Node, weight: Weight) -> Hashable:
    """Return what tells weights apart that are not stored once; those of other ranks than 2 are where they are one."""
    source = node.inputs[weight.index]
    if len(source.shape) != 2:
        return weight.of_rank(len(source.shape))
    rows = np.moveaxis(source.values, weight.axis, 0)
    steps = (max(extent // _SAMPLED_PLACES, 1) for extent in rows.shape)
    seen = rows[tuple(slice(None, None, step) for step in steps)]
    return weight.spec, rows.shape, seen.tobytes()
