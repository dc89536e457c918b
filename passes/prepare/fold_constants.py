"""Compute what depends on constants alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxq.dequantizing.steps import is_small
from onnxq.errors import OnnxqError
from onnxq.graph import (
    ArrayPayload,
    Changes,
    Constant,
    Graph,
    Node,
    Pass,
    Variable,
    become_constant,
    remove_nodes,
    scopes,
)
from onnxq.modelfile import to_model
from onnxq.runtime import open_session, run

# Quantization must survive, random numbers must stay random, and control flow holds graphs of its own.
_KEPT = frozenset(
    {
        "Bernoulli",
        "DequantizeLinear",
        "Dropout",
        "DynamicQuantizeLinear",
        "If",
        "Loop",
        "Multinomial",
        "Optional",
        "OptionalGetElement",
        "OptionalHasElement",
        "QuantizeLinear",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Scan",
        "SequenceMap",
    }
)
# Their output can be far larger than what they read, so its size must be known beforehand.
_GENERATORS = frozenset(
    {
        "AffineGrid",
        "BlackmanWindow",
        "CenterCropPad",
        "Col2Im",
        "ConstantOfShape",
        "DFT",
        "Expand",
        "HammingWindow",
        "HannWindow",
        "MaxUnpool",
        "MelWeightMatrix",
        "OneHot",
        "Pad",
        "Range",
        "Resize",
        "Tile",
        "Upsample",
    }
)
_ELEMENT_BYTES = 8
# Smaller integers are shape arithmetic, larger ones the codes of stored weights.
_SMALLEST_CODES = 256
_LARGEST_CODE = 2


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Replace nodes whose inputs are all constant by initializers, in every graph of the model.

    Leaves quantization, weights stored as codes behind a Cast or in words, random numbers, control flow, custom
    operators, outputs of a graph, results larger than ``largest``, and those that together make the model larger by
    more than that. Constants are fed to onnxruntime, so they are not copied into a model first.

    Attributes:
        largest: bytes that one result may have, and by which all results may exceed what they are computed from.
    """

    largest: int = 256 * 2**20

    def apply(self, graph: Graph) -> Changes:
        """Fold; ``changed`` holds the names of the tensors that became initializers."""
        changed: list[str] = []
        left: list[tuple[str, str]] = []
        for scope in scopes(graph):
            cone = self._cone(scope, left)
            if self._folds(scope, cone, graph.opset, changed):
                continue
            # One node that cannot be computed must not keep the others.
            stuck = [node for node in cone if not self._folds(scope, (node,), graph.opset, changed)]
            left.extend(
                (node.name, "onnxruntime cannot compute it alone, or its result is too large") for node in stuck
            )
        return Changes(tuple(changed), tuple(left))

    def _cone(self, scope: Graph, left: list[tuple[str, str]]) -> tuple[Node, ...]:
        """Return the nodes that depend on constants alone, in graph order."""
        known: dict[Variable, int] = {}
        cone = []
        grown = 0
        for node in scope.nodes:
            inputs = [tensor for tensor in node.inputs if tensor.name]
            if (
                node.domain
                or node.op in _KEPT
                or not all(_is_plain(tensor) if isinstance(tensor, Constant) else tensor in known for tensor in inputs)
                or node.bodies()
            ):
                continue
            read = [known[tensor] if tensor in known else math.prod(tensor.shape) for tensor in inputs]
            made = _most_elements(node, read)
            more = max(0, (made or 0) - sum(read)) * _ELEMENT_BYTES
            if obstacle := self._obstacle(node, made, grown + more):
                left.append((node.name, obstacle))
                continue
            grown += more
            cone.append(node)
            known.update(dict.fromkeys(node.outputs, made or 0))
        return tuple(cone)

    def _obstacle(self, node: Node, made: int | None, grown: int) -> str:
        if node.op == "Cast" and _is_codes(node.inputs[0]):
            return "decodes a stored weight"
        if any(isinstance(tensor, Constant) and _is_words(tensor) for tensor in node.inputs):
            return "takes the codes of a stored weight out of words"
        if made is None:
            return "the size of its result is not known"
        if made * _ELEMENT_BYTES > self.largest:
            return f"its result of up to {made} elements is too large"
        if grown > self.largest:
            return "its result and those before it make the model too large"
        return ""

    def _folds(self, scope: Graph, nodes: Sequence[Node], opset: int, changed: list[str]) -> bool:
        """Compute ``nodes`` in one session and make what others read constant; return whether that went well."""
        # What makes an output of a graph stays whole: kernels may crash when one of several outputs is omitted.
        removable = {node: None for node in nodes if not any(tensor.returned_by for tensor in node.outputs)}
        wanted = [
            tensor
            for node in removable
            for tensor in node.outputs
            if any(consumer not in removable for consumer in tensor.outputs)
        ]
        if not wanted:
            return True
        try:
            values = _compute(nodes, wanted, opset)
        except OnnxqError:
            return False
        payloads = [ArrayPayload(value) for value in values if isinstance(value, np.ndarray)]
        if len(payloads) < len(wanted) or any(
            payload.dtype.kind not in "fiub" or payload.nbytes > self.largest for payload in payloads
        ):
            return False
        remove_nodes(scope, removable)
        for tensor, payload in zip(wanted, payloads, strict=True):
            become_constant(tensor, payload)
            scope.initializers.append(tensor)
            changed.append(tensor.name)
        return True


