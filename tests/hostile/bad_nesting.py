"""Models that are nested without end: a name and the bytes of each."""

from __future__ import annotations

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from hostile.bad_parts import Builder, sound


def _function(name: str, callees: list[str]) -> object:
    nodes = [helper.make_node(callee, [f"t{i}"], [f"t{i + 1}"], domain="mine") for i, callee in enumerate(callees)]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    return helper.make_function("mine", name, ["t0"], [f"t{len(nodes)}"], nodes, imports)


def _with_functions(*functions: tuple[str, list[str]], leaf: str = "") -> ModelProto:
    model = sound("y = Identity(b)")
    model.opset_import.add(domain="mine", version=1)
    model.functions.extend(_function(name, callees) for name, callees in functions)
    if leaf:
        relu = [helper.make_node("Relu", ["t0"], ["t1"])]
        model.functions.append(helper.make_function("mine", leaf, ["t0"], ["t1"], relu, [helper.make_opsetid("", 17)]))
    model.graph.node.insert(2, helper.make_node(functions[0][0], ["b"], ["called"], domain="mine"))
    next(node for node in model.graph.node if node.op_type == "Identity").input[0] = "called"
    return model


def nested(levels: int) -> ModelProto:
    """Return a model with a tower of If nodes."""
    inner = GraphProto(name="innermost")
    inner.node.append(helper.make_node("Relu", ["b"], ["made"]))
    inner.output.append(helper.make_tensor_value_info("made", TensorProto.FLOAT, None))
    for level in range(levels):
        node = NodeProto(op_type="If", input=["yes"], output=[f"made{level}"])
        for key in ("then_branch", "else_branch") if level == 0 else ("then_branch",):
            attribute = node.attribute.add(name=key, type=AttributeProto.GRAPH)
            attribute.g.CopyFrom(inner)
        if level:
            other = node.attribute.add(name="else_branch", type=AttributeProto.GRAPH).g
            other.name = f"else{level}"
            other.node.append(helper.make_node("Relu", ["b"], [f"other{level}"]))
            other.output.append(helper.make_tensor_value_info(f"other{level}", TensorProto.FLOAT, None))
        inner = GraphProto(name=f"level{level}", node=[node])
        inner.output.append(helper.make_tensor_value_info(f"made{level}", TensorProto.FLOAT, None))
    model = sound()
    model.graph.node[-1].CopyFrom(inner.node[0])
    model.graph.output[0].name = model.graph.node[-1].output[0]
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    return model


MODELS: dict[str, Builder] = {
    "a_function_that_calls_itself": lambda: _with_functions(("f", ["f"])),
    "functions_that_call_each_other": lambda: _with_functions(("f", ["g"]), ("g", ["h"]), ("h", ["f"])),
    "functions_that_call_ten_others_each": lambda: _with_functions(
        *((f"f{i}", [f"f{i + 1}"] * 10) for i in range(12)), leaf="f12"
    ),
    "two_functions_of_one_name": lambda: _with_functions(("f", ["g"]), ("f", ["g"]), ("g", [])),
    "ifs_nested_20_deep": lambda: nested(20),
}


def nested_bytes(levels: int) -> bytes:
    """Return the file of a model with If nodes in one another, deeper than protobuf itself would write."""

    def field(number: int, data: bytes) -> bytes:
        size, varint = len(data), bytearray()
        while size > 127:
            varint.append(size & 127 | 128)
            size >>= 7
        return bytes([number << 3 | 2, *varint, size]) + data

    body = b""
    for _ in range(levels):
        attribute = field(1, b"then_branch") + field(6, body) + bytes([20 << 3 & 127 | 128, 1, AttributeProto.GRAPH])
        body = field(1, field(1, b"b") + field(2, b"c") + field(4, b"If") + field(5, attribute))
    return sound().SerializeToString() + field(7, body)
