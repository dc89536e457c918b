"""What goes wrong in the ranges of other quantizers does not go wrong here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from observations import AFFINE, wanted
from stored_values import initializers

from onnxq.calibration.collect import collect
from onnxq.calibration.methods import MinMax, Percentile
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.errors import DataError
from onnxq.pipeline import quantize
from onnxq.steps.request import Budget

PADS = "<pads = [1,1,1,1]>"
KERNEL = (8, 8, 3, 3)


def activation_parameters(path: Path) -> dict[str, tuple[float, int]]:
    """Return scale and zero point of every tensor that a QuantizeLinear reads."""
    values = initializers(path)
    return {
        node.input[0]: (float(values[node.input[1]]), int(values[node.input[2]]))
        for node in onnx.load(path).graph.node
        if node.op_type == "QuantizeLinear"
    }


# --- calibration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(9))
def test_an_outlier_counts_in_whichever_sample_it_is(place: int, build) -> None:
    model = build("(float[4] x) => (float[4] y) { h = Neg(x) y = Neg(h) }")
    samples = [{"x": np.full(4, 100.0 if index == place else 1.0, np.float32)} for index in range(9)]
    found = collect(model, samples, wanted(["h"], "range"))
    assert MinMax()(found.of("h"), AFFINE) == (-100.0, -1.0)


def test_shards_of_samples_merge_to_the_same_statistics(build, samples_for) -> None:
    model = build("(float[4,50] x) => (float[4,50] y) { h = Exp(x) y = Neg(h) }")
    samples = samples_for(model, 9)
    merged = CalibrationStatistics()
    for start in range(0, 9, 3):
        merged = merged.merge(collect(model, samples[start : start + 3], wanted(["h"])))
    assert merged == collect(model, samples, wanted(["h"]))


def test_ranges_of_a_heavy_tail_differ_between_methods(build) -> None:
    model = build("(float[1000] x) => (float[1000] y) { h = Neg(x) y = Neg(h) }")
    values = np.random.default_rng(0).standard_t(2, 1000).astype(np.float32)
    found = collect(model, [{"x": values}], wanted(["h"])).of("h")
    low, high = MinMax()(found, AFFINE)
    tight = Percentile(99.0)(found, AFFINE)
    assert low < tight[0] < tight[1] < high


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_activations_that_are_not_finite_are_an_error_and_no_infinite_scale(
    value: float, build, tmp_path: Path
) -> None:
    # The model itself makes the infinity: its input is finite, and so is one of its outputs.
    model = build(
        "(float[4,32] x) => (float[4,32] a, float[4,32] y) { a = MatMul(x, w) b = Add(a, k) y = MatMul(b, w) }",
        w=(32, 32),
        k=np.full(32, value, np.float32),
    )
    with pytest.raises(DataError, match=r"NaN or infinite values"):
        quantize(model, [{"x": np.eye(4, 32, dtype=np.float32)}], tmp_path / "q.onnx", budget=Budget(latency_seconds=0))
    assert list(tmp_path.iterdir()) == []


def test_samples_of_different_lengths_calibrate_together(build, tmp_path: Path) -> None:
    model = build("(float[N,L,32] x) => (float[N,L,16] y) { [n] y = MatMul(x, w) }", w=(32, 16))
    generator = np.random.default_rng(0)
    samples = [{"x": generator.normal(size=shape).astype(np.float32)} for shape in ((1, 3, 32), (2, 7, 32), (1, 1, 32))]
    scheme = replace(PRESETS["int8"], ranges=Percentile(99.9))
    done = quantize(model, samples, tmp_path / "q.onnx", scheme=scheme, budget=Budget(latency_seconds=0))
    assert done.report.plan.by_node["n"].mode is Mode.STATIC
    assert done.report.agreement.samples == 3


def test_samples_are_never_reused_for_another_run(build, tmp_path: Path) -> None:
    model = build("(float[4,32] x) => (float[4,16] y) { y = MatMul(x, w) }", w=(32, 16))
    scales = []
    for factor in (1.0, 100.0):
        samples = [{"x": np.linspace(-factor, factor, 128, dtype=np.float32).reshape(4, 32)}]
        scheme = replace(PRESETS["int8"], ranges=MinMax())
        quantize(model, samples, tmp_path / "q.onnx", scheme=scheme, budget=Budget(latency_seconds=0))
        scales.append(activation_parameters(tmp_path / "q.onnx")["x"][0])
    assert scales[1] == pytest.approx(100 * scales[0])


# --- scales ---------------------------------------------------------------------------------------------------------


def test_what_is_concatenated_has_one_scale(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        f"""(float[1,8,8,8] x) => (float[1,8,8,8] y) {{
        a = Conv {PADS} (x, w0) b = Conv {PADS} (x, w1) c = Concat <axis = 1> (a, b) y = Conv {PADS} (c, w2)
        }}""",
        w0=KERNEL,
        w1=np.random.default_rng(3).normal(0, 0.01, KERNEL).astype(np.float32),
        w2=(8, 16, 3, 3),
    )
    quantize_to(model, tmp_path / "q.onnx")
    found = activation_parameters(tmp_path / "q.onnx")
    assert found["a"] == found["b"] == found["c"]
    assert found["c"] != found["x"]


def test_a_sigmoid_has_the_range_that_it_can_have(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        f"""(float[1,8,8,8] x) => (float[1,8,8,8] y) {{
        a = Conv {PADS} (x, w0) s = Sigmoid(a) y = Conv {PADS} (s, w1)
        }}""",
        w0=np.full(KERNEL, 1e-3, np.float32),
        w1=KERNEL,
    )
    quantize_to(model, tmp_path / "q.onnx")
    scale, zero_point = activation_parameters(tmp_path / "q.onnx")["s"]
    assert (np.float32(scale), zero_point) == (np.float32(1 / 255), 0)


def test_a_clamp_around_zero_is_kept(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        f"""(float[1,8,8,8] x) => (float[1,8,8,8] y) {{
        a = Conv {PADS} (x, w0) b = Clip(a, lo, hi) y = Conv {PADS} (b, w1)
        }}""",
        w0=np.random.default_rng(0).normal(0, 3, KERNEL).astype(np.float32),
        w1=KERNEL,
        lo=np.array(-1, np.float32),
        hi=np.array(1, np.float32),
    )
    quantize_to(model, tmp_path / "q.onnx")
    assert Counter(node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node)["Clip"] == 1