def _most_elements(node: Node, read: Sequence[int]) -> int | None:
    """Return how many elements the largest output has, or at most may have; None when its inputs do not tell.

    Args:
        node: its inferred shapes count, where there are any.
        read: elements of its inputs; broadcasting and products make at most as many as they have multiplied.
    """
    shapes = [tensor.shape for tensor in node.outputs if tensor.name]
    if all(shape is not None and all(isinstance(extent, int) for extent in shape) for shape in shapes):
        return max((math.prod(shape) for shape in shapes), default=0)
    if node.op in _GENERATORS:
        return None
    if node.op == "Concat":
        return sum(read)
    return max(sum(read), math.prod(elements for elements in read if elements))


def _is_plain(tensor: Constant) -> bool:
    """Whether numpy itself has the type; strings and the codes of weights are not needed for folding."""
    return tensor.dtype.kind in "fiub" and not is_small(tensor.dtype)


def _is_codes(tensor: Variable | Constant) -> bool:
    """Whether the tensor is a weight's codes, which a Cast to float would store two or four times as large."""
    return (
        isinstance(tensor, Constant)
        and tensor.dtype.kind in "iu"
        and tensor.dtype.itemsize <= _LARGEST_CODE
        and tensor.nbytes >= _SMALLEST_CODES
    )


def _is_words(tensor: Constant) -> bool:
    """Whether the tensor is words of codes; float models have no such integers."""
    return tensor.dtype == np.uint32 and tensor.nbytes >= _SMALLEST_CODES


def _compute(nodes: Sequence[Node], wanted: Sequence[Variable], opset: int) -> list[object]:
    copies: dict[object, Variable] = {}

    def copy(tensor: Variable | Constant) -> Variable:
        if tensor not in copies:
            constant = isinstance(tensor, Constant)
            copies[tensor] = Variable(
                tensor.name,
                dtype=tensor.dtype if constant else None,
                shape=list(tensor.shape or ()) if constant else None,
            )
        return copies[tensor]

    feeds = list(dict.fromkeys(t for node in nodes for t in node.inputs if isinstance(t, Constant) and t.name))
    graph = Graph(
        nodes=[
            Node(node.op, node.name, dict(node.attrs), [copy(t) for t in node.inputs], [copy(t) for t in node.outputs])
            for node in nodes
        ],
        inputs=[copy(tensor) for tensor in feeds],
        outputs=[copy(tensor) for tensor in wanted],
        name="constants",
        opset=opset,
    )
    session = open_session(to_model(graph), threads=1, optimize=False)
    return run(session, {tensor.name: np.asarray(tensor.values) for tensor in feeds})
