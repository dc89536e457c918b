"""What runtimes can do, as the rows of targets say it: no two of its sets contradict each other."""

from __future__ import annotations

import pytest

from onnxq.ops import OPERATORS, Role
from onnxq.runtime.capabilities import Forms, Kernels
from onnxq.runtime.targets import TARGETS

every_row = pytest.mark.parametrize("kernels", [target.kernels for target in TARGETS.values()], ids=list(TARGETS))


@every_row
def test_what_is_fused_is_multiplied_or_vanishes_but_not_both(kernels: Kernels) -> None:
    fused = kernels.fused
    assert fused.float_output | fused.either_output <= fused.ops
    assert not fused.float_output & fused.either_output
    assert not fused.clamps & fused.ops
    assert all(OPERATORS["", op].role is not Role.WEIGHTED for op in fused.ops)


@every_row
def test_operators_are_multiplied_with_scales_of_each_run_in_one_way(kernels: Kernels) -> None:
    assert all(OPERATORS["", op].role is Role.WEIGHTED for op in kernels.own_dynamic)
    assert not kernels.dynamic & kernels.own_dynamic


def test_operators_that_keep_their_forms_keep_all_else() -> None:
    target = TARGETS["openvino"]
    assert target.kernels.forms != Forms()
    assert target.keeping_forms.kernels.forms == Forms()
    assert target.keeping_forms.kernels.fused == target.kernels.fused
