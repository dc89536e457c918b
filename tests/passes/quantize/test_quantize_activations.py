"""QuantizeLinear and DequantizeLinear on activations, in bodies too, and HardSigmoid between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from convolutions import between_convolutions
from counted_kernels import count_kernels
from model_texts import apply_once, difference, model, node_named, nodes, ops, outputs, running, sample, values
from model_zoo import batch_norm_chain, branches_that_share_a_scale
from onnx import ModelProto

from onnxq.algorithms.encode import encode
from onnxq.algorithms.encodings import Encodings
from onnxq.algorithms.equalization import ChannelScales
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.ir import Graph, all_graphs, as_graph, load, save, to_model
from onnxq.numerics.affine import QuantParams
from onnxq.onnx_api import infer_shapes
from onnxq.passes import AddToQuantized, InsertQuantizeDequantize, LiftConstants, QuantizeWeights
from onnxq.passes.preparing.preparation import prepare
from onnxq.pipeline.dequantization import dequantize
from onnxq.planning.plan import Activation, Decision, Plan
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.rewrite import Changes
from onnxq.runtime.targets import target_named
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.resources import silent

AFFINE = QuantSpec("uint8", symmetric=False)
SYMMETRIC = QuantSpec("int8")
FINE = QuantParams(np.asarray(np.float32(0.02)), np.asarray(np.uint8(128)))


def plan(activations: Sequence[Activation], static: Sequence[str] = ()) -> Plan:
    decisions = tuple(Decision(name, "", Mode.STATIC, "integer kernel") for name in static)
    return Plan(decisions, tuple(activations), "scheme", "target")


def activation(tensor: str, *, every_consumer: bool = False, spec: QuantSpec = AFFINE) -> Activation:
    return Activation(tensor, spec, tensor, every_consumer=every_consumer)


def insert(
    made: ModelProto, activations: Sequence[Activation], static: Sequence[str] = (), *, pairs: bool = True
) -> tuple[Graph, Changes]:
    """Apply the pass twice: the model is valid and still does what it did.

    Without bodies the pairs are exactly those of the plan.
    """
    graph = as_graph(made)
    infer_shapes(graph)
    step = InsertQuantizeDequantize(plan(activations, static), Encodings({item.tensor: FINE for item in activations}))
    changes = step.apply(graph)
    assert not step.apply(graph)
    if pairs:
        assert len(nodes(graph, "QuantizeLinear")) == len(nodes(graph, "DequantizeLinear")) == len(changes.changed)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for seed in (0, 1):
        inputs = {name: value if value.dtype != np.int64 else np.array(2) for name, value in sample(made, seed).items()}
        assert difference(outputs(graph, inputs), outputs(made, inputs)) < 0.1
    return graph, changes


def read(graph: Graph, node: str) -> list[str]:
    return [tensor.name for tensor in node_named(graph, node).inputs]


TWO_READERS = "(float[4] x) => (float[4] y, float[4] z) { [p] t = Neg(x) [a] y = Abs(t) [b] z = Neg(t) }"
RETURNED = "(float[4] x) => (float[4] t, float[4] y) { [p] t = Neg(x) [a] y = Abs(t) }"
TWO_OUTPUTS = """(float[4] x) => (float[2] y, float[2] z) {
    [cut] p, q = Split <axis = 0> (x, parts)  [a] y = Abs(p)  [b] z = Abs(q) }"""


@pytest.mark.parametrize(
    ("text", "tensors", "every_consumer", "static", "reads"),
    [
        (TWO_READERS, "t", False, ["a"], {"a": ["t.dequantized"], "b": ["t"]}),
        (TWO_READERS, "t", True, ["a"], {"a": ["t.dequantized"], "b": ["t.dequantized"]}),
        (TWO_READERS, "x", False, ["p"], {"p": ["x.dequantized"]}),
        (TWO_OUTPUTS, "pq", True, [], {"a": ["p.dequantized"], "b": ["q.dequantized"]}),
        ("(float[4] x) => (float[4] y) { [a] y = Mul(x, x) }", "x", False, ["a"], {"a": ["x.dequantized"] * 2}),
        (RETURNED, "t", False, ["a"], {"a": ["t.dequantized"]}),
    ],
    ids=["static nodes", "every consumer", "a graph input", "two outputs", "read twice", "a graph output"],
)
def test_the_dequantized_tensor_is_read_by_static_nodes_or_by_all(
    text: str, tensors: str, every_consumer: bool, static: list[str], reads: dict[str, list[str]]
) -> None:
    made = model(text, **({"parts": [2, 2]} if text is TWO_OUTPUTS else {}))
    graph, changes = insert(made, [activation(name, every_consumer=every_consumer) for name in tensors], static)
    assert changes == Changes(tuple(tensors))
    assert {name: read(graph, name) for name in reads} == reads
    assert [tensor.name for tensor in graph.inputs] == ["x"]
    if text is RETURNED:
        # A graph output is dequantized only where all consumers are.
        assert graph.outputs[0].inputs[0].op == "Neg"


def test_new_tensors_and_nodes_are_named_after_the_activation() -> None:
    graph, _ = insert(model(TWO_READERS), [activation("t")], static=["a"])
    (quantizer,), (decoder,) = nodes(graph, "QuantizeLinear"), nodes(graph, "DequantizeLinear")
    assert (quantizer.name, decoder.name) == ("t.quantize", "t.dequantize")
    assert [tensor.name for tensor in quantizer.inputs] == ["t", "t.scale", "t.zero_point"]
    assert [tensor.name for tensor in decoder.inputs] == ["t.codes", "t.scale", "t.zero_point"]
    assert decoder.outputs[0].shape == [4]
    assert quantizer.outputs[0].dtype == np.uint8


def test_a_symmetric_tensor_writes_a_zero_of_the_codes_type() -> None:
    graph = as_graph(model(TWO_READERS))
    parameters = {"t": QuantParams(np.asarray(np.float32(0.02)), None)}
    InsertQuantizeDequantize(plan([activation("t", spec=SYMMETRIC)], ["a"]), Encodings(parameters)).apply(graph)
    zero = nodes(graph, "QuantizeLinear")[0].inputs[2].values
    np.testing.assert_array_equal(zero, np.zeros((), np.int8), strict=True)


@pytest.mark.parametrize("static", [["a"], []])
def test_a_graph_output_keeps_its_name_and_carries_the_dequantized_values(static: list[str]) -> None:
    made = model(RETURNED)
    graph, _ = insert(made, [activation("t", every_consumer=True)], static)
    assert [tensor.name for tensor in graph.outputs] == ["t", "y"]
    assert graph.outputs[0].inputs[0].op == "DequantizeLinear"
    steps = outputs(graph, sample(made))["t"] / np.float32(0.02)
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)


DECODED = "(float[4] x) => (float[4] y) { q = QuantizeLinear(x, s, z)  t = DequantizeLinear(q, s, z)  [a] y = Abs(t) }"


@pytest.mark.parametrize(("text", "tensor"), [(DECODED, "t"), (TWO_READERS, "gone")], ids=["decoded", "not there"])
def test_a_tensor_that_is_dequantized_already_or_not_in_the_graph_is_left(text: str, tensor: str) -> None:
    scale = {"s": np.array(0.02, np.float32), "z": np.array(128, np.uint8)} if text is DECODED else {}
    step = InsertQuantizeDequantize(plan([activation(tensor, every_consumer=True)]), Encodings({tensor: FINE}))
    changes = step.apply(as_graph(model(text, **scale)))
    assert changes == Changes((), ((tensor, "is not in the graph or is dequantized already"),))


# --- with real plans ----------------------------------------------------------------------------------------------


def quantized(made: ModelProto, folder: Path) -> tuple[Graph, Plan]:
    graph = prepare(as_graph(made), opset=13)
    save(graph, folder / "prepared.onnx")
    bench = PreparedModel(folder / "prepared.onnx", preset_named("int8"), target_named("onnxruntime-cpu"))
    found = bench.plan({})
    statistics = bench.calibrate(found, [sample(made, seed) for seed in range(4)], silent)
    graph = load(bench.prepared)
    encodings = encode(
        replace(found, decisions=tuple(replace(one, mean=None) for one in found.decisions)), graph, statistics
    )
    QuantizeWeights(found, encodings).apply(graph)
    InsertQuantizeDequantize(found, encodings).apply(graph)
    return graph, found


def test_there_are_the_pairs_of_the_plan_with_one_scale_for_each_group(tmp_path: Path) -> None:
    graph, found = quantized(branches_that_share_a_scale(), tmp_path)
    stored = sum(len(decision.weights) + (decision.bias is not None) for decision in found.decisions)
    assert len(nodes(graph, "QuantizeLinear")) == len(found.activations)
    assert len(nodes(graph, "DequantizeLinear")) == len(found.activations) + stored
    groups: dict[str, set[tuple[float, int]]] = {}
    for item in found.activations:
        quantizer = node_named(graph, f"{item.tensor}.quantize")
        scale, zero = (tensor.values.item() for tensor in quantizer.inputs[1:])
        groups.setdefault(item.group, set()).add((scale, zero))
    assert len(groups) < len(found.activations)
    assert {len(pairs) for pairs in groups.values()} == {1}
    of = {item.tensor: item.group for item in found.activations}
    assert of["r"] == of["p"]
    assert of["l"] == of["i"] == of["j"] == of["one"] == of["other"]
    assert of["s"] != of["j"]


@pytest.mark.parametrize("build", [branches_that_share_a_scale, batch_norm_chain])
def test_onnxruntime_makes_integer_kernels_of_it(build: Callable[[], ModelProto], tmp_path: Path) -> None:
    graph, _ = quantized(build(), tmp_path)
    kernels = ops(running(graph, tmp_path))
    assert kernels.count("QLinearConv") >= 1
    assert kernels.count("Conv") == 0


def test_a_constant_of_another_body_of_the_same_name_is_not_meant() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            y = If (c) <
                then_branch = yes () => (float[4] u) { t = Constant <value_floats = [1.0]> () u = Add(x, t) },
                else_branch = no () => (float[4] v) { t = Neg(x) v = Abs(t) }>
        }"""
    )
    graph = as_graph(made)
    LiftConstants().apply(graph)
    changes = InsertQuantizeDequantize(plan([activation("t", every_consumer=True)]), Encodings({"t": FINE})).apply(
        graph
    )
    assert changes.changed == ("t",)
    (quantizer,) = nodes(graph, "QuantizeLinear")
    assert quantizer.inputs[0].inputs[0].op == "Neg"


