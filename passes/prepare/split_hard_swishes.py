"""Write HardSwish as HardSigmoid times its data, both of which have integer kernels."""

from __future__ import annotations

from collections.abc import Sequence

from onnxq.ir import Graph, Names, Node, Variable, nodes, replace_nodes
from onnxq.rewrite import Changes, Pass

_SLOPE, _MIDDLE = 1 / 6, 0.5


class SplitHardSwishes(Pass):
    """Replace HardSwish by HardSigmoid and Mul, as onnxruntime does when it loads a model.

    Nothing is gained or lost in float, and each of the two can be planned as integers.
    """

    def apply(self, graph: Graph) -> Changes:
        """Replace; ``changed`` holds the names of the nodes, which the products keep."""
        names = Names(graph)
        instead: dict[Node, Sequence[Node]] = {}
        for _, node in nodes(graph):
            if node.op != "HardSwish" or node.domain or len(node.inputs) != 1 or len(node.outputs) != 1:
                continue
            data, output = node.inputs[0], node.outputs[0]
            share = Variable(names.fresh(f"{output.name}.gate"), output.dtype, output.shape)
            settings = {"alpha": _SLOPE, "beta": _MIDDLE}
            gate = Node("HardSigmoid", names.fresh(f"{node.name}.gate"), settings, [data], [share])
            node.outputs.clear()
            instead[node] = (gate, Node("Mul", node.name, {}, [data, share], [output]))
        changed = tuple(node.name for node in instead)
        replace_nodes(graph, instead)
        return Changes(changed)
