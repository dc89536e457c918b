"""The parts of a report."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.ir import Graph
from onnxq.report.parts import AppliedPass, ModelFiles
from onnxq.rewrite import Changes, Pass, PassResult


@dataclass(frozen=True)
class Scale(Pass):
    factor: float = 2.0

    def apply(self, graph: Graph) -> Changes:
        return Changes()


def test_a_pass_is_told_in_plain_values() -> None:
    applied = PassResult(Scale(3.0), Changes(("a", "b"), (("c", "not wanted"),)), 0.5)
    options = {"factor": "3.0"}
    assert AppliedPass.of(applied) == AppliedPass("Scale", options, 0.5, 2, ("a", "b"), 1, (("c", "not wanted"),))


def test_the_size_ratio_is_a_share_of_the_float_model() -> None:
    assert ModelFiles("a.onnx", None, float_bytes=400, bytes=100).size_ratio == 0.25
