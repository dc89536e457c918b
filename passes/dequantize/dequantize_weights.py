"""Replace what decodes constant codes by the float weights that it gives."""

from __future__ import annotations

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Variable,
    become_constant,
    remove_nodes,
    replace_uses,
)
from onnxq.passes.dequantize.constant_cones import ConstantCones, Decoded
from onnxq.passes.dequantize.decoding import value_name
from onnxq.rewrite import Changes, Pass


class DequantizeWeights(Pass):
    """Compute the float weights that subgraphs of constants decode from codes, in every graph of the model.

    A subgraph counts when it holds DequantizeLinear, takes the bits of integers apart, or reads constants of a type
    that codes have, and gives floats. One that decodes rows which a Gather chose from codes becomes a Gather from the
    decoded table. Large weights are computed one by one when the model is written, and those that are decoded alike are
    one. A weight takes the name of its codes without their suffix where that is free. Leaves the constants of float
    models alone, and results far larger than what they are computed from.
    """

    def apply(self, graph: Graph) -> Changes:
        """Decode; ``changed`` holds the names of the tensors that became initializers or rows of one.

        Raises:
            ModelError: a decoder cannot be computed; the message names its node.
        """
        names = Names(graph)
        cones = ConstantCones.of(graph)
        changed: list[str] = []
        left: list[tuple[str, str]] = []
        made: dict[object, Constant] = {}
        chosen: dict[object, Variable] = {}
        for found in tuple(cones.results(graph.opset)):
            if found.tensor_data is None:
                left.append((found.tensor.name, found.obstacle))
                continue
            weight = made.get(found.recipe)
            place = found.scope, found.recipe, found.rows
            if found.rows is not None and place in chosen and not found.tensor.graph_output_of:
                replace_uses(found.tensor, chosen[place])
            elif found.rows is not None or found.tensor.graph_output_of:
                if weight is None:
                    weight = Constant(value_name(found.codes or found.tensor.name, names), found.tensor_data)
                _make_by_node(found, weight, names)
                chosen[place] = found.tensor
            elif weight is None:
                weight = become_constant(found.tensor, found.tensor_data)
                weight.name = value_name(found.codes, names, otherwise=weight.name)
                found.scope.initializers.append(weight)
            else:
                replace_uses(found.tensor, weight)
            if weight is not None:
                made[found.recipe] = weight
            changed.append(found.tensor.name)
        remove_nodes(graph, cones.unread())
        return Changes(tuple(changed), tuple(left))


def _make_by_node(found: Decoded, values: Constant, names: Names) -> None:
    """Have a node make the tensor from its values: what a graph returns must be made, and rows must be chosen."""
    maker = found.tensor.inputs[0]
    maker.outputs[maker.outputs.index(found.tensor)] = Variable("")
    op = "Identity" if found.rows is None else "Gather"
    inputs = [values] if found.rows is None else [values, found.rows.indices]
    found.scope.nodes.append(Node(op, names.unique(f"{maker.name}.decoded"), {}, inputs, [found.tensor]))
