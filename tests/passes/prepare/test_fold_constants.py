"""FoldConstants computes what is known, and leaves what must stay, cannot be computed or would be too large."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from folded_models import fold, value
from model_texts import difference, model, nodes, ops, outputs, sample, values

from onnxq.ir import Graph, Node, Tensor, Variable, as_graph, constant
from onnxq.passes import DropNoOps, FoldConstants, LiftConstants, NameNodes
from onnxq.rewrite import Changes, Pipeline


def test_a_chain_of_shape_arithmetic_becomes_one_initializer() -> None:
    made = model(
        """g (float[N, 4, 4] x) => (float[N, 16] y) {
            s = Shape(w)  f = Gather(s, zero)  u = Unsqueeze(f, zeros)  d = Mul(u, two)  h = Div(d, two)
            to = Concat <axis = 0> (minus, h)  [last] y = Reshape(x, to)
        }""",
        w=values(16, 3), zero=np.array(0), zeros=np.array([0]), two=np.array(2), minus=np.array([-1]),
    )  # fmt: skip
    graph, changes = fold(made)
    assert changes == Changes(("to",))
    assert ops(graph) == ["Reshape"]
    assert value(graph, "to").tolist() == [-1, 16]


@pytest.mark.parametrize(
    ("attributes", "expected"), [("", [2, 3, 5]), ("<start = 1>", [3, 5]), ("<start = -3, end = -1>", [2, 3])]
)
def test_the_shape_of_a_constant_is_known(attributes: str, expected: list[int]) -> None:
    made = model(f"g (int64[K] x) => (int64[K] y) {{ s = Shape {attributes} (w) y = Add(x, s) }}", w=values(2, 3, 5))
    graph = as_graph(made)
    assert FoldConstants().apply(graph) == Changes(("s",))
    assert value(graph, "s").tolist() == expected


def test_the_shape_of_an_input_is_not_folded_even_when_it_is_declared() -> None:
    graph, changes = fold(model("g (float[2, 3] x) => (int64[2] y) { s = Shape(x) y = Mul(s, s) }"))
    assert not changes
    assert ops(graph) == ["Shape", "Mul"]


def test_tensors_keep_their_names_and_types() -> None:
    graph, _ = fold(model("g (float16[4] x) => (float16[4] y) { s = Cast <to = 10> (w) y = Add(x, s) }", w=values(4)))
    (folded,) = nodes(graph)[0].inputs[1:]
    assert (folded.name, folded.dtype) == ("s", np.float16)


def test_a_node_that_fails_keeps_only_itself_and_what_depends_on_it() -> None:
    made = model(
        """g (float[4] x) => (float[4] y, float[4] z) {
            good = Mul(w, w)  y = Add(x, good)
            [bad] broken = Reshape(w, five)  [behind] worse = Neg(broken)
            four = Shape(w)  [shaped] flat = Reshape(worse, four)  z = Add(x, flat)
        }""",
        w=values(4), five=np.array([5]),
    )  # fmt: skip
    graph = as_graph(made)
    changes = FoldConstants().apply(graph)
    assert changes.changed == ("good", "four")
    assert [name for name, _ in changes.skipped] == ["bad", "behind", "shaped"]
    assert ops(graph) == ["Add", "Reshape", "Neg", "Reshape", "Add"]


def test_quantization_is_kept() -> None:
    made = model(
        """g (float[4] x) => (float[4] y) {
            q = QuantizeLinear(w, s, z)  d = DequantizeLinear(q, s, z)  y = Add(x, d)
        }""",
        w=values(4), s=np.array(0.1, np.float32), z=np.array(3, np.uint8),
    )  # fmt: skip
    graph, changes = fold(made)
    assert not changes
    assert ops(graph) == ["QuantizeLinear", "DequantizeLinear", "Add"]


@pytest.mark.parametrize(
    "operator",
    ["RandomNormal <shape = [4]> ()", "RandomUniform <shape = [4]> ()", "RandomNormalLike(w)", "RandomUniformLike(w)"],
)
def test_random_numbers_stay_random(operator: str) -> None:
    graph = as_graph(model(f"g (float[4] x) => (float[4] y) {{ r = {operator} y = Add(x, r) }}", w=values(4)))
    assert not FoldConstants().apply(graph)
    assert ops(graph)[0].startswith("Random")


def test_a_node_that_makes_a_graph_output_stays_and_reads_folded_tensors() -> None:
    made = model(
        "g (float[4] x) => (float[4] y, float[4] k) { a = Mul(w, w) b = Neg(a) k = Exp(b) y = Add(x, a) }", w=values(4)
    )
    graph, changes = fold(made)
    assert changes.changed == ("a", "b")
    assert ops(graph) == ["Exp", "Add"]


def test_what_depends_on_a_constant_graph_output_is_folded() -> None:
    made = model("g (float[4] x) => (float[4] y, float[4] k) { k = Exp(w) m = Neg(k) y = Add(x, m) }", w=values(4))
    graph, changes = fold(made)
    assert changes.changed == ("m",)
    assert ops(graph) == ["Exp", "Add"]


def test_a_node_with_a_graph_output_keeps_all_its_outputs() -> None:
    made = model(
        """g (float[2] x) => (float[2] y, float[2] k) {
            v = Neg(w)  k, a = Split <axis = 0> (v, parts)  y = Add(x, a)
        }""",
        w=values(4), parts=np.array([2, 2]),
    )  # fmt: skip
    graph, changes = fold(made)
    assert changes.changed == ("v",)
    assert ops(graph) == ["Split", "Add"]
    assert [tensor.name for tensor in nodes(graph, "Split")[0].outputs] == ["k", "a"]


def test_all_outputs_of_a_node_become_constant_when_only_one_feeds_a_node_that_stays() -> None:
    made = model(
        """g (float[2] x) => (float[2] y, float[2] k) {
            a, b = Split <axis = 0> (w, parts)  k = Neg(b)  y = Add(x, a)
        }""",
        w=values(4), parts=np.array([2, 2]),
    )  # fmt: skip
    graph, changes = fold(made)
    assert changes.changed == ("a", "b")
    assert ops(graph) == ["Neg", "Add"]


def test_bodies_are_folded_with_what_they_capture() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            k = Mul(w, w)
            y = If (c) <
                then_branch = yes () => (float[4] t) { a = Mul(k, k) b = Neg(a) t = Add(x, b) },
                else_branch = no () => (float[4] e) { e = Neg(k) }>
        }""",
        w=values(4),
    )
    graph, changes = fold(made)
    assert changes.changed == ("k", "b")
    assert ops(graph) == ["If", "Add", "Neg"]
    assert difference(outputs(graph, sample(made, 1)), outputs(made, sample(made, 1))) <= 1e-6


