"""A report that tests tell of."""

from __future__ import annotations

import math
from dataclasses import replace

from onnxq.judging.agreement import Agreement, OutputAgreement
from onnxq.judging.verify import Kernels, Latency
from onnxq.planning.plan import Activation, Decision, Plan, Weight
from onnxq.report import Report
from onnxq.report.parts import Encoding, Fidelity, ModelFiles, Performance, Run, Samples, Search
from onnxq.scheme import Mode, Spec
from onnxq.searching.search import NodeNoise

WEIGHT = Weight(1, "w", Spec("int8-narrow"), 0)
REPORT = Report(
    files=ModelFiles("model.onnx", None, float_bytes=400, bytes=100),
    plan=Plan(
        (Decision("a", "Conv", Mode.STATIC, "integer kernel", (WEIGHT,)), Decision("b", "Tanh", Mode.FLOAT, "why")),
        (Activation("x", Spec("uint8", symmetric=False), "x", (0.0, 1.0)),),
        "int8",
        "onnxruntime-cpu",
    ),
    samples=Samples(calibrated=3),
    fidelity=Fidelity(
        Agreement(3, (OutputAgreement("y", math.inf, None, 0.0, same_shapes=True, finite=True, compared=0),))
    ),
    performance=Performance(
        Kernels(integer=1, quantize=2, heavy_float=0), Latency(reference=2.0, candidate=1.0, threads=1, runs=5)
    ),
    search=Search(
        measured=4, sensitivities=(NodeNoise("a", Mode.STATIC, -math.inf), NodeNoise("b", Mode.STORAGE, math.inf))
    ),
    encoding=Encoding("MinMax()"),
    run=Run(seconds=0.5),
)


def changed(report: Report, **parts: dict[str, object]) -> Report:
    """Return a report with other fields in some parts."""
    return replace(report, **{part: replace(getattr(report, part), **fields) for part, fields in parts.items()})
