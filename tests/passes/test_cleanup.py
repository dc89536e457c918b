"""What computes nothing or the same twice goes; names are unique, metadata and old opsets leave."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_texts import (
    Array,
    apply_once,
    difference,
    initializer_names,
    model,
    named_graph,
    node_named,
    nodes,
    ops,
    outputs,
    sample,
    values,
)
from model_zoo import repeated_and_empty_node_names, zoo
from onnx import ModelProto, helper, numpy_helper

from onnxq.errors import ModelError
from onnxq.ir import Graph, all_graphs, as_graph, constant, metadata_bytes, to_model
from onnxq.passes import (
    DropNoOps,
    DropWheres,
    MergeEqual,
    NameNodes,
    NameTensors,
    RemoveUnused,
    ShareInitializers,
    StripMetadata,
    UpgradeOpset,
)
from onnxq.rewrite import Changes, Pipeline

# DropNoOps ------------------------------------------------------------------------------------------------------------


def drop(made: ModelProto) -> tuple[Graph, Changes]:
    graph = as_graph(made)
    changes = DropNoOps().apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0
    return graph, changes


def test_a_chain_of_identities_goes() -> None:
    made = model("g (float[4] x) => (float[4] y) { [a] p = Identity(x) [b] q = Identity(p) y = Add(p, q) }")
    graph, changes = drop(made)
    assert changes == Changes(("a", "b"))
    assert [tensor.name for tensor in nodes(graph)[0].inputs] == ["x", "x"]


def test_an_identity_of_a_constant_makes_the_constant_visible() -> None:
    made = model("g (float[2, 4] x) => (float[2, 3] y) { [a] v = Identity(w) y = MatMul(x, v) }", w=values(4, 3))
    graph, changes = drop(made)
    assert changes.changed == ("a",)
    assert nodes(graph)[0].inputs[1].name == "w"


@pytest.mark.parametrize("source", ["x", "w"])
def test_an_identity_that_makes_a_graph_output_stays(source: str) -> None:
    made = model(f"g (float[4] x) => (float[4] y) {{ [a] y = Identity({source}) }}", w=values(4))
    graph, changes = drop(made)
    assert changes == Changes((), (("a", "its output is an output of the graph"),))
    assert ops(graph) == ["Identity"]


def test_the_last_identity_of_a_chain_to_a_graph_output_stays() -> None:
    graph, changes = drop(model("g (float[4] x) => (float[4] y) { [a] p = Identity(x) [b] y = Identity(p) }"))
    assert changes.changed == ("a",)
    assert [node.name for node in nodes(graph)] == ["b"]


def test_what_makes_its_input_makes_the_output_under_its_name() -> None:
    made = model("g (float[4] x) => (float[N] y) { a = Exp(x) [a] p = Identity(a) [b] y = Identity(p) }")
    graph, changes = drop(made)
    assert changes == Changes(("a", "b"))
    assert ops(graph) == ["Exp"]
    assert [(tensor.name, tensor.shape) for tensor in graph.outputs] == [("y", ["N"])]


def test_a_tensor_has_one_name_as_an_output() -> None:
    made = model("g (float[4] x) => (float[4] y, float[4] z) { a = Exp(x) [a] y = Identity(a) [b] z = Identity(a) }")
    graph, changes = drop(made)
    assert changes.changed == ("a",)
    assert ops(graph) == ["Exp", "Identity"]


def test_bodies_read_what_an_identity_around_them_read() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            [a] p = Identity(x)
            y = If (c) <
                then_branch = yes () => (float[4] t) { [b] q = Identity(p) t = Neg(q) },
                else_branch = no () => (float[4] e) { [d] e = Identity(p) }>
        }"""
    )
    graph, changes = drop(made)
    assert changes == Changes(("a", "b"), (("d", "its output is an output of the graph"),))
    assert ops(graph) == ["If", "Neg", "Identity"]


def test_a_loop_that_hands_its_condition_on_keeps_doing_so() -> None:
    made = model(
        """g (float[4] x) => (float[4] y) {
            y = Loop (trips, keep, x) <
                body = b (int64 i, bool on, float[4] s) => (bool off, float[4] t) {
                    [a] off = Identity(on)  [d] r = Identity(s)  t = Mul(r, r) }>
        }""",
        trips=np.array(2), keep=np.array(True),
    )  # fmt: skip
    graph, changes = drop(made)
    assert changes.changed == ("d",)
    assert ops(graph) == ["Loop", "Identity", "Mul"]