def test_a_node_with_bodies_is_never_folded_itself() -> None:
    made = model(
        """g (float[4] x) => (float[4] y) {
            k = If (yes) <
                then_branch = t () => (float[4] a) { a = Mul(w, w) },
                else_branch = e () => (float[4] b) { b = Neg(w) }>
            y = Add(x, k)
        }""",
        w=values(4), yes=np.array(True),
    )  # fmt: skip
    graph, changes = fold(made)
    assert not changes
    assert ops(graph) == ["If", "Add", "Mul", "Neg"]


def test_custom_operators_are_left() -> None:
    made = model("g (float[4] x) => (float[4] y) { k = local.f(w) y = Add(x, k) }", w=values(4))
    assert not FoldConstants().apply(as_graph(made))


def test_strings_are_left() -> None:
    made = model(
        "g (string[1] x) => (bool[1] y) { k = Identity(w) y = Equal(x, k) }", opset=19, w=np.array(["é"], object)
    )
    graph = as_graph(made)
    assert not FoldConstants().apply(graph)
    assert ops(graph) == ["Identity", "Equal"]


def test_small_floats_are_no_floats_of_numpy() -> None:
    codes = np.arange(64).astype(ml_dtypes.float8_e5m2)
    made = model("g (float[64] x) => (float[64] y) { k = Cast <to = 1> (w) y = Add(x, k) }", opset=19, w=codes)
    assert not FoldConstants().apply(as_graph(made))


