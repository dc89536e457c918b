"""Turn Constant nodes into initializers, where every pass looks for weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from onnxq.ir import (
    ArrayPayload,
    Constant,
    Graph,
    Node,
    Payload,
    become_constant,
    remove_nodes,
    scopes,
)
from onnxq.rewrite import Changes, Pass

_PLAIN_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "value_float": np.float32,
        "value_floats": np.float32,
        "value_int": np.int64,
        "value_ints": np.int64,
        "value_string": object,
        "value_strings": object,
    }
)


class LiftConstants(Pass):
    """Turn each Constant node into an initializer of the graph it stands in, bodies of control flow included.

    Leaves constants that are outputs of their graph, and sparse values.
    """

    def apply(self, graph: Graph) -> Changes:
        """Lift; ``changed`` holds the names of the tensors."""
        changed, left = [], []
        for scope in scopes(graph):
            outputs = set(scope.outputs)
            lifted = []
            for node in scope.nodes:
                if node.op != "Constant" or node.domain:
                    continue
                tensor, payload = node.outputs[0], _payload(node)
                if tensor in outputs:
                    left.append((tensor.name, "is an output of its graph"))
                elif payload is None:
                    left.append((tensor.name, "holds sparse values"))
                else:
                    lifted.append((node, tensor, payload))
            remove_nodes(scope, [node for node, _, _ in lifted])
            for _, tensor, payload in lifted:
                become_constant(tensor, payload)
                scope.initializers.append(tensor)
                changed.append(tensor.name)
        return Changes(tuple(changed), tuple(left))


def _payload(node: Node) -> Payload | None:
    value = node.attrs.get("value")
    if isinstance(value, Constant):
        return value.payload
    for key, dtype in _PLAIN_TYPES.items():
        if key in node.attrs:
            return ArrayPayload(np.asarray(node.attrs[key], dtype))
    return None
