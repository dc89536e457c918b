"""Which alternatives a runtime has, and which nodes may take them."""

from __future__ import annotations

import pytest
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode, Spec
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import TARGETS, target_named
from onnxq.search.cost_model import KernelOption, alternatives, takers, wishes
from search.timed_models import TARGET, planned

DYNAMIC = KernelOption(Mode.DYNAMIC)
CODES = KernelOption(Mode.WEIGHT_ONLY, Spec("int4", (32,)))


def test_the_cpu_multiplies_integers_with_dynamic_scales_and_blocks_of_8_and_4_bits() -> None:
    assert [(one.mode, one.weight.format if one.weight else "") for one in alternatives(TARGET)] == [
        (Mode.DYNAMIC, ""),
        (Mode.WEIGHT_ONLY, "int8-narrow"),
        (Mode.WEIGHT_ONLY, "int4"),
    ]
    assert not list(alternatives(target_named("tensorrt")))


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_codes_of_every_alternative_keep_a_file_at_a_quarter_of_its_floats(target) -> None:
    for spec in target.kernels.multiplied:
        bits = {"int8-narrow": 8, "int4": 4}[spec.format]
        # A scale for each channel takes next to nothing.
        scales = 32 / spec.per[0] if isinstance(spec.per, tuple) else 0.0
        assert bits + scales <= 8 * 1.05


@pytest.mark.parametrize("scheme", ["int8", "int8-dynamic"])
def test_what_the_scheme_wants_as_integers_may_take_other_codes(perceptron: ModelProto, scheme: str) -> None:
    _, full = planned(perceptron, scheme)
    assert wishes(CODES, full, TARGET).keys() == {"first", "second"}
    assert {one.weight for one in wishes(CODES, full, TARGET).values()} == {CODES.weight}


@pytest.mark.parametrize("scheme", ["int8-per-tensor", "int8-storage", "int8-block32", "torch-fbgemm", "burn-q8s"])
def test_codes_that_the_user_chose_are_not_exchanged(perceptron: ModelProto, scheme: str) -> None:
    _, full = planned(perceptron, scheme)
    assert wishes(CODES, full, TARGET) == {}


def test_stored_weights_may_be_multiplied_as_the_same_codes(perceptron: ModelProto) -> None:
    _, full = planned(perceptron, "int8-storage")
    (multiplied,) = alternatives(target := target_named("openvino"))
    assert wishes(multiplied, full, target).keys() == {"first", "second"}


def test_what_falls_back_takes_nothing(residual: ModelProto, perceptron: ModelProto) -> None:
    for model, expected in ((residual, set()), (perceptron, {"first", "second"})):
        graph, full = planned(model)
        for alternative in (DYNAMIC, CODES):
            wished = wishes(alternative, full, TARGET)
            plan = make_plan(graph, preset_named("int8"), TARGET, wished)
            assert takers(alternative, plan, wished.keys()) == expected