@pytest.mark.parametrize(
    ("operator", "opset"),
    [
        ("Dropout <ratio = 0.5> (x)", 7),
        ("Dropout <ratio = 0.5> (x)", 11),
        ("Dropout(x)", 12),
        ("Dropout(x, ratio)", 13),
        ("Dropout(x, ratio, no)", 13),
        ("Dropout(x, , no)", 21),
    ],
)
def test_dropout_at_inference_goes(operator: str, opset: int) -> None:
    weights = {"ratio": np.array(0.5, np.float32), "no": np.array(False)} if opset > 11 else {}
    made = model(f"g (float[4] x) => (float[4] y) {{ [a] d = {operator} y = Neg(d) }}", opset=opset, **weights)
    graph, changes = drop(made)
    assert changes.changed == ("a",)
    assert ops(graph) == ["Neg"]


def test_a_mask_that_nobody_reads_goes_too() -> None:
    graph, changes = drop(model("g (float[4] x) => (float[4] y) { [a] d, m = Dropout(x) y = Neg(d) }"))
    assert changes.changed == ("a",)
    assert ops(graph) == ["Neg"]


@pytest.mark.parametrize(("output", "node"), [("mask", ""), ("z", "z = Not(mask)")])
def test_a_mask_that_is_used_keeps_its_dropout(output: str, node: str) -> None:
    made = model(f"g (float[4] x) => (float[4] y, bool[4] {output}) {{ [a] d, mask = Dropout(x) y = Neg(d) {node} }}")
    graph, changes = drop(made)
    assert changes == Changes((), (("a", "its mask is used"),))
    assert "Dropout" in ops(graph)


@pytest.mark.parametrize("fed", [True, False])
def test_a_dropout_that_may_train_stays(fed: bool) -> None:
    weights = {} if fed else {"train": np.array(True)}
    inputs = "float[4] x, bool train" if fed else "float[4] x"
    made = model(
        f"g ({inputs}) => (float[4] y) {{ [a] d = Dropout(x, ratio, train) y = Neg(d) }}",
        ratio=np.array(0.5, np.float32), **weights,
    )  # fmt: skip
    graph = as_graph(made)
    assert DropNoOps().apply(graph) == Changes((), (("a", "it may run in training mode"),))
    assert ops(graph) == ["Dropout", "Neg"]


def test_an_operator_of_the_same_name_in_another_domain_stays() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { d = local.Identity(x) y = Neg(d) }"))
    assert not DropNoOps().apply(graph)


# DropWheres -----------------------------------------------------------------------------------------------------------

CONDITIONS = {
    "yes": np.array(True), "no": np.zeros((1, 1), bool), "some": np.array([True, False, True, True]),
    "tall": np.ones((5, 1, 1), bool), "none": np.zeros(0, bool),
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Where(yes, x, z) y = Exp(a)", ["Exp"]),
        ("a = Where(no, z, x) y = Exp(a)", ["Exp"]),
        ("a = Where(no, x, z) y = Exp(a)", ["Where", "Exp"]),
        ("a = Where(some, x, z) y = Exp(a)", ["Where", "Exp"]),
        ("a = Where(tall, x, z) y = Exp(a)", ["Where", "Exp"]),
    ],
)
def test_wheres(body: str, left: list[str]) -> None:
    made = model(f"g (float[B, 4] x, float[4] z) => (float y) {{ {body} }}", **CONDITIONS)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    apply_once(DropWheres(), graph)
    assert ops(graph) == left
    for free in (1, 3):
        assert difference(outputs(graph, sample(made, 0, free)), outputs(made, sample(made, 0, free))) == 0


def test_refusals_have_their_reasons() -> None:
    text = "a = local.F(x) b = Where(yes, a, x) c = Where(none, x, x) d = Where(yes, z, x) y = Where(some, x, z)"
    graph = named_graph(model(f"g (float[B, 4] x, float[4] z) => (float y) {{ {text} }}", **CONDITIONS))
    assert [reason for _, reason in DropWheres().apply(graph).skipped] == [
        "the shape of an operand is not known",
        "its condition differs from entry to entry",
        "its input has another shape than its output",
        "its condition differs from entry to entry",
    ]


