"""Leave out what exporters have written about nodes, tensors and graphs."""

from __future__ import annotations

from onnxq.ir import Graph, strip_metadata
from onnxq.rewrite import Changes, Pass


class StripMetadata(Pass):
    """Remove metadata and documentation of nodes and inner tensors, and metadata of graphs, in bodies as well.

    Exporters keep there where in the program a node came from, which can be a fifth of a quantized file. Leaves what
    belongs to the model as a whole, and the documentation of graphs, inputs and outputs.
    """

    def apply(self, graph: Graph) -> Changes:
        """Strip; ``changed`` holds the names of the nodes and tensors."""
        return Changes(tuple(strip_metadata(graph)))
