"""Which passes follow the canonical form is decided by the scheme and the runtime, and read back by their names."""

from __future__ import annotations

import pytest

from onnxq.config.presets import PRESETS
from onnxq.errors import SchemeError
from onnxq.preparing.integer_steps import integer_steps, steps_named
from onnxq.runtime.targets import TARGETS, target_named


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("preset", ["int8", "int4-block32", "int8-storage"])
def test_the_names_of_steps_tell_them(preset: str, target: str) -> None:
    steps = integer_steps(PRESETS[preset], target_named(target))
    assert [type(step) for step in steps_named([type(step).__name__ for step in steps])] == [type(one) for one in steps]


def test_kernels_of_integers_want_forms_of_their_own() -> None:
    def names(preset: str) -> set[str]:
        return {type(step).__name__ for step in integer_steps(PRESETS[preset], target_named("openvino"))}

    assert names("int8") - names("int8-storage") == {"ConvolvePooled", "ConvolveTransposed", "ScanCells"}


@pytest.mark.parametrize("target", TARGETS)
def test_where_operators_keep_their_form_only_what_is_no_bet_follows(target: str) -> None:
    row = target_named(target)
    kept, all_of_them = (
        [type(step).__name__ for step in integer_steps(PRESETS["int8"], one)] for one in (row.keeping_forms, row)
    )
    assert kept == [name for name in all_of_them if name not in ("ConvolvePooled", "ConvolveTransposed", "ScanCells")]
    assert row.keeping_forms.name == target


def test_other_names_are_refused() -> None:
    with pytest.raises(SchemeError, match="the plan has step 'ScanCels', expected any of UnfuseProducts"):
        steps_named(["ScanCels"])
