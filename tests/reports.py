"""A report that tests tell of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from onnxq.config.scheme import Mode, QuantSpec
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import EvaluationSplit
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.layers import Layer, Layers, SampleSqnr
from onnxq.evaluation.sqnr import Place, WorstPlace
from onnxq.evaluation.verification import Kernels
from onnxq.planning.delivery import Delivery
from onnxq.planning.plan import Activation, Decision, Plan, Weight
from onnxq.report import Report
from onnxq.report.parts import (
    Accuracy,
    AppliedPass,
    Encoding,
    Machine,
    ModelFiles,
    Performance,
    Run,
    Samples,
    Search,
    Stage,
    TensorValues,
    WeightChannels,
)
from onnxq.search.kernel_times import NodeTime, Region
from onnxq.search.results import MethodGain, NodeSensitivity, Point

WEIGHT = Weight(1, "w", QuantSpec("int8-narrow"), 0)
REPORT = Report(
    files=ModelFiles("model.onnx", None, float_bytes=400, bytes=100),
    plan=Plan(
        (Decision("a", "Conv", Mode.STATIC, "integer kernel", (WEIGHT,)), Decision("b", "Tanh", Mode.FLOAT, "why")),
        (Activation("x", QuantSpec("uint8", symmetric=False), "x", (0.0, 1.0)),),
        "int8",
        "onnxruntime-cpu",
    ),
    samples=Samples(calibrated=3),
    accuracy=Accuracy(
        Agreement(3, (OutputAgreement("y", math.inf, None, 0.0, same_shapes=True, finite=True, compared=0),))
    ),
    performance=Performance(
        Kernels(integer=1, quantize=2, heavy_float=0), Latency(reference=2.0, candidate=1.0, threads=1, runs=5)
    ),
    search=Search(
        measured=4,
        sensitivities=(NodeSensitivity("a", Mode.STATIC, -math.inf), NodeSensitivity("b", Mode.STORAGE, math.inf)),
    ),
    encoding=Encoding("MinMax()"),
    run=Run(seconds=0.5),
)


OUTPUT = OutputAgreement("y", 31.25, 0.98, 0.5, same_shapes=True, finite=True, compared=50)
FULL = replace(
    REPORT,
    files=replace(REPORT.files, output="model.int8.onnx", model_digest="ab12", output_digest="cd34"),
    samples=Samples(3, EvaluationSplit(3, 0, 2), ("the samples are few",)),
    accuracy=Accuracy(
        Agreement(3, (replace(OUTPUT, worst=(WorstPlace(2, 28.5, Place((0, 17), 1.75, 1.25)),)),)),
        layers=Layers(
            3,
            (
                Layer("x", "a", "Conv", "static", 40.0, 38.0, (SampleSqnr(2, 34.5), SampleSqnr(0, 37.5))),
                Layer("y", "b", "Tanh", "float", math.inf, 31.25, (SampleSqnr(1, 28.5),)),
            ),
        ),
        wanted=20.0,
    ),
    performance=Performance(
        REPORT.performance.kernels,
        Latency(reference=2.0, candidate=1.0, threads=1, runs=5, rounds=6, interval=(1.9, 2.1)),
        (Region("a", 1, Mode.STATIC, 2.0, 1.0),),
        (NodeTime("a", 2.0, 1.0), NodeTime("b", 0.5, 0.5)),
        ran={"a": "QLinearConv"},
    ),
    search=Search(
        4,
        (NodeSensitivity("a", Mode.STATIC, 33.5), NodeSensitivity("b", Mode.STATIC, 40.0)),
        (
            Point(1, 0, 1.5, 31.25, 2.0, chosen=True),
            Point(0, 1, 1.75, None, None, predicted=36.0),
            Point(0, 0, 2.5, math.inf, 1.0, is_float=True),
        ),
    ),
    encoding=Encoding(
        "MinMax()",
        gains=(
            MethodGain("ranges", 30.0, 31.5, "percentile", 2.0, where=("x", "y", "z")),
            MethodGain("gptq", 31.5, 31.5, "", 1.0, "no lower error"),
        ),
        delivered=(Delivery(8, 2, 1, (("why", 1),)),),
        tensors=(TensorValues("x", -1.0, 3.0, (0.0, 1.0), 0.25, (1, 0, 5)),),
        weights=(WeightChannels("a", "w", 8, (0.1, 0.2, 0.3, 0.4, 0.5)),),
    ),
    run=Run(
        0.5,
        (AppliedPass("Scale", {"factor": "2.0"}, 0.1, 1, ("a",)),),
        (Stage("prepare", 0.25, 1 << 20), Stage("calibrate", 0.25, 1 << 21)),
        Machine("x86_64", 2, "Linux 6", {"onnxq": "0.2", "python": "3.11"}),
        ("onnxq", "quantize", "model.onnx", "--calib", "data"),
    ),
)


def changed(report: Report, **parts: dict[str, object]) -> Report:
    """Return a report with other fields in some parts."""
    return replace(report, **{part: replace(getattr(report, part), **fields) for part, fields in parts.items()})


PAYLOAD = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'{{ 7*7 }}\u2028\u202e\x07&lt;"


def hostile(value: Any) -> Any:
    """The same value with the tensor_data in every string; specs hold none that a model can choose."""
    if isinstance(value, QuantSpec):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: hostile(getattr(value, one.name)) for one in fields(value) if one.init})
    if isinstance(value, Mapping):
        return {f"{PAYLOAD}{number}": hostile(item) for number, item in enumerate(value.values())}
    if isinstance(value, tuple):
        return tuple(map(hostile, value))
    return PAYLOAD if type(value) is str and value else value


def large(nodes: int) -> Report:
    """A report of a deep network whose modes alternate and whose names are as long as exporters make them."""
    decisions = tuple(
        Decision(f"/model/layers.{index}/self_attn/q_proj/MatMul", "MatMul", list(Mode)[index % 5], "integer kernel")
        for index in range(nodes)
    )
    spec = QuantSpec("uint8", symmetric=False)
    names = tuple(f"/model/layers.{index}/self_attn/q_proj/MatMul_output_0" for index in range(nodes))
    tensors = tuple(replace(FULL.encoding.tensors[0], tensor=name, counts=tuple(range(48))) for name in names)
    activations = tuple(Activation(name, spec, name, (0.0, 1.0)) for name in names)
    report = changed(FULL, encoding={"tensors": tensors}, search={"sensitivities": ()}, performance={"times": ()})
    return replace(report, plan=Plan(decisions, activations, "int8", "onnxruntime-cpu"))
