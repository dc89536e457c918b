"""Quantized inputs and outputs: the same bits as the verified model, with scales in metadata and report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Build
from onnx import ModelProto, TensorProto

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import InputsOutputs, Mode, Rule, Scheme
from onnxq.config.scheme_file import load_scheme
from onnxq.errors import SchemeError
from onnxq.numerics.affine import dequantize, quantize
from onnxq.passes.quantize.graph_io import IO_KEY, GraphTensor
from onnxq.pipeline.quantization import Quantized
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.report import load_report
from onnxq.report.report import summary_rows
from onnxq.runtime.sessions import open_session, run

QuantizeTo = Callable[..., Quantized]
SamplesFor = Callable[..., list[dict[str, Any]]]


def of(preset: str) -> Scheme:
    return replace(PRESETS[preset], io=InputsOutputs.QUANTIZED)


@pytest.mark.parametrize(("preset", "kind"), [("int8", TensorProto.UINT8), ("int8-int16-data", TensorProto.UINT16)])
@pytest.mark.parametrize("target", ["onnxruntime-cpu", "qnn"])
def test_a_model_of_integers_computes_the_same_bits(
    preset: str,
    kind: int,
    target: str,
    residual: ModelProto,
    quantize_to: QuantizeTo,
    samples_for: SamplesFor,
    tmp_path: Path,
) -> None:
    floats, integers = tmp_path / "floats.onnx", tmp_path / "integers.onnx"
    quantize_to(residual, floats, scheme=preset, target=target)
    done = quantize_to(residual, integers, scheme=of(preset), target=target)
    written = onnx.load(integers).graph
    assert [(one.name, one.type.tensor_type.elem_type) for one in (*written.input, *written.output)] == [
        ("x", kind),
        ("y", kind),
    ]
    data, answer = done.report.encoding.io
    assert (data.name, data.kind, answer.name, answer.kind) == ("x", "input", "y", "output")
    for sample in samples_for(residual, 8):
        [expected] = run(open_session(floats), sample, ["y"])
        [found] = run(open_session(integers), {"x": quantize(sample["x"], *data.quantizer).values}, ["y"])
        assert np.array_equal(dequantize(found, *answer.quantizer), expected)


def test_scales_are_in_the_metadata_the_report_and_the_summary(
    residual: ModelProto, quantize_to: QuantizeTo, tmp_path: Path
) -> None:
    done = quantize_to(residual, tmp_path / "q.onnx", scheme=of("int8"))
    entries = {one.key: one.value for one in onnx.load(tmp_path / "q.onnx").metadata_props}
    found = tuple(GraphTensor(**one) for one in json.loads(entries[IO_KEY]))
    assert found == done.report.encoding.io
    done.report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json").encoding.io == found
    (row,) = (one.text for one in summary_rows(done.report) if one.name == "inputs and outputs")
    assert row == "; ".join(map(str, found))
    assert done.report.certificate is None


def test_inputs_and_outputs_that_are_read_and_computed_as_floats_stay(
    build: Build, quantize_to: QuantizeTo, tmp_path: Path
) -> None:
    text = (
        "(float[1,4,8,8] x, float[1,4,8,8] z) => (float[1,4,8,8] y, float[1,4,8,8] s, int64[4] k) "
        "{ [a] y = Conv(x, w) [b] t = Sin(x) [c] s = Mul(t, z) [d] k = Shape(x) }"
    )
    done = quantize_to(build(text, w=(4, 4, 1, 1)), tmp_path / "q.onnx", scheme=of("int8"), target="qnn")
    found = {one.name: (one.format, one.why) for one in done.report.encoding.io}
    assert found == {
        "x": ("", "nodes read it as floats, too"),
        "z": ("", "no quantizer reads it"),
        "y": ("uint8", ""),
        "s": ("", "it is computed as floats"),
    }


def test_an_output_that_nodes_read_too_is_dequantized_for_them(
    build: Build, quantize_to: QuantizeTo, samples_for: SamplesFor, tmp_path: Path
) -> None:
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] s) { [a] y = Conv(x, w) [b] s = Sin(y) }"
    model = build(text, w=(4, 4, 1, 1))
    done = quantize_to(model, tmp_path / "q.onnx", scheme=of("int8"), target="qnn")
    x, y, _ = done.report.encoding.io
    assert (x.format, y.format) == ("uint8", "uint8")
    [sample] = samples_for(model, 1)
    answers = run(open_session(tmp_path / "q.onnx"), {"x": quantize(sample["x"], *x.quantizer).values}, ["y", "s"])
    assert np.allclose(answers[1], np.sin(dequantize(answers[0], *y.quantizer)), atol=1e-6)


def test_a_plan_and_a_scheme_file_keep_the_choice(
    residual: ModelProto, quantize_to: QuantizeTo, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text('base = "int8"\nio = "quantized"\n')
    scheme = load_scheme(tmp_path / "mine.toml")
    first = quantize_to(residual, tmp_path / "first.onnx", scheme=scheme)
    save_plan(first.report.plan, tmp_path / "plan.toml")
    quantize_to(residual, tmp_path / "again.onnx", scheme=load_plan(tmp_path / "plan.toml"))
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "again.onnx").read_bytes()


def test_a_plan_without_quantized_inputs_and_outputs_is_refused(
    residual: ModelProto, quantize_to: QuantizeTo, tmp_path: Path
) -> None:
    with pytest.raises(
        SchemeError, match="quantizes neither an input nor an output of the model; leave --io quantized"
    ):
        quantize_to(residual, tmp_path / "q.onnx", scheme=of("int8-storage"))
    assert not (tmp_path / "q.onnx").exists()
    with pytest.raises(SchemeError, match="io 'integers' is not one of float, quantized"):
        Scheme((Rule(Mode.STATIC),), io="integers")  # type: ignore[arg-type]
