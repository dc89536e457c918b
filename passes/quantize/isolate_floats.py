"""Keep products that compute in float apart from the codes around them."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.config.scheme import Mode
from onnxq.ir import (
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    all_graphs,
    insert_nodes,
    producer,
    sole_consumer,
)
from onnxq.ops import Role, operator_of
from onnxq.passes.quantize.planned import copy_of
from onnxq.planning.plan import Plan
from onnxq.rewrite import Changes, Pass

# Others are left as they are between codes.
_TAKEN = frozenset({"Conv", "ConvTranspose", "Gemm"})


@dataclass(frozen=True, eq=False)
class IsolateFloats(Pass):
    """Let products that compute in float read a copy of what was decoded, where what they make becomes codes.

    Between a DequantizeLinear and a QuantizeLinear onnxruntime takes a product of float weights for a static one: when
    it loads the model it makes codes of the weights itself, coarser than those that they were stored as, and runs an
    integer kernel, which fails where the quantizer has a scale for each channel. It looks through clamps and through
    what only moves elements.

    Attributes:
        plan: names the products that are static.
    """

    plan: Plan

    def apply(self, graph: Graph) -> Changes:
        """Insert the copies; new tensors are called ``t.copy``."""
        names = Names(graph)
        changed = []
        for scope in all_graphs(graph):
            before: dict[Node, list[Node]] = {}
            for node in scope.nodes:
                decision = self.plan.by_node.get(node.name)
                is_float = decision is None or decision.mode is not Mode.STATIC
                if node.op in _TAKEN and not node.domain and is_float and _is_between_codes(node):
                    before[node] = [copy_of(node.inputs[0], node.inputs[0].name, names)]
                    node.inputs[0] = before[node][0].outputs[0]
                    changed.append(node.name)
            insert_nodes(scope, before=before)
        return Changes(tuple(changed))


def _is_between_codes(node: Node) -> bool:
    """Return whether what a product reads was decoded, and what it makes becomes codes."""
    made: Tensor = node.inputs[0]
    while isinstance(made, Variable) and (maker := producer(made)) is not None and _is_a(maker, Role.PASS_THROUGH):
        made = maker.inputs[0]
    maker = producer(made) if isinstance(made, Variable) else None
    if maker is None or maker.op != "DequantizeLinear":
        return False
    reader = sole_consumer(node.outputs[0])
    while reader is not None and (_is_a(reader, Role.PASS_THROUGH) or _is_a(reader, Role.CLAMP)):
        reader = sole_consumer(reader.outputs[0])
    return reader is not None and reader.op == "QuantizeLinear"


def _is_a(node: Node, role: Role) -> bool:
    operator = operator_of(node)
    return operator is not None and operator.role is role
