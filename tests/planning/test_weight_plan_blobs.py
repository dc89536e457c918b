"""Weights that onnxruntime's own operators, or kernels that it makes itself, cannot read are stored."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.config.scheme import Mode, QuantSpec, Storage
from onnxq.ir import Node, Variable, constant
from onnxq.lowering import AllowedOps
from onnxq.planning.plan import Decision
from onnxq.planning.weights import decide_weights

FLOAT = np.dtype(np.float32)


def decide(op: str, shape: tuple[int, int], spec: QuantSpec, emit: AllowedOps = AllowedOps.QDQ) -> Decision:
    weight, data = constant("w", np.zeros(shape, FLOAT)), Variable("x", FLOAT, [3, 4])
    inputs = [weight, data] if op == "Gather" else [data, weight]
    node = Node(op, "node", {}, inputs, [Variable("y", FLOAT)])
    return decide_weights(node, Mode.WEIGHT_ONLY, spec, "it was asked for", emit, in_body=False)


@pytest.mark.parametrize(
    ("columns", "format", "emit", "mode"),
    [
        (96, "uint4", AllowedOps.ORT, Mode.STORAGE),
        (96, "uint4", AllowedOps.QDQ, Mode.WEIGHT_ONLY),
        (96, "int4", AllowedOps.ORT, Mode.WEIGHT_ONLY),
        (128, "uint4", AllowedOps.ORT, Mode.WEIGHT_ONLY),
        (75, "int4", AllowedOps.ORT, Mode.STORAGE),
    ],
)
def test_rows_that_end_within_a_byte_are_looked_up_by_standard_operators_alone(
    columns: int, format: str, emit: AllowedOps, mode: Mode
) -> None:
    found = decide("Gather", (512, columns), QuantSpec(format, (32,), symmetric=format == "int4"), emit)
    assert found.mode is mode
    assert ("reads rows of whole bytes" in found.reason) == (mode is Mode.STORAGE)


@pytest.mark.parametrize("format", ["int2", "uint2"])
def test_two_bits_in_words_are_not_multiplied(format: str) -> None:
    spec = QuantSpec(format, (32,), storage=Storage.WORDS, symmetric=format == "int2")
    found = decide("MatMul", (512, 64), spec)
    assert found.mode is Mode.STORAGE
    assert found.reason.endswith("loads no 2-bit weights in words that are multiplied")
