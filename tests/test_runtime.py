"""Sessions and runs, and the errors of onnxruntime as one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.errors import DataError, ModelError
from onnxq.runtime import open_session, run


@pytest.fixture
def sample(perceptron: ModelProto, samples_for) -> dict[str, np.ndarray]:
    return samples_for(perceptron, 1)[0]


def test_a_model_is_the_same_as_message_bytes_and_file(
    perceptron: ModelProto, sample: dict[str, np.ndarray], tmp_path: Path
) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    sources = (perceptron, perceptron.SerializeToString(), tmp_path / "model.onnx")
    outputs = [run(open_session(source, threads=1), sample)[0] for source in sources]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


def test_optimisation_can_be_left_out(build, tmp_path: Path) -> None:
    model = build("(float[2,3] x) => (float[2,3] y) { a = Identity(x) b = Identity(a) y = Relu(b) }")
    counts = []
    for optimize in (True, False):
        open_session(model, optimize=optimize, optimized_copy=tmp_path / "copy.onnx")
        counts.append(len(onnx.load(tmp_path / "copy.onnx").graph.node))
    assert counts == [1, 3]


def test_outputs_come_in_the_order_asked_for(build) -> None:
    model = build("(float[2] x) => (float[2] a, float[2] b) { a = Neg(x) b = Abs(x) }")
    session, sample = open_session(model), {"x": np.array([1, -2], np.float32)}
    assert [one.tolist() for one in run(session, sample, ["b", "a"])] == [[1, 2], [-1, 2]]
    assert len(run(session, sample)) == 2
    assert run(session, sample, []) == []


def test_a_model_that_does_not_load_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model at all")
    with pytest.raises(ModelError, match=r"^/.*bad\.onnx .*onnxruntime") as caught:
        open_session(tmp_path / "bad.onnx")
    assert "\n" not in str(caught.value)
    assert "ONNXRuntimeError" not in str(caught.value)


def test_an_operator_that_the_runtime_does_not_know_is_named(build) -> None:
    model = build("(float[2] x) => (float[2] y) { y = Relu(x) }")
    model.graph.node[0].domain = "mine"
    model.opset_import.add(domain="mine", version=1)
    with pytest.raises(ModelError, match=r"^the model .*Relu"):
        open_session(model)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"x": np.zeros((4, 31), np.float32)},
        {"x": np.zeros((4, 32), np.float64)},
        {"x": np.zeros((4, 32), np.float32), "more": np.zeros(1, np.float32)},
        {"x": "text"},
    ],
)
def test_a_sample_that_does_not_run_is_told_in_one_line(broken: dict[str, object], perceptron: ModelProto) -> None:
    with pytest.raises(DataError, match=r"^the sample ") as caught:
        run(open_session(perceptron), broken)
    assert "\n" not in str(caught.value)


def test_a_run_that_fails_names_its_sample(build) -> None:
    model = build("(float[A] x, float[B] z) => (float[C] y) { y = Add(x, z) }")
    sample = {"x": np.zeros(2, np.float32), "z": np.zeros(3, np.float32)}
    with pytest.raises(DataError, match=r"^sample 7 .*"):
        run(open_session(model), sample, index=7)


def test_long_reasons_are_cut(build) -> None:
    text = f"(float[2] x) => (float[2] {'y' * 600}) {{ {'y' * 600} = Relu(x) }}"
    model = build(text)
    model.graph.node[0].domain = "mine." + "long" * 200
    model.opset_import.add(domain=model.graph.node[0].domain, version=1)
    with pytest.raises(ModelError) as caught:
        open_session(model)
    assert len(str(caught.value)) < 400


def test_external_data_of_a_model_in_memory_is_found(
    perceptron: ModelProto, sample: dict[str, np.ndarray], tmp_path: Path
) -> None:
    copy = onnx.ModelProto()
    copy.CopyFrom(perceptron)
    onnx.save(copy, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=0)
    session = open_session((tmp_path / "model.onnx").read_bytes(), external_folder=tmp_path)
    np.testing.assert_array_equal(run(session, sample)[0], run(open_session(perceptron), sample)[0])


def test_an_error_is_told_without_the_place_in_the_source_of_onnxruntime(build) -> None:
    model = build("(float[2] x) => (float[2] y) { y = Relu(x) }")
    model.ir_version = 99
    with pytest.raises(ModelError, match=r"onnxruntime: Unsupported model IR version: 99") as caught:
        open_session(model)
    assert ".cc" not in str(caught.value)
    assert "::" not in str(caught.value)
