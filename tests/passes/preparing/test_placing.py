"""Which passes quantize a graph, by the modes of the plan and what may be written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from conftest import Build
from onnx import ModelProto

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.encodings import Encodings
from onnxq.algorithms.equalization import ChannelScales, Equalization
from onnxq.config.presets import PRESETS
from onnxq.ir import read_model
from onnxq.lowering import AllowedOps
from onnxq.passes.preparing.placing import PlanApplier, quantized_tensors
from onnxq.runtime.targets import target_named
from onnxq.search.prepared_model import open_prepared_model
from onnxq.system.resources import silent

TARGET = target_named("onnxruntime-cpu")


def names(placing: PlanApplier, plan) -> list[str]:
    return [type(step).__name__ for step in placing.passes(plan, Encodings()).passes]


def test_a_plan_gets_the_passes_of_its_modes_and_those_that_finish(perceptron: ModelProto, plan_of) -> None:
    static, stored = (
        names(PlanApplier(TARGET), plan_of(perceptron, scheme=scheme)) for scheme in ("int8", "int8-storage")
    )
    assert static[:2] == ["QuantizeWeights", "InsertQuantizeDequantize"]
    assert "CompressWeights" in stored
    assert "QuantizeWeights" not in stored
    last = ["ShareInitializers", "DeduplicateTransposedWeights", "RemoveUnused"]
    assert static[-3:] == stored[-3:] == last


def test_operators_of_the_runtime_are_written_only_where_they_may_be(perceptron: ModelProto, plan_of) -> None:
    plan = plan_of(perceptron, scheme="int8-block32")
    assert "ReplaceWithContrib" in names(PlanApplier(TARGET, AllowedOps.ORT), plan)
    assert "ReplaceWithContrib" not in names(PlanApplier(TARGET), plan)
    assert "NarrowConstants" in names(PlanApplier(TARGET, half=10), plan)


def test_nodes_around_codes_are_known_for_their_tensors(build: Build, tmp_path: Path) -> None:
    model = build(
        """(float[2,32] x) => (float[2,16] y, float[2,32] h) {
            [first] h = MatMul(x, w)  [left] s = Relu(h)  [right] c = Cos(h)
            [both] b = Add(s, c)  [last] y = MatMul(b, v)
        }""",
        w=(32, 32),
        v=(32, 16),
    )
    bench = open_prepared_model(read_model(model), PRESETS["int8"], TARGET, tmp_path)
    rng = np.random.default_rng(0)
    samples = [{"x": rng.normal(size=(2, 32)).astype(np.float32)} for _ in range(4)]
    plan = bench.plan({})
    activations = tuple(replace(one, every_consumer=True) for one in plan.activations)
    more = replace(activations[0], tensor="h", group="h"), replace(activations[0], tensor="y", group="y")
    plan = replace(plan, activations=(*activations, *more))
    halves = EncodingConfig(equalization=Equalization({"b": ChannelScales(1, np.full(32, 0.5))}))
    built = bench.build(plan, bench.calibrate(plan, samples, silent), halves, tmp_path / "q.onnx", external_data=False)
    found = quantized_tensors(built, bench.graph)
    coders = {node.name: found.get(node.name) for node in built.nodes if node.op in ("QuantizeLinear", "Sum", "Mul")}
    assert set(coders.values()) == {"x", "h", "b", "y"}
    decoders = {node.outputs[0].name: found.get(node.name) for node in built.nodes if node.op == "DequantizeLinear"}
    # Callers read what was decoded; weights are no tensors that take time.
    assert [decoders.pop(name) for name in "hy"] == ["h", "y"]
    assert [decoders.pop(f"{weight}.dequantized") for weight in "wv"] == [None, None]
    assert set(decoders.values()) <= {"x", "b", "h"}
