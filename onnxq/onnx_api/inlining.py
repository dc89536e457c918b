"""Inline model-local functions as onnxruntime runs them; recursive functions, or too many nodes, are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import FunctionProto, ModelProto, NodeProto, checker, defs, inliner, shape_inference, version_converter

from onnxq.errors import ModelError
from onnxq.ir.elements import canonical_domain
from onnxq.ir.protos import node_protos
from onnxq.ops import OPERATORS

_MOST_NODES = 1_000_000
# The bindings turn any C++ error into one of these.
NATIVE_ERRORS = (
    RuntimeError,
    ValueError,
    IndexError,
    TypeError,
    MemoryError,
    checker.ValidationError,
    version_converter.ConvertError,
    shape_inference.InferenceError,
)
"""What onnx's C++ tools raise."""

_Key = tuple[str, str, str]


def inline_proto_functions(model: ModelProto) -> ModelProto:
    """Return a model in which the bodies of its functions stand in place of their calls.

    The functions that no other function calls come first. Only once they are inlined are the attributes of the calls
    inside them known, and onnx's inliner ignores the defaults of attributes that a call lacks. A function whose name is
    that of an operator is dropped, because onnxruntime runs the operator.

    Returns:
        A new model; functions that cannot be converted to the model's opset are left in it.

    Raises:
        ModelError: see `check_functions`, or a function cannot be inlined.
    """
    inlined = ModelProto()
    inlined.CopyFrom(model)
    versions = {canonical_domain(entry.domain): entry.version for entry in model.opset_import}
    del inlined.functions[:]
    inlined.functions.extend(function for function in model.functions if not _is_operator(function, versions))
    check_functions(inlined)
    waiting = {_name(function): function for function in inlined.functions}
    del inlined.functions[:]
    while waiting and not inlined.functions:
        called = {_callee(node) for function in waiting.values() for node in node_protos(function.node)}
        outermost = {key: function for key, function in waiting.items() if key not in called}
        for node in node_protos(inlined.graph.node):
            if callee := outermost.get(_callee(node)):
                names = {attribute.name for attribute in node.attribute}
                node.attribute.extend(default for default in callee.attribute_proto if default.name not in names)
        inlined.functions.extend(outermost.values())
        inlined = _inlined(inlined)
        waiting = {key: function for key, function in waiting.items() if key in called}
    return inlined


def _inlined(model: ModelProto) -> ModelProto:
    try:
        return inliner.inline_local_functions(model, convert_version=True)
    except NATIVE_ERRORS as error:
        lines = str(error).strip().splitlines()
        problem = lines[-1] if lines else type(error).__name__
        raise ModelError(f"the model-local functions cannot be inlined: {problem}") from error


def _is_operator(function: FunctionProto, versions: Mapping[str, int]) -> bool:
    domain = canonical_domain(function.domain)
    is_standard = defs.has(function.name, versions.get(domain, 1), domain)
    return not domain or is_standard or (domain, function.name) in OPERATORS


def check_functions(model: ModelProto) -> None:
    """Check that the functions of a model can be inlined into a model of reasonable size.

    Raises:
        ModelError: two functions share a name, a function calls itself, or the model would exceed a million nodes.
    """
    functions: dict[_Key, FunctionProto] = {}
    for function in model.functions:
        if functions.setdefault(_name(function), function) is not function:
            raise ModelError(f"the model has two functions named {function.name!r}; the model is damaged")
    calls = {key: [_callee(node) for node in node_protos(function.node)] for key, function in functions.items()}
    sizes: dict[_Key, int] = {}
    for key in functions:
        _measure(key, calls, sizes)
    total = sum(sizes.get(_callee(node), 1) for node in node_protos(model.graph.node))
    if total > _MOST_NODES:
        raise ModelError(
            f"the model has {total:.3g} nodes once its functions are inlined, expected at most {_MOST_NODES}; "
            "the functions multiply one another"
        )


def _measure(start: _Key, calls: dict[_Key, list[_Key]], sizes: dict[_Key, int]) -> None:
    # Count the nodes of a function and of all functions that it calls, deepest first.
    path: dict[_Key, Iterator[_Key]] = {}
    pending = [start]
    while pending:
        key = pending[-1]
        if key in sizes:
            pending.pop()
            continue
        callees = path.setdefault(key, iter(calls[key]))
        waiting = next((callee for callee in callees if callee in calls and callee not in sizes), None)
        if waiting is None:
            sizes[key] = sum(sizes.get(callee, 1) for callee in calls[key])
            pending.pop()
        elif waiting in path:
            raise ModelError(f"function {waiting[1]!r} of the model calls itself; the model is damaged")
        else:
            pending.append(waiting)


def _name(function: FunctionProto) -> _Key:
    return function.domain, function.name, function.overload


def _callee(node: NodeProto) -> _Key:
    return node.domain, node.op_type, node.overload
