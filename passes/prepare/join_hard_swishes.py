"""Write HardSigmoid times its data as HardSwish, where a runtime computes that in the kernel before it."""

from __future__ import annotations

from onnxq.errors import ModelError
from onnxq.ir import Graph, Node, nodes
from onnxq.onnx_api import infer_shapes
from onnxq.passes.canonical.use_hard_swish import UseHardSwish, has_slope_of_sixth
from onnxq.passes.prepare.upgrade_opset import UpgradeOpset
from onnxq.rewrite import Changes, Pass, RewriteRules

_OPSET = 14


class JoinHardSwishes(Pass):
    """Bring a model to the opset of HardSwish that has it in two nodes, and use it.

    OpenVINO knows the one node, and the formula of older exporters, but not the two, of which it makes kernels of their
    own and changes of layout around them.
    """

    def apply(self, graph: Graph) -> Changes:
        """Join; ``changed`` holds the names of the nodes, ``left`` those of a model that cannot be converted."""
        gates = tuple(node.name for _, node in nodes(graph) if _is_gate(node))
        if not gates:
            return Changes()
        try:
            UpgradeOpset(_OPSET).apply(graph)
        except ModelError as error:
            return Changes(left=tuple((name, str(error)) for name in gates))
        infer_shapes(graph)
        return RewriteRules((UseHardSwish(),)).apply(graph)


def _is_gate(node: Node) -> bool:
    """Return whether a node is the HardSigmoid of HardSwish, which a product multiplies with its own data."""
    if node.op != "HardSigmoid" or node.domain or not has_slope_of_sixth(node):
        return False
    products = (reader for reader in node.outputs[0].outputs if reader.op == "Mul" and not reader.domain)
    return any(tensor is node.inputs[0] for reader in products for tensor in reader.inputs)
