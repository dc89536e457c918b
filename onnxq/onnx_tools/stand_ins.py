"""Stand-ins: operators of ONNX that have the types and shapes of those that onnx does not know.

onnx's inference knows nothing of what is behind an operator that it does not know. With stand-ins it needs one run.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, NodeProto, TensorProto, defs, helper

from onnxq.graph.elements import domain_named
from onnxq.operators import OPERATORS, Operator

_UNKNOWN = "onnxq.unknown.shape"
_TRANSPOSES = "trans"


def put_stand_ins(graph: GraphProto, root: GraphProto, opset: int) -> set[str]:
    """Replace the nodes of a graph that onnx does not know by stand-ins, where the table of operators has them.

    Args:
        graph: which is edited; its bodies are not.
        root: the main graph, which is given an input of its own that nobody else reads.
        opset: version of the default domain.

    Returns:
        The names of what onnx cannot tell anything of: it does not know the node, or not what that makes.
    """
    unknown = [node for node in graph.node if not is_known(node, opset)]
    made = {name for node in graph.node if not _is_inferred(node, opset) for name in node.output if name}
    if not any(_row(node) for node in unknown):
        return made
    nodes = [one for node in graph.node for one in ((node,) if is_known(node, opset) else _stand_ins(node, opset))]
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    if not any(info.name == _UNKNOWN for info in root.input):
        root.input.append(helper.make_tensor_value_info(_UNKNOWN, TensorProto.INT64, [None]))
    return made


def is_known(node: NodeProto, opset: int) -> bool:
    """Whether onnx knows an operator, at the opset of the model when it is its own."""
    domain = domain_named(node.domain)
    return bool(defs.has(node.op_type, opset, "") if not domain else defs.has(node.op_type, domain=domain))


def _is_inferred(node: NodeProto, opset: int) -> bool:
    """Whether onnx can tell what a node makes, which it cannot of many in its domain of classical learning."""
    if not is_known(node, opset):
        return False
    domain = domain_named(node.domain)
    schema = defs.get_schema(node.op_type, domain=domain) if domain else defs.get_schema(node.op_type, opset, "")
    return bool(schema.has_type_and_shape_inference_function)


def _row(node: NodeProto) -> Operator | None:
    row = OPERATORS.get((domain_named(node.domain), node.op_type))
    return row if row is not None and row.types else None


def _stand_ins(node: NodeProto, opset: int) -> Iterator[NodeProto]:
    """Yield nodes that make the outputs of which anything is known, or the node itself."""
    row = _row(node)
    if row is None:
        yield node
        return
    first = _standard(node, row, opset)
    if first is not None:
        yield first
    for index, name in enumerate(node.output):
        source = _input(node, row.types, index)
        if not name or not source or (index == 0 and first is not None):
            continue
        shaped = _input(node, row.shapes, index) == source
        yield helper.make_node(*(("Identity", [source]) if shaped else ("Reshape", [source, _UNKNOWN])), [name])


def _standard(node: NodeProto, row: Operator, opset: int) -> NodeProto | None:
    """Return the operator of ONNX that makes the same first output."""
    if row.standard is None or any(proto.name.startswith(_TRANSPOSES) and proto.i for proto in node.attribute):
        return None
    op, indices = row.standard
    if not defs.has(op, opset, ""):
        return None
    inputs = [node.input[index] if index < len(node.input) else "" for index in indices]
    known = defs.get_schema(op, opset).attributes
    made = helper.make_node(op, inputs, [node.output[0]])
    made.attribute.extend(proto for proto in node.attribute if proto.name in known)
    return made


def _input(node: NodeProto, indices: tuple[int | None, ...], index: int) -> str:
    """Return the name of the input that an output is like, or an empty string."""
    like = indices[index] if index < len(indices) else None
    return node.input[like] if like is not None and like < len(node.input) else ""
