"""Versions of the file format and of the operators."""

from __future__ import annotations

from typing import Final

NEWEST_IR_VERSION: Final = 13
"""The newest IR version that onnxruntime loads. A model with a higher one keeps it; onnxq never sets one."""
NEWEST_OPSET: Final = 26
"""The newest ONNX opset that onnxruntime loads."""

_FIRST_IR: Final = 3
_IR_WITH_INITIALIZERS_BESIDE_INPUTS: Final = 4
_IR_BY_OPSET: Final = ((25, 13), (24, 12), (23, 11), (21, 10), (19, 9), (13, 7))


def minimum_ir_version(opset: int, *, all_initializers_are_inputs: bool = True) -> int:
    """Return the lowest IR version for an ONNX opset, at most 13. Initializers beside graph inputs need version 4.

    >>> minimum_ir_version(21)
    10
    """
    needed = next((version for first, version in _IR_BY_OPSET if opset >= first), _FIRST_IR)
    return needed if all_initializers_are_inputs else max(needed, _IR_WITH_INITIALIZERS_BESIDE_INPUTS)
