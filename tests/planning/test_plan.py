"""Plans: what they tell of themselves."""

from __future__ import annotations

from onnxq.calibration.accumulators import Request
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.planning.plan import METADATA_KEY, Activation, Decision, Plan

SPEC = QuantSpec("uint8", symmetric=False)
PLAN = Plan(
    decisions=(
        Decision("a", "Conv", Mode.STATIC, "integer kernel"),
        Decision("b", "Tanh", Mode.FLOAT, "onnxruntime-cpu has no integer kernel for Tanh"),
        Decision("c", "Gather", Mode.STORAGE, "computes in float"),
        Decision("d", "Tanh", Mode.FLOAT, "onnxruntime-cpu has no integer kernel for Tanh"),
    ),
    activations=(
        Activation("x", SPEC, "x"),
        Activation("s", SPEC, "s", fixed_range=(0.0, 1.0)),
        Activation("y", SPEC, "x"),
    ),
    scheme="int8",
    target="onnxruntime-cpu",
)


def test_decisions_are_found_by_node() -> None:
    assert PLAN.by_node["b"] is PLAN.decisions[1]
    assert list(PLAN.by_node) == ["a", "b", "c", "d"]


def test_nodes_are_counted_by_mode() -> None:
    assert [PLAN.count(mode) for mode in (Mode.STATIC, Mode.STORAGE, Mode.FLOAT)] == [1, 1, 2]


def test_only_ranges_that_are_not_fixed_are_calibrated() -> None:
    assert PLAN.observed_tensors == tuple(PLAN.calibrated) == ("x", "y")
    assert PLAN.requests == (Request("x", "range"), Request("y", "range"))


def test_reasons_are_counted_and_the_most_frequent_comes_first() -> None:
    assert PLAN.left_in_float() == (("onnxruntime-cpu has no integer kernel for Tanh", 2), ("computes in float", 1))


def test_a_plan_shows_as_a_line() -> None:
    assert repr(PLAN) == "Plan(int8 for onnxruntime-cpu; 4 nodes: 1 static, 1 storage, 2 float)"


def test_plans_are_values() -> None:
    twin = Plan(PLAN.decisions, PLAN.activations, "int8", "onnxruntime-cpu")
    assert twin == PLAN
    assert hash(twin) == hash(PLAN)
    assert twin != Plan(PLAN.decisions, (), "int8", "onnxruntime-cpu")


def test_written_models_name_their_scheme_under_the_key_of_all_versions() -> None:
    # Models that were written before are recognised by it, wherever its module lies today.
    assert METADATA_KEY == "onnxq.scheme"
