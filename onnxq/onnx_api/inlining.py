"""Refuse model-local functions that cannot be inlined: recursive functions, and functions whose size explodes."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import FunctionProto, ModelProto, NodeProto

from onnxq.errors import ModelError
from onnxq.ir.protos import node_protos

_MOST_NODES = 1_000_000

_Key = tuple[str, str, str]


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