# RemoveUnused ---------------------------------------------------------------------------------------------------------


def test_nodes_without_effect_go_with_what_only_they_read() -> None:
    made = model(
        "g (float[4] x) => (float[4] y) { y = Add(x, w) [a] p = Mul(x, v) [b] q = Mul(p, w) }", w=values(4), v=values(4)
    )
    graph = as_graph(made)
    assert RemoveUnused().apply(graph) == Changes(("a", "b", "v"))
    assert ops(graph) == ["Add"]
    assert initializer_names(to_model(graph)) == {"w"}


def test_nodes_without_names_are_reported_too() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { y = Neg(x) p = Exp(x) }"))
    assert RemoveUnused().apply(graph) == Changes(("Exp_p",))
    assert not RemoveUnused().apply(graph)


def test_a_weight_that_lost_its_last_reader_goes() -> None:
    made = model("g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }", w=values(4, 4))
    graph = as_graph(made)
    graph.nodes[0].inputs[1] = constant("other", np.eye(4, dtype=np.float32))
    assert RemoveUnused().apply(graph) == Changes(("w",))
    assert initializer_names(to_model(graph)) == {"other"}


def test_initializers_that_no_node_ever_read_go_and_inputs_stay() -> None:
    made = model(
        """g (float[4] x, float[4] z, float[4] v, float[4] u) => (float[4] y)
        <float[4] v = {1, 2, 3, 4}, float[4] u = {4, 3, 2, 1}> { y = Neg(x) d = Abs(u) }""",
        w=values(4),
    )
    graph = as_graph(made)
    assert RemoveUnused().apply(graph).changed == ("Abs_d", "w")
    written = to_model(graph)
    assert initializer_names(written) == {"v", "u"}
    assert [info.name for info in written.graph.input] == ["x", "z", "v", "u"]
    given = {"x": values(4), "z": values(4), "v": values(4), "u": values(4)}
    assert difference(outputs(graph, given), outputs(made, given)) == 0


def test_what_a_body_reads_is_used_until_the_node_of_the_body_goes() -> None:
    text = """g (float[4] x, bool c) => (float[4] {out}) {{
        h = Neg(x)
        [branch] y = If (c) <
            then_branch = yes () => (float[4] t) {{ [dead] d = Exp(h) t = Add(h, w) }},
            else_branch = no () => (float[4] e) {{ e = Neg(h) }}>
        z = Abs(x)
    }}"""
    used = model(text.format(out="y"), w=values(4))
    graph = as_graph(used)
    assert RemoveUnused().apply(graph).changed == ("Abs_z", "dead")
    assert difference(outputs(graph, sample(used)), outputs(used, sample(used))) == 0

    graph = as_graph(model(text.format(out="z"), w=values(4)))
    assert {"Neg_h", "branch", "w"} <= set(RemoveUnused().apply(graph).changed)
    assert ops(graph) == ["Abs"]
    assert initializer_names(to_model(graph)) == set()


