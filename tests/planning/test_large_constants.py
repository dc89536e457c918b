"""Which constants of a node become codes when it computes in float."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxq.config.scheme import Granularity, Method, QuantSpec
from onnxq.ir import Node, Tensor, Variable, constant
from onnxq.planning.weights import every_weight, large_weights, weight_at

INT8 = QuantSpec("int8-narrow", Granularity.CHANNEL)
CONTRIB = "com.microsoft"


def learned(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def call(op: str, *inputs: NDArray[Any] | None, domain: str = "", **attributes: Any) -> Node:
    """A node that is fed where there is no array."""
    made: list[Tensor] = [
        Variable(f"x{index}", np.float32) if one is None else constant(f"w{index}", one)
        for index, one in enumerate(inputs)
    ]
    return Node(op, "n", attributes, made, [Variable("y")], domain)


def axes(node: Node) -> dict[int, tuple[int, int]]:
    return {weight.index: (weight.axis, weight.reduction_axis) for weight in large_weights(node, INT8)}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (call("Attention", None, learned(8, 96), learned(96), domain=CONTRIB), {1: (-1, 0)}),
        (call("FusedMatMul", None, learned(16, 32), domain=CONTRIB), {1: (-1, -2)}),
        (call("FusedMatMul", None, learned(16, 32), domain=CONTRIB, transB=1), {1: (-2, -1)}),
        (call("FusedGemm", None, learned(16, 32), learned(16), domain=CONTRIB, transB=1), {1: (0, 1)}),
        (call("FusedConv", None, learned(16, 3, 3, 3), domain=CONTRIB), {1: (0, 1)}),
        (
            call("EmbedLayerNormalization", None, None, learned(99, 8), learned(64, 8), learned(2, 8), domain=CONTRIB),
            {2: (0, -1), 3: (0, -1)},
        ),
        (call("Einsum", None, learned(64, 128), equation="bi,ij->bj"), {1: (1, 1)}),
        (call("Add", None, learned(1, 197, 64)), {1: (1, 2)}),
        (call("Add", learned(1, 4096), None), {0: (0, 1)}),
        (call("Mystery", None, learned(128, 64), domain="my.own"), {1: (0, 1)}),
    ],
)
def test_learned_numbers_of_any_operator_are_stored(node: Node, expected: dict[int, tuple[int, int]]) -> None:
    assert axes(node) == expected


@pytest.mark.parametrize("spec", [INT8, QuantSpec("int4", (32,))])
@pytest.mark.parametrize(
    "node",
    [
        call("LSTM", None, learned(64, 8), learned(64, 16)),
        call("Conv", None, learned(512)),
        call("Gather", learned(64, 8), None, axis=5),
    ],
    ids=lambda node: node.op,
)
def test_a_damaged_weight_that_lacks_an_axis_of_its_operator_is_not_stored(node: Node, spec: QuantSpec) -> None:
    assert not list(large_weights(node, spec))


HALVES = np.arange(8192, dtype=np.float32).reshape(128, 64) / 2


@pytest.mark.parametrize(
    "node",
    [
        call("Add", None, learned(64, 63)),
        call("Add", None, learned(8192)),
        call("Add", None, learned(128, 64).astype(np.float64)),
        call("Add", None, HALVES),
        call("Add", None, np.triu(np.full((128, 128), np.finfo(np.float32).min))),
        call("Add", None, np.where(HALVES > 7, -np.inf, learned(128, 64)).astype(np.float32)),
        call("Greater", None, learned(128, 64)),
        call("RotaryEmbedding", None, None, learned(128, 64), learned(128, 64), domain=CONTRIB),
        call("Gemm", None, None, learned(1, 8192)),
    ],
)
def test_small_chosen_and_setting_numbers_are_not(node: Node) -> None:
    assert axes(node) == {}


def test_every_weight_is_any_size() -> None:
    assert [weight.index for weight in every_weight(call("Add", None, HALVES[:1]), INT8)] == [1]


BLOCKS = QuantSpec("int4-narrow", (32,), scale="float16")
NV = QuantSpec("float4e2m1", (16,), scale="ue4m3", two_level=True)


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((5000, 1), INT8, Granularity.TENSOR),
        ((5000, 2), INT8, Granularity.TENSOR),
        ((5000, 4), INT8, Granularity.TENSOR),
        ((5000, 5), INT8, Granularity.CHANNEL),
        ((5000, 16), INT8, Granularity.CHANNEL),
        ((5000, 1), replace(INT8, format="int16-narrow"), Granularity.TENSOR),
        ((5000, 3), replace(INT8, format="int16-narrow"), Granularity.CHANNEL),
        ((5000, 1), BLOCKS, (32,)),
        ((5000, 1), replace(BLOCKS, scale="float32"), Granularity.TENSOR),
        ((5000, 1), replace(BLOCKS, per=(1,)), (1,)),
        ((5000, 2), BLOCKS, (32,)),
        ((5000, 64), BLOCKS, (32,)),
        ((5000, 1), NV, (16,)),
        ((5000, 1), replace(NV, scale="float16", two_level=False), (16,)),
        ((5000, 1), replace(INT8, method=Method.TORCH, format="int8"), Granularity.CHANNEL),
        ((64, 1), INT8, Granularity.CHANNEL),
        ((300, 1), INT8, Granularity.TENSOR),
    ],
)
def test_scales_take_no_more_than_their_codes_and_less_than_codes_save(
    shape: tuple[int, ...], spec: QuantSpec, expected: Granularity | tuple[int, ...]
) -> None:
    table = call("Gather", learned(*shape), None)
    assert weight_at(table, 0, spec).spec.per == expected
    stored = [weight.spec.per for weight in large_weights(table, spec)]
    assert stored == ([expected] if np.prod(shape) >= 256 else [])
    turned = call("MatMul", None, learned(*shape[::-1]))
    assert weight_at(turned, 1, spec).spec.per == expected


def test_a_weight_that_no_codes_make_smaller_stays() -> None:
    half = call("MatMul", None, learned(64, 64).astype(np.float16))
    assert not list(large_weights(half, QuantSpec("int16-narrow", Granularity.CHANNEL)))
    assert list(large_weights(half, INT8))


def test_one_scale_of_a_tensor_needs_no_second_level() -> None:
    spec = replace(NV, per=(1,))
    (weight,) = large_weights(call("MatMul", None, learned(64, 64).astype(np.float16)), spec)
    assert weight.spec == spec
    (weight,) = large_weights(
        call("Gather", learned(5000, 1).astype(np.float16), None), replace(spec, format="float8e4m3fn")
    )
    assert (weight.spec.per, weight.spec.two_level, weight.spec.scale) == (Granularity.TENSOR, False, "float32")
