"""Chains name what they make after one weight, and keep its nodes in an order of execution."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnxq.ir import Constant, Graph, Names, Node, Variable, to_model
from onnxq.lowering import NodeBuilder
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


def test_each_node_stands_for_what_the_chain_takes_the_place_of() -> None:
    chain = NodeBuilder("cell", Names(Graph()), (("cell", "GRU"),))
    shape = chain.variable("shape", np.int64)
    chain.append(Node("Shape", chain.named("shape"), {}, [Variable("x")], [shape]))
    chain.cast("numbers", shape)
    assert [node.name for node in chain.nodes] == ["cell.shape.1", "cell.numbers.cast"]
    assert [node.origins for node in chain.nodes] == [(("cell", "GRU"),)] * 2
    assert (shape.dtype, chain.nodes[1].outputs[0].dtype) == (np.dtype(np.int64), None)
