"""Passes of the user's own in quantize(), plan() and calibrate()."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.calibration.accumulators import Range
from onnxq.calibration.data import Data
from onnxq.evaluation.goal import Goal
from onnxq.ir import Graph
from onnxq.pipeline import calibrate, plan, quantize
from onnxq.report import FidelityError
from onnxq.rewrite import Changes, Pass
from onnxq.steps.request import Budget

UNSEARCHED = Budget(search="off", latency_seconds=0)


@dataclass(frozen=True)
class Scale(Pass):
    """Multiply the weight of the first Conv, which changes all that follows."""

    factor: float = 1.0

    def apply(self, graph: Graph) -> Changes:
        node = next(node for node in graph.nodes if node.op == "Conv")
        node.inputs[1].values = node.inputs[1].values * np.float32(self.factor)
        node.name = "scaled"
        return Changes((node.name,), (("other", "not wanted"),))


def test_passes_of_the_users_come_first_and_the_report_tells_of_them(residual: ModelProto, samples_for) -> None:
    report = quantize(residual, samples_for(residual), prepare=[Scale(), "NameNodes"], budget=UNSEARCHED).report
    assert [one.name for one in report.run.passes[:3]] == ["Scale", "NameNodes", "FixInitializers"]
    assert report.plan.decisions[0].node == "scaled"
    told = json.loads(report.to_json())["run"]["passes"]
    assert (told[0]["name"], told[0]["options"], told[0]["skipped_names"]) == (
        "Scale",
        {"factor": "1.0"},
        [["other", "not wanted"]],
    )
    assert len(told) == len(report.run.passes)


def test_what_passes_of_the_users_change_is_judged_beside_the_model_that_was_given(
    residual: ModelProto, samples_for, tmp_path: Path
) -> None:
    output = tmp_path / "out.onnx"
    with pytest.raises(FidelityError):
        quantize(
            residual,
            samples_for(residual),
            output,
            prepare=[Scale(10.0)],
            budget=Budget(latency_seconds=0, search="off"),
        )
    assert not output.exists()


def test_plan_and_statistics_are_those_of_the_rewritten_model(residual: ModelProto, samples_for) -> None:
    assert plan(residual, prepare=[Scale()]).decisions[0].node == "scaled"
    samples = samples_for(residual)
    usual, scaled = (calibrate(residual, samples, prepare=passes) for passes in ((), [Scale(10.0)]))
    highest = [{name: one.of(name).need(Range).maximum for name in usual.by_tensor} for one in (usual, scaled)]
    assert any(highest[1][name] > maximum * 2 for name, maximum in highest[0].items())
    done = quantize(
        residual,
        Data(samples, statistics=scaled),
        prepare=[Scale(10.0)],
        goal=Goal(force=True),
        budget=Budget(latency_seconds=0, search="off"),
    )
    assert done.report.run.passes[0].options == {"factor": "10.0"}
