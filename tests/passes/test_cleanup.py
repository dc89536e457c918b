"""What computes nothing or the same twice goes; names are unique, metadata and old opsets leave."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_texts import (
    apply_once,
    difference,
    initializer_names,
    model,
    named_graph,
    nodes,
    outputs,
    sample,
    values,
)
from model_zoo import repeated_and_empty_node_names, zoo
from onnx import ModelProto, helper
from rule_cases import Case, Rule, table

from onnxq.errors import ModelError
from onnxq.ir import Graph, all_graphs, as_graph, metadata_bytes, to_model
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
from onnxq.rewrite import Changes


def choice(then: str, other: str, *, before: str = "", behind: str = "", result: str = "y") -> str:
    """A graph with an If whose result is y."""
    return f"""(float[4] x, bool c) => ({result}) {{ {before} y = If (c) <
        then_branch = yes () => (float[4] t) {then}, else_branch = no () => (float[4] e) {other}> {behind} }}"""


drop = Rule(DropNoOps(), "float[4] x", w=values(4, 3), v=values(4), ratio=0.5, no=False, train=True, trips=np.array(2))
OUTPUT = "its output is an output of the graph"
DROPPED = [
    drop("[a] p = Identity(x) [b] q = Identity(p) y = Add(p, q)", "Add", changed="a b",
         holds=lambda graph: [tensor.name for tensor in graph.nodes[0].inputs] == ["x", "x"]),
    drop("[a] m = Identity(w) y = MatMul(x, m)", "MatMul", inputs="float[2, 4] x", changed="a",
         holds=lambda graph: graph.nodes[0].inputs[1].name == "w"),
    drop("[a] y = Identity(x)", stays=OUTPUT),
    drop("[a] y = Identity(v)", stays=OUTPUT),
    drop("[a] p = Identity(x) [b] y = Identity(p)", "Identity", changed="a",
         holds=lambda graph: graph.nodes[0].name == "b"),
    drop("(float[4] x) => (float[N] y) { a = Exp(x) [a] p = Identity(a) [b] y = Identity(p) }", "Exp", changed="a b",
         holds=lambda graph: [output.name for output in graph.outputs] == ["y"]),
    drop("(float[4] x) => (y, z) { a = Exp(x) [a] y = Identity(a) [b] z = Identity(a) }", "Exp Identity", changed="a"),
    drop(choice("{ [b] q = Identity(p) t = Neg(q) }", "{ [d] e = Identity(p) }", before="[a] p = Identity(x)"),
         "If Neg Identity", changed="a b"),
    drop("""(float[4] x) => (float[4] y) { y = Loop (trips, train, x) <body = b (int64 i, bool on, float[4] s) =>
         (bool off, float[4] t) { [a] off = Identity(on)  [d] r = Identity(s)  t = Mul(r, r) }> }""",
         "Loop Identity Mul", changed="d"),
    *(drop(f"[a] d = {dropout} y = Neg(d)", "Neg", opset=opset, changed="a")
      for dropout, opset in [("Dropout <ratio = 0.5> (x)", 7), ("Dropout <ratio = 0.5> (x)", 11), ("Dropout(x)", 12),
                             ("Dropout(x, ratio)", 13), ("Dropout(x, ratio, no)", 13), ("Dropout(x, , no)", 21)]),
    drop("[a] d, m = Dropout(x) y = Neg(d)", "Neg", changed="a"),
    drop("(float[4] x) => (y, mask) { [a] d, mask = Dropout(x) y = Neg(d) }", stays="its mask is used"),
    drop("(float[4] x) => (y, z) { [a] d, mask = Dropout(x) y = Neg(d) z = Not(mask) }", stays="its mask is used"),
    drop("[a] d = Dropout(x, ratio, train) y = Neg(d)", runs=False, stays="it may run in training mode"),
    drop("[a] d = Dropout(x, ratio, fed) y = Neg(d)", inputs="float[4] x, bool fed", runs=False,
         stays="it may run in training mode"),
    drop("d = local.Identity(x) y = Neg(d)", stays=""),
]  # fmt: skip

where = Rule(
    DropWheres(), "float[B, 4] x, float[4] z", yes=True, no=np.zeros((1, 1), bool), none=np.zeros(0, bool),
    some=np.array([True, False, True, True]), tall=np.ones((5, 1, 1), bool),
)  # fmt: skip
WHERES = [
    where("a = Where(yes, x, z) y = Exp(a)", "Exp"),
    where("a = Where(no, z, x) y = Exp(a)", "Exp"),
    where("a = Where(no, x, z) y = Exp(a)", stays="its input has another shape than its output"),
    where("a = Where(some, x, z) y = Exp(a)", stays="its condition differs from entry to entry"),
    where("a = Where(tall, x, z) y = Exp(a)", stays="its input has another shape than its output"),
    where("a = Where(none, x, x) y = Exp(a)", runs=False, stays="its condition differs from entry to entry"),
    where("a = local.F(x) y = Where(yes, a, x)", stays="the shape of an operand is not known"),
]

unused = Rule(RemoveUnused(), "float[4] x", w=values(4), v=values(4))
DEAD = choice("{ [dead] d = Exp(h) t = Add(h, w) }", "{ e = Neg(h) }", before="h = Neg(x)", behind="z = Abs(x)",
              result="%s")  # fmt: skip
UNUSED = [
    unused("y = Add(x, w) [a] p = Mul(x, v) [b] q = Mul(p, w)", "Add", changed="a b v",
           holds=lambda graph: initializer_names(to_model(graph)) == {"w"}),
    unused("y = Neg(x) p = Exp(x)", "Neg", changed="Exp_p"),
    unused(DEAD % "y", "Neg If Add Neg", changed="Abs_z dead"),
    unused(DEAD % "z", "Abs", changed="Neg_h If_y w dead Add_t Neg_e",
           holds=lambda graph: not initializer_names(to_model(graph))),
    unused(choice("<float[2] k = {1, 2}> { [dead] d = Neg(k) t = Abs(x) }", "{ e = Neg(x) }"), "If Abs Neg",
           changed="dead k"),
]  # fmt: skip

equal = Rule(MergeEqual(), "float[4, 4] x, float[4, 4] z, bool c", w=values(4, 4), one=1)
ON_VECTORS = "(float[4] x, bool c) => (y)"
EQUAL = [
    equal("a = Exp(x) b = Neg(a) d = Exp(x) e = Neg(d) y = Div(b, e)", "Exp Neg Div"),
    equal("a = Add(x, z) b = Add(z, x) y = Sub(a, b)", "Add Sub"),
    equal("a = Sub(x, z) b = Sub(z, x) y = Add(a, b)", stays=""),
    equal("a = Softmax<axis=0>(x) b = Softmax<axis=1>(x) y = Add(a, b)", stays=""),
    equal("a = Transpose<perm=[1,0]>(x) b = Transpose<perm=[1,0]>(x) y = MatMul(a, b)", "Transpose MatMul"),
    equal("a = LeakyRelu<alpha=0.0>(x) b = LeakyRelu<alpha=-0.0>(x) y = Add(a, b)", stays=""),
    equal("a = MatMul(x, w) b = MatMul(x, w) y = Sub(a, b)", "MatMul Sub"),
    equal("a = Exp(x) y = Exp(x)", "Exp"),
    equal("a, b = Split(x) d, e = Split(x) y = Concat<axis=0>(a, e)", "Split Concat"),
    equal("a = Clip(x, , one) b = Clip(x, , one) y = Sub(a, b)", "Clip Sub"),
    equal("[a] a = Exp(x) [b] b = Exp(x) [c] y = Sub(a, b)", "Exp Sub",
          holds=lambda graph: [node.origins for node in graph.nodes] == [(("a", "Exp"), ("b", "Exp")), ()]),
    equal("a = RandomNormalLike(x) b = RandomNormalLike(x) d = local.F(x) e = local.F(x) y = Sum(a, b, d, e)",
          stays=""),
    # Two outputs keep their names, and one gives its own.
    equal("(float[4] x) => (y, z) { a = Exp(x) y = Exp(x) z = Exp(x) b = Neg(a) c = Neg(b) }", "Exp Exp Neg Neg"),
    # Bodies read what stands before them, branches do not share, and an output of a body is made in it.
    equal(f"""{ON_VECTORS} {{ a = Exp(x)
          t = If (c) <then_branch = yes () => (p) {{ q = Exp(x) r = Neg(x) p = Add(q, r) }},
                      else_branch = no () => (e) {{ s = Neg(x) u = Abs(x) e = Add(s, u) }}>
          d = Abs(x) f = Add(a, t) y = Add(f, d) }}""", "Exp If Abs Add Add Neg Add Neg Abs Add"),
    equal(f"""{ON_VECTORS} {{ a = Exp(x) t = If (c) <then_branch = yes () => (p) {{ p = Exp(x) }},
          else_branch = no () => (e) {{ e = Neg(x) }}> y = Add(a, t) }}""", stays=""),
]  # fmt: skip


def fed(made: ModelProto) -> None:
    made.graph.input.append(helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, [4]))


def returned(made: ModelProto) -> None:
    made.graph.output.append(helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, [4]))


ONES, ZEROS, NAN = np.ones(4, np.float32), np.zeros(4, np.float32), np.array([1, np.nan, 2, 3], np.float32)
share = Rule(ShareInitializers(), "float[4] x", one=values(4), other=values(4))
SUMS = "a = Add(x, one) y = Add(a, other)"
SHARED = [
    share(SUMS, "Add Add", changed="other",
          holds=lambda graph: [node.inputs[1].name for node in graph.nodes] == ["one", "one"]),
    share(SUMS, "Add Add", changed="other", one=2, other=2),
    share(SUMS, "Add Add", changed="other", one=NAN, other=NAN.copy(), runs=False),
    share(SUMS, stays="", other=values(4, seed=1)),
    share(SUMS, stays="", one=ZEROS, other=-ZEROS),
    share("a = Add(x, one) b = Reshape(other, four) c = Cast <to = 1> (third) d = Add(a, b) y = Add(c, d)", stays="",
          one=ZEROS, other=ZEROS.reshape(2, 2), third=np.zeros(4, np.int32), four=[4]),
    share("a = Equal(x, one) b = Equal(x, other) y = Or(a, b)", stays="", inputs="string[1] x", opset=19,
          one=np.array(["a"], object), other=np.array(["b"], object), feed={"x": np.array(["b"], object)}),
    share(SUMS, stays="", damage=fed),
    share(SUMS, stays="", damage=returned),
    share("""(float[8, 4, 2, 2] x) => (y) {
          y, m, v = BatchNormalization <training_mode = 1> (x, scale, bias, mean, variance) }""", stays="", runs=False,
          scale=ONES, bias=ZEROS, mean=ZEROS, variance=ONES),
]  # fmt: skip

tensors = Rule(NameTensors(), "float[4, 8] x, bool c", w=values(8, 8))


# Nodes are unnamed where a case is built, so the pass is applied to the graph as it was read.
NAMED = {
    "(float[4] x) => (y) { a = Neg(x) [Neg_a] b = Exp(a) y = Add(a, b) }": ["Neg_a.1", "Neg_a", "Add_y"],
    "(float[4] Neg_y) => (y) { y = Neg(Neg_y) }": ["Neg_y.1"],
    "(float[3, 2, 4] x) => (h) { , h = GRU <hidden_size = 5> (x, w, r) }": ["GRU_h"],
}
ALIKE = """(float[4,8] x, bool c) => (float[4,8] y) { h = MatMul(x, w) y = If (c) <
    then_branch = t () => (float[4,8] y) { a = Neg(h) b = MatMul(a, w) y = Tanh(b) },
    else_branch = e () => (float[4,8] y) { a = Abs(h) b = MatMul(a, w) y = Sin(b) }> }"""
HIDING = """(float[4] s, int64 m, bool c) => (y) {
    t = Loop (m, , s) <body = b (int64 i, bool g, float[4] s) => (bool h, float[4] u)
        <float[4] k = {0.5, 0.5, 0.5, 0.5}> { h = Identity(g) u = Mul(s, k) }>
    y = If (c) <then_branch = p () => (float[4] u) <float[4] k = {3, 3, 3, 3}> { u = Sub(t, k) },
                else_branch = e () => (float[4] u) { u = Add(t, s) }> }"""


def tensor_names(graph: Graph) -> list[str]:
    """The names of what all graphs are given, store and make, each tensor once."""
    named = {
        tensor: tensor.name
        for scope in all_graphs(graph)
        for tensor in (*scope.inputs, *scope.initializers, *(output for node in scope.nodes for output in node.outputs))
    }
    return [name for name in named.values() if name]


RENAMED = [
    # The first graph keeps a name, and readers follow.
    tensors(ALIKE, "MatMul If Neg MatMul Tanh Abs MatMul Sin", changed="y.1 a.1 b.1 y.2",
            holds=lambda graph: tensor_names(graph) == ["x", "c", "w", "h", "y", "a", "b", "y.1", "a.1", "b.1", "y.2"]),
    # Inputs and constants of bodies hide nothing outside.
    *(tensors(HIDING, "Loop If Identity Mul Sub Add",
              feed={"s": np.float32([1, 2, 3, 4]), "m": np.array(2), "c": np.array(chosen)},
              holds=lambda graph: len(set(tensor_names(graph))) == len(tensor_names(graph))
              and [tensor.name for tensor in graph.inputs] == ["s", "m", "c"]
              and nodes(graph, "Add")[0].inputs[1].name == "s") for chosen in (True, False)),
    tensors("y = MatMul(x, w)", stays=""),
]  # fmt: skip


@table(DROPPED, WHERES, UNUSED, EQUAL, SHARED, RENAMED)
def test_rules(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("text", NAMED)
def test_nodes_without_names_are_named_after_operator_and_output(text: str) -> None:
    weights = {"w": values(1, 15, 4), "r": values(1, 15, 5)} if "GRU" in text else {}
    graph = as_graph(model(text, **weights))
    before = [node.name for node in nodes(graph)]
    changes = NameNodes().apply(graph)
    assert [node.name for node in nodes(graph)] == NAMED[text]
    assert changes.changed == tuple(name for name in NAMED[text] if name not in before)


def test_the_first_of_several_nodes_keeps_the_name_over_all_bodies() -> None:
    made = repeated_and_empty_node_names()
    with pytest.raises(ModelError, match="same"):
        outputs(made, sample(made))
    graph = as_graph(made)
    assert NameNodes().apply(graph).changed == ("same.1", "Tanh_d", "same.2", "Neg_e")
    assert [node.name for node in nodes(graph)] == ["same", "same.1", "Tanh_d", "branch", "same.2", "Neg_e"]
    assert outputs(graph, sample(made))["y"].shape == (2, 16)


@given(names=st.lists(st.sampled_from(["", "n", "n.1", "Neg_t1", "t1", "/a:0;é"]), min_size=1, max_size=12))
@settings(max_examples=50)
def test_any_names_become_unique_and_unique_ones_stay(names: list[str]) -> None:
    steps = " ".join(f"t{i + 1} = Neg(t{i})" for i in range(len(names)))
    made = model(f"(float[4] t0) => (float[4] t{len(names)}) {{ {steps} }}")
    for node, name in zip(made.graph.node, names, strict=True):
        node.name = name
    graph = as_graph(made)
    changes = NameNodes().apply(graph)
    renamed = [node.name for node in graph.nodes]
    assert all(renamed)
    assert len(set(renamed)) == len(renamed)
    assert all(renamed[names.index(name)] == name for name in names if name)
    assert set(changes.changed) == {new for new, old in zip(renamed, names, strict=True) if new != old}


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


def test_initializers_that_no_node_ever_read_go_and_inputs_stay() -> None:
    made = model(
        """(float[4] x, float[4] z, float[4] v, float[4] u) => (float[4] y)
        <float[4] v = {1, 2, 3, 4}, float[4] u = {4, 3, 2, 1}> { y = Neg(x) d = Abs(u) }""",
        w=values(4),
    )
    graph = as_graph(made)
    assert RemoveUnused().apply(graph).changed == ("Abs_d", "w")
    written = to_model(graph)
    assert initializer_names(written) == {"v", "u"}
    assert [info.name for info in written.graph.input] == ["x", "z", "v", "u"]
    feed = dict.fromkeys("xzvu", values(4))
    assert difference(outputs(graph, feed), outputs(made, feed)) == 0


def test_an_initializer_that_nothing_read_to_begin_with_is_no_change() -> None:
    made = share(SUMS, other=values(4, seed=1)).made
    made.graph.initializer.add().CopyFrom(made.graph.initializer[0])
    made.graph.initializer[2].name = "unread"
    assert not ShareInitializers().apply(as_graph(made))


def test_long_chains_merge_in_one_walk() -> None:
    chains = " ".join(f"{name}{i + 1} = Neg({name}{i})" for i in range(2000) for name in "ab")
    graph = named_graph(
        model(f"(float[4] x) => (float[4] y) {{ a0 = Exp(x) b0 = Exp(x) {chains} y = Add(a2000, b2000) }}")
    )
    MergeEqual().apply(graph)
    assert len(graph.nodes) == 2002


def test_copies_in_bodies_become_one_around_them() -> None:
    weight = "<float[4] {0} = {{1, 2, 3, 4}}>"
    made = model(
        f"""(float[4] x, bool c) => (float[4] y, float[4] z) {{
            y = If (c) <then_branch = yes () => (float[4] t) {weight.format("w")} {{ t = Add(x, w) }},
                        else_branch = no () => (float[4] e) {weight.format("v")} {{ e = Mul(x, v) }}>
            z = If (c) <then_branch = yes2 () => (float[4] t2) {weight.format("u")} {{ t2 = Sub(x, u) }},
                        else_branch = no2 () => (float[4] e2) <float[4] w = {{5, 6, 7, 8}}> {{ e2 = Mul(x, w) }}> }}"""
    )
    graph = as_graph(made)
    assert apply_once(ShareInitializers(), graph).changed == ("v", "u")
    written = to_model(graph).graph
    assert [tensor.name for tensor in written.initializer] == ["w.1"]
    assert [len(branch.g.initializer) for node in written.node for branch in node.attribute] == [0, 0, 0, 1]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_scalars_of_several_bodies_stay_apart_on_wish() -> None:
    text = choice("<float u = {2}, float v = {2}> { s = Add(x, u) t = Add(s, v) }", "<float w = {2}> { e = Mul(x, w) }")
    assert ShareInitializers(scalars_apart=True).apply(as_graph(model(text))).changed == ("v",)
    assert ShareInitializers().apply(as_graph(model(text))).changed == ("v", "w")


def test_nodes_lose_what_was_written_about_them() -> None:
    made = model("(float[4,8] x) => (float[4,8] y) { [one] h = MatMul(x, w) [two] y = Relu(h) }", w=values(8, 8))
    made.graph.node[0].metadata_props.add(key="namespace", value="model/layer")
    made.graph.node[1].doc_string = "relu, line 7"
    graph = as_graph(made)
    assert apply_once(StripMetadata(), graph) == Changes(("one", "two"))
    assert metadata_bytes(graph) == 0


OLD: dict[str, Callable[[], ModelProto]] = {name: build for name, build in zoo() if name.startswith("opset_")}


@pytest.mark.parametrize("version", [13, 17, 21])
@pytest.mark.parametrize("name", OLD)
def test_a_converted_model_computes_the_same(name: str, version: int) -> None:
    made = OLD[name]()
    graph = as_graph(made)
    before, weights = graph.opset, [node.inputs[1].values for node in nodes(graph, "Conv")]
    changes = UpgradeOpset(version).apply(graph)
    assert changes.changed == ((f"opset {before} to {version}",) if before < version else ())
    assert graph.opset == max(before, version)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for node, weight in zip(nodes(graph, "Conv"), weights, strict=True):
        np.testing.assert_array_equal(node.inputs[1].values, weight, strict=True)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= 1e-6
    assert not UpgradeOpset(version).apply(graph)


def test_nodes_still_stand_for_what_they_stood_for() -> None:
    graph = as_graph(model("(float[4] x) => (float[4] y) { [n] y = Neg(x) }", opset=11))
    graph.nodes[0].origins = (("a", "Sub"), ("b", "Mul"))
    UpgradeOpset(13).apply(graph)
    assert graph.nodes[0].origins == (("a", "Sub"), ("b", "Mul"))


def test_a_version_that_onnxruntime_does_not_load_is_an_error() -> None:
    with pytest.raises(ModelError, match="1000"):
        UpgradeOpset(1000).apply(as_graph(OLD["opset_21"]()))
