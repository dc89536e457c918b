"""Take products out of onnxruntime's own operators, whose integer kernels are those of ONNX's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from onnxq.ir import (
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    constant,
    is_fixed,
    joined_origins,
    nodes,
    optional,
    producer,
    replace_nodes,
)
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.soundness import Uses, stays_in_range, stored

_BIAS_IS_OPTIONAL = 11
DOMAIN: Final = "com.microsoft"
_MATRIX = 2
_TRANSPOSES = ("transA", "transB", "transBatchA", "transBatchB")
_SPLIT_TAKES_SIZES = 13
_ACTIVATIONS = frozenset({"Relu", "Sigmoid", "Tanh"})
_OF_ATTENTION = frozenset({"mask_filter_value", "num_heads", "scale", "unidirectional"})


class UnfuseProducts(Pass):
    """Write the products in Attention, FusedMatMul, FusedGemm and FusedConv as MatMul, Gemm and Conv.

    What is left of an Attention is a MultiHeadAttention, and an activation follows its product, with which onnxruntime
    fuses it again in float. Leaves products of what is transposed at run time, activations with parameters, and
    attention that remembers, turns its heads or has a mask of ends and beginnings.
    """

    def apply(self, graph: Graph) -> Changes:
        """Replace; ``changed`` holds the names of the nodes, which their products keep."""
        names, uses = Names(graph), Uses(graph)
        instead: dict[Node, Sequence[Node]] = {}
        left = []
        for _, node in nodes(graph):
            if node.domain != DOMAIN or node.op not in _FORMS or not node.outputs:
                continue
            found = _FORMS[node.op](node, names, graph.opset)
            rounds = node.op == "Attention" or float(node.attrs.get("alpha", 1.0)) != 1.0
            if rounds and not isinstance(found, str) and uses.decides(node.outputs):
                found = "its last bit may decide what reads it"
            if isinstance(found, str):
                left.append((node.name, found))
            else:
                instead[node] = found
        changed = tuple(node.name for node in instead)
        for node, made in instead.items():
            outputs = node.outputs[:1]
            node.outputs.clear()
            made[-1].outputs = outputs
            for one in made:
                one.origins = joined_origins((node,))
        replace_nodes(graph, instead)
        return Changes(changed, tuple(left))


def _matmul(node: Node, names: Names, opset: int) -> list[Node] | str:
    alpha, turned = float(node.attrs.get("alpha", 1.0)), [name for name in _TRANSPOSES if node.attrs.get(name, 0)]
    data, weight = optional(node, 0), optional(node, 1)
    if data is None or weight is None:
        return "it lacks an input"
    if alpha == 1.0 and not turned:
        return [Node("MatMul", node.name, {}, [data, weight])]
    if turned not in ([], ["transB"]) or not is_fixed(weight) or len(weight.shape) != _MATRIX:
        return "it transposes or scales what is computed at run time"
    if weight.dtype.name != "float32":
        return f"its weight is {weight.dtype.name}, not float32"
    values = np.ascontiguousarray(weight.values.T if turned else weight.values)
    if alpha != 1.0:
        # A factor of zero would make numbers of what is infinite.
        values64 = values.astype(np.float64)
        scaled = (
            stored(values64 * alpha, weight.dtype, values64) if alpha and stays_in_range(alpha, np.float32) else None
        )
        if scaled is None:
            return "its weight or result may leave the range of float32"
        values = scaled
    return [Node("MatMul", node.name, {}, [data, constant(names.fresh(f"{weight.name}.turned"), values)])]


def _gemm(node: Node, names: Names, opset: int) -> list[Node] | str:
    if optional(node, 2) is None and opset < _BIAS_IS_OPTIONAL:
        return "Gemm needs a bias at this opset"
    return _activated("Gemm", node, node.inputs[:3], ("alpha", "beta", "transA", "transB"), names)


def _conv(node: Node, names: Names, opset: int) -> list[Node] | str:
    kept = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    return _activated("Conv", node, node.inputs[:3], kept, names, added=optional(node, 3))


def _activated(
    op: str, node: Node, inputs: Sequence[Tensor], kept: Sequence[str], names: Names, added: Tensor | None = None
) -> list[Node] | str:
    """Return the product, what is added to it, and the activation behind it."""
    activation = str(node.attrs.get("activation", ""))
    if activation and activation not in _ACTIVATIONS:
        return f"its activation {activation} has parameters"
    if len(inputs) < _MATRIX or not all(tensor.name for tensor in inputs[:2]):
        return "it lacks an input"
    attributes = {name: node.attrs[name] for name in kept if name in node.attrs}
    read = list(inputs)
    while not read[-1].name:
        read.pop()
    made = [Node(op, node.name, attributes, read)]
    if added is not None:
        _then(made, "Add", node, "sum", names, added)
    if activation:
        _then(made, activation, node, activation.lower(), names)
    return made


def _attention(node: Node, names: Names, opset: int) -> list[Node] | str:
    data, weight, bias = (optional(node, index) for index in range(3))
    mask, past = optional(node, 3), optional(node, 4)
    others = {name for name in node.attrs if node.attrs[name]} - _OF_ATTENTION - {"qkv_hidden_sizes"}
    if data is None or weight is None or not is_fixed(weight) or len(weight.shape) != _MATRIX:
        return "its weight is no constant matrix"
    if past is not None or others or any(output.name for output in node.outputs[1:]):
        return "it remembers what it was given before, or turns its heads"
    if mask is not None and not _is_plain(mask, data):
        return "MultiHeadAttention may not know its mask, such as one that begins elsewhere in each row"
    if opset < _SPLIT_TAKES_SIZES:
        return f"Split takes sizes from opset {_SPLIT_TAKES_SIZES} on"
    sizes = [int(size) for size in node.attrs.get("qkv_hidden_sizes", ())] or [weight.shape[1] // 3] * 3
    if sum(sizes) != weight.shape[1] or len(sizes) != len("qkv"):
        return f"its weight has {weight.shape[1]} columns, expected {sizes}"
    made = [Node("MatMul", node.name, {}, [data, weight])]
    if bias is not None:
        _then(made, "Add", node, "bias", names, bias)
    split = constant(names.fresh(f"{node.name}.sizes"), np.array(sizes, np.int64))
    _then(made, "Split", node, "split", names, split, axis=-1)
    parts = [_made(node, part, made[0], names) for part in ("query", "key", "value")]
    made[-1].outputs = parts
    inputs = [*parts, Variable(""), mask or Variable(""), optional(node, 5) or Variable("")]
    while not inputs[-1].name:
        inputs.pop()
    attributes = {name: value for name, value in node.attrs.items() if name in _OF_ATTENTION}
    made.append(Node("MultiHeadAttention", names.fresh(f"{node.name}.heads"), attributes, inputs, domain=DOMAIN))
    return made


def _is_plain(mask: Tensor, data: Tensor) -> bool:
    """Whether a mask has a value for each position, or for each two, or one length for each row."""
    maker = producer(mask)
    if maker is not None and (maker.domain, maker.op) == (DOMAIN, "EmbedLayerNormalization"):
        return True
    if mask.shape is None or not _MATRIX <= len(mask.shape) <= _MATRIX + 1:
        return False
    # A column of a single value masks nothing, however many positions there are.
    return mask.shape[-1] != 1 or (data.shape is not None and data.shape[1] == 1)


def _then(
    made: list[Node], op: str, node: Node, role: str, names: Names, *others: Tensor, **attributes: object
) -> None:
    """Append a node that reads what the last one makes."""
    value = _made(node, made[-1].op.lower(), made[0], names)
    made[-1].outputs = [value]
    made.append(Node(op, names.fresh(f"{node.name}.{role}"), dict(attributes), [value, *others]))


def _made(node: Node, role: str, product: Node, names: Names) -> Variable:
    """Return a tensor of the type of the data, whose shape inference finds."""
    return Variable(names.fresh(f"{node.outputs[0].name}.{role}"), product.inputs[0].dtype)


_FORMS: Mapping[str, Callable[[Node, Names, int], list[Node] | str]] = MappingProxyType(
    {"Attention": _attention, "FusedConv": _conv, "FusedGemm": _gemm, "FusedMatMul": _matmul}
)
