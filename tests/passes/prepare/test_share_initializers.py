"""ShareInitializers keeps one of several equal initializers, wherever they are read."""

from __future__ import annotations

import numpy as np
import onnx
from model_texts import Array, difference, initializer_names, model, nodes, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import Graph, as_graph, to_model
from onnxq.passes import RemoveUnused, ShareInitializers
from onnxq.rewrite import Changes


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
