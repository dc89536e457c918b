"""What is known of one node, of a quantized model with its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build, QuantizeTo, Samples
from onnx import ModelProto

from onnxq.config.scheme import Mode
from onnxq.errors import DataError, ModelError
from onnxq.pipeline.request import Budget
from onnxq.report import Report
from onnxq.report.explanation import Explanation, explain


@dataclass(frozen=True)
class Made:
    """A quantized model with its report."""

    path: Path
    report: Report

    def __call__(self, node: str) -> Explanation:
        return explain(self.path, self.report, node)


@pytest.fixture(scope="module")
def made(residual: ModelProto, quantize_to: QuantizeTo, tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tmp_path_factory.mktemp("explained") / "int8.onnx"
    return Made(path, quantize_to(residual, path).report)


def test_formats_ranges_and_neighbours_are_those_of_the_plan(made: Made) -> None:
    found = made("left")
    assert (found.op_type, found.mode, found.is_there) == ("Conv", Mode.STATIC, True)
    assert [weight.spec.format for weight in found.weights] == ["int8-narrow"]
    assert [one.tensor for one in found.read] == ["b"]
    low, high = found.read[0].known_range
    assert low == 0 < high
    assert [(one.node, one.op_type, one.mode) for one in found.producers] == [("stem_relu", "Relu", Mode.STATIC)]
    assert [one.node for one in found.consumers] == ["left_relu"]
    assert {one.node for one in made("stem_relu").consumers} == {"left", "sum"}
    assert {one.node for one in made("sum").producers} == {"right", "stem_relu"}
    assert [one.node for one in found.channels] == ["left"]


@pytest.mark.parametrize(
    ("node", "kernel", "fused"),
    [
        ("stem", "QLinearConv", False),
        ("stem_relu", "QLinearConv", True),
        ("sum", "QLinearAdd", False),
        ("last", "QLinearConv", False),
    ],
)
def test_kernels_are_what_the_runtime_makes(node: str, kernel: str, fused: bool, made: Made) -> None:
    (found,) = made(node).kernels
    assert (found.op_type, found.fused) == (kernel, fused)
    assert made("stem").kernels[0].name == made("stem_relu").kernels[0].name


def test_a_pattern_of_nodes_runs_as_the_kernel_that_makes_what_the_last_one_makes(
    build: Build, quantize_to: QuantizeTo, tmp_path: Path
) -> None:
    gelu = """(float[4,32] x) => (float[4,16] y) {
        [first] a = MatMul(x, w0)
        [div] b = Div(a, root)
        [erf] c = Erf(b)
        [add] d = Add(c, one)
        [mul] e = Mul(a, d)
        [halve] f = Mul(e, half)
        [second] y = MatMul(f, w1)
    }"""
    scalars = {"root": np.float32(np.sqrt(2)), "one": np.float32(1), "half": np.float32(0.5)}
    model = build(gelu, w0=(32, 32), w1=(32, 16), **scalars)
    made = Made(tmp_path / "y.onnx", quantize_to(model, tmp_path / "y.onnx", scheme="int8-storage").report)
    kernels = {node: [one.op_type for one in made(node).kernels] for node in made.report.plan.by_node}
    assert {one for node in kernels for one in kernels[node] if node not in ("first", "second")} == {"Gelu"}
    assert kernels["first"] == kernels["second"] == ["MatMul"]


def test_a_product_of_dynamic_data_keeps_its_name_and_neighbours(
    perceptron: ModelProto, quantize_to: QuantizeTo, tmp_path: Path
) -> None:
    path = tmp_path / "int8.onnx"
    made = Made(path, quantize_to(perceptron, path, scheme="int8-dynamic").report)
    found = made("second")
    assert (found.mode, found.is_there) == (Mode.DYNAMIC, True)
    assert [one.node for one in found.producers] == ["relu"]
    assert [one.node for one in made("relu").consumers] == ["second"]
    assert {one.op_type for one in found.kernels} <= {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
    assert found.kernels


def test_a_node_that_another_took_in_is_told_so(build: Build, quantize_to: QuantizeTo, tmp_path: Path) -> None:
    text = "(float[1,4,32] x) => (float[1,4,64] y) { [product] a = MatMul(x, w) [bias] s = Add(a, b) y = Relu(s) }"
    made = Made(tmp_path / "y.onnx", quantize_to(build(text, w=(32, 64), b=(64,)), tmp_path / "y.onnx").report)
    gone = [node for node in made.report.plan.by_node if not made(node).is_there]
    assert gone == ["bias"]


def test_noise_and_time_are_those_of_the_search(
    perceptron: ModelProto, quantize_to: QuantizeTo, samples_for: Callable[..., Samples], tmp_path: Path
) -> None:
    path, budget = tmp_path / "int8.onnx", Budget(accuracy="off", latency_seconds=0.05)
    made = Made(path, quantize_to(perceptron, path, budget=budget, goal=45, samples=samples_for(perceptron, 8)).report)
    found = made("first")
    assert found.sensitivities == tuple(one for one in made.report.search.sensitivities if one.node == "first")
    assert found.time is not None
    assert found.time.float_milliseconds > 0
    assert found.figures == made.report.plan.by_node["first"].figures


def test_json_holds_everything(made: Made) -> None:
    plain = json.loads(json.dumps(made("stem").to_dict(), allow_nan=False))
    assert (plain["mode"], plain["kernels"][0]["op_type"]) == ("static", "QLinearConv")
    assert plain["weights"][0]["spec"]["format"] == "int8-narrow"


def test_unknown_nodes_name_the_nearest(made: Made) -> None:
    with pytest.raises(ModelError, match="did you mean 'stem_relu'"):
        made("stem_rely")


def test_the_report_of_another_model_is_refused(
    made: Made, residual: ModelProto, perceptron: ModelProto, tmp_path: Path
) -> None:
    paths = tmp_path / "float.onnx", tmp_path / "other.onnx"
    onnx.save(residual, paths[0])
    onnx.save(perceptron, paths[1])
    for path, reported in zip(paths, ("is the float model", "is of another model"), strict=True):
        with pytest.raises(DataError, match=reported):
            explain(path, made.report, "stem")
