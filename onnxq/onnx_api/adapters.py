"""Operators whose results onnx's version converter changes, written in a form that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from onnx import TensorProto

from onnxq.errors import ModelError
from onnxq.ir.data_types import data_type_of
from onnxq.ir.edit import replace_nodes
from onnxq.ir.elements import Constant, Node, Tensor, Variable
from onnxq.ir.graph import Graph
from onnxq.ir.node_builder import NodeBuilder
from onnxq.ir.queries import Names, all_nodes, numbers_of
from onnxq.onnx_api.shape_inference import infer_shapes

CONVERTED: Final = "onnxq.converted"
"""Domain of nodes that are in their new form already, because the converter leaves other domains alone."""

_FLOAT_MAX = float(np.finfo(np.float32).max)
# The first opset whose Reshape can keep an axis of no elements.
_ALLOWS_ZERO = 14
# The first opset whose Resize needs no region of interest.
_OPTIONAL_REGION = 13


def adapt_operators(graph: Graph, version: int) -> Graph:
    """Return a graph from which onnx's converter makes one of ``version`` that computes the same.

    A graph without such operators is returned as it is. Otherwise the result is a copy with inferred types, in which
    some nodes have the domain `CONVERTED`.

    Raises:
        ModelError: an operator cannot be converted; the message says why, and what to do.
    """

    def adapters(scope: Graph) -> dict[Node, _Adapt]:
        rows = ((node, *_ADAPTERS[node.op]) for _, node in all_nodes(scope) if not node.domain and node.op in _ADAPTERS)
        return {node: adapt for node, opsets, adapt in rows if any(graph.opset < opset <= version for opset in opsets)}

    if not adapters(graph):
        return graph
    copy = graph.copy()
    infer_shapes(copy)
    names = Names(copy)
    replaced: dict[Node, Sequence[Node]] = {}
    for node, adapt in adapters(copy).items():
        new = _NewNodes(node, names, graph.opset, version)
        adapt(node, new)
        if new.nodes:
            replaced[node] = new.nodes
    replace_nodes(copy, replaced)
    copy.opset_imports[CONVERTED] = 1
    return copy


class _NewNodes(NodeBuilder):
    """The nodes that replace a node; none if it stays, perhaps with other attributes.

    Attributes:
        old: the replaced node.
        before: the opset to convert from.
        version: the opset to convert to.
    """

    def __init__(self, old: Node, names: Names, before: int, version: int) -> None:
        super().__init__(old.name or old.outputs[0].name, names)
        self.old, self.before, self.version = old, before, version

    def __call__(
        self,
        op: str,
        *inputs: Tensor,
        dtype: Any = None,
        output: Variable | None = None,
        domain: str = "",
        **attrs: Any,
    ) -> Variable:
        """Add a node and return its output, a new tensor unless ``output`` is given."""
        is_last = output is self.old.outputs[0]
        # The one that does the work keeps the name, and with it documentation and metadata.
        keeps = (is_last or op == self.old.op) and all(node.name != self.old.name for node in self.nodes)
        variable, dtype = output or f"{op}.output", dtype or self.old.inputs[0].dtype
        result = self.node(op, self.old if keeps else op, inputs, variable, dtype, domain=domain, **attrs)
        self.nodes[-1].source = self.old.source if keeps and op == self.old.op else None
        return result

    def constant(self, values: Any) -> Constant:
        return self.store("values", values)


_Adapt = Callable[[Node, _NewNodes], None]


def _convert_softmax(node: Node, new: _NewNodes) -> None:
    # Until opset 12 the axes from this one on count as one. The converter ignores that of Hardmax, and needs the rank.
    data, axis = node.inputs[0], node.attrs.get("axis", 1)
    shape = data.shape
    if shape is not None and shape:
        together = [index for index in range(len(shape))[axis % len(shape) :] if shape[index] != 1]
        if len(together) < 2:
            only = together[0] if together else -1
            _keep(node, axis=only if only < len(shape) - 1 else -1)
            return
        if 0 in shape:
            new("Identity", data, output=node.outputs[0])
            return
    elif axis == -1:
        _keep(node, axis=-1)
        return
    sizes = new("Shape", data, dtype=np.dtype(np.int64))
    rows = new(node.op, new("Flatten", data, axis=axis), domain=CONVERTED, axis=-1)
    allows = {"allowzero": 1} if new.version >= _ALLOWS_ZERO else {}
    new("Reshape", rows, sizes, output=node.outputs[0], domain=CONVERTED, **allows)


def _convert_batch_normalization(node: Node, new: _NewNodes) -> None:
    # With spatial=0 each element of a sample has parameters of its own; later opsets lack that.
    if node.attrs.get("spatial", 1) or len(node.outputs) > 1:
        return
    data, scale, bias, mean, variance = node.inputs
    epsilon = new.constant(np.array(node.attrs.get("epsilon", 1e-5), data.dtype or np.float32))
    factor = new("Div", scale, new("Sqrt", new("Add", variance, epsilon)))
    offset = new("Sub", bias, new("Mul", mean, factor))
    new("Add", new("Mul", data, factor), offset, output=node.outputs[0])


def _convert_clip(node: Node, new: _NewNodes) -> None:
    # The bounds that are not given were those of float32, which float16 takes as infinite.
    if node.inputs[0].dtype in (None, np.float32):
        return
    limits = [*node.inputs[1:], *[Variable("")] * (3 - len(node.inputs))]
    bounds = []
    for name, tensor, default in zip(("min", "max"), limits, (-_FLOAT_MAX, _FLOAT_MAX), strict=True):
        with np.errstate(over="ignore"):
            value = np.array(node.attrs.get(name, default)).astype(node.inputs[0].dtype)
        bounds.append(tensor if tensor.name else new.constant(value))
    new(node.op, node.inputs[0], *bounds, output=node.outputs[0], domain=CONVERTED)


def _convert_dropout(node: Node, new: _NewNodes) -> None:
    # Outside of training the mask was false everywhere for onnxruntime, and is true since opset 12.
    mask = node.outputs[1] if len(node.outputs) > 1 else None
    if mask is None or not (mask.outputs or mask.graph_output_of):
        return
    data = node.inputs[0]
    new("Identity", data, output=node.outputs[0])
    any_truth = new("Cast", data, dtype=np.dtype(np.bool_), to=TensorProto.BOOL)
    if mask.dtype == np.bool_:
        new("Xor", any_truth, any_truth, output=mask)
    else:
        nothing = new("Xor", any_truth, any_truth, dtype=np.dtype(np.bool_))
        new("Cast", nothing, output=mask, to=data_type_of(mask.dtype or data.dtype) or TensorProto.FLOAT)


def _convert_group_normalization(node: Node, new: _NewNodes) -> None:
    # Until opset 20 scale and bias were those of a group; now each channel has its own.
    integer = np.dtype(np.int64)
    groups = new.constant(np.array([node.attrs["num_groups"]]))
    channels = new("Shape", node.inputs[0], start=1, end=2, dtype=integer)
    grid = new("Concat", groups, new("Div", channels, groups, dtype=integer), axis=0, dtype=integer)
    last_axis = new.constant(np.array([1]))

    def repeated(tensor: Tensor) -> Tensor:
        rows = new("Expand", new("Unsqueeze", tensor, last_axis), grid)
        return new("Reshape", rows, new.constant(np.array([-1])))

    inputs = node.inputs[0], *map(repeated, node.inputs[1:])
    new(node.op, *inputs, output=node.outputs[0], domain=CONVERTED, **node.attrs)


def _convert_mean_variance(node: Node, new: _NewNodes) -> None:
    # Before opset 9 it is an operator of onnxruntime with other attributes, for four axes.
    axes = [0, 1, 2, 3] if node.attrs.get("across_channels", 0) else [0, 2, 3]
    scales = node.attrs.get("normalize_variance", 1)
    data = node.inputs[0]
    centred = new("Sub", data, new("ReduceMean", data, axes=axes), output=None if scales else node.outputs[0])
    if scales:
        variance = new("ReduceMean", new("Mul", centred, centred), axes=axes)
        new("Div", centred, new("Sqrt", variance), output=node.outputs[0])


def _convert_resize(node: Node, new: _NewNodes) -> None:
    # Coordinates were asymmetric. Nearest neighbours were the ones below where an axis grows, and above where it
    # shrinks, which takes two nodes if both occur, or if nobody knows.
    data, factors, mode = node.inputs[0], numbers_of(node, 1, "scales"), node.attrs.get("mode", "nearest")
    scales = node.inputs[1] if len(node.inputs) > 1 else new.constant(np.array(factors, np.float32))
    region = Variable("") if new.version >= _OPTIONAL_REGION else new.constant(np.zeros(0, np.float32))
    common = {"domain": CONVERTED, "mode": mode, "coordinate_transformation_mode": "asymmetric"}

    def resize(tensor: Tensor, sizes: Tensor, rounding: str, output: Tensor | None) -> Tensor:
        rounding_mode = {"nearest_mode": rounding} if mode == "nearest" else {}
        return new("Resize", tensor, region, sizes, output=output, **common, **rounding_mode)

    if mode != "nearest" or (factors is not None and all(factor >= 1 for factor in factors)):
        resize(data, scales, "floor", node.outputs[0])
    elif factors is not None and all(factor <= 1 for factor in factors):
        resize(data, scales, "ceil", node.outputs[0])
    else:
        unit = new.constant(np.ones(1, np.float32))
        smaller = resize(data, new("Min", scales, unit, dtype=scales.dtype), "ceil", None)
        resize(smaller, new("Max", scales, unit, dtype=scales.dtype), "floor", node.outputs[0])


def _convert_swish(node: Node, new: _NewNodes) -> None:
    # onnxruntime runs it as a function, at its first opset only.
    data, alpha = node.inputs[0], node.attrs.get("alpha", 1.0)
    scaled = data if alpha == 1 else new("Mul", data, new.constant(np.array(alpha, data.dtype or np.float32)))
    new("Mul", data, new("Sigmoid", scaled), output=node.outputs[0])


def _convert_thresholded_relu(node: Node, new: _NewNodes) -> None:
    # Before opset 10 it is an operator of onnxruntime, and the same.
    _refuse_function(node, new)
    _keep(node)


def _keep(node: Node, **attributes: Any) -> None:
    node.domain = CONVERTED
    node.attrs.update(attributes)


def _refuse(node: Node, new: _NewNodes, reason: str) -> None:
    raise ModelError(
        f"node {node.name or node.outputs[0].name!r} ({node.op}) cannot be converted from opset {new.before} to "
        f"{new.version}: {reason}"
    )


def _check_attention(node: Node, new: _NewNodes) -> None:
    if len(node.outputs) > 3 and node.attrs.get("qk_matmul_output_mode", 0):
        _refuse(node, new, f"onnxruntime returns other scores from opset 25 on; {_EARLIER_THAN.format(24)}")


def _refuse_function(node: Node, new: _NewNodes) -> None:
    # Without a kernel for a type, onnxruntime runs the function that defines the operator, up to opset 18.
    dtype = node.inputs[0].dtype
    if new.version >= 19 and dtype in (np.float64, np.int32, np.int64):
        _refuse(node, new, f"onnxruntime has no {dtype} kernel for it from opset 19 on; {_EARLIER_THAN.format(18)}")


_FUNCTIONS: Final = ("Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Selu", "Softplus", "Softsign")
_WITHOUT_KERNEL: Final = (
    *("Bernoulli", "GlobalLpPool", "MaxRoiPool", "Multinomial", "RoiAlign"),
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
)
_EARLIER_THAN = "choose number formats that need no later opset than {}"
_refuse_without_kernel = partial(
    _refuse, reason=f"onnxruntime has no kernel for it from opset 22 on; {_EARLIER_THAN.format(21)}"
)
_refuse_batches = partial(_refuse, reason="until opset 8 it has batches; export the model at opset 9 or later")

# The opsets at which the meaning changes, and the function that writes the old meaning in the new form.
_ADAPTERS: Final[Mapping[str, tuple[Collection[int], _Adapt]]] = {
    "Attention": ({25}, _check_attention),
    "BatchNormalization": ({9}, _convert_batch_normalization),
    "Clip": ({11, 12}, _convert_clip),
    "Dropout": ({10, 12}, _convert_dropout),
    "GroupNormalization": ({21}, _convert_group_normalization),
    "Hardmax": ({13}, _convert_softmax),
    "LogSoftmax": ({13}, _convert_softmax),
    "MeanVarianceNormalization": ({9}, _convert_mean_variance),
    "Resize": ({11}, _convert_resize),
    "Softmax": ({13}, _convert_softmax),
    "Swish": ({25}, _convert_swish),
    "ThresholdedRelu": ({10, 19}, _convert_thresholded_relu),
    "Upsample": ({11}, _convert_resize),
    "Scan": ({9}, _refuse_batches),
    **dict.fromkeys(_FUNCTIONS, ({19}, _refuse_function)),
    **dict.fromkeys(_WITHOUT_KERNEL, ({22}, _refuse_without_kernel)),
}
