"""Which passes put codes into a graph, by the modes of the plan and what may be written."""

from __future__ import annotations

from onnx import ModelProto

from onnxq.encoding.codes import Codes
from onnxq.lowering import Emit
from onnxq.placing import Placing
from onnxq.targets import target_named

TARGET = target_named("onnxruntime-cpu")


def names(placing: Placing, plan) -> list[str]:
    return [type(step).__name__ for step in placing.passes(plan, Codes()).passes]


def test_a_plan_gets_the_passes_of_its_modes_and_those_that_finish(perceptron: ModelProto, plan_of) -> None:
    static, stored = (names(Placing(TARGET), plan_of(perceptron, scheme=scheme)) for scheme in ("int8", "int8-storage"))
    assert static[:2] == ["QuantizeWeights", "InsertQuantizeDequantize"]
    assert "StoreWeights" in stored
    assert "QuantizeWeights" not in stored
    assert static[-3:] == stored[-3:] == ["ShareInitializers", "StoreOnce", "RemoveUnused"]


def test_operators_of_the_runtime_are_written_only_where_they_may_be(perceptron: ModelProto, plan_of) -> None:
    plan = plan_of(perceptron, scheme="int8-block32")
    assert "ReplaceWithContrib" in names(Placing(TARGET, Emit.ORT), plan)
    assert "ReplaceWithContrib" not in names(Placing(TARGET), plan)
    assert "NarrowConstants" in names(Placing(TARGET, half=10), plan)
