"""Drop nodes that return their input: Identity, and Dropout at inference."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.graph import Changes, Graph, Node, Pass, is_fixed, optional, remove_nodes, replace_uses, scopes


@dataclass(frozen=True)
class DropNoOps(Pass):
    """Let the consumers of an Identity or Dropout read its input, constants included.

    Leaves a node whose output is an output of its graph, a Dropout whose mask is used, and one in training mode.
    """

    def apply(self, graph: Graph) -> Changes:
        """Drop; ``changed`` holds the names of the nodes."""
        changed: list[str] = []
        left: list[tuple[str, str]] = []
        for scope in scopes(graph):
            dropped = []
            for node in scope.nodes:
                if node.op not in ("Identity", "Dropout") or node.domain:
                    continue
                if scope in node.outputs[0].returned_by:
                    left.append((node.name, "its output is an output of the graph"))
                elif obstacle := _dropout_obstacle(node):
                    left.append((node.name, obstacle))
                else:
                    dropped.append(node)
            for node in dropped:
                replace_uses(node.outputs[0], node.inputs[0], graph_outputs=True)
            remove_nodes(scope, dropped)
            changed.extend(node.name for node in dropped)
        return Changes(tuple(changed), tuple(left))


def _dropout_obstacle(node: Node) -> str:
    if node.op != "Dropout":
        return ""
    if len(node.outputs) > 1 and (node.outputs[1].outputs or node.outputs[1].returned_by):
        return "its mask is used"
    training = optional(node, 2)
    if training is not None and not (is_fixed(training) and not training.values.any()):
        return "it may run in training mode"
    return ""
