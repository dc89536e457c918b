"""Convert a model to a later opset, when the nodes that are to be inserted need it."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.ir import Graph, origins_by_name, put_back_origins
from onnxq.onnx_api import upgrade_opset
from onnxq.rewrite import Changes, Pass


@dataclass(frozen=True)
class UpgradeOpset(Pass):
    """Convert the default domain to ``version`` with onnx's own converter; later models stay as they are.

    Attributes:
        version: the lowest opset that is wanted.
    """

    version: int = 13

    def apply(self, graph: Graph) -> Changes:
        """Convert; ``changed`` says from which opset to which."""
        before = graph.opset
        if before >= self.version:
            return Changes()
        origins = origins_by_name(graph)
        graph.adopt(upgrade_opset(graph, self.version))
        put_back_origins(graph, origins)
        return Changes((f"opset {before} to {self.version}",))
