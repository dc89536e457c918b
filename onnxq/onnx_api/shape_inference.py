"""Types and shapes of all tensors, inferred by onnx on the model without its weights."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Sequence
from functools import cache

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, defs, helper, shape_inference

from onnxq.errors import ModelError
from onnxq.ir.data_types import data_type_name, data_type_of
from onnxq.ir.declarations import forget_claims, read_tensor_type
from onnxq.ir.elements import Shape, Tensor, Variable, canonical_domain
from onnxq.ir.graph import Graph
from onnxq.ir.order import toposort
from onnxq.ir.protos import subgraph_protos
from onnxq.ir.queries import all_graphs
from onnxq.ir.symbolic_dims import is_symbol
from onnxq.ir.type_inference import believed_outputs, einsum_terms, inferred_at
from onnxq.onnx_api.weightless import weightless_model
from onnxq.ops import OPERATORS, Operator

_MOST_PROPAGATED = 1 << 20


def infer_shapes(graph: Graph) -> None:
    """Infer dtype and shape of every tensor of a graph and its bodies, and write them into the Variables.

    Earlier types of inner tensors are forgotten first, unless onnx cannot infer the operator that makes them. What
    cannot be inferred is None. Declared inputs and outputs are only completed, except lengths in the body of a Loop
    that the Loop's inputs do not have. If onnx refuses the whole model, the graph keeps its types. Names of dimensions
    come only from the model's inputs (see `forget_claims`).

    Raises:
        ModelError: an overridable initializer has another type or rank than its input.
    """
    _check_overridable(graph)
    toposort(graph)
    forget_claims(graph)
    model = weightless_model(graph)
    _sanitise(model, graph)
    inferred = _infer(model)
    if inferred is None:
        return
    scopes = list(zip(all_graphs(graph), subgraph_protos(inferred.graph), strict=True))
    if _forget_false_states(scopes):
        infer_shapes(graph)
        return
    for scope, proto in scopes:
        _write_back(scope, proto)


def _check_overridable(graph: Graph) -> None:
    for initializer in graph.initializers:
        if initializer.overridable_input is None:
            continue
        dtype, shape = read_tensor_type(initializer.overridable_input.type)
        declared, stored = data_type_of(dtype), initializer.tensor_data.onnx_dtype
        if (declared and declared != stored) or (shape is not None and len(shape) != len(initializer.shape)):
            raise ModelError(
                f"input {initializer.name!r} is declared as {data_type_name(declared)} {shape}, but its initializer is "
                f"{data_type_name(stored)} {list(initializer.shape)}; correct one of them"
            )


def infer_proto(model: ModelProto, *, data_prop: bool = False) -> ModelProto | None:
    """Return a model with the types that onnx infers; None if onnx refuses the model, which is still usable."""
    try:
        return shape_inference.infer_shapes(model, data_prop=data_prop)
    # The bindings turn any C++ error into one of these.
    except (shape_inference.InferenceError, RuntimeError, ValueError, IndexError, MemoryError):
        return None


def _infer(model: ModelProto) -> ModelProto | None:
    for trust_outputs in (True, False):
        if not trust_outputs:
            for info in model.graph.output:
                info.ClearField("type")
        inferred = infer_proto(model)
        if inferred is None:
            continue
        if not 0 < _propagated(inferred.graph) <= _MOST_PROPAGATED:
            return inferred
        more = infer_proto(model, data_prop=True)
        if more is not None:
            return _without_propagated_names(more, inferred)
    return None


def _without_propagated_names(propagated: ModelProto, inferred: ModelProto) -> ModelProto:
    """Forget names that onnx takes from the target of a Reshape, where they may be 0 and mean another dimension."""
    for scope, plain in zip(subgraph_protos(propagated.graph), subgraph_protos(inferred.graph), strict=True):
        shapes = {info.name: _read(info)[1] for info in (*plain.value_info, *plain.output)}
        for info in (*scope.value_info, *scope.output):
            for index, dimension in enumerate(info.type.tensor_type.shape.dim):
                names = shapes.get(info.name) or []
                if dimension.dim_param and dimension.dim_param not in names[index : index + 1]:
                    dimension.ClearField("dim_param")
    return propagated


@cache
def _propagating() -> frozenset[str]:
    # Operators that onnx propagates values through; cached because listing all schemas is slow.
    return frozenset(schema.name for schema in defs.get_all_schemas() if schema.has_data_propagation_function)


def _propagated(graph: GraphProto) -> int:
    """Return how many values onnx would hold to propagate data, which it does for every vector of known length.

    A few concatenations of a vector with itself exceed any memory.
    """
    sizes: dict[str, int] = {}
    total = 0
    for scope in subgraph_protos(graph):
        for info in (*scope.input, *scope.value_info, *scope.output):
            dims = info.type.tensor_type.shape.dim
            if len(dims) == 1:
                sizes[info.name] = dims[0].dim_value
        sizes.update({tensor.name: tensor.dims[0] for tensor in scope.initializer if len(tensor.dims) == 1})
        for node in scope.node:
            if not canonical_domain(node.domain) and node.op_type in _propagating():
                read = [sizes.get(name, 1) for name in node.input]
                length = sum(read) if node.op_type == "Concat" else max(read, default=0)
                sizes.update(dict.fromkeys(node.output, length))
                total += length
    return total


def _sanitise(model: ModelProto, graph: Graph) -> None:
    # Unset negative dimensions and untrusted names, and drop declarations that inference can replace.
    trusted = {tensor.name: {size for size in tensor.shape or () if isinstance(size, str)} for tensor in graph.inputs}
    fed = {info.name for info in model.graph.input}
    fixed = [tensor for tensor in model.graph.initializer if tensor.name not in fed]
    if len(fixed) < len(model.graph.initializer):
        # onnx would take the values of overridable initializers for constants.
        del model.graph.initializer[:]
        model.graph.initializer.extend(fixed)
    # Bodies first: the substitution copies the nodes that hold them.
    for scope in reversed(list(subgraph_protos(model.graph))):
        foreign = substitute_unknown_operators(scope, model, graph.opset)
        kept = [info for info in scope.value_info if info.name in foreign]
        del scope.value_info[:]
        scope.value_info.extend(kept)
        for info in (*scope.input, *scope.output, *scope.value_info):
            if info.type.WhichOneof("value") != "tensor_type":
                continue
            names = trusted.get(info.name, set()) if scope is model.graph else set()
            for dimension in info.type.tensor_type.shape.dim:
                if dimension.WhichOneof("value") == "dim_value" and dimension.dim_value < 0:
                    dimension.ClearField("dim_value")
                if dimension.WhichOneof("value") == "dim_param" and dimension.dim_param not in names:
                    dimension.ClearField("dim_param")


def _forget_false_states(scopes: Sequence[tuple[Graph, GraphProto]]) -> bool:
    """Forget lengths that bodies of Loops declare and first values of their states do not have; onnxruntime warns only.

    Returns:
        Whether there were such lengths.
    """
    shapes: dict[Graph | None, ChainMap[str, Shape | None]] = {None: ChainMap()}
    changed = False
    for scope, proto in scopes:
        entries = (*proto.input, *proto.value_info, *proto.output)
        shapes[scope] = visible = shapes[scope.parent].new_child({info.name: _read(info)[1] for info in entries})
        for node in scope.nodes:
            for body in node.subgraphs() if node.op == "Loop" else ():
                pairs = zip(body.inputs[2:], node.inputs[2:], strict=False)
                if sum(_forget_lengths(state, visible.get(first.name, first.shape)) for state, first in pairs):
                    changed = True
                    for tensor in body.outputs:
                        _forget_lengths(tensor, [None] * len(tensor.shape or ()))
    return changed


def _forget_lengths(tensor: Tensor, shape: Shape | None) -> bool:
    """Forget lengths of a tensor that another shape of the same rank does not have, and return whether it had any."""
    if not isinstance(tensor, Variable) or not tensor.shape or shape is None or len(shape) != len(tensor.shape):
        return False
    kept = [None if isinstance(old, int) and old != new else old for old, new in zip(tensor.shape, shape, strict=True)]
    changed = kept != tensor.shape
    tensor.shape = kept
    return changed


def _write_back(scope: Graph, inferred: GraphProto) -> None:
    declarations = {info.name: info for info in (*inferred.value_info, *inferred.input, *inferred.output)}
    as_read = {info.name: info for info in scope.source.output} if scope.source is not None else {}
    declared = set(scope.inputs) | set(scope.outputs)
    for node in scope.nodes:
        for tensor in node.outputs:
            if tensor.name and isinstance(tensor, Variable) and tensor not in declared:
                tensor.dtype, tensor.shape = _read(declarations.get(tensor.name))
                _let_names_be_facts(tensor)
    for tensor in declared:
        if isinstance(tensor, Variable) and tensor.name in declarations:
            dtype, shape = _read(declarations.get(tensor.name))
            if scope.parent is None and tensor.name in as_read:
                shape = _as_declared(shape, read_tensor_type(as_read[tensor.name].type)[1])
            tensor.dtype = tensor.dtype if tensor.dtype is not None else dtype
            tensor.shape = _complete(tensor.shape, shape)
            if tensor not in scope.inputs:
                _let_names_be_facts(tensor)


def _let_names_be_facts(tensor: Variable) -> None:
    """Forget how a tensor was declared, so that the names of its dimensions count as inferred."""
    if any(isinstance(size, str) for size in tensor.shape or ()):
        tensor.source = None


def _read(info: ValueInfoProto | None) -> tuple[object, Shape | None]:
    """Return dtype and shape, without placeholder names of dimensions."""
    if info is None:
        return None, None
    dtype, shape = read_tensor_type(info.type)
    if shape is not None:
        shape = [None if isinstance(size, str) and not is_symbol(size) else size for size in shape]
    return dtype, shape


def _as_declared(inferred: Shape | None, declared: Shape | None) -> Shape | None:
    """Return the inferred shape, without dimensions that would rename a declared dimension."""
    if inferred is None or declared is None or len(inferred) != len(declared):
        return inferred
    return [
        None if isinstance(old, str) and is_symbol(old) and new != old else new
        for new, old in zip(inferred, declared, strict=True)
    ]


def _complete(declared: Shape | None, inferred: Shape | None) -> Shape | None:
    if declared is None or inferred is None or len(declared) != len(inferred):
        return inferred if declared is None else declared
    return [new if old is None else old for old, new in zip(declared, inferred, strict=True)]


# Unknown operators are replaced by functions and operators of ONNX with the same types and shapes. onnx infers nothing
# behind an unknown operator; with substitutes, one run of inference is enough.

_UNKNOWN = "onnxq.unknown.shape"
_DOMAIN = "onnxq.inference"
_TRANSPOSES = "trans"
# Unsqueeze has its axes in an attribute until opset 12.
_EINSUM_OPSET = 12


def substitute_unknown_operators(graph: GraphProto, model: ModelProto, opset: int) -> set[str]:
    """Replace a graph's nodes that onnx does not know or whose shapes it infers wrongly.

    The operator table has the substitutes. Bodies are not edited. The model gets functions and an additional input.

    Returns:
        The names of outputs that onnx cannot infer.
    """
    foreign = {name for node in graph.node if not _is_inferred(node, opset) for name in node.output if name}
    nodes = [list(_stand_ins(node, model, opset)) for node in graph.node]
    if all(len(group) == 1 and group[0] is node for group, node in zip(nodes, graph.node, strict=True)):
        return foreign
    kept = [NodeProto.FromString(stand_in.SerializeToString()) for group in nodes for stand_in in group]
    del graph.node[:]
    graph.node.extend(kept)
    if not any(info.name == _UNKNOWN for info in model.graph.input):
        model.graph.input.append(helper.make_tensor_value_info(_UNKNOWN, TensorProto.INT64, [None]))
    return foreign


def _stand_ins(node: NodeProto, model: ModelProto, opset: int) -> Iterator[NodeProto]:
    if not is_known(node, opset):
        yield from _of_foreign(node, opset)
    elif canonical_domain(node.domain):
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
    """Return the call of a new function that computes the same as a node, at its own opset."""
    name = f"stand_in_{len(model.functions)}"
    read = list(dict.fromkeys(name for name in node.input if name))
    imports = [helper.make_opsetid("", opset)]
    model.functions.append(helper.make_function(_DOMAIN, name, read, list(node.output), list(body), imports))
    if not any(entry.domain == _DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    return helper.make_node(name, read, list(node.output), domain=_DOMAIN)


def _of_einsum(node: NodeProto, model: ModelProto) -> Iterator[NodeProto]:
    # onnx takes the length of a subscript from the first operand that has it, so let Sum broadcast the operands.
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
    """Yield a node, and Reshapes that hide the shapes of its outputs from index ``believed`` on."""
    twin = NodeProto()
    twin.CopyFrom(node)
    hidden = [(index, name) for index, name in enumerate(node.output) if index >= believed and name]
    for index, name in hidden:
        twin.output[index] = f"{_DOMAIN}.{name}"
    yield twin
    for index, name in hidden:
        yield helper.make_node("Reshape", [twin.output[index], _UNKNOWN], [name])


def is_known(node: NodeProto, opset: int) -> bool:
    """Whether onnx knows an operator; for the default domain, at the given opset."""
    domain = canonical_domain(node.domain)
    return bool(defs.has(node.op_type, opset, "") if not domain else defs.has(node.op_type, domain=domain))


def _is_inferred(node: NodeProto, opset: int) -> bool:
    """Whether onnx infers the outputs of a node; for many operators of ``ai.onnx.ml`` it does not."""
    if not is_known(node, opset):
        return False
    domain = canonical_domain(node.domain)
    schema = defs.get_schema(node.op_type, domain=domain) if domain else defs.get_schema(node.op_type, opset, "")
    return bool(schema.has_type_and_shape_inference_function)


def _of_foreign(node: NodeProto, opset: int) -> Iterator[NodeProto]:
    """Yield nodes that make the outputs of known type, or the node itself if its operator is not in the table."""
    row = OPERATORS.get((canonical_domain(node.domain), node.op_type))
    if row is None or not row.types:
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
    if row.standard is None or any(proto.name.startswith(_TRANSPOSES) and proto.i for proto in node.attribute):
        return None
    op, indices = row.standard
    if not defs.has(op, opset, ""):
        return None
    inputs = [node.input[index] if index < len(node.input) else "" for index in indices]
    attributes = defs.get_schema(op, opset).attributes
    standard = helper.make_node(op, inputs, [node.output[0]])
    standard.attribute.extend(proto for proto in node.attribute if proto.name in attributes)
    return standard


def _input(node: NodeProto, indices: tuple[int | None, ...], index: int) -> str:
    like = indices[index] if index < len(indices) else None
    return node.input[like] if like is not None and like < len(node.input) else ""
