"""What is to become of a model: names are looked up, and a plan speaks for itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxq.errors import SchemeError
from onnxq.lowering import Emit
from onnxq.pipeline import plan
from onnxq.presets import PRESETS
from onnxq.targets import DEFAULT_TARGET
from onnxq.wanted import Wanted


def test_a_plan_brings_its_own_target_and_emit(residual) -> None:
    made = replace(plan(residual, target="tensorrt"), emit=Emit.ORT)
    wanted = Wanted.of(made, DEFAULT_TARGET, ())
    assert (wanted.target, wanted.replay, wanted.scheme.emit) == ("tensorrt", made, Emit.ORT)


def test_names_are_looked_up_at_the_door() -> None:
    assert Wanted.of("int8-storage", DEFAULT_TARGET, ()).scheme is PRESETS["int8-storage"]
    with pytest.raises(SchemeError, match="did you mean 'tensorrt'"):
        Wanted.of("int8", "tensort", ())
