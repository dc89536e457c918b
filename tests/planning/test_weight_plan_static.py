"""Weights of 4 bits, and by encoders of packages, between data of 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaged_encoders import installed_package

from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec
from onnxq.errors import SchemeError
from onnxq.lowering import AllowedOps
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.planning.weights import check_weight_spec, needed_opset
from onnxq.runtime.targets import TARGETS

TARGET = TARGETS["onnxruntime-cpu"]
NARROW = QuantSpec("int4-narrow", Granularity.CHANNEL, method=Method.MSE)


def test_weights_of_four_bits_stand_between_data_where_the_target_reads_them() -> None:
    for mode, target in ((Mode.DYNAMIC, TARGET), (Mode.STATIC, TARGETS["tensorrt"])):
        with pytest.raises(SchemeError, match=r"^weights as symmetric int4-narrow per channel have no fast integer"):
            check_weight_spec(NARROW, mode, target)
    check_weight_spec(NARROW, Mode.STATIC, TARGET)


@pytest.mark.parametrize("emit", [AllowedOps.QDQ, AllowedOps.ORT, AllowedOps.STRICT])
def test_static_weights_of_four_bits_ask_for_the_opset_of_their_type(emit: AllowedOps) -> None:
    decisions = [
        Decision("n", "MatMul", Mode.STATIC, "", (Weight(1, "w", spec, 0, 8),)) for spec in (QuantSpec("int8"), NARROW)
    ]
    needed = [needed_opset(Plan((one,), (), "", TARGET.name), emit) for one in decisions]
    assert needed == [13, 21]


@pytest.mark.parametrize("mode", [Mode.STATIC, Mode.DYNAMIC, Mode.WEIGHT_ONLY, Mode.STORAGE])
def test_the_encoder_of_a_package_makes_codes_of_every_mode(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QuantSpec("int8", Granularity.CHANNEL, method="halved")
    with installed_package(monkeypatch):
        check_weight_spec(spec, mode, TARGET)
        with pytest.raises(SchemeError, match="did you mean 'halved'"):
            check_weight_spec(replace(spec, method="halve"), mode, TARGET)
