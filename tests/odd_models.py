"""Models that are odd in one way each."""

from __future__ import annotations

from typing import Any

import numpy as np
from model_texts import model
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

GENERATOR = np.random.default_rng(0)
CLASSIC = """{
    c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, k)
    r = Relu(c)
    f = Flatten <axis = 1> (r)
    y = MatMul(f, m)
}"""


def weight(*shape: int) -> NDArray[np.float32]:
    return (GENERATOR.standard_normal(shape) / np.sqrt(max(1, shape[0]))).astype(np.float32)


def product(text: str, *, head: str = "(float[4,32] x) => (float[4,32] y)", **options: Any) -> ModelProto:
    """Return a product of x and w, called a, and whatever the text makes of it."""
    stored = {"w": weight(32, 32), **options}
    return model(f"{head} {{ [product] a = MatMul(x, w) {text} }}", **stored)


def with_overridable_initializers(made: ModelProto, *names: str) -> ModelProto:
    for stored in made.graph.initializer:
        if not names or stored.name in names:
            made.graph.input.append(helper.make_tensor_value_info(stored.name, stored.data_type, stored.dims))
    return made


def renamed(made: ModelProto, names: dict[str, str]) -> ModelProto:
    for node in made.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        node.name = f"{node.name}/ä:;{{}}"
    for named in (*made.graph.input, *made.graph.output, *made.graph.initializer):
        named.name = names.get(named.name, named.name)
    return made


def twice_named(made: ModelProto) -> ModelProto:
    for node in made.graph.node:
        node.name = "node"
    return made


def reversed_nodes(made: ModelProto) -> ModelProto:
    nodes = list(made.graph.node)
    del made.graph.node[:]
    made.graph.node.extend(reversed(nodes))
    return made


def annotated(made: ModelProto, shape: list[int]) -> ModelProto:
    made.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, shape))
    return made


def with_sparse(made: ModelProto) -> ModelProto:
    values = numpy_helper.from_array(np.ones(3, np.float32), "v")
    made.graph.sparse_initializer.add(
        values=values, indices=numpy_helper.from_array(np.array([0, 9, 31]), "at"), dims=[1, 32]
    )
    return made


def with_function(made: ModelProto) -> ModelProto:
    nodes = [
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(weight(32, 32))),
        helper.make_node("MatMul", ["p", "k"], ["q"]),
        helper.make_node("MatMul", ["q", "k"], ["r"]),
    ]
    made.functions.append(helper.make_function("mine", "twice", ["p"], ["r"], nodes, [helper.make_opsetid("", 17)]))
    return made


def with_optional_input(made: ModelProto) -> ModelProto:
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [4, 32]))
    made.graph.input.append(helper.make_value_info("o", kind))
    made.graph.node.append(helper.make_node("OptionalHasElement", ["o"], ["has"]))
    return made


def with_value_info(made: ModelProto, info: ValueInfoProto) -> ModelProto:
    made.graph.value_info.append(info)
    return made
