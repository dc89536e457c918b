"""Calls hand functions their inputs and attributes."""

from __future__ import annotations

import torch

from onnxq.ir import Node, constant
from onnxq.training.operators import Call

CALL = Call(
    Node("Pad", attrs={"pads": [1, 2], "value": constant("v", 3.0)}), (torch.zeros(2), None, torch.tensor([4])), 17
)


def test_inputs_are_there_or_left_out() -> None:
    assert CALL[0].tolist() == [0, 0]
    assert (CALL.optional(1), CALL.optional(7)) == (None, None)
    assert [one.numel() for one in CALL.given] == [2, 1]


def test_numbers_come_from_an_input_or_an_attribute() -> None:
    assert (CALL.numbers(2, "pads"), CALL.numbers(1, "pads"), CALL.numbers(1)) == ([4], [1, 2], None)
    assert (CALL.number(2, "value", 0), CALL.number(5, "other", 7)) == (4, 7)


def test_tensors_among_attributes_are_arrays() -> None:
    assert CALL.attribute("value").item() == 3.0
