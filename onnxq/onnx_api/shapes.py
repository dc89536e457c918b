"""Types and shapes of all tensors, from onnx's own inference on the model without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from onnx import AttributeProto, GraphProto, ModelProto, ValueInfoProto, defs, shape_inference

from onnxq.errors import ModelError
from onnxq.ir.data_types import data_type_name, data_type_of
from onnxq.ir.declarations import forget_claims, read_tensor_type
from onnxq.ir.elements import Shape, Variable, domain_named
from onnxq.ir.model import Graph
from onnxq.ir.order import toposort
from onnxq.ir.scopes import scopes
from onnxq.ir.shape_entries import is_symbol
from onnxq.onnx_api.skeleton import skeleton
from onnxq.onnx_api.stand_ins import put_stand_ins

_MOST_PROPAGATED = 1 << 20


def infer_shapes(graph: Graph) -> None:
    """Find out dtype and shape of every tensor of a graph and its bodies, and write them into the Variables.

    What was known before about tensors inside the graph is forgotten first, unless onnx cannot tell what the operator
    that makes them gives; what cannot be found out is None. Declared inputs and outputs are only completed. Where
    inference gives up on the model as a whole, the graph is left as it is. Names of dimensions come from the inputs of
    the model alone, see `forget_claims`.

    Raises:
        ModelError: an overridable initializer has another type or rank than the input it stands for.
    """
    _check_overridable(graph)
    toposort(graph)
    forget_claims(graph)
    model = skeleton(graph)
    _sanitise(model, graph)
    inferred = _infer(model)
    if inferred is None:
        return
    for scope, proto in zip(scopes(graph), _graphs(inferred.graph), strict=True):
        _write_back(scope, proto)


def _check_overridable(graph: Graph) -> None:
    for initializer in graph.initializers:
        if initializer.input_source is None:
            continue
        dtype, shape = read_tensor_type(initializer.input_source)
        declared, stored = data_type_of(dtype), initializer.payload.onnx_dtype
        if (declared and declared != stored) or (shape is not None and len(shape) != len(initializer.shape)):
            raise ModelError(
                f"input {initializer.name!r} is declared as {data_type_name(declared)} {shape}, but its initializer is "
                f"{data_type_name(stored)} {list(initializer.shape)}; correct one of them"
            )


def _infer(model: ModelProto) -> ModelProto | None:
    """Return the model with what onnx can tell, or None when its inference gives up on the model."""
    for trust_outputs in (True, False):
        if not trust_outputs:
            for info in model.graph.output:
                info.ClearField("type")
        try:
            known = shape_inference.infer_shapes(model)
            if not 0 < _propagated(known.graph) <= _MOST_PROPAGATED:
                return known
            return shape_inference.infer_shapes(model, data_prop=True)
        # The bindings turn any C++ error into one of these, and none of them should keep a user from going on.
        except (shape_inference.InferenceError, RuntimeError, ValueError, IndexError, MemoryError):
            continue
    return None


@cache
def _propagating() -> frozenset[str]:
    """Names of the operators that data propagates through; to ask onnx for them takes a while."""
    return frozenset(schema.name for schema in defs.get_all_schemas() if schema.has_data_propagation_function)


def _propagated(graph: GraphProto) -> int:
    """Return how many values onnx would hold to propagate data, which it does for every vector of known length.

    A few concatenations of a vector with itself are more than any memory holds.
    """
    sizes: dict[str, int] = {}
    total = 0
    for scope in _graphs(graph):
        for info in (*scope.input, *scope.value_info, *scope.output):
            dims = info.type.tensor_type.shape.dim
            if len(dims) == 1:
                sizes[info.name] = dims[0].dim_value
        sizes.update({tensor.name: tensor.dims[0] for tensor in scope.initializer if len(tensor.dims) == 1})
        for node in scope.node:
            if not domain_named(node.domain) and node.op_type in _propagating():
                read = [sizes.get(name, 1) for name in node.input]
                made = sum(read) if node.op_type == "Concat" else max(read, default=0)
                sizes.update(dict.fromkeys(node.output, made))
                total += made
    return total


def _sanitise(model: ModelProto, graph: Graph) -> None:
    """Unset negative dimensions and names that are no facts, and drop declarations that inference can replace.

    Operators that onnx does not know are replaced by stand-ins.
    """
    trusted = {tensor.name: {size for size in tensor.shape or () if isinstance(size, str)} for tensor in graph.inputs}
    fed = {info.name for info in model.graph.input}
    fixed = [tensor for tensor in model.graph.initializer if tensor.name not in fed]
    if len(fixed) < len(model.graph.initializer):
        # A caller may override the others, whose values onnx takes for constants.
        del model.graph.initializer[:]
        model.graph.initializer.extend(fixed)
    # Bodies first: stand-ins replace the nodes that hold them by copies.
    for scope in reversed(list(_graphs(model.graph))):
        foreign = put_stand_ins(scope, model, graph.opset)
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


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and its bodies in the order of `scopes`."""
    pending = [graph]
    while pending:
        scope = pending.pop()
        yield scope
        bodies: list[GraphProto] = []
        for node in scope.node:
            for proto in node.attribute:
                if proto.type == AttributeProto.GRAPH:
                    bodies.append(proto.g)
                elif proto.type == AttributeProto.GRAPHS:
                    bodies.extend(proto.graphs)
        pending.extend(reversed(bodies))


def _write_back(scope: Graph, inferred: GraphProto) -> None:
    known = {info.name: info for info in (*inferred.value_info, *inferred.input, *inferred.output)}
    as_read = {info.name: info for info in scope.source.output} if scope.source is not None else {}
    declared = set(scope.inputs) | set(scope.outputs)
    for node in scope.nodes:
        for tensor in node.outputs:
            if tensor.name and isinstance(tensor, Variable) and tensor not in declared:
                tensor.dtype, tensor.shape = _read(known.get(tensor.name))
                _let_names_be_facts(tensor)
    for tensor in declared:
        if isinstance(tensor, Variable) and tensor.name in known:
            dtype, shape = _read(known.get(tensor.name))
            if scope.parent is None and tensor.name in as_read:
                shape = _as_declared(shape, read_tensor_type(as_read[tensor.name])[1])
            tensor.dtype = tensor.dtype if tensor.dtype is not None else dtype
            tensor.shape = _complete(tensor.shape, shape)
            if tensor not in scope.inputs:
                _let_names_be_facts(tensor)


def _let_names_be_facts(tensor: Variable) -> None:
    """Forget how a tensor was declared, so that the names of its dimensions count as inferred."""
    if any(isinstance(size, str) for size in tensor.shape or ()):
        tensor.source = None


def _read(info: ValueInfoProto | None) -> tuple[object, Shape | None]:
    """Return dtype and shape, without the dimension names that inference made up."""
    if info is None:
        return None, None
    dtype, shape = read_tensor_type(info)
    if shape is not None:
        shape = [None if isinstance(size, str) and not is_symbol(size) else size for size in shape]
    return dtype, shape


def _as_declared(inferred: Shape | None, declared: Shape | None) -> Shape | None:
    """Return an inferred shape without what would change the name of a declared dimension."""
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
