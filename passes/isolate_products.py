"""Keep what follows weight-only products apart from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxq.graph import Graph, Names, Node, Tensor, Variable, constant, insert_nodes, scopes
from onnxq.passes.base import Changes, Pass
from onnxq.planning.plan import Plan
from onnxq.scheme import Mode

_PRODUCTS = frozenset({"Gemm", "MatMul"})
_CLAMPS = frozenset({"Clip", "Relu"})


@dataclass(frozen=True, eq=False)
class IsolateProducts(Pass):
    """Write what follows a weight-only product in operators that onnxruntime does not take for something else.

    It takes a Relu or Clip behind a product, with or without a bias between them, for the beginning of a quantizer, and
    merges an Add of matrices into the product; either way it does not multiply the codes. Such clamps become Max and
    Min, and such an Add becomes a Sum. Leaves clamps whose limits are attributes, as models below opset 11 have them.

    Attributes:
        plan: names the products.
    """

    plan: Plan

    def apply(self, graph: Graph) -> Changes:
        """Replace; a Clip between two limits becomes two nodes."""
        names = Names(graph)
        changed = []
        for scope in scopes(graph):
            before: dict[Node, list[Node]] = {}
            for node in scope.nodes:
                decision = self.plan.by_node.get(node.name)
                if decision is None or decision.mode is not Mode.WEIGHT_ONLY or node.op not in _PRODUCTS:
                    continue
                reader = _only_reader(node.outputs[0])
                if reader is not None and _is_merged(reader, node.outputs[0]):
                    reader.op = "Sum"
                    changed.append(reader.name)
                elif reader is not None and reader.op == "Add":
                    reader = _only_reader(reader.outputs[0])
                if reader is not None and (ends := _ends(reader, names)):
                    before[reader] = _replace(reader, ends, names)
                    changed.append(reader.name)
            insert_nodes(scope, before=before)
        return Changes(tuple(changed))


def _only_reader(tensor: Variable) -> Node | None:
    return tensor.outputs[0] if len(tensor.outputs) == 1 and not tensor.returned_by else None


def _is_merged(reader: Node, product: Variable) -> bool:
    """Return whether onnxruntime merges the Add that reads a product into it, a vector aside."""
    others = [tensor for tensor in reader.inputs if tensor is not product]
    return (
        reader.op == "Add"
        and not reader.domain
        and _may_have_rank_2(product)
        and any(_may_have_rank_2(tensor) for tensor in others)
    )


def _may_have_rank_2(tensor: Tensor) -> bool:
    return tensor.shape is None or len(tensor.shape) == 2


def _ends(clamp: Node, names: Names) -> list[tuple[str, Tensor]]:
    """Return the operators that clamp from below and above, each with its limit; none where nothing is to be done."""
    if clamp.op not in _CLAMPS or clamp.domain or clamp.attrs or not clamp.outputs[0].outputs:
        return []
    if clamp.op == "Relu":
        zero = np.zeros((), clamp.inputs[0].dtype or np.float32)
        return [("Max", constant(names.fresh(f"{clamp.name}.zero"), zero))]
    limits = zip(("Max", "Min"), clamp.inputs[1:], strict=False)
    return [(op, limit) for op, limit in limits if limit.name]


def _replace(clamp: Node, ends: list[tuple[str, Tensor]], names: Names) -> list[Node]:
    """Turn a clamp into its last operator, and return the one that must stand before it, if any."""
    data, (last, limit) = clamp.inputs[0], ends[-1]
    before = []
    if len(ends) > 1:
        raised = Variable(names.fresh(f"{clamp.outputs[0].name}.raised"), data.dtype, data.shape)
        before.append(Node("Max", names.fresh(f"{clamp.name}.max"), {}, [data, ends[0][1]], [raised]))
        data = raised
    clamp.op, clamp.inputs = last, [data, limit]
    return before