def test_initializers_of_bodies_go_with_their_readers() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            y = If (c) <
                then_branch = yes () => (float[4] t) <float[2] k = {1, 2}> { [dead] d = Neg(k) t = Abs(x) },
                else_branch = no () => (float[4] e) { e = Neg(x) }>
        }"""
    )
    graph = as_graph(made)
    assert RemoveUnused().apply(graph).changed == ("dead", "k")
    assert [node.op for node in nodes(graph)] == ["If", "Abs", "Neg"]


# MergeEqual -----------------------------------------------------------------------------------------------------------

SIGNATURE = "g (float[4, 4] x, float[4, 4] z, bool c) => (float y)"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Exp(x) b = Exp(x) y = Sub(a, b)", ["Exp", "Sub"]),
        ("a = Exp(x) b = Neg(a) d = Exp(x) e = Neg(d) y = Div(b, e)", ["Exp", "Neg", "Div"]),
        ("a = Add(x, z) b = Add(z, x) y = Sub(a, b)", ["Add", "Sub"]),
        ("a = Sub(x, z) b = Sub(z, x) y = Add(a, b)", ["Sub", "Sub", "Add"]),
        ("a = Softmax<axis=0>(x) b = Softmax<axis=1>(x) y = Add(a, b)", ["Softmax", "Softmax", "Add"]),
        ("a = Transpose<perm=[1,0]>(x) b = Transpose<perm=[1,0]>(x) y = MatMul(a, b)", ["Transpose", "MatMul"]),
        ("a = LeakyRelu<alpha=0.0>(x) b = LeakyRelu<alpha=-0.0>(x) y = Add(a, b)", ["LeakyRelu", "LeakyRelu", "Add"]),
        ("a = MatMul(x, w) b = MatMul(x, v) y = Sub(a, b)", ["MatMul", "Sub"]),
        ("a = Exp(x) y = Exp(x)", ["Exp"]),
        ("a, b = Split(x) d, e = Split(x) y = Concat<axis=0>(a, e)", ["Split", "Concat"]),
        ("a = Clip(x, , one) b = Clip(x, , one) y = Sub(a, b)", ["Clip", "Sub"]),
    ],
)
def test_equal_nodes(body: str, left: list[str]) -> None:
    made = model(f"{SIGNATURE} {{ {body} }}", w=values(4, 4), v=values(4, 4), one=np.array(1, np.float32))
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    ShareInitializers().apply(graph)
    apply_once(MergeEqual(), graph)
    RemoveUnused().apply(graph)
    assert ops(graph) == left
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_the_node_that_stays_stands_for_those_that_go() -> None:
    made = model(f"{SIGNATURE} {{ [a] a = Exp(x) [b] b = Exp(x) [c] y = Sub(a, b) }}")
    graph = named_graph(made)
    MergeEqual().apply(graph)
    assert [node.origins for node in graph.nodes] == [(("a", "Exp"), ("b", "Exp")), ()]


def test_random_numbers_and_other_domains_stay() -> None:
    text = "a = RandomNormalLike(x) b = RandomNormalLike(x) d = local.F(x) e = local.F(x) y = Sum(a, b, d, e)"
    graph = named_graph(model(f"{SIGNATURE} {{ {text} }}"))
    assert not MergeEqual().apply(graph)


def test_two_outputs_keep_their_names_and_one_gives_its_own() -> None:
    made = model(
        "g (float[4] x) => (float[4] y, float[4] z) { a = Exp(x) y = Exp(x) z = Exp(x) b = Neg(a) c = Neg(b) }"
    )
    graph = named_graph(made)
    apply_once(MergeEqual(), graph)
    assert ops(graph) == ["Exp", "Exp", "Neg", "Neg"]
    assert [tensor.name for tensor in graph.outputs] == ["y", "z"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_bodies_read_what_stands_before_them_and_branches_do_not_share() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            a = Exp(x)
            t = If (c) <
                then_branch = yes () => (float[4] p) { q = Exp(x) r = Neg(x) p = Add(q, r) },
                else_branch = no () => (float[4] e) { s = Neg(x) u = Sqrt(x) e = Add(s, u) }>
            d = Sqrt(x)
            f = Add(a, t)
            y = Add(f, d)
        }"""
    )
    graph = named_graph(made)
    assert len(apply_once(MergeEqual(), graph).changed) == 1
    assert ops(graph) == ["Exp", "If", "Sqrt", "Add", "Add", "Neg", "Add", "Neg", "Sqrt", "Add"]
    for seed in (0, 1):
        inputs = {**sample(made, seed), "x": np.ones(4, np.float32)}
        assert difference(outputs(graph, inputs), outputs(made, inputs)) == 0


