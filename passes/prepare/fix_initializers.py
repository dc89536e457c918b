"""Make initializers constants that are listed as inputs by nobody's intent."""

from __future__ import annotations

from onnxq.ir import Constant, Graph, Node
from onnxq.ops import operator_of
from onnxq.rewrite import Changes, Pass

# Since this version of the file format an initializer need not be an input, and one that is can be fed.
_IR_OF_PLAIN_INITIALIZERS = 4


class FixInitializers(Pass):
    """Take initializers off the list of inputs where the graph lists every one of them.

    Before version 4 of the file format that had to be so, and nobody could feed them; exporters went on with it for
    years, and runtimes neither fold nor multiply as codes what a caller may feed. Leaves a graph that lists only some,
    a single one, or no weights of layers: there a person chose what can be fed.
    """

    def apply(self, graph: Graph) -> Changes:
        """Fix; ``changed`` holds the names of the initializers."""
        listed = [tensor for tensor in graph.initializers if tensor.input_source is not None]
        is_old = (graph.ir_version or _IR_OF_PLAIN_INITIALIZERS) < _IR_OF_PLAIN_INITIALIZERS
        is_habit = len(listed) == len(graph.initializers) > 1 and any(_holds_weights(node) for node in graph.nodes)
        if not is_old and not is_habit:
            return Changes(left=tuple((tensor.name, "is listed as an input, as others are not") for tensor in listed))
        for tensor in listed:
            tensor.input_source = None
        return Changes(tuple(tensor.name for tensor in listed))


def _holds_weights(node: Node) -> bool:
    operator = operator_of(node)
    return operator is not None and any(
        place < len(node.inputs) and isinstance(node.inputs[place], Constant) for place in operator.weights
    )
