"""What ONNX says about operators: how many inputs and outputs a node must have."""

from __future__ import annotations

from functools import cache

from onnx import NodeProto, defs

from onnxq.errors import ModelError


def check_arity(node: NodeProto, opset: int) -> None:
    """Check that a node of the default domain has the inputs and outputs without which it means nothing.

    Raises:
        ModelError: there are too few.
    """
    inputs, outputs = _least(node.op_type, opset)
    for found, least, what in ((len(node.input), inputs, "inputs"), (len(node.output), outputs, "outputs")):
        if found < least:
            subject = f"{node.op_type} node {node.name!r}" if node.name else f"a node {node.op_type}"
            raise ModelError(f"{subject} has {found} {what}, expected {least} or more; the model is damaged")


@cache
def _least(op_type: str, opset: int) -> tuple[int, int]:
    """Return the least numbers of inputs and outputs; 0 for an operator that onnx does not know."""
    if not defs.has(op_type, max_inclusive_version=opset):
        return 0, 0
    schema = defs.get_schema(op_type, max_inclusive_version=opset)
    return schema.min_input, schema.min_output