# --- constants among the data ---------------------------------------------------------------------------------------


def test_a_constant_operand_becomes_codes_for_static_nodes_only() -> None:
    made = model(
        """g (float[2, 3] x) => (float[2, 3] y, float[2, 3] v) {
            [n] y = Mul(x, k) [clip] c = Clip(x, k) [m] v = Mul(c, k)
        }""",
        k=np.float32(0.3),
    )
    graph = as_graph(made)
    found = plan([replace(activation("k"), fixed_range=(0.3, 0.3))], ["n", "clip"])
    given = encode(found, graph)
    assert InsertQuantizeDequantize(found, given).apply(graph) == Changes(("k",))
    assert [node.op for node in graph.nodes] == ["DequantizeLinear", "Mul", "Clip", "Mul"]
    decoder = nodes(graph, "DequantizeLinear")[0]
    assert decoder.inputs[0].values.dtype == np.uint8
    assert node_named(graph, "n").inputs[1] is decoder.outputs[0]
    assert node_named(graph, "clip").inputs[1].name == node_named(graph, "m").inputs[1].name == "k"
    # One number is a code exactly.
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) < 1e-6
    assert InsertQuantizeDequantize(found, given).apply(graph).changed == ()


@pytest.mark.parametrize(
    ("operand", "kernel"),
    [
        (np.float32(-0.25), "QLinearAdd"),
        (np.ones((1, 8, 8, 8), np.float32), "QLinearAdd"),
        (np.linspace(0, 2, 8, dtype=np.float32).reshape(1, 8, 1, 1), "QLinearMul"),
    ],
)
def test_an_operand_between_convolutions_runs_as_integers_and_is_replayed(
    operand: np.ndarray, kernel: str, build, quantize_to, running_graph, lonely_pairs, tmp_path: Path
) -> None:
    call = kernel.removeprefix("QLinear")
    made = between_convolutions(build, f"s = Sigmoid(a) [n] m = {call}(s, k) b = Sigmoid(m)", k=operand)
    done = quantize_to(made, tmp_path / "q.onnx")
    assert kernel in {node.op_type for node in running_graph(tmp_path / "q.onnx").node}
    assert lonely_pairs(tmp_path / "q.onnx") == []
    save_plan(done.report.plan, tmp_path / "plan.toml")
    again = quantize_to(made, tmp_path / "again.onnx", scheme=load_plan(tmp_path / "plan.toml"))
    assert again.report.plan.effect == done.report.plan.effect
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "q.onnx").read_bytes()


