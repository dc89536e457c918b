"""Damage to serialized models: in their bytes, and in their fields, such as wrong operators, names, dims and types."""

from __future__ import annotations

import contextlib
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import onnx
from onnx import AttributeProto, defs, helper


def damaged(data: bytes, chance: random.Random, index: int) -> tuple[str, bytes]:
    """Return a damaged copy of a serialized model, and what was done to it."""
    if index % 3 == 0:
        return damaged_bytes(data, chance)
    model = onnx.ModelProto()
    model.ParseFromString(data)
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        name = chance.choice(list(DAMAGES))
        with contextlib.suppress(IndexError, ValueError, TypeError):
            done.append(f"{name}: {DAMAGES[name](model.graph, chance)}")
    return "; ".join(done) or "nothing", model.SerializeToString()


def damaged_bytes(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """Change, lose, repeat or invent a few bytes, hardly ever of a weight, where nothing would be noticed."""
    structure = list(outside_of_weights(data))
    sizes = [end - start for start, end in structure]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    changed = bytearray(data)
    done = []
    for _ in range(chance.choice((1, 2, 4))):
        place = chance.randrange(ends[-1])
        which = bisect(ends, place)
        position = min(structure[which][1] - (ends[which] - place), len(changed) - 1)
        kind = chance.choice(("change", "change", "change", "lose", "repeat", "cut"))
        length = chance.choice((1, 2, 8))
        if kind == "change":
            changed[position] = chance.randrange(256)
        elif kind == "lose":
            del changed[position : position + length]
        elif kind == "repeat":
            changed[position:position] = changed[position : position + length]
        elif chance.random() < 0.1:
            del changed[position:]
        done.append(f"{kind} at {position}")
        if len(changed) < 2:
            break
    return "bytes: " + ", ".join(done), bytes(changed)


def outside_of_weights(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a serialized model that lie between the values of its larger tensors."""
    model = onnx.ModelProto()
    model.ParseFromString(data)
    start = 0
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) > 64:
            found = data.find(tensor.raw_data, start)
            if found > start:
                yield start, found
                start = found + len(tensor.raw_data)
    if start < len(data):
        yield start, len(data)


def scopes_of(graph: Any) -> Iterator[Any]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from scopes_of(attribute.g)


def any_node(graph: Any, chance: random.Random) -> Any:
    scope = chance.choice([scope for scope in scopes_of(graph) if scope.node])
    return chance.choice(scope.node)


def any_name(graph: Any, chance: random.Random) -> str:
    node = chance.choice(graph.node)
    return str(chance.choice([*node.input, *node.output, "", "no such tensor"]))


def any_number(chance: random.Random, known: int) -> int:
    return chance.choice((0, -1, 1, 2, 3, 5, 7, known + 1, known - 1, 2 * known, 1 << 31, -(1 << 62), (1 << 63) - 1))


def wrong_operator(graph: Any, chance: random.Random) -> str:
    node = any_node(graph, chance)
    known = node.op_type
    others = [other.op_type for other in graph.node]
    node.op_type = chance.choice([*others, chance.choice(defs.get_all_schemas()).name, chance.choice(others) + "X"])
    return f"{known} becomes {node.op_type}"


def wrong_domain(graph: Any, chance: random.Random) -> str:
    node = any_node(graph, chance)
    node.domain = chance.choice(("ai.onnx", "com.microsoft", "ai.onnx.ml", "nowhere"))
    return f"{node.op_type} in {node.domain}"


def wrong_names(side: str) -> Callable[[Any, random.Random], str]:
    """Return what adds, drops, swaps, omits or exchanges names in a node's ``input`` or ``output``."""

    def change(graph: Any, chance: random.Random) -> str:
        node = any_node(graph, chance)
        names = list(getattr(node, side))
        kind = chance.choice(("add", "drop", "swap", "omit", "other", "repeat"))
        first, second = chance.randrange(len(names)), chance.randrange(len(names))
        if kind in ("add", "repeat"):
            names.append(any_name(graph, chance) if kind == "add" else names[first])
        elif kind == "drop":
            del names[first]
        elif kind == "swap":
            names[first], names[second] = names[second], names[first]
        else:
            names[first] = "" if kind == "omit" else any_name(graph, chance)
        getattr(node, side)[:] = names
        return f"{kind} {side} {first} of {node.op_type} {node.name}"

    return change


def wrong_attribute(graph: Any, chance: random.Random) -> str:
    attribute = chance.choice(any_node(graph, chance).attribute)
    kind = chance.choice(("lose", "type", "value", "value", "name"))
    name = attribute.name
    if kind == "lose":
        attribute.name = f"{name}x"
    elif kind == "name":
        attribute.name = chance.choice(("axis", "axes", "to", "alpha", "transB", "perm", "value"))
    elif kind == "type":
        value = chance.choice((1, -1, 0.5, "text", [1, 2], [0.5], ["text"], [7] * 9))
        attribute.CopyFrom(helper.make_attribute(name, value))
    elif attribute.type == AttributeProto.INT:
        attribute.i = any_number(chance, attribute.i)
    elif attribute.type == AttributeProto.INTS:
        values = list(attribute.ints)
        if chance.random() < 0.5:
            values[chance.randrange(len(values))] = any_number(chance, values[0])
        else:
            values.append(chance.choice(values))
        attribute.ints[:] = values
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = chance.choice((0.0, -1.0, float("nan"), float("inf"), 1e38, 1e-45))
    elif attribute.type == AttributeProto.TENSOR:
        return wrong_tensor(attribute.t, chance)
    else:
        attribute.s = chance.choice((b"", b"x", b"\xff\xfe", b"SAME_UPPER", b"linear"))
    return f"{kind} of attribute {name}"


def wrong_tensor(tensor: Any, chance: random.Random) -> str:
    kind = chance.choice(("type", "dims", "dims", "cut", "name", "nan"))
    if kind == "type":
        tensor.data_type = chance.choice((0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 14, 16, 17, 21, 22, 23, 99))
    elif kind == "dims" and chance.random() < 0.5:
        index = chance.randrange(len(tensor.dims))
        tensor.dims[index] = any_number(chance, tensor.dims[index])
    elif kind == "dims":
        tensor.dims[:] = chance.choice(([*tensor.dims, 1], [1, *tensor.dims], tensor.dims[::-1], tensor.dims[1:], []))
    elif kind == "cut":
        tensor.raw_data = tensor.raw_data[: chance.randrange(len(tensor.raw_data))]
    elif kind == "nan":
        tensor.raw_data = b"\xff" * len(tensor.raw_data)
    else:
        tensor.name += "x"
    return f"{kind} of tensor {tensor.name}"


def wrong_initializer(graph: Any, chance: random.Random) -> str:
    return wrong_tensor(chance.choice(graph.initializer), chance)


def wrong_declaration(graph: Any, chance: random.Random) -> str:
    info = chance.choice([*graph.input, *graph.output, *graph.value_info[:5]])
    kind = chance.choice(("type", "dims", "rank", "none", "name", "sequence"))
    declared = info.type.tensor_type
    if kind == "type":
        declared.elem_type = chance.choice((0, 1, 2, 7, 8, 9, 10, 11, 16, 99))
    elif kind == "dims":
        chance.choice(declared.shape.dim).dim_value = any_number(chance, 1)
    elif kind == "rank":
        declared.shape.dim.add().dim_value = any_number(chance, 1)
    elif kind == "none":
        info.ClearField("type")
    elif kind == "name":
        info.name = any_name(graph, chance)
    else:
        info.type.sequence_type.elem_type.tensor_type.elem_type = 1
    return f"{kind} of {info.name}"


def wrong_nodes(graph: Any, chance: random.Random) -> str:
    kind = chance.choice(("lose", "repeat", "swap"))
    index = chance.randrange(len(graph.node))
    if kind == "lose":
        del graph.node[index]
    elif kind == "repeat":
        graph.node.append(graph.node[index])
    else:
        nodes = list(graph.node)
        other = chance.randrange(len(nodes))
        nodes[index], nodes[other] = nodes[other], nodes[index]
        del graph.node[:]
        graph.node.extend(nodes)
    return f"{kind} node {index}"


def new_input(graph: Any, chance: random.Random) -> str:
    """Let a caller override an initializer, under a type that may be another one."""
    tensor = chance.choice(graph.initializer)
    info = graph.input.add(name=tensor.name)
    info.type.tensor_type.elem_type = chance.choice((tensor.data_type, 1, 7, 10))
    for extent in tensor.dims:
        info.type.tensor_type.shape.dim.add().dim_value = extent
    return f"{tensor.name} is an input"


DAMAGES: Mapping[str, Callable[[Any, random.Random], str]] = {
    "operator": wrong_operator,
    "domain": wrong_domain,
    "inputs": wrong_names("input"),
    "outputs": wrong_names("output"),
    "attribute": wrong_attribute,
    "initializer": wrong_initializer,
    "declaration": wrong_declaration,
    "nodes": wrong_nodes,
    "input": new_input,
}
