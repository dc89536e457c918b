"""Replace calls of model-local functions by their bodies."""

from __future__ import annotations

from onnxq.ir import Graph
from onnxq.onnx_api import inline_functions
from onnxq.rewrite import Changes, Pass


class InlineFunctions(Pass):
    """Inline every model-local function, so that the nodes inside are planned like any other."""

    def apply(self, graph: Graph) -> Changes:
        """Inline; ``changed`` holds the names of the functions."""
        functions = tuple(function.name for function in graph.functions)
        if functions:
            graph.adopt(inline_functions(graph))
        return Changes(functions)
