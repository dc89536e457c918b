"""Write clamps and sums as the operators that float models have."""

from __future__ import annotations

from typing import Final

from onnxq.ir import Constant, Graph, Node, Variable, all_graphs, remove_nodes, replace_uses
from onnxq.rewrite import Changes, Pass

_CLIP_HAS_INPUTS = 11
_FLOATS: Final = frozenset({"float16", "float32", "float64"})


class RestoreOperators(Pass):
    """Turn Max and Min with one number into Relu or Clip, and Sum of one or two tensors into nothing or Add.

    Quantized models have the former where the latter would keep a runtime from its kernels. Both compute the same, but
    only the latter are known to whatever quantizes the float model again. Leaves Max and Min of tensors or of integers,
    and all of them below opset 11.
    """

    def apply(self, graph: Graph) -> Changes:
        """Replace; ``changed`` holds the names of the nodes."""
        changed: list[str] = []
        gone: list[Node] = []
        for scope in all_graphs(graph):
            raised: dict[Variable, Node] = {}
            for node in scope.nodes:
                if node.domain:
                    continue
                if node.op == "Sum" and len(node.inputs) <= 2:
                    gone.extend(_add(node))
                elif node.op in ("Max", "Min") and graph.opset >= _CLIP_HAS_INPUTS and _limit(node) is not None:
                    gone.extend(_clamp(node, raised))
                else:
                    continue
                changed.append(node.name)
            for node in raised.values():
                if not node.inputs[1].values.any():
                    node.op, node.inputs = "Relu", node.inputs[:1]
        remove_nodes(graph, gone)
        return Changes(tuple(changed))


def _add(node: Node) -> list[Node]:
    """Make a Sum an Add of two tensors, or let its consumers read the only one; return it when it is not needed."""
    if len(node.inputs) == 2:
        node.op = "Add"
    elif node.outputs[0].graph_output_of:
        node.op = "Identity"
    else:
        replace_uses(node.outputs[0], node.inputs[0])
        return [node]
    return []


def _clamp(node: Node, raised: dict[Variable, Node]) -> list[Node]:
    """Make a Max or Min with a number a Clip; return the Max that is not needed because Min ends its range."""
    limit = _limit(node)
    data = next(tensor for tensor in node.inputs if tensor is not limit)
    if node.op == "Max":
        raised[node.outputs[0]] = node
        node.op, node.inputs = "Clip", [data, limit]
        return []
    lower = raised.get(data)
    if lower is None or len(data.outputs) > 1 or data.graph_output_of:
        node.op, node.inputs = "Clip", [data, Variable(""), limit]
        return []
    node.op, node.inputs = "Clip", [*lower.inputs, limit]
    del raised[data]
    return [lower]


def _limit(node: Node) -> Constant | None:
    """Return the number that is one of two inputs, the other being a tensor."""
    numbers = [tensor for tensor in node.inputs if isinstance(tensor, Constant)]
    if len(node.inputs) != 2 or len(numbers) != 1 or numbers[0].shape or numbers[0].dtype.name not in _FLOATS:
        return None
    return numbers[0]