@pytest.mark.parametrize(("is_known", "made"), [(True, ["Mul", "QuantizeLinear"]), (False, ["QuantizeLinear"])])
def test_channels_are_multiplied_where_their_place_among_the_axes_is_known(is_known: bool, made: list[str]) -> None:
    graph = as_graph(model("g (float[3, 3, 3] x) => (float[3, 3, 3] y) { a = Abs(x) [read] y = Neg(a) }"))
    infer_shapes(graph)
    plain = outputs(graph, data := {"x": values(3, 3, 3) / 4})
    factors = ChannelScales(1, np.array([1.0, 0.5, 0.25]))
    stored = Encodings({"a": FINE}, factors={"a": factors})
    if not is_known:
        graph.nodes[0].outputs[0].shape = None
    InsertQuantizeDequantize(plan([activation("a")], ["read"]), stored).apply(graph)
    assert ops(graph)[: 1 + len(made)] == ["Abs", *made]
    # The static node is given what was divided.
    assert np.abs(outputs(graph, data)["y"] - np.clip(factors.divide(plain["y"]), -2.54, 2.56)).max() < 0.011


# InsertQuantizeDequantize around and inside bodies.

CAPTURED = """(float[4] x, bool c) => (float[4] y) {
    [p] t = Neg(x)
    y = If (c) <
        then_branch = yes () => (float[4] u) { [inner] u = Abs(t) },
        else_branch = no () => (float[4] v) { [other] v = Neg(t) }>
}"""


