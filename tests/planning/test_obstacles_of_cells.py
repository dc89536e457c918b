"""Why a recurrent cell, or a clamp with a slope, cannot run on integers."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.ir import read_model
from onnxq.lowering import AllowedOps
from onnxq.planning.plan import Decision
from onnxq.planning.planner import make_plan
from onnxq.preparing.preparation import prepare
from onnxq.runtime.targets import TARGETS

# --- cells that only an operator of the runtime's own computes with integers ----------------------------------------

CELL = "(float[2,4,8] x) => (float[2,1,4,16] y) { [n] y = LSTM <hidden_size = 16> (x, w, r) }"
SIXTEEN_BITS = {name: np.ones((1, 64, size), np.float16) for name, size in (("w", 8), ("r", 16))}


def cell_decision(model: ModelProto, target: str = "onnxruntime-cpu") -> Decision:
    graph = prepare(read_model(model))
    return make_plan(graph, PRESETS["int8"], TARGETS[target], emit=AllowedOps.ORT).by_node["n"]


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "qnn"])
def test_an_lstm_is_stored_for_a_target_without_such_an_operator(build, target: str) -> None:
    decision = cell_decision(build(CELL, w=(1, 64, 8), r=(1, 64, 16)), target)
    assert decision.mode is Mode.STORAGE
    assert decision.reason.endswith(f"LSTM has no integer kernel on {target}")


@pytest.mark.parametrize(
    ("text", "weights", "reason"),
    [
        (
            CELL.replace("x)", "x, float[1,64,16] r)", 1),
            {"w": (1, 64, 8)},
            "its weight is computed at run time",
        ),
        (CELL.replace("float", "float16"), SIXTEEN_BITS, "its weight is float16, not float32"),
        (
            CELL.replace("= 16", "= 16, layout = 1"),
            {"w": (1, 64, 8), "r": (1, 64, 16)},
            "LSTM with the batch first has no dynamic integer kernel on onnxruntime-cpu",
        ),
        (
            CELL.replace("2,4,8", "1,1,66001").replace("2,1,4,16", "1,1,1,1").replace("= 16", "= 1"),
            {"w": (1, 4, 66001), "r": (1, 4, 1)},
            "sums of 66001 products can overflow an int32 accumulator",
        ),
        (
            CELL.replace("x, w", "x, e").replace("2,4,8", "2,4,0"),
            {"e": np.ones((1, 64, 0), np.float32), "r": (1, 64, 16)},
            "its weight of shape [1, 64, 0] has no dynamic integer kernel",
        ),
    ],
)
def test_an_lstm_that_the_kernel_does_not_know_says_why(build, text: str, weights, reason: str) -> None:
    decision = cell_decision(build(text, **weights))
    assert decision.mode is Mode.STORAGE
    assert decision.reason.endswith(reason)
