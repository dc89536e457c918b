"""Integer kernels take weights in the pairs of their target's row, and whoever shares a weight reads the same codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxq.config.scheme import Granularity, Method, Mode, QuantSpec
from onnxq.ir import Node, Variable, constant
from onnxq.numerics.pairs import Pairs
from onnxq.planning.plan import Decision
from onnxq.planning.weights import weight_at, with_pairs
from onnxq.runtime.targets import TARGETS, Target

CPU = TARGETS["onnxruntime-cpu"]
PER_CHANNEL = QuantSpec("int8-narrow", Granularity.CHANNEL)
FLOAT = np.dtype(np.float32)


def call(op: str, shape: tuple[int, ...], **attributes: Any) -> Node:
    """Return a node that multiplies a weight of this shape, or looks its rows up."""
    data, weight = Variable("x", FLOAT, [3, 4]), constant("w", np.zeros(shape, FLOAT))
    inputs = [weight, data] if op == "Gather" else [data, weight]
    return Node(op, op.lower(), attributes, inputs, [Variable("y", FLOAT)])


def pairs_of(*nodes: tuple[Node, Mode], target: Target = CPU, spec: QuantSpec = PER_CHANNEL) -> list[Pairs]:
    """Return the pairs of the weight of each node."""
    weights = (weight_at(node, 0 if node.op == "Gather" else 1, spec) for node, _ in nodes)
    decisions = [
        Decision(node.name, node.op, mode, "", (weight,)) for (node, mode), weight in zip(nodes, weights, strict=True)
    ]
    found = with_pairs((node for node, _ in nodes), decisions, target)
    return [one.weights[0].pairs for one in found]


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_convolutions_have_the_pairs_of_the_target_and_matrices_begin_anew(target: Target) -> None:
    own, product = target.kernels.pairs, Pairs.TAP
    assert own is (Pairs.TAP if target.name == "openvino" else Pairs.ROW)
    static = [call("Conv", (16, 8, 3, 3)), call("Conv", (16, 1, 3, 3), group=8), call("Gemm", (16, 8))]
    assert pairs_of(*((node, Mode.STATIC) for node in static), target=target) == [own, own, product]
    assert pairs_of((call("LSTM", (1, 64, 16)), Mode.DYNAMIC), target=target) == [product]


@pytest.mark.parametrize(
    ("node", "spec", "mode"),
    [
        (call("Conv", (16, 1, 3, 3), group=16), PER_CHANNEL, Mode.STATIC),
        (call("Gemm", (16, 8)), PER_CHANNEL, Mode.STORAGE),
        (call("Gemm", (16, 8)), QuantSpec("int4-narrow", Granularity.CHANNEL), Mode.STATIC),
        (call("Gemm", (16, 8)), QuantSpec("int16", Granularity.CHANNEL), Mode.STATIC),
        (call("Gemm", (16, 8)), QuantSpec("uint8", Granularity.CHANNEL, symmetric=False), Mode.STATIC),
        (call("Gemm", (16, 8)), QuantSpec("int8", Granularity.CHANNEL, method=Method.TORCH), Mode.STATIC),
    ],
    ids=["depthwise", "multiplied as floats", "4 bits", "16 bits", "unsigned", "in the arithmetic of PyTorch"],
)
def test_no_pairs_are_what_no_kernel_adds_so_or_others_decide(node: Node, spec: QuantSpec, mode: Mode) -> None:
    assert pairs_of((node, mode), spec=spec) == [Pairs.NONE]


def test_a_table_that_is_multiplied_too_has_the_codes_of_the_product() -> None:
    rows, product = call("Gather", (16, 8)), call("Gemm", (16, 8), transB=1)
    assert pairs_of((rows, Mode.STORAGE), (product, Mode.STATIC)) == [Pairs.TAP, Pairs.TAP]
    assert pairs_of((rows, Mode.STORAGE), (product, Mode.STORAGE)) == [Pairs.NONE, Pairs.NONE]
    # Along other axes, codes cannot be shared.
    assert pairs_of((rows, Mode.STORAGE), (call("Gemm", (16, 8)), Mode.STATIC)) == [Pairs.NONE, Pairs.TAP]
