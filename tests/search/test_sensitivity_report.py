"""What quantized values cost one by one, told of real models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import QuantizeTo, Samples
from onnx import ModelProto, numpy_helper

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.errors import SchemeError
from onnxq.pipeline.quantization import sensitivity
from onnxq.pipeline.request import Budget
from onnxq.search.sensitivity_report import ORDERS, NodeCost, OptionCost, Sensitivity, TensorCost

PLAIN = Budget(accuracy="off", latency_seconds=0.05)


@pytest.fixture(scope="module")
def residual_costs(residual: ModelProto, samples_for) -> Sensitivity:
    return sensitivity(residual, samples_for(residual), budget=PLAIN)


def test_tensors_and_weights_make_less_noise_alone_than_all_do_together(residual_costs: Sensitivity) -> None:
    alone = [one.sqnr for one in residual_costs.tensors if one.sqnr is not None]
    assert {one.output for one in residual_costs.tensors if one.alone} == {"y"}
    assert len(alone) > 4
    assert min(alone) > residual_costs.sqnr > 20
    ways = {(one.node, option.mode): option for one in residual_costs.nodes for option in one.options}
    for name in ("stem", "left", "right", "last"):
        static, stored = ways[name, Mode.STATIC], ways[name, Mode.STORAGE]
        # Static nodes add the noise of their data to that of their weights.
        assert stored.sqnr > static.sqnr > residual_costs.sqnr
        assert static.milliseconds > 0
        assert static.weight.format == "int8-narrow"


def with_alternating_signs(model: ModelProto) -> ModelProto:
    """Return a model whose stored weights fit in pairs, so that integer kernels read them as they are."""
    made = ModelProto.FromString(model.SerializeToString())
    for tensor in made.graph.initializer:
        if len(tensor.dims) > 2:
            kernel = numpy_helper.to_array(tensor)
            ordered = np.abs(np.moveaxis(kernel, 1, -1)).reshape(len(kernel), -1)
            ordered[:, 1::2] *= -1
            values = np.moveaxis(ordered.reshape(np.moveaxis(kernel, 1, -1).shape), -1, 1)
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))
    return made


def test_the_noise_of_a_weight_alone_is_that_of_a_model_with_it_alone(
    residual: ModelProto, quantize_to: QuantizeTo, samples_for, tmp_path: Path
) -> None:
    residual = with_alternating_signs(residual)
    # Errors are measured on one sample, so it is the only one.
    samples, budget = samples_for(residual, 1), replace(PLAIN, latency_seconds=0)
    integers, plain = (replace(PRESETS[name], correct_biases=False) for name in ("int8", "int8-storage"))
    found = sensitivity(residual, samples, scheme=integers, budget=budget)
    stored = {one.node: option.sqnr for one in found.nodes for option in one.options if option.mode is Mode.STORAGE}
    for name in ("stem", "right"):
        scheme = plain.excluding(*(stored.keys() - {name}))
        report = quantize_to(residual, tmp_path / "alone.onnx", scheme=scheme, samples=samples).report
        assert [one.node for one in report.plan.decisions if one.weights] == [name]
        assert report.agreement.worst_sqnr == pytest.approx(stored[name], abs=0.05)


def test_a_product_is_told_in_every_way_that_the_runtime_has(perceptron: ModelProto, samples_for) -> None:
    found = sensitivity(perceptron, samples_for(perceptron), budget=PLAIN)
    ways = {one.node: one.options for one in found.nodes}
    assert {option.mode for option in ways["first"]} == {Mode.STATIC, Mode.DYNAMIC, Mode.STORAGE}
    assert all(option.milliseconds is not None and option.sqnr is not None for option in ways["first"])


@pytest.mark.parametrize("options", [{"target": "tensorrt"}, {"budget": replace(PLAIN, latency_seconds=0)}])
def test_times_are_none_where_they_are_not_measured(perceptron: ModelProto, samples_for, options: dict) -> None:
    found = sensitivity(perceptron, samples_for(perceptron), **{"budget": PLAIN, **options})
    assert {option.milliseconds for one in found.nodes for option in one.options} == {None}
    assert {one.milliseconds for one in found.nodes} == {None}
    assert {one.quantize for one in found.tensors} == {None}
    assert any(option.sqnr for one in found.nodes for option in one.options)


@pytest.mark.parametrize("scheme", ["int8-storage", "int4-block32", "int8-dynamic"])
def test_other_modes_are_told_with_their_own_times(perceptron: ModelProto, samples_for, scheme: str) -> None:
    found = sensitivity(perceptron, samples_for(perceptron), scheme=scheme, budget=PLAIN)
    wanted = next(one for one in found.nodes if one.node == "first")
    own = [option for option in wanted.options if option.mode is wanted.mode]
    assert own
    assert all(option.milliseconds is not None and 10 < option.sqnr < 90 for option in own)


def tensor(name: str, sqnr: float | None, quantize: float | None) -> TensorCost:
    return TensorCost(name, "uint8", sqnr, True, "y", quantize, None)


def node(name: str, sqnr: float | None, milliseconds: float | None) -> NodeCost:
    ways = (OptionCost(Mode.STATIC, None, 1.0, sqnr), OptionCost(Mode.STORAGE, None, 1.0, 90.0)) if sqnr else ()
    return NodeCost(name, "Conv", Mode.STATIC, milliseconds, ways)


ROWS = (("b", 30.0, 2.0), ("c", None, None), ("a", 20.0, 1.0), ("d", math.inf, 3.0))
FOUND = Sensitivity("int8", "t", 4, math.inf, tuple(tensor(*row) for row in ROWS), tuple(node(*row) for row in ROWS))


@pytest.mark.parametrize(
    ("order", "tensors"), [("graph", "bcad"), ("error", "abcd"), ("time", "dbac"), ("name", "abcd")]
)
def test_rows_are_sorted_and_cut(order: str, tensors: str) -> None:
    found = FOUND.ordered(order)
    assert order in ORDERS
    assert "".join(one.tensor for one in found.tensors) == tensors
    assert [one.tensor for one in FOUND.ordered(order, 2).tensors] == list(tensors[:2])
    assert [one.node for one in FOUND.ordered(order, 1).nodes] == list(tensors[:1])


def test_an_order_that_there_is_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(SchemeError, match="did you mean 'error'"):
        FOUND.ordered("eror")


def test_json_has_words_for_infinity() -> None:
    plain = json.loads(json.dumps(FOUND.to_dict(), allow_nan=False))
    assert plain["sqnr"] == "Infinity"
    assert [one["sqnr"] for one in plain["tensors"]] == [30.0, None, 20.0, "Infinity"]
    assert plain["nodes"][0]["options"][1]["mode"] == "storage"


def test_a_search_that_is_off_is_refused(perceptron: ModelProto, samples_for) -> None:
    samples: Samples = samples_for(perceptron)
    with pytest.raises(SchemeError, match="measures nothing"):
        sensitivity(perceptron, samples, budget="off")


def test_people_are_told_in_a_line_and_notebooks_in_tables() -> None:
    found = replace(FOUND, sqnr=18.0)
    assert repr(found) == "Sensitivity(18.0 dB with all quantized by int8 for t, on 4 samples; 4 tensors, 4 nodes)"
    shown = found._repr_html_()
    assert "<tr><td>b</td><td>uint8</td><td>30.0</td><td>2.000</td></tr>" in shown
    assert "<tr><td>c</td><td>Conv</td><td>static</td><td>-</td><td>-</td></tr>" in shown
