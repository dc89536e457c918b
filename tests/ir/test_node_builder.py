"""Chains name what they make after one weight, and keep its nodes in an order of execution."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnxq.ir import Constant, Graph, Names, Node, NodeBuilder, Variable, to_model
from onnxq.numerics.formats import FORMATS


def test_names_come_from_the_weight_and_are_new() -> None:
    taken = Graph([Node("Neg", "w.cast", {}, [Variable("x")], [Variable("w.codes")])], name="taken")
    chain = NodeBuilder("w", Names(taken))
    quantized = chain.store("codes", np.zeros(3, np.int8))
    first, second = chain.cast("numbers", quantized), chain.cast("numbers", quantized)
    assert [quantized.name, first.name, second.name] == ["w.codes.1", "w.numbers", "w.numbers.1"]
    assert len({node.name for node in chain.nodes}) == 2


def test_codes_of_few_bits_share_bytes() -> None:
    quantized = NodeBuilder("w", Names(Graph())).store_quantized(
        "codes", np.array([[-8, 7, 1]], np.int8), FORMATS["int4"]
    )
    assert isinstance(quantized, Constant)
    assert (quantized.shape, quantized.nbytes, quantized.tensor_data.onnx_dtype) == ((1, 3), 2, TensorProto.INT4)
    assert quantized.values.astype(np.int8).tolist() == [[-8, 7, 1]]


def test_each_node_reads_what_stands_before_it() -> None:
    chain = NodeBuilder("w", Names(Graph()))
    padded = chain.pad("padded", chain.cast("numbers", chain.store("codes", np.ones((2, 3), np.int8))), [0, 1])
    split = chain.reshape("split", padded, [2, 2, 2])
    cut = chain.cut("cut", split, 1, 1)
    cut.dtype, cut.shape = np.dtype(np.float32), [2, 1, 2]
    model = to_model(Graph(chain.nodes, outputs=[cut], name="chain", opset=13))
    assert [node.op_type for node in model.graph.node] == ["Cast", "Pad", "Reshape", "Slice"]


def test_a_node_may_take_a_name_an_output_or_a_type_that_is_there() -> None:
    old = Node("MatMul", "old", {}, [Variable("x")], [Variable("y", np.float32, [2])])
    new = NodeBuilder("", Names(Graph([old], name="taken")))
    twin = new.node("Neg", old, old.inputs, "old", like=old.outputs[0])
    new.named_after("y").node("Add", "bias", [twin, twin], "sum", np.float16, [3])
    assert [(node.name, node.outputs[0].name) for node in new.nodes] == [("old", "old.1"), ("y.bias", "y.sum")]
    assert [(node.outputs[0].dtype, node.outputs[0].shape) for node in new.nodes] == [
        (np.float32, [2]),
        (np.float16, [3]),
    ]
    (output,) = list(old.outputs)
    assert new.instead_of(old) == new.nodes
    assert (old.outputs, new.nodes[-1].outputs) == ([], [output])
