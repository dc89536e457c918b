"""Encodings in and out: a file gives formats, ranges and scales, and a written one gives the same again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from conftest import Build
from onnx import ModelProto, numpy_helper

from onnxq.config.encodings_file import TensorEncoding, load_encodings
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.errors import SchemeError
from onnxq.pipeline.quantization import Quantized, plan
from onnxq.planning.given import unapplied
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.report.encodings import save_encodings

QuantizeTo = Callable[..., Quantized]
BYTE = TensorEncoding("x", "uint8", scales=(0.125,), zero_points=(100,))


def with_encodings(*encodings: TensorEncoding, preset: str = "int8") -> Any:
    return replace(PRESETS[preset], encodings=encodings)


def parameters_of(file: Path) -> dict[str, tuple[Any, ...]]:
    """Return scale and zero point of each tensor and weight of a written model, by the name of its scale."""
    graph = onnx.load(file).graph
    stored = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    return {
        node.input[1]: tuple(stored[name].tobytes() for name in node.input[1:3] if name in stored)
        for node in graph.node
        if node.op_type in ("QuantizeLinear", "DequantizeLinear")
    }


@pytest.mark.parametrize("preset", ["int8", "int8-int16-data", "int4-int8-data"])
def test_what_is_written_gives_the_same_scales_and_zero_points_when_it_is_read(
    preset: str, residual: ModelProto, quantize_to: QuantizeTo, samples_for: Callable[..., Any], tmp_path: Path
) -> None:
    target, file = "qnn", tmp_path / "model.encodings"
    first = quantize_to(residual, tmp_path / "first.onnx", scheme=preset, target=target)
    save_encodings(first.graph, first.report.plan, residual, file)
    found = load_encodings(file)
    assert {one.tensor for one in found} == {"x", "b", "d", "e", "g", "y", "w0", "w1", "w2", "w3"}
    # Other samples would give other ranges.
    samples = [{"x": 3 * one["x"]} for one in samples_for(residual)]
    scheme = with_encodings(*found, preset=preset)
    again = quantize_to(residual, tmp_path / "again.onnx", scheme=scheme, target=target, samples=samples)
    assert parameters_of(tmp_path / "first.onnx") == parameters_of(tmp_path / "again.onnx")
    save_encodings(again.graph, again.report.plan, residual, tmp_path / "again.encodings")
    assert (tmp_path / "again.encodings").read_bytes() == file.read_bytes()


def test_a_plan_file_keeps_given_scales(residual: ModelProto, quantize_to: QuantizeTo, tmp_path: Path) -> None:
    scheme = with_encodings(BYTE, TensorEncoding("w0", "int8", scales=(0.03125,), zero_points=(0,)))
    first = quantize_to(residual, tmp_path / "first.onnx", scheme=scheme)
    save_plan(first.report.plan, tmp_path / "plan.toml")
    kept = load_plan(tmp_path / "plan.toml")
    assert kept.by_node["stem"].weights[0].scales == (0.03125,)
    quantize_to(residual, tmp_path / "again.onnx", scheme=kept)
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "again.onnx").read_bytes()


def test_tensors_that_share_a_scale_share_the_given_one(build: Build) -> None:
    text = (
        "(float[1,3,8,8] x) => (float[1,4,4,4] y) "
        "{ [a] a = Conv(x, w) [b] b = MaxPool <kernel_shape = [2,2], strides = [2,2]> (a) [c] y = Conv(b, v) }"
    )
    model = build(text, w=(4, 3, 1, 1), v=(4, 4, 1, 1))
    made = plan(model, scheme=with_encodings(replace(BYTE, tensor="b")))
    assert {one.tensor: one.found_range for one in made.activations} == {
        "x": None,
        "a": (-12.5, 19.375),
        "b": (-12.5, 19.375),
        "y": None,
    }


def test_formats_alone_leave_ranges_to_calibration(residual: ModelProto) -> None:
    made = plan(residual, scheme=with_encodings(TensorEncoding("x", "uint16")))
    assert (made.by_tensor["x"].spec.format, made.by_tensor["x"].known_range) == ("uint16", None)
    assert made.by_tensor["b"].spec.format == "uint8"


def test_middle_zero_points_of_unsigned_weights_are_those_of_signed_ones(residual: ModelProto) -> None:
    given = TensorEncoding("w0", "uint8", scales=(0.5,), zero_points=(128,))
    (weight,) = plan(residual, scheme=with_encodings(given)).by_node["stem"].weights
    assert (weight.spec.format, weight.spec.symmetric, weight.scales) == ("int8", True, (0.5,))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (replace(BYTE, tensor="xx"), "the encodings are of tensor 'xx', which the model lacks; did you mean 'x'"),
        (
            replace(BYTE, format="uint4", zero_points=(3,)),
            "activations as uint4 per .*, found at tensor 'x' in the enc",
        ),
        (
            replace(BYTE, scales=(1.0, 1.0), zero_points=(0, 0)),
            "tensor 'x' is an activation and has 2 scales, expected one",
        ),
        (
            TensorEncoding("w0", "int8", scales=(1.0,) * 3, zero_points=(0,) * 3),
            "weight 'w0' has 3 scales in the encodings, expected one, or one for each of 8 channels along axis 0",
        ),
        (
            TensorEncoding("w0", "int8", scales=(1.0,) * 8, zero_points=(0,) * 8, axis=1),
            "weight 'w0' has 8 scales along axis 1 in the encodings, expected one, or one for each of 8 channels along",
        ),
        (
            TensorEncoding("w0", "uint8", scales=(1.0,), zero_points=(7,)),
            "weight 'w0' has zero points in the encodings, expected 128 for uint8",
        ),
        (
            TensorEncoding("w0", "int16", scales=(1.0,), zero_points=(0,)),
            "weights as symmetric int16 per tensor have no fast .*, found at weight 'w0' in the encodings",
        ),
    ],
)
def test_encodings_that_do_not_fit_are_refused(given: TensorEncoding, sentence: str, residual: ModelProto) -> None:
    with pytest.raises(SchemeError, match=sentence):
        plan(residual, scheme=with_encodings(given))


def test_encodings_that_no_integer_kernel_uses_are_told(build: Build) -> None:
    model = build("(float[4,32] x) => (float[4,16] y) { [m] a = MatMul(x, w) [t] y = Tanh(a) }", w=(32, 16))
    given = tuple(replace(BYTE, tensor=name) for name in ("x", "a"))
    made = plan(model, scheme=with_encodings(*given))
    assert [one.mode for one in made.decisions] == [Mode.STATIC, Mode.FLOAT]
    (sentence,) = unapplied(given, made)
    assert sentence == "1 of 2 encodings are of tensors that no integer kernel reads or writes: a"
    assert unapplied(given[:1], made) == ()
