"""Leave out initial states of recurrent layers that are zero."""

from __future__ import annotations

from typing import Any

from onnxq.ir import Constant, Graph, Node, Variable, scopes
from onnxq.rewrite import Changes, Pass

_STATES = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
"""Which inputs are initial states."""
# What moves or repeats zeros makes zeros.
_KEEPING_ZEROS = frozenset({"Expand", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"})


class DropInitialStates(Pass):
    """Let LSTM, GRU and RNN begin with the zeros that they begin with by themselves.

    What has computed the zeros, from a batch size that nobody knows, is no longer needed then.
    """

    def apply(self, graph: Graph) -> Changes:
        """Drop; ``changed`` holds the names of the layers."""
        changed = []
        for scope in scopes(graph):
            for node in scope.nodes:
                states = [] if node.domain else [index for index in _STATES.get(node.op, ()) if _is_zero(node, index)]
                for index in states:
                    node.inputs[index] = Variable("")
                while states and not node.inputs[-1].name:
                    node.inputs.pop()
                if states:
                    changed.append(node.name)
        return Changes(tuple(changed))


def _is_zero(node: Node, index: int) -> bool:
    return index < len(node.inputs) and bool(node.inputs[index].name) and _holds_zeros(node.inputs[index])


def _holds_zeros(tensor: Any) -> bool:
    """Whether all entries are zero, however many there are."""
    while not isinstance(tensor, Constant):
        producer = tensor.inputs[0] if tensor.inputs else None
        if producer is None or producer.domain or not producer.inputs:
            return False
        if producer.op == "ConstantOfShape":
            filling = producer.attrs.get("value")
            return filling is None or (isinstance(filling, Constant) and not filling.values.any())
        if producer.op not in _KEEPING_ZEROS:
            return False
        tensor = producer.inputs[0]
    return tensor.input_source is None and tensor.dtype.kind == "f" and not tensor.values.any()
