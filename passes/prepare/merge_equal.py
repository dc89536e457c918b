"""Compute equal things once."""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Hashable
from typing import Any

from onnxq.ir import (
    Constant,
    Graph,
    Node,
    OpaqueAttribute,
    joined_origins,
    remove_nodes,
    replace_uses,
)
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.patterns import COMMUTATIVE

# What two calls of may differ in, and what runtimes match by node: one for each reader.
_KEPT = frozenset(
    {
        "Bernoulli",
        "DequantizeLinear",
        "Dropout",
        "DynamicQuantizeLinear",
        "Multinomial",
        "QuantizeLinear",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)


class MergeEqual(Pass):
    """Let all read the first of several nodes of equal operator, attributes and inputs, in bodies what is around them.

    Constants count as equal when they are the same tensor, as they are once `ShareInitializers` has been applied.
    Leaves random numbers, quantization, operators with bodies or of other domains, and nodes that make two outputs of
    a graph, which have a name each.
    """

    def apply(self, graph: Graph) -> Changes:
        """Merge; ``changed`` holds the names of the nodes that went."""
        return Changes(tuple(_merge(graph, ChainMap())))


def _merge(scope: Graph, first: ChainMap[Hashable, tuple[Node, Graph]]) -> list[str]:
    """Merge the nodes of one graph and its bodies, given what stands before it in the graphs around."""
    gone, names = [], []
    for node in scope.nodes:
        for body in node.bodies():
            names.extend(_merge(body, first.new_child()))
        key = _key(node)
        if key is None:
            continue
        kept, home = first.setdefault(key, (node, scope))
        if kept is node or not _can_merge(node, kept, same_graph=home is scope):
            continue
        for old, new in zip(node.outputs, kept.outputs, strict=True):
            if old.returned_by:
                new.dtype, new.shape, new.source = old.dtype, old.shape, old.source
            replace_uses(old, new, graph_outputs=True)
        kept.origins = joined_origins((kept, node))
        gone.append(node)
        names.append(node.name)
    remove_nodes(scope, gone)
    return names


def _can_merge(node: Node, kept: Node, *, same_graph: bool) -> bool:
    """Whether no output of a graph loses its name, and none is made by a node of another graph."""
    return all(
        not old.returned_by or (same_graph and not new.returned_by)
        for old, new in zip(node.outputs, kept.outputs, strict=True)
    )


def _key(node: Node) -> Hashable:
    """Return what is equal for nodes that compute the same; None where that cannot be said."""
    if node.domain or node.op in _KEPT or node.bodies() or not node.outputs:
        return None
    attributes = [(name, _content(value)) for name, value in sorted(node.attrs.items())]
    if any(content is None for _, content in attributes):
        return None
    inputs: list[Any] = [tensor if tensor.name else None for tensor in node.inputs]
    if node.op in COMMUTATIVE and len(inputs) == 2:
        inputs.sort(key=id)
    return node.op, tuple(attributes), tuple(inputs), tuple(bool(tensor.name) for tensor in node.outputs)


def _content(value: Any) -> Hashable:
    """Return what makes two values of an attribute equal: types, signs of zeros and payloads of NaN count."""
    if isinstance(value, bool | int | float | str | bytes):
        return type(value).__name__, repr(value)
    if isinstance(value, list | tuple):
        parts = tuple(_content(part) for part in value)
        return None if None in parts else parts
    if isinstance(value, Constant):
        digest = hashlib.blake2b(digest_size=20)
        for chunk in value.payload.chunks():
            digest.update(chunk)
        text = value.dtype.kind in "OSU"
        return None if text else (value.payload.onnx_dtype, tuple(value.shape), digest.digest())
    return value.proto.SerializeToString(deterministic=True) if isinstance(value, OpaqueAttribute) else None