def test_a_body_reads_the_dequantized_tensor_where_every_consumer_does() -> None:
    graph, _ = insert(model(CAPTURED), [activation("t", every_consumer=True)])
    assert read(graph, "inner") == read(graph, "other") == ["t.copy"]
    assert read(graph, "t.share") == ["t.dequantized"]


def test_a_body_reads_the_float_tensor_otherwise() -> None:
    graph, changes = insert(model(CAPTURED), [activation("t")])
    assert changes == Changes((), (("t", "no node reads it"),))
    assert read(graph, "inner") == ["t"]


def scope_ops(graph: Graph) -> list[list[str]]:
    """Op types of each graph, the main graph first, those of control flow aside."""
    return [[node.op for node in scope.nodes if not node.subgraphs()] for scope in all_graphs(graph)]


@pytest.mark.parametrize("every_consumer", [True, False])
def test_static_nodes_of_bodies_decode_codes_that_are_made_outside(*, every_consumer: bool) -> None:
    graph, _ = insert(
        model(CAPTURED), [activation("t", every_consumer=every_consumer)], ["inner", "other"], pairs=False
    )
    assert scope_ops(graph) == [["Neg", "QuantizeLinear"], ["DequantizeLinear", "Abs"], ["DequantizeLinear", "Neg"]]
    assert read(graph, "inner") == ["t.dequantized"]
    assert read(graph, "other") == ["t.dequantized.1"]
    assert read(graph, "t.dequantize.1") == ["t.codes", "t.scale", "t.zero_point"]


def test_float_nodes_of_bodies_read_floats_beside_static_ones() -> None:
    graph, _ = insert(model(CAPTURED), [activation("t", every_consumer=True)], ["inner"], pairs=False)
    main = ["Neg", "QuantizeLinear", "DequantizeLinear"]
    assert scope_ops(graph) == [main, ["DequantizeLinear", "Abs"], ["Neg"]]
    assert (read(graph, "inner"), read(graph, "other")) == (["t.dequantized.1"], ["t.dequantized"])


IN_BODY = """g (float[4] x, int64 n) => (float[4] y) {
    y = Loop (n, go, x) <body = b (int64 i, bool g, float[4] s) => (bool h, float[4] t) {
        h = Identity(g) [a] r = Neg(s) [b] t = Abs(r)
    }>
}"""


