from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxq.calibration.segments import Stage, stages
from onnxq.errors import DataError, ModelError
from onnxq.runtime.sessions import open_session, run
from tests.conftest import Build

CHAIN = """(float[N,4] x) => (float[N,2] y) {
    a = MatMul(x, w0)
    b = Relu(a)
    c = MatMul(b, w1)
    d = Add(c, bias)
    e = Add(d, x)
    y = MatMul(e, w2)
}"""
X = np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)


@pytest.fixture
def chain(build: Build) -> onnx.ModelProto:
    return build(CHAIN, w0=(4, 4), w1=(4, 4), bias=(4,), w2=(4, 2))


def through(parts: tuple[Stage, ...], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run stages one after the other."""
    for stage in parts:
        with stage:
            values = values | stage.run(values)
    return values


@pytest.mark.parametrize("cuts", [[], ["b"], ["b", "d"], ["a", "b", "c", "d", "e", "y"], ["x", "e"]])
@pytest.mark.parametrize("optimize", [True, False])
def test_stages_together_are_the_model(chain: onnx.ModelProto, cuts: list[str], optimize: bool) -> None:
    parts = stages(chain, cuts, optimize=optimize)
    assert len(parts) == 1 + len({"a", "b", "c", "d", "e"} & set(cuts))
    expected = run(open_session(chain, optimize=optimize), {"x": X})[0]
    assert through(parts, {"x": X})["y"] == pytest.approx(expected, rel=1e-6)


def test_a_stage_says_what_it_needs_and_what_later_ones_need(chain: onnx.ModelProto) -> None:
    parts = stages(chain, ["b", "d"])
    assert [part.inputs for part in parts] == [("x",), ("b",), ("x", "d")]
    assert [part.outputs for part in parts] == [("b",), ("d",), ("y",)]
    assert [set(part.kept) for part in parts] == [{"x", "b"}, {"x", "d"}, set()]


def test_tensors_between_cuts_can_be_observed(chain: onnx.ModelProto) -> None:
    parts = stages(chain, ["b"], observed=["a", "c", "x"])
    assert [part.outputs for part in parts] == [("a", "b"), ("c", "y")]
    assert set(parts[1].run({"x": X, "b": X}, outputs=["c"])) == {"c"}


def test_a_free_weight_can_be_another_in_each_call(chain: onnx.ModelProto) -> None:
    parts = stages(chain, ["b", "d"], free=["w1", "bias"])
    assert [part.weights for part in parts] == [(), ("w1", "bias"), ()]
    own = parts[1].run({"b": X})["d"]
    moved = parts[1].run({"b": X}, {"bias": np.float32([5, 5, 5, 5])})["d"]
    bias = onnx.numpy_helper.to_array(next(t for t in chain.graph.initializer if t.name == "bias"))
    assert moved - own == pytest.approx(np.broadcast_to(5 - bias, (3, 4)), abs=1e-5)
    assert parts[1].run({"b": X})["d"].tolist() == own.tolist()


@pytest.mark.parametrize("version", [3, 8])
def test_weights_of_old_models_that_are_inputs_are_free_as_well(build: Build, version: int) -> None:
    model = build("(float[2] x, float[2] w) => (float[2] y) { y = Add(x, w) }", opset=7, w=np.float32([1, 2]))
    model.ir_version = version
    (stage,) = stages(model, [], free=["w"])
    assert stage.inputs == ("x",)
    assert stage.run({"x": np.float32([0, 0])})["y"].tolist() == [1, 2]
    assert stage.run({"x": np.float32([0, 0])}, {"w": np.float32([5, 6])})["y"].tolist() == [5, 6]


def test_weights_of_files_stay_there(chain: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    expected = run(open_session(chain), {"x": X})[0]
    onnx.save(chain, path, save_as_external_data=True, size_threshold=0, location="weights")
    parts = stages(path, ["b", "d"], free=["w0"])
    assert through(parts, {"x": X})["y"] == pytest.approx(expected, rel=1e-6)
    assert parts[0].run({"x": X}, {"w0": np.zeros((4, 4), np.float32)})["b"].max() == 0


def test_bodies_stay_whole_and_read_free_weights() -> None:
    def branch(kind: str) -> onnx.GraphProto:
        made = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(kind, ["a", "w"], ["inner"])], kind, [], [made])

    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("If", ["flag"], ["b"], then_branch=branch("Add"), else_branch=branch("Sub")),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    weight = onnx.numpy_helper.from_array(np.float32([1, 1]), "w")
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    parts = stages(model, ["a", "b"], free=["w"])
    values = {"x": np.float32([3, 4]), "flag": np.array(True)}
    assert through(parts, values)["y"].tolist() == [-4, -5]
    given = values | parts[0].run(values)
    assert parts[1].run(given, {"w": np.float32([0, 7])})["b"].tolist() == [3, 11]


def test_what_is_no_tensor_of_numbers_is_not_carried_across_a_cut(build: Build) -> None:
    model = build(
        """(float[2] x) => (float[2] y) {
        s = SequenceConstruct(x, x)
        a = Relu(x)
        zero = Constant <value = int64 {0}> ()
        b = SequenceAt(s, zero)
        c = Add(a, b)
        y = Neg(c)
        }"""
    )
    parts = stages(model, ["a", "c"])
    assert [part.outputs for part in parts] == [("a", "b"), ("c",), ("y",)]
    assert through(parts, {"x": np.float32([1, -1])})["y"].tolist() == [-2, 1]


def test_what_a_stage_lacks_or_does_not_know_is_told(chain: onnx.ModelProto) -> None:
    first, second = stages(chain, ["b"], free=["w0"])
    with pytest.raises(DataError, match="Tensor 'x' is not among the values"):
        first.run({})
    with pytest.raises(DataError, match="Weight 'w00' is not free in the stage, expected one of w0"):
        first.run({"x": X}, {"w00": X})
    with pytest.raises(DataError, match="expected one of none"):
        second.run({"x": X, "b": X}, {"w0": X})
    with pytest.raises(DataError, match="invalid dimensions"):
        first.run({"x": X}, {"w0": X})
    with pytest.raises(ModelError, match="Weight 'b' is not in the main graph"):
        stages(chain, [], free=["b"])
    with pytest.raises(ModelError, match="Tensor 'z' is not in the main graph"):
        stages(chain, ["z"])


def test_files_that_are_no_models_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        stages(tmp_path / "none.onnx", [])
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ModelError, match="is no ONNX model"):
        stages(tmp_path / "text.onnx", [])


def test_a_closed_stage_can_be_run_again(chain: onnx.ModelProto) -> None:
    (stage,) = stages(chain, [])
    with stage:
        first = stage.run({"x": X})["y"]
    assert stage.run({"x": X})["y"].tolist() == first.tolist()
