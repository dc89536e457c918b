"""AddToCodes makes the HardSigmoid of codes an Add, and its integer kernel gives what HardSigmoid gives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from convolutions import between_convolutions
from model_texts import apply_once, difference, model, ops, outputs, sample
from onnx import ModelProto

from onnxq.commands.dequantization import dequantize
from onnxq.config.scheme import Mode
from onnxq.evaluation.verification import count_kernels
from onnxq.ir import Graph, as_graph
from onnxq.passes import AddToCodes
from onnxq.planning.plan import Decision, Plan
from onnxq.rewrite import Changes

PLAN = Plan((Decision("gate", "HardSigmoid", Mode.STATIC, "integer kernel"),), (), "int8", "onnxruntime-cpu")
STEPS = {"s": np.float32(0.05), "z": np.uint8(100), "t": np.float32(1 / 255), "w": np.uint8(0)}


def graph_of(gate: str, **given: np.ndarray) -> tuple[ModelProto, Graph]:
    text = f"""g (float[4, 99] x) => (float[4, 99] y) {{
      c = QuantizeLinear(x, s, z) d = DequantizeLinear(c, s, z) [gate] g = {gate}
      e = QuantizeLinear(g, t, w) y = DequantizeLinear(e, t, w) }}"""
    made = model(text, **{**STEPS, **given})
    return made, as_graph(made)


@pytest.mark.parametrize(
    "gate",
    [
        "HardSigmoid(d)",
        "HardSigmoid <alpha = 0.16666667> (d)",
        "HardSigmoid <alpha = 1.0, beta = 0.0> (d)",
        "HardSigmoid <alpha = 0.5, beta = -0.25> (d)",
        "HardSigmoid <alpha = 0.1, beta = 3.0> (d)",
    ],
)
@pytest.mark.parametrize("signed", [False, True])
def test_the_sum_is_what_hard_sigmoid_gives(gate: str, signed: bool) -> None:
    made, graph = graph_of(gate, **({"z": np.int8(-28), "w": np.int8(-128)} if signed else {}))
    inputs = {"x": 4 * sample(made)["x"]}
    expected = outputs(made, inputs)
    assert apply_once(AddToCodes(PLAN), graph) == Changes(("gate",))
    assert [op for op in ops(graph) if not op.endswith("Linear")] == ["Add", "Clip"]
    # One code, where a sum lies in the middle of two.
    assert difference(outputs(graph, inputs), expected) <= 1.01 / 255


def test_one_of_floats_is_left() -> None:
    graph = as_graph(model("g (float[2, 3] x) => (float[2, 3] y) { [gate] y = HardSigmoid(x) }"))
    assert apply_once(AddToCodes(PLAN), graph) == Changes((), (("gate", "its data is not decoded from codes"),))


@pytest.mark.parametrize(
    ("middle", "kernels"),
    [
        ("b = HardSigmoid(a)", {"QLinearConv": 2, "QLinearAdd": 1}),
        ("b = HardSwish(a)", {"QLinearConv": 2, "QLinearAdd": 1, "QLinearMul": 1}),
        (
            "p = GlobalAveragePool(a) g = HardSigmoid(p) b = Mul(a, g)",
            {"QLinearConv": 2, "QLinearAdd": 1, "QLinearMul": 1, "QLinearGlobalAveragePool": 1},
        ),
    ],
)
def test_gates_between_convolutions_run_as_integers_and_come_back_as_floats(
    middle: str, kernels: dict[str, int], build, quantize_to, lonely_pairs, tmp_path: Path
) -> None:
    made = between_convolutions(build, middle)
    quantize_to(made, tmp_path / "q.onnx")
    assert lonely_pairs(tmp_path / "q.onnx") == []
    found = count_kernels(tmp_path / "q.onnx")
    assert (found.integer, found.heavy_float) == (sum(kernels.values()), 0)

    dequantize(tmp_path / "q.onnx", tmp_path / "f.onnx")
    written = Counter(node.op_type for node in onnx.load(tmp_path / "f.onnx").graph.node)
    assert written["Clip"] == written["Add"] == 1
    inputs = sample(made)
    assert difference(outputs(onnx.load(tmp_path / "f.onnx"), inputs), outputs(made, inputs)) < 0.1
