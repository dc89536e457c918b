"""Drop nodes that return their input: Identity, and Dropout at inference."""

from __future__ import annotations

from onnxq.ir import (
    Graph,
    Node,
    Tensor,
    Variable,
    is_fixed,
    optional,
    remove_nodes,
    replace_uses,
    scopes,
)
from onnxq.rewrite import Changes, Pass

# Before, a Dropout was in training mode unless it said otherwise.
_INFERS = 7


class DropNoOps(Pass):
    """Let the consumers of an Identity or Dropout read its input, constants included.

    What makes its input makes an output of a graph under the name of that. Leaves a node between an input, a constant
    or another output and an output of its graph, a Dropout whose mask is used, and one in training mode.
    """

    def apply(self, graph: Graph) -> Changes:
        """Drop; ``changed`` holds the names of the nodes."""
        changed: list[str] = []
        left: list[tuple[str, str]] = []
        for scope in scopes(graph):
            dropped = []
            own = set(scope.nodes)
            for node in scope.nodes:
                if node.op not in ("Identity", "Dropout") or node.domain:
                    continue
                source, made = node.inputs[0], node.outputs[0]
                if made.returned_by and not (set(made.returned_by) == {scope} and _can_be_returned(source, own)):
                    left.append((node.name, "its output is an output of the graph"))
                elif obstacle := _dropout_obstacle(node, graph.opset):
                    left.append((node.name, obstacle))
                else:
                    if made.returned_by:
                        source.dtype, source.shape, source.source = made.dtype, made.shape, made.source
                    replace_uses(made, source, graph_outputs=True)
                    dropped.append(node)
            remove_nodes(scope, dropped)
            changed.extend(node.name for node in dropped)
        return Changes(tuple(changed), tuple(left))


def _can_be_returned(tensor: Tensor, own: set[Node]) -> bool:
    """Whether a node of the same graph makes it, so that it may do so under the name of the output."""
    return isinstance(tensor, Variable) and bool(tensor.inputs) and tensor.inputs[0] in own and not tensor.returned_by


def _dropout_obstacle(node: Node, opset: int) -> str:
    if node.op != "Dropout":
        return ""
    if opset < _INFERS and not node.attrs.get("is_test", 0):
        return "it is in training mode"
    if len(node.outputs) > 1 and (node.outputs[1].outputs or node.outputs[1].returned_by):
        return "its mask is used"
    training = optional(node, 2)
    if training is not None and not (is_fixed(training) and not training.values.any()):
        return "it may run in training mode"
    return ""
