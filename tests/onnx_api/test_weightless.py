from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper, parser

from onnxq.ir import Graph, load, read_model, save, to_model
from onnxq.onnx_api import weightless_model
from onnxq.onnx_api.weightless import WeightlessModel

LARGE = np.arange(1024, dtype=np.float32)


def graph() -> Graph:
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (y) { y = Sum(x, w, s) }')
    model.graph.initializer.append(numpy_helper.from_array(LARGE, "w"))
    model.graph.initializer[0].doc_string = "doc"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1), "s"))
    model.graph.initializer.append(helper.make_tensor("names", TensorProto.STRING, [300], [b"long text"] * 300))
    return read_model(model)


def test_large_weights_are_references_and_small_ones_stay() -> None:
    large, small, names = weightless_model(graph()).graph.initializer

    assert large.data_location == TensorProto.EXTERNAL
    assert (list(large.dims), large.doc_string, large.raw_data) == ([1024], "doc", b"")
    assert small.raw_data == np.float32(1).tobytes()
    assert len(names.string_data) == 300


def test_the_threshold_is_in_bytes() -> None:
    def count(threshold: int) -> int:
        stored = weightless_model(graph(), threshold).graph.initializer
        return sum(tensor.data_location == TensorProto.EXTERNAL for tensor in stored)

    assert (count(4097), count(4096), count(5), count(4), count(0)) == (0, 1, 1, 2, 2)


def test_a_skeleton_of_external_weights_does_not_read_them(tmp_path, monkeypatch) -> None:
    save(graph(), tmp_path / "m.onnx", external_data=True)
    read = load(tmp_path / "m.onnx")
    monkeypatch.setattr(np, "memmap", None)

    assert len(weightless_model(read).SerializeToString()) < 5000


def test_restoring_puts_every_weight_back() -> None:
    original = graph()

    for threshold in (0, 1024, 10**6):
        assert to_model(WeightlessModel.of(original, threshold).restore()) == to_model(original)
