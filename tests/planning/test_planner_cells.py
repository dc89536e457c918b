"""What becomes of recurrent cells that one operator of the runtime's own computes."""

from __future__ import annotations

import pytest
from onnx import ModelProto

from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme
from onnxq.ir import read_model
from onnxq.lowering import AllowedOps
from onnxq.numerics.pairs import Pairs
from onnxq.planning import planner
from onnxq.planning.plan import Decision, Demotion, Weight
from onnxq.preparing.preparation import prepare
from onnxq.runtime.targets import TARGETS

STATIC, STORAGE, FLOAT = Mode.STATIC, Mode.STORAGE, Mode.FLOAT
# --- cells that only an operator of the runtime's own computes with integers ----------------------------------------

CELL = "(float[2,4,8] x) => (float[2,1,4,16] y) { [n] y = LSTM <hidden_size = 16> (x, w, r) }"


def cell_decision(
    model: ModelProto,
    mode: Mode = STATIC,
    *,
    emit: AllowedOps = AllowedOps.ORT,
    demotion: Demotion | None = None,
) -> Decision:
    graph = prepare(read_model(model))
    demotions = {"n": demotion} if demotion is not None else {}
    target = TARGETS["onnxruntime-cpu"]
    return planner.make_plan(graph, Scheme((Rule(mode),)), target, demotions, emit).by_node["n"]


@pytest.mark.parametrize(
    ("mode", "why"),
    [(STATIC, "no kernel of LSTM has fixed scales"), (Mode.DYNAMIC, "the scheme custom asks for dynamic")],
)
def test_an_lstm_becomes_dynamic_where_an_operator_of_the_runtimes_own_may_be_written(
    build, mode: Mode, why: str
) -> None:
    decision = cell_decision(build(CELL, w=(1, 64, 8), r=(1, 64, 16)), mode)
    assert (decision.mode, decision.data) == (Mode.DYNAMIC, "x")
    assert decision.reason == f"multiplies integers whose scale each run computes: {why}"
    spec = QuantSpec("int8-narrow", Granularity.CHANNEL)
    assert decision.weights == (Weight(1, "w", spec, 1, 512, 2, Pairs.TAP), Weight(2, "r", spec, 1, 1024, 2, Pairs.TAP))


@pytest.mark.parametrize("mode", [STORAGE, Mode.WEIGHT_ONLY, FLOAT])
def test_an_lstm_that_is_wanted_otherwise_is_not_dynamic(build, mode: Mode) -> None:
    decision = cell_decision(build(CELL, w=(1, 64, 8), r=(1, 64, 16)), mode)
    assert decision.mode is (FLOAT if mode is FLOAT else STORAGE)


@pytest.mark.parametrize("emit", [AllowedOps.QDQ, AllowedOps.STRICT])
@pytest.mark.parametrize("mode", [STATIC, Mode.DYNAMIC])
def test_an_lstm_is_stored_where_only_standard_operators_may_be_written(build, mode: Mode, emit: AllowedOps) -> None:
    decision = cell_decision(build(CELL, w=(1, 64, 8), r=(1, 64, 16)), mode, emit=emit)
    assert decision.mode is STORAGE
    assert decision.reason.endswith("with --emit ort it has an integer kernel on onnxruntime-cpu")


def test_a_measured_wish_makes_an_lstm_stored_or_dynamic(build) -> None:
    model = build(CELL, w=(1, 64, 8), r=(1, 64, 16))
    stored = cell_decision(model, demotion=Demotion(STORAGE, "it is slower", "1 ms"))
    assert (stored.mode, stored.figures, len(stored.weights)) == (STORAGE, "1 ms", 2)
    dynamic = cell_decision(model, demotion=Demotion(Mode.DYNAMIC, "it is faster", "2 ms"))
    assert (dynamic.mode, dynamic.figures, dynamic.data) == (Mode.DYNAMIC, "2 ms", "x")
    assert dynamic.reason.endswith(": it is faster")


def test_an_lstm_in_a_body_becomes_dynamic(build) -> None:
    model = build(
        """(float[2,4,8] x, bool c) => (float[2,1,4,16] y) {
        y = If (c) <
            then_branch = t () => (float[2,1,4,16] u) { [n] u = LSTM <hidden_size = 16> (x, w, r) },
            else_branch = e () => (float[2,1,4,16] v) { [m] v = LSTM <hidden_size = 16> (x, w, r) }>
        }""",
        w=(1, 64, 8),
        r=(1, 64, 16),
    )
    assert cell_decision(model).mode is Mode.DYNAMIC
