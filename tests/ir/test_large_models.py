"""A model is large by the weights that lie beside it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import ModelProto

from onnxq.ir.protos import is_large


def test_a_model_is_large_by_its_external_data(large: Path, perceptron: ModelProto, tmp_path: Path) -> None:
    assert is_large(large)
    assert is_large(large.read_bytes())
    assert is_large(onnx.load(large, load_external_data=False))
    assert not is_large(perceptron)
    assert not is_large(tmp_path / "missing.onnx")
    assert not is_large(b"no model")


def test_weights_of_bodies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.ir.protos._LARGE_BYTES", 2000)
    helper = onnx.helper

    def weight(name: str) -> onnx.TensorProto:
        tensor = onnx.TensorProto(name=name, dims=[300], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
        tensor.external_data.add(key="length", value="1200")
        return tensor

    inner = helper.make_node("Constant", [], ["c"], value=weight("c"))
    then = helper.make_graph([inner], "then", [], [helper.make_tensor_value_info("c", 1, [300])])
    other = helper.make_graph([], "other", [], [helper.make_tensor_value_info("w", 1, [300])], [weight("w")])
    branch = helper.make_node("If", ["x"], ["y"], then_branch=then, else_branch=other)
    given, made = helper.make_tensor_value_info("x", 9, []), helper.make_tensor_value_info("y", 1, [300])
    assert is_large(helper.make_model(helper.make_graph([branch], "g", [given], [made])))
    assert not is_large(helper.make_model(then))
