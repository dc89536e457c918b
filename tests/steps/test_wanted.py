"""What is to become of a model: names are looked up, and a plan speaks for itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxq.config.presets import PRESETS
from onnxq.errors import SchemeError
from onnxq.lowering import AllowedOps
from onnxq.pipeline import plan
from onnxq.runtime.targets import DEFAULT_TARGET
from onnxq.steps.wanted import Wanted


def test_a_plan_brings_its_own_target_and_emit(residual) -> None:
    made = replace(plan(residual, target="tensorrt"), emit=AllowedOps.ORT)
    wanted = Wanted.of(made, DEFAULT_TARGET, ())
    assert (wanted.target, wanted.replay, wanted.scheme.emit) == ("tensorrt", made, AllowedOps.ORT)


@pytest.mark.parametrize(
    ("asked", "target", "measured", "written"),
    [
        (AllowedOps.FASTEST, DEFAULT_TARGET, True, AllowedOps.FASTEST),
        (AllowedOps.FASTEST, DEFAULT_TARGET, False, AllowedOps.QDQ),
        (AllowedOps.FASTEST, "openvino", True, AllowedOps.QDQ),
        (AllowedOps.QDQ, DEFAULT_TARGET, True, AllowedOps.QDQ),
        (AllowedOps.STRICT, "tensorrt", True, AllowedOps.STRICT),
        (AllowedOps.ORT, "onnxruntime-cpu-arm", False, AllowedOps.ORT),
    ],
)
def test_operators_of_the_runtimes_own_are_written_where_they_are_measured_or_asked_for(
    asked: AllowedOps, target: str, measured: bool, written: AllowedOps
) -> None:
    wanted = Wanted.of(replace(PRESETS["int8"], emit=asked), target, ())
    assert wanted.emit(measured=measured) is written


def test_a_plan_is_carried_out_with_the_operators_that_it_was_made_with(residual) -> None:
    made = replace(plan(residual), emit=AllowedOps.FASTEST)
    assert Wanted.of(made, DEFAULT_TARGET, ()).emit(measured=False) is AllowedOps.FASTEST


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "qnn"])
def test_no_other_target_is_given_operators_of_onnxruntimes_own(target: str) -> None:
    wanted = Wanted.of(replace(PRESETS["int8"], emit=AllowedOps.ORT), target, ())
    with pytest.raises(SchemeError, match=f"only onnxruntime has, and the target is {target}; leave it out"):
        wanted.emit(measured=True)


def test_names_are_looked_up_at_the_door() -> None:
    assert Wanted.of("int8-storage", DEFAULT_TARGET, ()).scheme is PRESETS["int8-storage"]
    with pytest.raises(SchemeError, match="did you mean 'tensorrt'"):
        Wanted.of("int8", "tensort", ())
