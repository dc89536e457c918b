from __future__ import annotations

import pytest

from onnxq.ir.protos import NEWEST_IR_VERSION, NEWEST_OPSET, minimum_ir_version


@pytest.mark.parametrize(
    ("opset", "expected"),
    [(7, 3), (12, 3), (13, 7), (18, 7), (19, 9), (21, 10), (23, 11), (24, 12), (25, 13), (28, 13)],
)
def test_the_file_format_follows_from_the_opset(opset: int, expected: int) -> None:
    assert minimum_ir_version(opset) == expected
    assert minimum_ir_version(opset, all_initializers_are_inputs=False) == max(expected, 4)


def test_the_newest_opset_asks_for_the_newest_file_format() -> None:
    assert minimum_ir_version(NEWEST_OPSET) == NEWEST_IR_VERSION
