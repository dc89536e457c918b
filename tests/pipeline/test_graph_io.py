"""Quantized inputs and outputs: the same bits as the verified model, with scales in metadata and report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Build
from onnx import ModelProto, TensorProto

from onnxq.certificate import onnxq_verify
from onnxq.certificate.certificate import read_certificate
from onnxq.certificate.making import certify
from onnxq.certificate.verifying import verify
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import InputsOutputs, Mode, Rule, Scheme
from onnxq.config.scheme_file import load_scheme
from onnxq.errors import SchemeError
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.latency import bench
from onnxq.evaluation.layers import compare_layers
from onnxq.evaluation.metrics import Metric, compare_scores
from onnxq.numerics.affine import dequantize, quantize
from onnxq.passes.quantize.graph_io import IO_KEY, GraphTensor
from onnxq.pipeline.quantization import Quantized
from onnxq.pipeline.request import Budget
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.report import load_report
from onnxq.report.report import summary_rows
from onnxq.runtime.sessions import open_session, run

QuantizeTo = Callable[..., Quantized]
SamplesFor = Callable[..., list[dict[str, Any]]]


PLAIN = Budget(search="off", accuracy="off", latency_seconds=0)


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


def test_it_is_compared_timed_and_run_on_engines_as_if_it_took_floats(
    residual: ModelProto, quantize_to: QuantizeTo, samples_for: SamplesFor, tmp_path: Path
) -> None:
    original, floats, integers = (tmp_path / f"{name}.onnx" for name in ("model", "floats", "integers"))
    onnx.save(residual, original)
    quantize_to(residual, floats, scheme="int8")
    quantize_to(residual, integers, scheme=of("int8"))
    samples = samples_for(residual, 4)
    assert compare_files(original, integers, samples) == compare_files(original, floats, samples)
    assert [one.tensor for one in compare_layers(original, integers, samples).layers][-1] == "y"
    metric = Metric("mean", lambda outputs, _: float(np.mean([one["y"].mean() for one in outputs])))
    assert compare_scores(metric, original, integers, samples) == compare_scores(metric, original, floats, samples)
    assert bench(original, integers, samples, latency_seconds=0.01).latency.speed > 0


@pytest.mark.parametrize("made_by", ["quantize", "certify"])
def test_its_certificate_has_probes_of_integers(
    made_by: str, residual: ModelProto, quantize_to: QuantizeTo, samples_for: SamplesFor, tmp_path: Path
) -> None:
    original, integers = tmp_path / "model.onnx", tmp_path / "integers.onnx"
    onnx.save(residual, original)
    quantize_to(residual, integers, scheme=of("int8"), budget=PLAIN)
    if made_by == "certify":
        certify(original, integers, samples_for(residual, 8))
    certificate, _ = read_certificate(integers)
    assert certificate is not None
    assert ([one.type for one in certificate.inputs], certificate.without_probes) == (["uint8"], "")
    assert certificate.sqnr > 20
    verdict = verify(integers, reference=original)
    assert verdict.right
    assert onnxq_verify.verify(integers)["right"]
    assert math.isclose(verdict.engines[0].sqnr, certificate.sqnr, abs_tol=0.01)
    # Other weights are found, and named by the first layer.
    model = onnx.load(integers)
    weight = next(one for one in model.graph.initializer if len(one.dims) == 4)
    weight.raw_data = bytes(len(weight.raw_data))
    onnx.save(model, integers)
    verdict = verify(integers, reference=original)
    assert [list(one.wrong) for one in verdict.engines] == [["y"]]
    assert verdict.engines[0].first


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
