"""Keep one of several equal initializers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from onnxq.graph import Constant, Graph, onnx_dtype, replace_uses
from onnxq.passes.base import Changes, Pass


@dataclass(frozen=True)
class ShareInitializers(Pass):
    """Let all nodes of the main graph read the first of several initializers of equal type, shape and bytes.

    Leaves initializers that are inputs or outputs of the graph.

    Attributes:
        smallest: bytes below which a constant is not worth looking at.
    """

    smallest: int = 16

    def apply(self, graph: Graph) -> Changes:
        """Share; ``changed`` holds the names of the initializers that are no longer read."""
        first: dict[tuple[int, tuple[int, ...], bytes], Constant] = {}
        fixed = {tensor.name for tensor in (*graph.inputs, *graph.outputs)}
        changed = []
        constants = dict.fromkeys(t for node in graph.nodes for t in node.inputs if isinstance(t, Constant))
        for tensor in constants:
            if tensor.nbytes < self.smallest or tensor.name in fixed:
                continue
            digest = hashlib.blake2b(digest_size=20)
            for chunk in tensor.payload.chunks():
                digest.update(chunk)
            key = (onnx_dtype(tensor), tuple(tensor.shape), digest.digest())
            kept = first.setdefault(key, tensor)
            if kept is not tensor:
                replace_uses(tensor, kept)
                changed.append(tensor.name)
        return Changes(tuple(changed))
