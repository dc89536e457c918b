"""Compute what depends on constants alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxq.errors import OnnxqError
from onnxq.graph import ArrayPayload, Constant, Graph, Node, Variable, become_constant, remove_nodes, scopes, to_model
from onnxq.passes.base import Changes, Pass
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
_GENERATORS = frozenset({"ConstantOfShape", "EyeLike", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile"})


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Replace nodes whose inputs are all constant by initializers, in every graph of the model.

    Leaves quantization, random numbers, control flow, custom operators, outputs of a graph, and results larger than
    ``largest``. Constants are fed to onnxruntime, so they are not copied into a model first.

    Attributes:
        largest: bytes that one result may have.
    """

    largest: int = 256 * 2**20

    def apply(self, graph: Graph) -> Changes:
        """Fold; ``changed`` holds the names of the tensors that became initializers."""
        changed: list[str] = []
        left: list[tuple[str, str]] = []
        for scope in scopes(graph):
            cone = self._cone(scope)
            if _folds(scope, cone, graph.opset, changed):
                continue
            # One node that cannot be computed must not keep the others.
            refused = [node for node in cone if not _folds(scope, (node,), graph.opset, changed)]
            left.extend((node.name, "onnxruntime cannot compute it alone") for node in refused)
        return Changes(tuple(changed), tuple(left))

    def _cone(self, scope: Graph) -> tuple[Node, ...]:
        """Return the nodes that depend on constants alone, in graph order."""
        known: set[Variable] = set()
        cone = []
        for node in scope.nodes:
            inputs = [tensor for tensor in node.inputs if tensor.name]
            if (
                node.domain
                or node.op in _KEPT
                or not all(_is_plain(tensor) if isinstance(tensor, Constant) else tensor in known for tensor in inputs)
                or any(isinstance(value, Graph) for value in node.attrs.values())
                or not self._small_enough(node)
            ):
                continue
            cone.append(node)
            known.update(node.outputs)
        return tuple(cone)

    def _small_enough(self, node: Node) -> bool:
        for tensor in node.outputs:
            shape = tensor.shape
            if shape is None or not all(isinstance(extent, int) for extent in shape):
                if node.op in _GENERATORS:
                    return False
            elif int(np.prod(shape, dtype=np.float64)) * 8 > self.largest:
                return False
        return True


def _is_plain(tensor: Constant) -> bool:
    """Whether the runtime takes the constant as a feed; packed and string types are not needed for folding."""
    return tensor.dtype is not None and np.dtype(tensor.dtype).kind in "fiub"


def _folds(scope: Graph, nodes: Sequence[Node], opset: int, changed: list[str]) -> bool:
    """Compute ``nodes`` in one session and make what others read constant; return whether that went well."""
    inside, outputs = set(nodes), set(scope.outputs)
    wanted = [
        tensor
        for node in nodes
        for tensor in node.outputs
        if tensor.name and tensor not in outputs and any(consumer not in inside for consumer in tensor.outputs)
    ]
    if not wanted:
        return True
    try:
        values = _compute(nodes, wanted, opset)
    except OnnxqError:
        return False
    if not all(isinstance(value, np.ndarray) and value.dtype.kind in "fiub" for value in values):
        return False
    kept = {node for node in nodes if any(tensor in outputs for tensor in node.outputs)}
    remove_nodes(scope, _removable(nodes, kept))
    for tensor, value in zip(wanted, values, strict=True):
        become_constant(tensor, ArrayPayload(value))
        scope.initializers.append(tensor)
        changed.append(tensor.name)
    return True


def _removable(nodes: Sequence[Node], kept: set[Node]) -> list[Node]:
    """Return the nodes that no kept node needs."""
    needed = set(kept)
    for node in reversed(nodes):
        if any(consumer in needed for tensor in node.outputs for consumer in tensor.outputs):
            needed.add(node)
    return [node for node in nodes if node not in needed]


def _compute(nodes: Sequence[Node], wanted: Sequence[Variable], opset: int) -> list[object]:
    copies: dict[object, Variable] = {}

    def copy(tensor: Variable | Constant) -> Variable:
        if tensor not in copies:
            known = isinstance(tensor, Constant)
            copies[tensor] = Variable(tensor.name, tensor.dtype if known else None, tensor.shape if known else None)
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