def test_a_few_small_integers_are_cast() -> None:
    graph, changes = fold(
        model("g (float[4] x) => (float[4] y) { k = Cast <to = 1> (w) y = Add(x, k) }", w=np.arange(4, dtype=np.int8))
    )
    assert changes.changed == ("k",)
    assert ops(graph) == ["Add"]


def test_weights_that_were_stored_as_float16_become_float32() -> None:
    made = model(
        "g (float[N, 32] x) => (float[N, 32] y) { k = Cast <to = 1> (w) y = MatMul(x, k) }",
        w=values(32, 32, dtype=np.float16),
    )
    graph, changes = fold(made)
    assert changes.changed == ("k",)
    assert value(graph, "k").dtype == np.float32


def test_constants_and_identities_are_folded_through_when_they_are_gone() -> None:
    made = model(
        """g (float[4] x) => (float[4] y) {
            k = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()  i = Identity(k)  s = Mul(i, i)  y = Add(x, s)
        }"""
    )
    graph = as_graph(made)
    Pipeline((NameNodes(), LiftConstants(), DropNoOps(), FoldConstants())).apply(graph)
    assert value(graph, "s").tolist() == [1, 4, 9, 16]
    assert ops(graph) == ["Add"]


def test_what_a_caller_may_feed_is_not_folded() -> None:
    text = "g (float[4] x) => (float[4] y) { k = Neg(w) s = Add(k, v) t = Mul(v, v) a = Add(x, s) y = Add(a, t) }"
    made = model(text, w=values(4), v=values(4))
    made.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [4]))
    graph, changes = fold(made)
    assert changes.changed == ("t",)
    fed = sample(made) | {"w": np.float32([1, 2, 3, 4])}
    assert difference(outputs(graph, fed), outputs(made, fed)) <= 1e-6


W, AXES, NONE = constant("w", values(4)), constant("a", np.array([0])), Variable("")


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    [
        ("Add", [W], {}),
        ("Add", [W, AXES], {}),
        ("Cast", [W], {}),
        ("Cast", [W], {"to": "x"}),
        ("Cast", [W], {"to": [1]}),
        ("Cast", [W], {"to": 999}),
        ("Concat", [], {"axis": 0}),
        ("ConstantOfShape", [NONE], {}),
        ("Gather", [W], {}),
        ("Reshape", [W], {}),
        ("Reshape", [W, W, W], {}),
        ("Shape", [], {}),
        ("Slice", [W, AXES], {}),
        ("Squeeze", [NONE, AXES], {}),
        ("Transpose", [NONE], {}),
        ("Transpose", [W], {"perm": [0, 0]}),
        ("Transpose", [W], {"perm": "x"}),
        ("Unsqueeze", [W], {}),
    ],
)
def test_damaged_nodes_are_left(op: str, inputs: list[Tensor], attributes: dict[str, object]) -> None:
    x, k, y = (Variable(name, np.dtype(np.float32), [4]) for name in "xky")
    graph = Graph([Node(op, "bad", attributes, inputs, [k]), Node("Add", "", {}, [x, k], [y])], [x], [y], opset=17)
    assert not FoldConstants().apply(graph).changed
    assert ops(graph) == [op, "Add"]


def test_a_chain_of_thousands_is_folded_in_linear_time() -> None:
    chain = " ".join(f"k{i + 1} = {('Neg', 'Exp', 'Mul')[i % 3]}(k{i}{', k0' * (i % 3 == 2)})" for i in range(6000))
    graph = as_graph(model(f"g (float[1] x) => (float[1] y) {{ {chain} y = Add(x, k6000) }}", k0=values(1)))
    assert FoldConstants().apply(graph).changed == ("k6000",)
    assert ops(graph) == ["Add"]
