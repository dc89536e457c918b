"""What a model holds: operators, types, sizes, and what is quantized and how."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Granularity
from onnxq.errors import ModelError
from onnxq.lowering.decode import stored_format
from onnxq.numerics.formats import FORMATS
from onnxq.pipeline.inspection import Inspection, Port, WeightNode, inspect_model
from onnxq.planning.plan import Weight


def inspected(model: ModelProto, folder: Path) -> Inspection:
    onnx.save(model, folder / "model.onnx")
    return inspect_model(folder / "model.onnx")


def test_a_float_model_is_told_apart(residual: ModelProto, tmp_path: Path) -> None:
    found = inspected(residual, tmp_path)
    assert not found.quantized
    assert found.scheme is None
    assert found.opsets == {"": 17}
    assert found.operators == {"Conv": 4, "Relu": 3, "Add": 1}
    assert found.inputs == (Port("x", "float", (1, 8, 8, 8)),)
    assert found.outputs == (Port("y", "float", (1, 8, 8, 8)),)
    assert found.constants == {"float": (6, 4 * (4 * 8 * 8 * 9 + 2 * 8))}
    assert found.bytes == (tmp_path / "model.onnx").stat().st_size
    assert (found.external_bytes, found.graphs, found.ir_version) == (0, 1, 8)
    assert found.weights[0] == WeightNode("stem", "Conv", "float", (8, 8, 3, 3), 0, "float", 32)


def test_a_static_model_shows_codes_and_scales(residual: ModelProto, quantize_to, tmp_path: Path) -> None:
    quantize_to(residual, tmp_path / "q.onnx")
    found = inspect_model(tmp_path / "q.onnx")
    assert found.quantized
    assert found.scheme == "int8"
    assert {(one.weight, one.scales, one.data) for one in found.weights} == {("int8", 8, "int")}
    assert [one.node for one in found.weights] == ["stem", "left", "right", "last"]


def test_one_scale_for_a_weight_is_one(residual: ModelProto, quantize_to, tmp_path: Path) -> None:
    quantize_to(residual, tmp_path / "q.onnx", scheme="int8-per-tensor")
    assert {one.scales for one in inspect_model(tmp_path / "q.onnx").weights} == {1}


def test_stored_weights_are_seen_through_their_decoder(residual: ModelProto, quantize_to, tmp_path: Path) -> None:
    quantize_to(residual, tmp_path / "q.onnx", scheme="int8-storage")
    found = inspect_model(tmp_path / "q.onnx")
    assert found.quantized
    assert {(one.weight, one.scales, one.data) for one in found.weights} == {("int8", 8, "float")}


def test_stored_float16_weights_are_seen_through_both_casts(build, quantize_to, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float16)
    model = build("(float16[4,32] x) => (float16[4,32] y) { [n] y = MatMul(x, w) }", w=weight)
    quantize_to(model, tmp_path / "q.onnx", scheme="int8-storage")
    assert inspect_model(tmp_path / "q.onnx").weights == (WeightNode("n", "MatMul", "int8", (32, 32), 32, "float", 8),)


EVERY_WEIGHT = """(int64[2] i, float[4,64] x, float[1,8,8,8] image, float[3,2,64] words)
    => (float[2,64] rows, float[4,32] y, float[1,8,6,6] z, float[3,1,2,64] h) {
    r = Gather(table, i) rows = Tanh(r)
    e = MatMul(x, w) y = Gemm(e, v, b)
    z = Conv(image, k)
    h = LSTM <hidden_size = 64> (words, cells, states)
}"""


@pytest.fixture(scope="module")
def every_weight(build) -> ModelProto:
    """Return a model of an operator of each kind that has weights."""
    shapes = {"table": (64, 64), "w": (64, 48), "v": (48, 32), "b": (32,), "k": (8, 8, 3, 3)}
    return build(EVERY_WEIGHT, **shapes, cells=(1, 256, 64), states=(1, 256, 64))


def planned_weight(op_type: str, weight: Weight, shape: tuple[int, ...]) -> tuple[str, int, int, int]:
    """Return the format, the bits, the elements and the number of scales that a weight should have in the model."""
    spec = weight.spec
    format = stored_format(FORMATS[spec.format])
    # A pattern that is looked up stands for the number, whatever type holds it; rows of floats are patterns.
    looked_up = FORMATS[spec.format].is_float and (op_type == "Gather" or not format.is_float)
    name = spec.format if looked_up else str(onnx.TensorProto.DataType.Name(format.onnx_type)).lower()
    extents = [1] * len(shape)
    if spec.granularity is Granularity.CHANNEL:
        extents[weight.axis] = shape[weight.axis]
    elif isinstance(spec.granularity, tuple):
        extents = list(shape)
        extents[weight.reduction_axis] = -(-shape[weight.reduction_axis] // spec.granularity[0])
    return name, format.bits, math.prod(shape), math.prod(extents)


@pytest.mark.parametrize("emit", ["qdq", "ort"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_form_that_weights_are_written_in_is_known(
    preset: str, emit: str, every_weight: ModelProto, quantize_to, samples_for, tmp_path: Path
) -> None:
    samples = [{**sample, "i": np.arange(2)} for sample in samples_for(every_weight)]
    report = quantize_to(every_weight, tmp_path / "q.onnx", scheme=preset, emit=emit, samples=samples).report
    shapes = {tensor.name: tuple(tensor.dims) for tensor in every_weight.graph.initializer}
    planned = [
        planned_weight(decision.op_type, weight, shapes[weight.tensor])
        for decision in report.plan.decisions
        for weight in decision.weights
        if len(shapes[weight.tensor]) > 1
    ]
    found = inspect_model(tmp_path / "q.onnx")
    assert found.quantized
    assert len(planned) >= 5
    quantized = [(one.weight, one.bits, math.prod(one.shape), one.scales) for one in found.weights if one.scales]
    assert sorted(quantized) == sorted(planned)


def test_weights_in_constant_nodes_are_weights(build, tmp_path: Path) -> None:
    text = "(float[4,2] x) => (float[4,2] y) { w = Constant <value = float[2,2] {1, 2, 3, 4}> () [n] y = MatMul(x, w) }"
    assert inspected(build(text), tmp_path).weights == (WeightNode("n", "MatMul", "float", (2, 2), 0, "float", 32),)


def test_a_product_of_casts_in_a_float_model_is_no_decoder(build, tmp_path: Path) -> None:
    text = """(float[4,8] x, int8[8,8] c, float s) => (float[4,8] y) {
        d = Cast <to = 1> (c) w = Mul(d, s) [n] y = MatMul(x, w)
    }"""
    found = inspected(build(text), tmp_path)
    assert found.weights == ()
    assert not found.quantized


def test_unknown_shapes_types_and_bodies_are_shown(build, tmp_path: Path) -> None:
    text = """(float[N,4] x, bool c) => (float[N,4] y) {
        y = If (c) <then_branch = t () => (float[N,4] u) { u = Relu(x) },
                    else_branch = e () => (float[N,4] v) { v = Tanh(x) }>
    }"""
    found = inspected(build(text), tmp_path)
    assert found.inputs[0].shape == ("N", 4)
    assert found.graphs == 3
    assert found.operators == {"If": 1, "Relu": 1, "Tanh": 1}


def test_external_data_is_counted_without_being_read(perceptron: ModelProto, tmp_path: Path) -> None:
    copy = onnx.ModelProto()
    copy.CopyFrom(perceptron)
    onnx.save(copy, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=1000)
    found = inspect_model(tmp_path / "model.onnx")
    assert found.external_bytes == 4 * (32 * 32 + 32 * 16)
    assert found.constants["float"] == (3, found.external_bytes + 4 * 16)


def test_the_findings_are_plain_values(residual: ModelProto, tmp_path: Path) -> None:
    plain = json.loads(json.dumps(inspected(residual, tmp_path).to_dict(), allow_nan=False))
    assert plain["quantized"] is False
    assert plain["weights"][0]["shape"] == [8, 8, 3, 3]


def test_a_missing_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"missing\.onnx does not exist"):
        inspect_model(tmp_path / "missing.onnx")
