"""Patterns: what they match, in which order of operands, and what a match gives."""

from __future__ import annotations

import pytest
from small_models import model

from onnxq.errors import PassError
from onnxq.ir import Constant, Graph, read_model
from onnxq.rewrite import Match, NodePattern, OpsetPatternBuilder
from onnxq.rewrite.patterns import COMMUTATIVE, find

op = OpsetPatternBuilder("Test")
x, y = op.any("x"), op.any("y")


def graph_of(body: str, head: str = "(float[4] a, float[4] b) => (float[4] z)") -> Graph:
    return read_model(model(f"g {head} <float[1] half = {{0.5}}, float[4] w = {{1, 2, 3, 4}}> {{ {body} }}"))


def last(body: str, pattern: NodePattern) -> Match | None:
    graph = graph_of(body)
    return find(pattern, graph.outputs[0].inputs[0], graph.opset)


def test_captured_tensors_and_named_nodes_are_attributes() -> None:
    found = last("[first] s = Sigmoid(a) [last] z = Mul(s, b)", op.Mul(op.Sigmoid(x, name="gate"), y))
    assert found is not None
    assert (found.x.name, found.y.name, found.gate.name) == ("a", "b", "first")
    assert [node.name for node in found.nodes] == ["last", "first"]
    with pytest.raises(AttributeError, match="names nothing 'w'; it names x, y, gate"):
        _ = found.w


@pytest.mark.parametrize("op_type", sorted(COMMUTATIVE - {"And", "Or", "Xor", "Equal", "BitwiseAnd", "BitwiseOr"}))
def test_operands_of_a_commutative_operator_stand_in_any_order(op_type: str) -> None:
    pattern = getattr(op, op_type)(op.Neg(x), y)
    for operands in ("n, b", "b, n"):
        found = last(f"n = Neg(a) z = {op_type}({operands})", pattern)
        assert found is not None
        assert (found.x.name, found.y.name) == ("a", "b")


def test_operands_of_others_do_not() -> None:
    assert last("n = Neg(a) z = Sub(n, b)", op.Sub(op.Neg(x), y))
    assert last("n = Neg(a) z = Sub(b, n)", op.Sub(op.Neg(x), y)) is None


def test_orders_are_tried_together() -> None:
    pattern = op.Add(op.Mul(x, op.Neg(y)), x)
    for text in ("Mul(a, n) z = Add(m, a)", "Mul(n, a) z = Add(m, a)", "Mul(n, a) z = Add(a, m)"):
        assert last(f"n = Neg(b) m = {text}", pattern)
    assert last("n = Neg(b) m = Mul(a, n) z = Add(m, b)", pattern) is None


def test_a_value_that_is_used_twice_is_one_node() -> None:
    centred = op.Sub(x, op.scalar("mean"))
    pattern = op.Mul(centred, op.Neg(centred))
    assert last("d = Sub(a, half) n = Neg(d) z = Mul(d, n)", pattern)
    assert last("d = Sub(a, half) e = Sub(a, half) n = Neg(e) z = Mul(d, n)", pattern) is None


def test_numbers_stand_for_constants() -> None:
    assert last("z = Mul(a, half)", op.Mul(x, 0.5))
    assert last("z = Mul(half, a)", op.Mul(x, 0.5))
    assert last("z = Mul(a, half)", op.Mul(x, 0.51)) is None
    assert last("z = Mul(a, w)", op.Mul(x, 1.0)) is None
    assert last("z = Mul(a, b)", op.Mul(x, 1.0)) is None


def test_constants_are_captured_as_such() -> None:
    found = last("z = Mul(a, w)", op.Mul(x, op.constant("c")))
    assert found is not None
    assert isinstance(found.c, Constant)
    assert last("z = Mul(a, w)", op.Mul(x, op.scalar("c"))) is None
    assert last("z = Mul(a, b)", op.Mul(x, op.constant("c"))) is None


def test_what_a_caller_can_override_is_no_constant() -> None:
    proto = model("g (float[4] a, float[4] w) => (float[4] z) { z = Mul(a, w) }")
    proto.graph.initializer.append(
        model("g () => (float[4] z) <float[4] w = {1, 2, 3, 4}> { z = Neg(w) }").graph.initializer[0]
    )
    graph = read_model(proto)
    assert find(op.Mul(x, op.constant("c")), graph.nodes[0], 17) is None
    assert find(op.Mul(x, y), graph.nodes[0], 17)


@pytest.mark.parametrize(
    ("pattern", "inputs", "matches"),
    [
        (op.Clip(x), "a", True),
        (op.Clip(x), "a, low", False),
        (op.Clip(x, ...), "a, low", True),
        (op.Clip(x, None, y), "a, , low", True),
        (op.Clip(x, None, y), "a, low, low", False),
        (op.Clip(x, op.optional("low"), op.optional("high")), "a", True),
        (op.Clip(x, op.optional("low"), op.optional("high")), "a, , low", True),
        (op.Clip(x, y), "a", False),
    ],
)
def test_inputs_that_are_left_out(pattern: NodePattern, inputs: str, matches: bool) -> None:
    graph = graph_of(f"low = Constant<value_float=0.0>() z = Clip({inputs})")
    assert (find(pattern, graph.nodes[-1], 17) is not None) is matches


def test_attributes_count_with_their_defaults() -> None:
    assert last("z = Softmax(a)", op.Softmax(x, axis=-1))
    assert last("z = Softmax<axis=0>(a)", op.Softmax(x, axis=-1)) is None
    assert last("z = Softmax<axis=0>(a)", op.Softmax(x, axis=0))
    for attributes in ("blocksize=2", 'blocksize=2, mode="DCR"'):
        assert last(f"z = DepthToSpace<{attributes}>(a)", op.DepthToSpace(x, mode="DCR"))
        assert last(f"z = DepthToSpace<{attributes}>(a)", op.DepthToSpace(x, mode="CRD")) is None


def test_further_outputs_have_an_index() -> None:
    graph = graph_of("p, q = Split<axis=0>(a) z = Neg(q)", "(float[4] a) => (float[2] z)")
    assert find(op.Neg(op.Split(x)[1]), graph.nodes[-1], 17)
    assert find(op.Neg(op.Split(x)), graph.nodes[-1], 17) is None


def test_operators_of_other_domains() -> None:
    graph = graph_of("n = Neg(a) z = com.microsoft.Gelu(n)")
    assert find(op.call("com.microsoft", "Gelu", op.Neg(x)), graph.nodes[-1], 17)
    assert find(op.call("mine", "Gelu", op.Neg(x)), graph.nodes[-1], 17) is None


def test_an_operator_that_onnx_does_not_have_is_told() -> None:
    with pytest.raises(PassError, match=r"rule Test looks for .*'Covn', which ONNX does not have; did you mean 'Conv'"):
        op.Covn(x)
