"""Write HardSigmoid between codes as an addition, for which there is an integer kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxq.config.scheme import Mode
from onnxq.ir import (
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    constant,
    insert_nodes,
    is_constant,
    producer,
    replace_nodes,
)
from onnxq.numerics.affine import parameters_from_range, quantize
from onnxq.numerics.formats import format_named
from onnxq.passes.quantize.planned import planned_nodes
from onnxq.planning.obstacles import slope_and_middle
from onnxq.planning.plan import Plan
from onnxq.rewrite import Changes, Pass


@dataclass(frozen=True, eq=False)
class AddToCodes(Pass):
    """Replace each static HardSigmoid by an Add and a Clip.

    Codes times a slope are the same codes with another scale, so the data is decoded with that and what is left is to
    add the middle, itself a code. The codes behind it begin at 0 and end at 1, which is where runtimes drop the Clip.
    Leaves a HardSigmoid whose data is not decoded from codes.

    Attributes:
        plan: names the nodes.
    """

    plan: Plan

    def apply(self, graph: Graph) -> Changes:
        """Replace; ``changed`` holds the names of the nodes, which their Adds keep."""
        names = Names(graph)
        changed: list[str] = []
        left: list[tuple[str, str]] = []
        instead: dict[Node, Sequence[Node]] = {}
        decoders: dict[Graph, list[Node]] = {}
        for scope, node, _ in planned_nodes(graph, self.plan, Mode.STATIC, ("HardSigmoid",)):
            source = producer(node.inputs[0])
            if source is None or source.op != "DequantizeLinear" or not all(map(is_constant, source.inputs[1:3])):
                left.append((node.name, "its data is not decoded from codes"))
                continue
            slope, middle = slope_and_middle(node)
            stored, term = _decoded(middle, source.inputs[2].dtype, node.name, names)
            decoders.setdefault(scope, []).append(stored)
            instead[node] = _added(node, source, slope, term, names)
            changed.append(node.name)
        replace_nodes(graph, instead)
        for scope, nodes in decoders.items():
            insert_nodes(scope, first=nodes)
        return Changes(tuple(changed), tuple(left))


def _decoded(value: float, dtype: np.dtype[np.generic], name: str, names: Names) -> tuple[Node, Variable]:
    """Return the node that decodes a number from the code that stands for exactly that, and its output."""
    format = format_named(dtype.name)
    codes = quantize(
        np.asarray(value, np.float32), parameters_from_range(value, value, format, symmetric=False), format
    )
    inputs = [
        constant(names.unique(f"{name}.middle.codes"), codes.codes),
        constant(names.unique(f"{name}.middle.scale"), codes.parameters.scale),
        constant(names.unique(f"{name}.middle.zero_point"), np.asarray(codes.parameters.zero_point)),
    ]
    decoded = Variable(names.unique(f"{name}.middle"), np.dtype(np.float32), [])
    return Node("DequantizeLinear", names.unique(f"{name}.middle.dequantize"), {}, inputs, [decoded]), decoded


def _added(node: Node, source: Node, slope: float, term: Tensor, names: Names) -> list[Node]:
    output = node.outputs[0]
    codes, scale, zero_point = source.inputs
    steeper = constant(names.unique(f"{node.name}.scale"), np.asarray(scale.values * np.float32(slope), np.float32))
    data, total = (
        Variable(names.unique(f"{node.name}.{what}"), output.dtype, output.shape) for what in ("scaled", "sum")
    )
    ends = [
        constant(names.unique(f"{node.name}.{end}"), np.float32(end == "maximum")) for end in ("minimum", "maximum")
    ]
    node.outputs.clear()
    return [
        Node("DequantizeLinear", names.unique(f"{node.name}.dequantize"), {}, [codes, steeper, zero_point], [data]),
        Node("Add", node.name, {}, [data, term], [total]),
        Node("Clip", names.unique(f"{node.name}.clip"), {}, [total, *ends], [output]),
    ]
