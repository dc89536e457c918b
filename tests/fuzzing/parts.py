"""What a model needs of itself."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import AttributeProto, ModelProto, NodeProto


def captured(nodes: Sequence[NodeProto]) -> list[str]:
    """Return what nodes and their bodies read from around them."""
    made: set[str] = set()
    found: dict[str, None] = {}
    for node in nodes:
        found.update(dict.fromkeys(name for name in node.input if name and name not in made))
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                body = attribute.g
                own = {entry.name for entry in (*body.input, *body.initializer)}
                inner = [*captured(body.node)]
                here = {name for one in body.node for name in one.output}
                inner += [entry.name for entry in body.output if entry.name not in here]
                found.update(dict.fromkeys(name for name in inner if name not in own and name not in made))
        made.update(node.output)
    return list(found)


def pruned(model: ModelProto) -> ModelProto:
    """Leave out of a model, in place, what no output needs."""
    graph = model.graph
    needed = {entry.name for entry in graph.output}
    nodes = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            nodes.append(node)
            needed.update(captured([node]))
    kept = [NodeProto.FromString(node.SerializeToString()) for node in reversed(nodes)]
    del graph.node[:]
    graph.node.extend(kept)
    for entries in (graph.input, graph.initializer):
        left = [type(one).FromString(one.SerializeToString()) for one in entries if one.name in needed]
        del entries[:]
        entries.extend(left)
    del graph.value_info[:]
    used = {node.op_type for node in graph.node}
    calls = {function.name: {node.op_type for node in function.node} for function in model.functions}
    while more := set().union(*(calls[name] for name in used & calls.keys())) - used:
        used |= more
    functions = [function for function in model.functions if function.name in used]
    del model.functions[:]
    model.functions.extend(functions)
    return model
