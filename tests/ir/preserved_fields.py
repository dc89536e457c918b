"""A model, and edits that each put one more field of the format into it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, SparseTensorProto, TensorProto, TypeProto, helper, numpy_helper, parser

BASE = """
<ir_version: 13, opset_import: ["" : 25], producer_name: "made", producer_version: "1.2">
base (float[N,4] x, bool c) => (float[N,4] y, float[N,4] s)
<float[4] w = {1, 2, 3, 4}, float[4] outer = {5, 6, 7, 8}, float[N,4] h> {
  [scale] h = Mul(x, w)
  [branch] y = If (c) <
    then_branch = t () => (float[N,4] u) { [t1] u = Add(h, outer) },
    else_branch = e () => (float[N,4] v) <float[4] k = {1, 1, 1, 1}> { [e1] k2 = Add(k, outer) [e2] v = Sub(h, k2) }>
  [soft] s = Softmax <axis = 1> (h)
}
"""

Edit = Callable[[ModelProto], object]


def base() -> ModelProto:
    return parser.parse_model(BASE)


def metadata(holder: object, value: str = "v") -> None:
    holder.metadata_props.add(key="k", value=value)


def branch(model: ModelProto, index: int = 0) -> onnx.GraphProto:
    return model.graph.node[1].attribute[index].g


def attribute(model: ModelProto, value: AttributeProto) -> None:
    model.graph.node[2].attribute.append(value)


def make_attribute(model: ModelProto, value: object, kind: int | None = None) -> None:
    attribute(model, helper.make_attribute("extra", value, attr_type=kind))


def empty_attribute(kind: int) -> Edit:
    return lambda model: attribute(model, AttributeProto(name="extra", type=kind))


def sparse(name: str = "sparse") -> SparseTensorProto:
    values = numpy_helper.from_array(np.array([1.5, 2.5], np.float32), name)
    indices = numpy_helper.from_array(np.array([1, 3], np.int64), "")
    return helper.make_sparse_tensor(values, indices, [4])


def initializer(data_type: int, dims: list[int], raw: bytes) -> Edit:
    return lambda model: model.graph.initializer.append(
        TensorProto(name="stored", data_type=data_type, dims=dims, raw_data=raw)
    )


def typed_initializer(data_type: int, values: list[object]) -> Edit:
    return lambda model: model.graph.initializer.append(helper.make_tensor("typed", data_type, [len(values)], values))


def extra_output(kind: TypeProto, operator: str) -> Edit:
    def edit(model: ModelProto) -> None:
        model.graph.node.append(helper.make_node(operator, ["x"], ["z"]))
        model.graph.output.append(onnx.ValueInfoProto(name="z", type=kind))

    return edit


def function(model: ModelProto) -> None:
    node = helper.make_node("Relu", ["p"], ["q"], doc_string="inside")
    made = helper.make_function("local", "f", ["p"], ["q"], [node], [helper.make_opsetid("", 25)], ["a"])
    made.doc_string, made.overload = "doc", "one"
    metadata(made)
    made.value_info.append(helper.make_tensor_value_info("q", 1, ["N"]))
    model.functions.append(made)
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.graph.node.append(helper.make_node("f", ["x"], ["fx"], domain="local", overload="one"))


def overridable(model: ModelProto) -> None:
    info = helper.make_tensor_value_info("w", 1, [4])
    info.doc_string = "may be fed"
    model.graph.input.insert(1, info)


def training(model: ModelProto) -> None:
    info = model.training_info.add()
    info.algorithm.name = "step"
    info.update_binding.add(key="w", value="w")


def quantization(model: ModelProto) -> None:
    annotation = model.graph.quantization_annotation.add(tensor_name="h")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")


def denotations(model: ModelProto) -> None:
    kind = model.graph.input[0].type
    kind.denotation = "IMAGE"
    kind.tensor_type.shape.dim[0].denotation = "DATA_BATCH"


def rank_and_dimension_kinds(model: ModelProto) -> None:
    model.graph.node.extend(helper.make_node("Relu", ["x"], [name]) for name in ("r1", "r2", "r3", "r4"))
    for name, shape in (("r1", None), ("r2", []), ("r3", [None, 4]), ("r4", ["M", -1])):
        model.graph.value_info.append(helper.make_tensor_value_info(name, 1, shape))


def loop(model: ModelProto) -> None:
    text = """
    <ir_version: 13, opset_import: ["" : 25]>
    looped (int64 n, bool go, float[4] start) => (float[4] last) <float[4] step = {1, 2, 3, 4}> {
      last = Loop (n, go, start) <body = b (int64 i, bool keep, float[4] now) => (bool again, float[4] next)
        { again = Identity(keep) next = Add(now, step) }>
    }
    """
    model.CopyFrom(parser.parse_model(text))


def nested_bodies(model: ModelProto) -> None:
    inner = onnx.NodeProto()
    inner.CopyFrom(model.graph.node[1])
    inner.output[0] = "deep"
    for index, name in ((0, "deep_u"), (1, "deep_v")):
        body = inner.attribute[index].g
        body.node[-1].output[0] = body.output[0].name = name
    inner.attribute[1].g.initializer[0].name = inner.attribute[1].g.node[0].input[0] = "deep_k"
    inner.attribute[1].g.node[0].output[0] = inner.attribute[1].g.node[1].input[1] = "deep_k2"
    branch(model).node.append(inner)


def clear(model: ModelProto, name: str) -> None:
    model.ClearField(name)
