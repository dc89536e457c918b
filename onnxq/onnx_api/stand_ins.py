"""Stand-ins: operators of ONNX that have the types and shapes of those that onnx does not know.

onnx's inference knows nothing of what is behind an operator that it does not know. With stand-ins it needs one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, defs, helper

from onnxq.ir.elements import domain_named
from onnxq.ir.types import believed_outputs, einsum_terms, inferred_at
from onnxq.ops import OPERATORS, Operator

_UNKNOWN = "onnxq.unknown.shape"
_DOMAIN = "onnxq.inference"
_TRANSPOSES = "trans"
# Where Unsqueeze still has its axes in an attribute.
_EINSUM_OPSET = 12


def put_stand_ins(graph: GraphProto, model: ModelProto, opset: int) -> set[str]:
    """Replace the nodes of a graph that onnx does not know by stand-ins, where the table of operators has them.

    Nodes whose shapes onnx infers wrongly get stand-ins as well.

    Args:
        graph: which is edited; its bodies are not.
        model: around it, which is given functions, and an input of its own that nobody else reads.
        opset: version of the default domain.

    Returns:
        The names of what onnx cannot tell anything of: it does not know the node, or not what that makes.
    """
    made = {name for node in graph.node if not _is_inferred(node, opset) for name in node.output if name}
    nodes = [list(_stand_ins(node, model, opset)) for node in graph.node]
    if all(len(ones) == 1 and ones[0] is node for ones, node in zip(nodes, graph.node, strict=True)):
        return made
    kept = [NodeProto.FromString(one.SerializeToString()) for ones in nodes for one in ones]
    del graph.node[:]
    graph.node.extend(kept)
    if not any(info.name == _UNKNOWN for info in model.graph.input):
        model.graph.input.append(helper.make_tensor_value_info(_UNKNOWN, TensorProto.INT64, [None]))
    return made


def _stand_ins(node: NodeProto, model: ModelProto, opset: int) -> Iterator[NodeProto]:
    if not is_known(node, opset):
        yield from _of_foreign(node, opset)
    elif domain_named(node.domain):
        yield node
    elif (later := inferred_at(node.op_type, opset)) != opset:
        yield _call(node, [node], later, model)
    elif node.op_type == "Einsum" and len(node.input) > 1:
        yield from _of_einsum(node, model)
    elif (believed := believed_outputs(node.op_type, opset)) is not None:
        yield from _without_shapes(node, believed)
    else:
        yield node


def _call(node: NodeProto, body: Sequence[NodeProto], opset: int, model: ModelProto) -> NodeProto:
    """Return the call of a new function that computes, at an opset of its own, what a node does."""
    name = f"stand_in_{len(model.functions)}"
    read = list(dict.fromkeys(name for name in node.input if name))
    imports = [helper.make_opsetid("", opset)]
    model.functions.append(helper.make_function(_DOMAIN, name, read, list(node.output), list(body), imports))
    if not any(entry.domain == _DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    return helper.make_node(name, read, list(node.output), domain=_DOMAIN)


def _of_einsum(node: NodeProto, model: ModelProto) -> Iterator[NodeProto]:
    """Yield operators that broadcast, since onnx takes the length of a letter from the first operand that has it."""
    terms, result = einsum_terms(next((proto.s.decode() for proto in node.attribute if proto.name == "equation"), ""))
    if "." in result or any("." in term for term in terms) or len(terms) != len(node.input):
        yield from _without_shapes(node, 0)
        return
    body: list[NodeProto] = []
    operands = []
    for index, (name, term) in enumerate(zip(node.input, terms, strict=True)):
        equation = f"{term}->{''.join(letter for letter in result if letter in term)}"
        missing = [place for place, letter in enumerate(result) if letter not in term]
        body.append(helper.make_node("Einsum", [name], [f"{index}.kept"], equation=equation))
        operands.append(f"{index}.kept")
        if missing:
            body.append(helper.make_node("Unsqueeze", [f"{index}.kept"], [f"{index}.wide"], axes=missing))
            operands[-1] = f"{index}.wide"
    yield _call(node, [*body, helper.make_node("Sum", operands, list(node.output))], _EINSUM_OPSET, model)


def _without_shapes(node: NodeProto, believed: int) -> Iterator[NodeProto]:
    """Yield a node and what hides the shapes of its outputs from an index on."""
    twin = NodeProto()
    twin.CopyFrom(node)
    hidden = [(index, name) for index, name in enumerate(node.output) if index >= believed and name]
    for index, name in hidden:
        twin.output[index] = f"{_DOMAIN}.{name}"
    yield twin
    for index, name in hidden:
        yield helper.make_node("Reshape", [twin.output[index], _UNKNOWN], [name])


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


def _of_foreign(node: NodeProto, opset: int) -> Iterator[NodeProto]:
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