def test_an_output_of_a_body_is_made_in_the_body() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            a = Exp(x)
            t = If (c) <
                then_branch = yes () => (float[4] p) { p = Exp(x) },
                else_branch = no () => (float[4] e) { e = Neg(x) }>
            y = Add(a, t)
        }"""
    )
    graph = named_graph(made)
    assert not MergeEqual().apply(graph)


def test_long_chains_merge_in_one_walk() -> None:
    chains = " ".join(f"{name}{i + 1} = Neg({name}{i})" for i in range(2000) for name in "ab")
    made = model(f"g (float[4] x) => (float[4] y) {{ a0 = Exp(x) b0 = Exp(x) {chains} y = Add(a2000, b2000) }}")
    graph = named_graph(made)
    Pipeline((MergeEqual(),)).apply(graph)
    assert len(graph.nodes) == 2002


# ShareInitializers ----------------------------------------------------------------------------------------------------


def share(made: ModelProto) -> tuple[Graph, Changes]:
    graph = as_graph(made)
    changes = ShareInitializers().apply(graph)
    assert not ShareInitializers().apply(graph)
    RemoveUnused().apply(graph)
    onnx.checker.check_model(to_model(graph))
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0
    return graph, changes


def two_sums(one: Array, other: Array, kind: str = "float") -> ModelProto:
    return model(f"g ({kind}[4] x) => ({kind}[4] y) {{ a = Add(x, one) y = Add(a, other) }}", one=one, other=other)


def test_equal_initializers_become_the_first() -> None:
    graph, changes = share(two_sums(values(4), values(4)))
    assert changes == Changes(("other",))
    assert initializer_names(to_model(graph)) == {"one"}
    assert [node.inputs[1].name for node in nodes(graph)] == ["one", "one"]


def test_values_shape_and_type_must_agree() -> None:
    zeros = np.zeros(4, np.float32)
    assert not share(two_sums(values(4), values(4, seed=1)))[1]
    made = model(
        "g (float[4] x) => (float[4] y) { a = Add(x, one) b = Reshape(other, four) c = Cast <to = 1> (third)"
        " d = Add(a, b) y = Add(c, d) }",
        one=zeros, other=zeros.reshape(2, 2), third=np.zeros(4, np.int32), four=np.array([4]),
    )  # fmt: skip
    assert not share(made)[1]


def test_negative_zero_is_not_zero() -> None:
    assert not share(two_sums(np.zeros(4, np.float32), np.full(4, -0.0, np.float32)))[1]


def test_values_that_are_nan_are_equal_when_their_bytes_are() -> None:
    nan = np.array([1, np.nan, 2, 3], np.float32)
    graph = as_graph(two_sums(nan, nan.copy()))
    assert ShareInitializers().apply(graph).changed == ("other",)


def test_text_is_not_mistaken_for_equal_text() -> None:
    made = model(
        "g (string[1] x) => (bool[1] y) { a = Equal(x, one) b = Equal(x, other) y = Or(a, b) }",
        opset=19, one=np.array(["a"], object), other=np.array(["b"], object),
    )  # fmt: skip
    graph = as_graph(made)
    assert not ShareInitializers().apply(graph)
    assert [outputs(graph, {"x": np.array([text], object)})["y"][0] for text in "abc"] == [True, True, False]


def test_an_initializer_that_nothing_read_to_begin_with_is_no_change() -> None:
    made = two_sums(values(4), values(4, seed=1))
    made.graph.initializer.add().CopyFrom(made.graph.initializer[0])
    made.graph.initializer[2].name = "unread"
    graph, changes = share(made)
    assert not changes
    assert initializer_names(to_model(graph)) == {"one", "other"}


def test_what_a_caller_may_feed_instead_is_left() -> None:
    made = two_sums(values(4), values(4))
    made.graph.input.append(onnx.helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, [4]))
    graph, changes = share(made)
    assert not changes
    assert initializer_names(to_model(graph)) == {"one", "other"}


def test_what_the_model_returns_is_left() -> None:
    made = two_sums(values(4), values(4))
    made.graph.output.append(onnx.helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, [4]))
    _, changes = share(made)
    assert not changes


def test_copies_in_bodies_become_one_around_them() -> None:
    weight = "<float[4] {0} = {{1, 2, 3, 4}}>"
    made = model(
        f"""g (float[4] x, bool c) => (float[4] y, float[4] z) {{
            y = If (c) <
                then_branch = yes () => (float[4] t) {weight.format("w")} {{ t = Add(x, w) }},
                else_branch = no () => (float[4] e) {weight.format("v")} {{ e = Mul(x, v) }}>
            z = If (c) <
                then_branch = yes2 () => (float[4] t2) {weight.format("u")} {{ t2 = Sub(x, u) }},
                else_branch = no2 () => (float[4] e2) <float[4] w = {{5, 6, 7, 8}}> {{ e2 = Mul(x, w) }}>
        }}"""
    )
    graph, changes = share(made)
    assert changes.changed == ("v", "u")
    written = to_model(graph).graph
    assert [tensor.name for tensor in written.initializer] == ["w.1"]
    assert [len(branch.g.initializer) for node in written.node for branch in node.attribute] == [0, 0, 0, 1]


def test_scalars_of_several_bodies_stay_apart_on_wish() -> None:
    then = "yes () => (float[4] t) <float u = {2}, float v = {2}> { s = Add(x, u) t = Add(s, v) }"
    other = "no () => (float[4] e) <float w = {2}> { e = Mul(x, w) }"
    made = model(
        f"g (float[4] x, bool c) => (float[4] y) {{ y = If (c) <then_branch = {then}, else_branch = {other}> }}"
    )
    assert ShareInitializers(scalars_apart=True).apply(as_graph(made)).changed == ("v",)
    assert ShareInitializers().apply(as_graph(made)).changed == ("v", "w")


def test_scalars_are_shared() -> None:
    _, changes = share(two_sums(np.array(2, np.float32), np.array(2, np.float32)))
    assert changes.changed == ("other",)


def test_statistics_that_training_moves_on_stay_apart() -> None:
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    text = """g (float[8, 4, 2, 2] x) => (float[8, 4, 2, 2] y) {
        y, m, v = BatchNormalization <training_mode = 1> (x, scale, bias, mean, variance) }"""
    graph = as_graph(model(text, scale=ones, bias=zeros, mean=zeros, variance=ones))
    assert not ShareInitializers().apply(graph)


# NameNodes ------------------------------------------------------------------------------------------------------------


def test_nodes_without_names_are_named_after_operator_and_output() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { a = Neg(x) [Neg_a] b = Exp(a) y = Add(a, b) }"))
    assert NameNodes().apply(graph) == Changes(("Neg_a.1", "Add_y"))
    assert [node.name for node in nodes(graph)] == ["Neg_a.1", "Neg_a", "Add_y"]


def test_the_first_of_several_nodes_keeps_the_name_over_all_bodies() -> None:
    made = repeated_and_empty_node_names()
    with pytest.raises(ModelError, match="same"):
        outputs(made, sample(made))
    graph = as_graph(made)
    changes = NameNodes().apply(graph)
    assert changes.changed == ("same.1", "Tanh_d", "same.2", "Neg_e")
    names = [node.name for node in nodes(graph)]
    assert names == ["same", "same.1", "Tanh_d", "branch", "same.2", "Neg_e"]
    assert outputs(graph, sample(made))["y"].shape == (2, 16)


def test_a_new_name_is_no_name_of_a_tensor_either() -> None:
    graph = as_graph(model("g (float[4] Neg_y) => (float[4] y) { y = Neg(Neg_y) }"))
    assert NameNodes().apply(graph).changed == ("Neg_y.1",)


def test_nodes_whose_outputs_are_omitted_are_named_after_the_first_that_is_not() -> None:
    made = model(
        "g (float[3, 2, 4] x) => (float[1, 2, 5] h) { , h = GRU <hidden_size = 5> (x, w, r) }",
        w=values(1, 15, 4), r=values(1, 15, 5),
    )  # fmt: skip
    graph = as_graph(made)
    assert NameNodes().apply(graph).changed == ("GRU_h",)


@given(names=st.lists(st.sampled_from(["", "n", "n.1", "Neg_t1", "t1", "/a:0;é"]), min_size=1, max_size=12))
@settings(max_examples=50)
def test_any_names_become_unique_and_unique_ones_stay(names: list[str]) -> None:
    steps = " ".join(f"t{i + 1} = Neg(t{i})" for i in range(len(names)))
    made = model(f"g (float[4] t0) => (float[4] t{len(names)}) {{ {steps} }}")
    for node, name in zip(made.graph.node, names, strict=True):
        node.name = name
    graph = as_graph(made)
    changes = NameNodes().apply(graph)
    found = [node.name for node in graph.nodes]
    assert all(found)
    assert len(set(found)) == len(found)
    firsts = {name: names.index(name) for name in names if name}
    assert all(found[index] == name for name, index in firsts.items())
    assert set(changes.changed) == {new for new, old in zip(found, names, strict=True) if new != old}


# NameTensors ----------------------------------------------------------------------------------------------------------

ALIKE = """g (float[4,8] x, bool c) => (float[4,8] y) {
    h = MatMul(x, w)
    y = If (c) <
        then_branch = t () => (float[4,8] y) { a = Neg(h) b = MatMul(a, w) y = Tanh(b) },
        else_branch = e () => (float[4,8] y) { a = Abs(h) b = MatMul(a, w) y = Sin(b) }>
}"""


def tensor_names(graph: Graph) -> list[str]:
    """The names of what all graphs are given, store and make, each tensor once."""
    found = {
        tensor: tensor.name
        for scope in all_graphs(graph)
        for tensor in (*scope.inputs, *scope.initializers, *(one for node in scope.nodes for one in node.outputs))
    }
    return [name for name in found.values() if name]


def test_the_first_graph_keeps_a_name_and_readers_follow() -> None:
    made = model(ALIKE, w=values(8, 8))
    graph = as_graph(made)
    assert apply_once(NameTensors(), graph) == Changes(("y.1", "a.1", "b.1", "y.2"))
    assert tensor_names(graph) == ["x", "c", "w", "h", "y", "a", "b", "y.1", "a.1", "b.1", "y.2"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0


def test_declared_types_go_with_their_tensors() -> None:
    made = model(ALIKE, w=values(8, 8))
    for attribute in made.graph.node[1].attribute:
        attribute.g.value_info.append(helper.make_tensor_value_info("a", 1, [4, 8]))
    graph = as_graph(made)
    NameTensors().apply(graph)
    bodies = {attribute.name: attribute.g for attribute in to_model(graph).graph.node[1].attribute}
    assert [info.name for info in bodies["then_branch"].value_info] == ["a"]
    assert [info.name for info in bodies["else_branch"].value_info] == ["a.1"]
    assert bodies["else_branch"].output[0].name == "y.2"


def shadowing() -> ModelProto:
    """A Loop whose state is called like an input outside, and whose constant like one of the other body."""
    made = model(
        """g (float[4] s, int64 m, bool c) => (float[4] y) {
            t = Loop (m, , s) <body = b (int64 i, bool g, float[4] s) => (bool h, float[4] u) {
                h = Identity(g) u = Mul(s, k) }>
            y = If (c) <
                then_branch = p () => (float[4] u) { u = Sub(t, k) },
                else_branch = e () => (float[4] u) { u = Add(t, s) }>
        }"""
    )
    loop, branch = made.graph.node
    for body, number in ((loop.attribute[0].g, 0.5), (branch.attribute[0].g, 3.0)):
        body.initializer.append(numpy_helper.from_array(np.full(4, number, np.float32), "k"))
    return made


def test_inputs_and_constants_of_bodies_hide_nothing_outside_any_longer() -> None:
    made = shadowing()
    graph = as_graph(made)
    changes = apply_once(NameTensors(), graph)
    assert set(changes.changed) == {"s.1", "k.1", "u.1", "u.2"}
    assert len(set(tensor_names(graph))) == len(tensor_names(graph))
    assert [tensor.name for tensor in graph.inputs] == ["s", "m", "c"]
    assert [node.inputs[1].name for node in nodes(graph) if node.op == "Add"] == ["s"]
    inputs = {"s": np.float32([1, 2, 3, 4]), "m": np.array(2), "c": np.array(True)}
    for inputs["c"] in (np.array(True), np.array(False)):
        assert difference(outputs(graph, inputs), outputs(made, inputs)) == 0


def test_unique_names_and_those_of_the_main_graph_stay() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { y = Add(x, k) }", k=values(4)))
    assert not NameTensors().apply(graph)


# StripMetadata --------------------------------------------------------------------------------------------------------


def test_nodes_lose_what_was_written_about_them() -> None:
    made = model("g (float[4,8] x) => (float[4,8] y) { [one] h = MatMul(x, w) [two] y = Relu(h) }", w=values(8, 8))
    made.graph.node[0].metadata_props.add(key="namespace", value="model/layer")
    made.graph.node[1].doc_string = "relu, line 7"
    graph = as_graph(made)
    assert apply_once(StripMetadata(), graph) == Changes(("one", "two"))
    assert metadata_bytes(graph) == 0
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_new_nodes_and_bare_ones_have_none() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { y = Relu(x) }"))
    assert not StripMetadata().apply(graph)


# UpgradeOpset ---------------------------------------------------------------------------------------------------------

OLD: dict[str, Callable[[], ModelProto]] = {name: build for name, build in zoo() if name.startswith("opset_")}


@pytest.mark.parametrize("version", [13, 17, 21])
@pytest.mark.parametrize("name", OLD)
def test_a_converted_model_computes_the_same(name: str, version: int) -> None:
    made = OLD[name]()
    graph = as_graph(made)
    before = graph.opset
    changes = UpgradeOpset(version).apply(graph)
    assert bool(changes) is (before < version)
    assert graph.opset == max(before, version)
    onnx.checker.check_model(to_model(graph), full_check=True)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= 1e-6
    assert not UpgradeOpset(version).apply(graph)


def test_nodes_still_stand_for_what_they_stood_for() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { [n] y = Neg(x) }", opset=11))
    graph.nodes[0].origins = (("a", "Sub"), ("b", "Mul"))
    UpgradeOpset(13).apply(graph)
    assert graph.nodes[0].origins == (("a", "Sub"), ("b", "Mul"))


def test_changes_say_from_which_opset_to_which() -> None:
    assert UpgradeOpset(13).apply(as_graph(OLD["opset_11"]())) == Changes(("opset 11 to 13",))


def test_attributes_that_became_inputs_are_constants() -> None:
    made = model(
        """g (float[2, 1, 4] x) => (float[4, 2] y, float[1, 2, 4] z) {
            [squeeze] s = Squeeze <axes = [1]> (x)  [unsqueeze] z = Unsqueeze <axes = [0]> (s)
            [sum] r = ReduceSum <axes = [1], keepdims = 1> (x)  [swap] y = Transpose <perm = [1, 0]> (s)
        }""",
        opset=11,
    )
    graph = as_graph(made)
    UpgradeOpset(13).apply(graph)
    for name, axes in (("squeeze", [1]), ("unsqueeze", [0]), ("sum", [1])):
        node = node_named(graph, name)
        assert "axes" not in node.attrs
        source = node.inputs[1]
        stored = source if not source.inputs else source.inputs[0].attrs["value"]
        assert stored.values.tolist() == axes
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


@pytest.mark.parametrize("version", [7, 16, 17])
def test_a_model_that_is_new_enough_is_not_touched(version: int) -> None:
    graph = as_graph(model("g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }", w=values(4, 4)))
    written, before = to_model(graph), graph.nodes
    assert not UpgradeOpset(version).apply(graph)
    assert graph.nodes is before
    assert to_model(graph) == written


def test_bodies_are_converted_and_still_know_the_graph_around_them() -> None:
    made = model(
        """g (float[2, 1] x, bool c) => (float[2] y) {
            y = If (c) <
                then_branch = yes () => (float[2] t) { m = Mul(x, w) t = Squeeze <axes = [1]> (m) },
                else_branch = no () => (float[2] e) { e = Squeeze <axes = [1]> (x) }>
        }""",
        opset=11, w=values(2, 1),
    )  # fmt: skip
    graph = as_graph(made)
    UpgradeOpset(13).apply(graph)
    assert all(body.parent is graph for body in graph.nodes[-1].subgraphs())
    assert all("axes" not in node.attrs for node in nodes(graph, "Squeeze"))
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) <= 1e-6


def test_weights_are_the_same_bytes_afterwards() -> None:
    made = OLD["opset_9"]()
    graph = as_graph(made)
    UpgradeOpset(21).apply(graph)
    weight = nodes(graph, "Conv")[0].inputs[1]
    np.testing.assert_array_equal(weight.values, values(8, 3, 3, 3), strict=True)


def test_a_version_that_onnxruntime_does_not_load_is_an_error() -> None:
    with pytest.raises(ModelError, match="1000"):
        UpgradeOpset(1000).apply(as_graph(OLD["opset_21"]()))
    assert ops(as_graph(OLD["opset_21"]()))[0] == "Conv"