def test_tensors_of_bodies_are_quantized_where_they_are_made() -> None:
    wanted = [activation("s"), activation("r", every_consumer=True), activation("t", every_consumer=True)]
    graph, changes = insert(model(IN_BODY, go=np.array(True)), wanted, ["a", "b"], pairs=False)
    assert changes.changed == ("s", "r", "t")
    pair = ["QuantizeLinear", "DequantizeLinear"]
    assert scope_ops(graph) == [[], [*pair, "Identity", "Neg", *pair, "Abs", *pair]]
    body = next(scope for scope in all_graphs(graph) if scope.parent is not None)
    assert [tensor.name for tensor in body.inputs] == ["i", "g", "s"]
    assert body.outputs[1].inputs[0].name == "t.dequantize"


# AddToCodes makes the HardSigmoid of quantized values an Add, and its integer kernel gives what HardSigmoid gives.

PLAN = Plan((Decision("gate", "HardSigmoid", Mode.STATIC, "integer kernel"),), (), "int8", "onnxruntime-cpu")
STEPS = {"s": np.float32(0.05), "z": np.uint8(100), "t": np.float32(1 / 255), "w": np.uint8(0)}


def graph_of(gate: str, **given: np.ndarray) -> tuple[ModelProto, Graph]:
    text = f"""g (float[4, 99] x) => (float[4, 99] y) {{
      c = QuantizeLinear(x, s, z) d = DequantizeLinear(c, s, z) [gate] g = {gate}
      e = QuantizeLinear(g, t, w) y = DequantizeLinear(e, t, w) }}"""
    made = model(text, **{**STEPS, **given})
    return made, as_graph(made)


@pytest.mark.parametrize(
    "gate",
    [
        "HardSigmoid(d)",
        "HardSigmoid <alpha = 0.16666667> (d)",
        "HardSigmoid <alpha = 1.0, beta = 0.0> (d)",
        "HardSigmoid <alpha = 0.5, beta = -0.25> (d)",
        "HardSigmoid <alpha = 0.1, beta = 3.0> (d)",
    ],
)
@pytest.mark.parametrize("signed", [False, True])
def test_the_sum_is_what_hard_sigmoid_gives(gate: str, signed: bool) -> None:
    made, graph = graph_of(gate, **({"z": np.int8(-28), "w": np.int8(-128)} if signed else {}))
    inputs = {"x": 4 * sample(made)["x"]}
    expected = outputs(made, inputs)
    assert apply_once(AddToQuantized(PLAN), graph) == Changes(("gate",))
    assert [op for op in ops(graph) if not op.endswith("Linear")] == ["Add", "Clip"]
    # One code, where a sum lies in the middle of two.
    assert difference(outputs(graph, inputs), expected) <= 1.01 / 255


def test_one_of_floats_is_left() -> None:
    graph = as_graph(model("g (float[2, 3] x) => (float[2, 3] y) { [gate] y = HardSigmoid(x) }"))
    assert apply_once(AddToQuantized(PLAN), graph) == Changes(
        (), (("gate", "its activation is not dequantized from integers"),)
    )


@pytest.mark.parametrize(
    ("middle", "kernels"),
    [
        ("b = HardSigmoid(a)", {"QLinearConv": 2, "QLinearAdd": 1}),
        ("b = HardSwish(a)", {"QLinearConv": 2, "QLinearAdd": 1, "QLinearMul": 1}),
        (
            "p = GlobalAveragePool(a) g = HardSigmoid(p) b = Mul(a, g)",
            {"QLinearConv": 2, "QLinearAdd": 1, "QLinearMul": 1, "QLinearGlobalAveragePool": 1},
        ),
    ],
)
def test_gates_between_convolutions_run_as_integers_and_come_back_as_floats(
    middle: str, kernels: dict[str, int], build, quantize_to, lonely_pairs, tmp_path: Path
) -> None:
    made = between_convolutions(build, middle)
    quantize_to(made, tmp_path / "q.onnx")
    assert lonely_pairs(tmp_path / "q.onnx") == []
    found = count_kernels(tmp_path / "q.onnx")
    assert (found.integer, found.heavy_float) == (sum(kernels.values()), 0)

    dequantize(tmp_path / "q.onnx", tmp_path / "f.onnx")
    written = Counter(node.op_type for node in onnx.load(tmp_path / "f.onnx").graph.node)
    assert written["Clip"] == written["Add"] == 1
    inputs = sample(made)
    assert difference(outputs(onnx.load(tmp_path / "f.onnx"), inputs), outputs(made, inputs)) < 0.1
