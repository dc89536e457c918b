"""What becomes of weights where another toolkit's arithmetic is followed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec
from onnxq.errors import SchemeError
from onnxq.ir import Node, Variable, constant
from onnxq.planning.weights import check_weight_spec, decide_weights
from onnxq.runtime.targets import TARGETS

TARGET = TARGETS["onnxruntime-cpu"]
# --- every parameter, as Burn does --------------------------------------------------------------------------------

BURN = QuantSpec("int8-narrow", method=Method.BURN)


def burned(node: Node) -> list[tuple[int, str]]:
    decision = decide_weights(node, Mode.STORAGE, BURN, "so", in_body=False)
    assert decision.mode is (Mode.STORAGE if decision.weights else Mode.FLOAT)
    assert all((weight.spec, weight.axis, weight.reduction_axis) == (BURN, 0, -1) for weight in decision.weights)
    return [(weight.index, weight.tensor) for weight in decision.weights]


def operands(op: str, *arrays: NDArray[Any]) -> Node:
    data = Variable("x", np.dtype(np.float32), [2, 4])
    return Node(op, "n", {}, [data, *(constant(f"p{i}", array) for i, array in enumerate(arrays))], [Variable("y")])


def test_burn_takes_biases_norms_and_the_weights_of_operators_that_onnxq_does_not_know() -> None:
    weight, bias = np.ones((4, 4), np.float32), np.ones(4, np.float32)
    assert burned(operands("Gemm", weight, bias)) == [(1, "p0"), (2, "p1")]
    assert burned(operands("LayerNormalization", bias, bias)) == [(1, "p0"), (2, "p1")]
    assert burned(operands("Mystery", weight.astype(np.float16), np.ones((1, 1, 3)).astype(np.float32))) == [
        (1, "p0"),
        (2, "p1"),
    ]


def test_settings_numbers_masks_and_integers_are_no_parameters() -> None:
    sizes = np.array([1, 1, 2, 2], np.float32)
    assert burned(operands("Resize", np.zeros(0, np.float32), sizes)) == []
    assert burned(operands("Pow", np.array(2, np.float32))) == []
    assert burned(operands("Add", np.array([[0, -np.inf]], np.float32))) == []
    assert burned(operands("Gather", np.arange(4))) == []
    assert burned(operands("Mul", np.zeros((0, 4), np.float32))) == []


@pytest.mark.parametrize(
    ("mode", "spec", "message"),
    [
        (Mode.STATIC, BURN, 'method = "burn" computes in float, so it has no mode static; say mode = "storage"'),
        (Mode.WEIGHT_ONLY, BURN, 'method = "burn" computes in float, so it has no mode weight-only'),
        (Mode.STORAGE, QuantSpec("int8", Granularity.CHANNEL, method=Method.BURN), "Burn has no scales per channel"),
        (Mode.STORAGE, QuantSpec("int4", (256,), method=Method.BURN), "Burn has no blocks longer than 255"),
    ],
)
def test_what_burn_does_not_do_is_told(mode: Mode, spec: QuantSpec, message: str) -> None:
    with pytest.raises(SchemeError) as caught:
        check_weight_spec(spec, mode, TARGET)
    assert str(caught.value).startswith(message)
