"""One table holds every operator that torch computes."""

from __future__ import annotations

import pytest

from onnxq.ir import Node
from onnxq.ops import OPERATORS
from onnxq.training.operators import TORCH, Call, function_of


def test_every_operator_whose_weights_become_codes_can_be_trained() -> None:
    weighted = {op for (domain, op), row in OPERATORS.items() if row.weights and not domain}
    assert weighted - set(TORCH) <= {"QLinearConv", "ScatterND"}


@pytest.mark.parametrize(
    ("node", "known"),
    [
        (Node("Relu"), True),
        (Node("Relu", domain="com.example"), False),
        (Node("NonMaxSuppression"), False),
        (Node("Resize", attrs={"antialias": 1}), False),
        (Node("LSTM", attrs={"clip": 1.0}), False),
    ],
)
def test_what_torch_does_not_compute_is_told(node: Node, known: bool) -> None:
    assert (function_of(Call(node, (), 17)) is not None) == known
