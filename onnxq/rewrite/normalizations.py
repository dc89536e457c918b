"""What keeps a spelt-out normalization from becoming one operator."""

from __future__ import annotations

import numpy as np

from onnxq.ir.elements import Node
from onnxq.rewrite.patterns import Match
from onnxq.rewrite.ranks import may_widen, reduces_last_axis


def normalization_obstacle(found: Match, operator: str, first_opset: int, *means: Node) -> str:
    """Say why a match that normalizes ``x`` keeps its form; an empty string where it need not.

    Args:
        found: the match. A value named ``odd`` says that it is not in the form that runtimes know.
        operator: what ONNX has for it.
        first_opset: from which on it does.
        means: nodes that have to reduce their data along the last axis.
    """
    if not all(map(reduces_last_axis, means)):
        return "it normalizes along another axis than the last"
    if found.opset < first_opset and "odd" not in found.values:
        return f"ONNX has {operator} from opset {first_opset} on"
    if found.x.dtype is None or not found.x.shape or not isinstance(found.x.shape[-1], int) or not found.x.shape[-1]:
        return "type or length of what it normalizes is unknown"
    if np.dtype(found.x.dtype).itemsize > 4:
        return f"{np.dtype(found.x.dtype)} would be normalized with float32"
    return "its constants may have more dimensions than its data" if may_widen(found, found.x) else ""
