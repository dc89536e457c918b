"""Who makes a noisy tensor codes is left in float, or keeps float weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
from onnx import ModelProto

from onnxq.config.scheme import Mode
from onnxq.ir import read_model
from onnxq.planning.plan import Demotion
from onnxq.preparing.preparation import prepare
from search.table_laboratory import Table, search

RESIDUAL = """(float[1,8,8,8] x) => (float[1,8,8,8] y) {
    [c0] a = Conv <pads = [1,1,1,1]> (x, w0) [c1] b = Conv <pads = [1,1,1,1]> (a, w1)
    [mixed] s = Add(b, a) [c2] y = Conv <pads = [1,1,1,1]> (s, w2) }"""
SILU = """(float[1,8,8,8] x) => (float[1,8,8,8] y) {
    [c0] a = Conv <pads = [1,1,1,1]> (x, w0) [gate] g = Sigmoid(a)
    [mixed] s = Mul(a, g) [c1] y = Conv <pads = [1,1,1,1]> (s, w1) }"""
SQUEEZE = """(float[1,8,8,8] x) => (float[1,8,8,8] y) {
    [c0] a = Conv <pads = [1,1,1,1]> (x, w0) [pool] p = GlobalAveragePool(a) [c1] e = Conv(p, w1)
    [gate] g = Sigmoid(e) [mixed] s = Mul(a, g) [c2] y = Conv <pads = [1,1,1,1]> (s, w2) }"""


class Blocks(Table):
    """Noise by tensor, and none of weights."""

    @property
    def read(self) -> Mapping[str, float]:
        return self.noise


@pytest.mark.parametrize(
    ("text", "loud", "floats"),
    [
        (RESIDUAL, "s", {"mixed", "c2"}),
        (SILU, "g", {"gate", "mixed"}),
        (SILU, "s", {"gate", "mixed", "c1"}),
        (SQUEEZE, "g", {"gate", "mixed"}),
        (SQUEEZE, "s", {"gate", "mixed", "c2"}),
        (SQUEEZE, "p", {"pool", "c1", "gate", "mixed"}),
    ],
)
def test_who_would_make_a_noisy_tensor_codes_is_left_in_float_weights_or_none(
    build: Callable[..., ModelProto], text: str, loud: str, floats: set[str]
) -> None:
    shapes = {f"w{i}": (8, 8, 1, 1) if "Conv(p, w1)" in text and i == 1 else (8, 8, 3, 3) for i in range(3)}
    graph = prepare(read_model(build(text, **{name: shape for name, shape in shapes.items() if f"{name})" in text})))
    names = [node.name for node in graph.nodes]
    quiet = {tensor.name: 1e-4 for node in graph.nodes for tensor in (*node.inputs, *node.outputs)}
    table = Blocks(graph, dict.fromkeys(names, 9e5), dict.fromkeys(names, 3e5), {**quiet, loud: 0.5})
    outcome = search(table)
    assert {one.node for one in outcome.plan.decisions if one.mode is not Mode.STATIC} == floats
    assert table.sqnr(outcome.plan) >= 20
    # No other choice that is faithful is as fast.
    every = (
        table.plan({name: Demotion(Mode.STORAGE, "why") for name, left in zip(names, kept, strict=True) if left})
        for kept in itertools.product((False, True), repeat=len(names))
    )
    assert table.times(outcome.plan).total == min(table.times(one).total for one in every if table.sqnr(one) >= 20)
