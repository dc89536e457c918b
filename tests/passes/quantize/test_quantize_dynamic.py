"""Dynamic matrix multiplications and recurrent cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import (
    Array,
    apply_once,
    difference,
    model,
    named_graph,
    node_named,
    nodes,
    ops,
    outputs,
    sample,
    values,
)
from onnx import GraphProto, ModelProto

from onnxq.algorithms.encode import encode
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme
from onnxq.ir import Graph, Variable, as_graph, constants, to_model
from onnxq.lowering import AllowedOps
from onnxq.onnx_api import infer_shapes
from onnxq.passes import (
    NameNodes,
    QuantizeDynamically,
    QuantizeRecurrentCells,
    RemoveUnused,
    ReplaceIntegerOperators,
)
from onnxq.planning.planner import make_plan
from onnxq.rewrite import Changes
from onnxq.runtime.targets import target_named


def dynamic(made: ModelProto, weight: QuantSpec | None = None) -> ModelProto:
    """Make every node dynamic that can be; a second time there is nothing left to do."""
    graph = as_graph(made)
    NameNodes().apply(graph)
    infer_shapes(graph)
    scheme = Scheme((Rule(Mode.DYNAMIC, weight=weight),))
    plan = make_plan(graph, scheme, target_named("onnxruntime-cpu"))
    step = QuantizeDynamically(plan, encode(plan, graph))
    assert step.apply(graph)
    assert not step.apply(graph)
    RemoveUnused().apply(graph)
    found = to_model(graph)
    onnx.checker.check_model(found, full_check=True)
    return found


MATMUL = model("g (float[4,32] x) => (float[4,16] y) { [n] y = MatMul(x, w) }", w=values(32, 16))
GEMM = model(
    "g (float[4,32] x) => (float[4,16] y) { [n] y = Gemm <transB = 1> (x, w, b) }", w=values(16, 32), b=values(16)
)
TWO = model(
    "g (float[4,32] x) => (float[4,16] y, float[4,16] z) { [a] y = MatMul(x, w) [b] z = MatMul(x, v) }",
    w=values(32, 16),
    v=values(32, 16),
)
IN_BODY = model(
    """g (float[4,32] x, bool c) => (float[4,16] y) {
        y = If (c) <
            then_branch = yes () => (float[4,16] u) { [inner] u = MatMul(x, w) },
            else_branch = no () => (float[4,16] v) { [other] v = MatMul(x, w) }>
    }""",
    w=values(32, 16),
)


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.CHANNEL])
@pytest.mark.parametrize(
    ("made", "kernels"),
    [
        (MATMUL, ["DynamicQuantizeMatMul"]),
        (GEMM, ["DynamicQuantizeMatMul"]),
        (TWO, None),
        (IN_BODY, None),
    ],
    ids=["MatMul", "Gemm", "two", "body"],
)
def test_results_stay_close_and_a_runtime_fuses_all_of_it(
    made: ModelProto,
    kernels: list[str] | None,
    granularity: Granularity,
    running_graph: Callable[[Path], GraphProto],
    tmp_path: Path,
) -> None:
    inputs = sample(made, 0)
    found = dynamic(made, QuantSpec("int8-narrow", granularity))
    assert difference(outputs(made, inputs), outputs(found, inputs)) < 0.05
    if made is TWO:
        # Products of the same data share its codes.
        assert [node.op_type for node in found.graph.node].count("DynamicQuantizeLinear") == 1
    onnx.save(found, tmp_path / "m.onnx")
    assert kernels in (None, [node.op_type for node in running_graph(tmp_path / "m.onnx").node])


def test_the_codes_are_those_that_the_standard_defines() -> None:
    # Neighbours of different signs, so that no two products are too much for 16 bits.
    weight = np.abs(values(32, 16)) * np.float32([[1], [-1]] * 16)
    made = model("g (float[4,32] x) => (float[4,16] y) { [n] y = MatMul(x, w) }", w=weight)
    found = dynamic(made, QuantSpec("int8-narrow", Granularity.CHANNEL))
    x = sample(made, 1)["x"]
    scale = np.abs(weight).max(axis=0) / np.float32(127)
    integers = np.rint(weight / scale)
    low, high = min(x.min(), 0), max(x.max(), 0)
    step = np.float32((high - low) / np.float32(255))
    zero = np.rint(-low / step)
    data = np.clip(np.rint(x / step) + zero, 0, 255) - zero
    assert np.allclose(outputs(found, {"x": x})["y"], (data @ integers) * (step * scale), rtol=1e-5, atol=1e-6)


# QuantizeRecurrentCells writes onnxruntime's integer LSTM, which computes as the LSTM with decoded weights does.

ROUNDING = 1e-6
"""Float32 sums in another order, and the sigmoid and tanh of the kernel."""
NOISE = 0.03
"""Eight-bit data and hidden states, relative to the largest output."""
STEPS, BATCH, SIZE, HIDDEN = 6, 3, 24, 16
PER_CHANNEL = QuantSpec("int8-narrow", Granularity.CHANNEL)
PER_TENSOR = QuantSpec("int8-narrow", Granularity.TENSOR)


def cell(
    attributes: str = "", given: str = "b", *, inputs: str = "", directions: int = 1, **stored: Array
) -> ModelProto:
    """An LSTM whose inputs behind the weights are ``given``, as in ``b, , h``; known ones hold random values."""
    kinds = {
        "b": values(directions, 8 * HIDDEN, seed=1),
        "h": values(directions, BATCH, HIDDEN, seed=2),
        "c": values(directions, BATCH, HIDDEN, seed=3),
        "p": values(directions, 3 * HIDDEN, seed=4),
        "lengths": np.array([STEPS, 2, 0], np.int32),
    }
    read = [name.strip() for name in given.split(",")]
    weights = {
        "w": values(directions, 4 * HIDDEN, SIZE, seed=5, scale=0.2),
        "r": values(directions, 4 * HIDDEN, HIDDEN, seed=6, scale=0.2),
    }
    text = f"""g (float[{STEPS}, {BATCH}, {SIZE}] x{inputs}) => (float y, float last, float state) {{
        [cell] y, last, state = LSTM <hidden_size = {HIDDEN}{attributes}> (x, w, r, {given})
    }}"""
    made = model(text, **{**weights, **{name: kinds[name] for name in read if name in kinds}, **stored})
    for output in made.graph.output:
        output.type.tensor_type.ClearField("shape")
    return made


def quantized(
    made: ModelProto, weight: QuantSpec | None = None, target: str = "onnxruntime-cpu"
) -> tuple[Graph, Changes]:
    """Replace every cell that a plan makes dynamic; a second time there is nothing left to do."""
    graph = named_graph(made)
    scheme = Scheme((Rule(Mode.DYNAMIC, weight=weight),))
    plan = make_plan(graph, scheme, target_named(target), emit=AllowedOps.ORT)
    encodings = encode(plan, graph)
    changes = apply_once(QuantizeRecurrentCells(plan, encodings), graph)
    assert not QuantizeDynamically(plan, encodings).apply(graph)
    RemoveUnused().apply(graph)
    return graph, changes


def decoded(graph: Graph) -> ModelProto:
    """The same model as float cells with the weights that the quantized values stand for."""
    found = named_graph(to_model(graph))
    assert ReplaceIntegerOperators().apply(found)
    return to_model(found)


def stored(graph: Graph, suffix: str) -> dict[str, Array]:
    found = {tensor.name: tensor.values for tensor in constants(graph)}
    return {name.removesuffix(suffix): array for name, array in found.items() if name.endswith(suffix)}


# --- what the kernel computes ---------------------------------------------------------------------------------------


def eight_bits(array: Array) -> tuple[Array, np.float32]:
    """Codes without their zero point, and their scale, as DynamicQuantizeLinear defines them."""
    low, high = np.minimum(array.min(), 0), np.maximum(array.max(), 0)
    scale = np.float32((high - low) / np.float32(255)) or np.float32(1)
    zero = np.rint(-low / scale)
    return np.clip(np.rint(array / scale) + zero, 0, 255) - zero, scale


def lstm_of_integers(x: Array, integers: dict[str, Array], scales: dict[str, Array], bias: Array) -> Array:
    """Equations of ONNX LSTM with products of integers; all data has one scale, and so have all hidden states."""

    def sigmoid(values: Array) -> Array:
        return 1 / (1 + np.exp(-values))

    data, step = eight_bits(x)
    hidden = state = np.zeros((BATCH, HIDDEN), np.float32)
    found = []
    for now in data:
        before, scale = eight_bits(hidden)
        products = (now @ integers["w"][0]) * (step * scales["w"][0]) + (before @ integers["r"][0]) * (
            scale * scales["r"][0]
        )
        into, out, forget, new = np.split(products + bias[0].reshape(2, -1).sum(axis=0), 4, axis=1)
        state = sigmoid(forget) * state + sigmoid(into) * np.tanh(new)
        hidden = (sigmoid(out) * np.tanh(state)).astype(np.float32)
        found.append(hidden)
    return np.stack(found)[:, None]


@pytest.mark.parametrize("weight", [PER_CHANNEL, PER_TENSOR], ids=["channel", "tensor"])
def test_products_are_those_of_integers_with_a_scale_for_all_data_and_one_for_each_hidden_state(
    weight: QuantSpec,
) -> None:
    made = cell()
    graph, changes = quantized(made, weight)
    assert (ops(graph), changes.changed) == (["DynamicQuantizeLSTM"], ("cell",))
    x = sample(made)["x"]
    integers = {name: array.astype(np.float64) for name, array in stored(graph, ".codes").items()}
    expected = lstm_of_integers(x, integers, stored(graph, ".scale"), values(1, 8 * HIDDEN, seed=1))
    assert difference({"y": outputs(graph, {"x": x})["y"]}, {"y": expected.astype(np.float32)}) <= ROUNDING


def of_both_signs(*shape: int) -> Array:
    """Return a weight of which neighbours have different signs, so that no pair is too much for 16 bits."""
    return np.asarray(np.abs(values(*shape, seed=5)) * np.float32([1, -1] * shape[-1])[: shape[-1]])


@pytest.mark.parametrize("spec", [PER_CHANNEL, PER_TENSOR], ids=["channel", "tensor"])
def test_codes_lie_transposed_with_a_scale_for_each_row_or_one_of_each_direction(spec: QuantSpec) -> None:
    weight = of_both_signs(2, 4 * HIDDEN, SIZE)
    weight[1] *= 10
    graph, _ = quantized(cell(', direction = "bidirectional"', directions=2, w=weight), spec)
    scale = np.abs(weight).max(axis=2) / np.float32(127)
    scale = scale if spec is PER_CHANNEL else np.full(2, scale.max())
    integers = np.rint(weight / scale.reshape(2, -1, 1)).astype(np.int8)
    np.testing.assert_array_equal(stored(graph, ".codes")["w"], integers.transpose(0, 2, 1), strict=True)
    np.testing.assert_array_equal(stored(graph, ".scale")["w"], scale, strict=True)
    np.testing.assert_array_equal(stored(graph, ".zero_point")["w"], np.zeros(scale.shape, np.int8), strict=True)


def test_codes_of_neighbours_fit_16_bits_where_they_are_multiplied() -> None:
    weight = np.abs(values(1, 4 * HIDDEN, SIZE, seed=5)) + 1
    graph, _ = quantized(cell(w=weight))
    integers = stored(graph, ".codes")["w"].astype(int)[0, : SIZE // 2 * 2]
    assert 120 < (integers[::2] + integers[1::2]).max() <= 128


TWO_CELLS = {"attributes": ', direction = "bidirectional"', "directions": 2}
CASES: dict[str, dict[str, Any]] = {
    "one direction": {},
    "backward": {"attributes": ', direction = "reverse"'},
    "two directions": TWO_CELLS,
    "no bias": {"given": ""},
    "lengths": {"given": "b, lengths"},
    "initial hidden state": {"given": "b, , h"},
    "initial state without a bias": {"given": ", , h, c"},
    "peepholes": {"given": "b, , , , p"},
    "everything in two directions": {**TWO_CELLS, "given": "b, lengths, h, c, p"},
    "clipped": {"attributes": ", clip = 0.5"},
    "one gate for two": {"attributes": ", input_forget = 1"},
    "other activations": {
        "attributes": ', activations = ["HardSigmoid", "Softsign", "Tanh"], activation_alpha = [0.3]'
    },
    "a layout that is written out": {"attributes": ", layout = 0"},
    "computed lengths and states": {"given": "b, n, s", "inputs": f", int32[{BATCH}] n, float[1, {BATCH}, {HIDDEN}] s"},
}


@pytest.mark.parametrize("weight", [PER_CHANNEL, PER_TENSOR], ids=["channel", "tensor"])
@pytest.mark.parametrize("case", CASES)
def test_a_cell_computes_nearly_what_its_decoded_weights_do_and_comes_back_as_it_was(
    case: str, weight: QuantSpec
) -> None:
    made = cell(**CASES[case])
    graph, changes = quantized(made, weight)
    assert (ops(graph), changes.changed) == (["DynamicQuantizeLSTM"], ("cell",))
    # Lengths of a batch, if it is given any.
    inputs = sample(made) | ({"n": np.array([1, STEPS, 3], np.int32)} if "inputs" in CASES[case] else {})
    back = decoded(graph)
    # Were it zero, no integers would be multiplied.
    assert 1e-4 < difference(outputs(graph, inputs), outputs(back, inputs)) < NOISE

    (node,), (given,) = back.graph.node, made.graph.node
    assert (node.op_type, node.domain, list(node.output)) == ("LSTM", "", list(given.output))
    assert list(node.input) == [name for name in given.input if name or any(given.input[3:])]
    assert {one.name for one in node.attribute} == {one.name for one in given.attribute} - {"layout"}
    assert difference(outputs(back, inputs), outputs(made, inputs)) < NOISE


# --- weights that are shared, or around a body ----------------------------------------------------------------------


SHARING = f"""g (float[{STEPS}, {BATCH}, {HIDDEN}] x) => (float[{STEPS}, 1, {BATCH}, {HIDDEN}] y,
                                                          float[{STEPS}, 1, {BATCH}, {HIDDEN}] z) {{
    [one] y = LSTM <hidden_size = {HIDDEN}> (x, w, w)
    [two] z = LSTM <hidden_size = {HIDDEN}, direction = "reverse"> (x, w, r)
}}"""


def test_a_weight_of_several_cells_is_quantized_once_and_decoded_once() -> None:
    weights = {name: values(1, 4 * HIDDEN, HIDDEN, seed=seed, scale=0.2) for seed, name in enumerate("wr")}
    made = model(SHARING, **weights)
    graph, changes = quantized(made)
    assert changes.changed == ("one", "two")
    assert set(stored(graph, ".codes")) == {"w", "r"}
    one, two = nodes(graph)
    assert one.inputs[1] is one.inputs[2] is two.inputs[1]
    back = decoded(graph)
    assert sorted(tensor.name for tensor in back.graph.initializer) == ["r", "w"]
    assert difference(outputs(graph, sample(made)), outputs(back, sample(made))) < NOISE


STATE, SEQUENCE = f"float[1, {BATCH}, {HIDDEN}]", f"float[{STEPS}, 1, {BATCH}, {HIDDEN}]"
IN_AN_IF = f"""g (float[{STEPS}, {BATCH}, {SIZE}] x, bool c) => ({SEQUENCE} y) {{ y = If (c) <
    then_branch = yes () => ({SEQUENCE} t) {{ [one] t = LSTM <hidden_size = {HIDDEN}> (x, w, r) }},
    else_branch = no () => ({SEQUENCE} e) {{
        [two] e = LSTM <hidden_size = {HIDDEN}, direction = "reverse"> (x, w, r) }}> }}"""
# The hidden state of each step is quantized anew.
IN_A_LOOP = f"""g (float[1, {BATCH}, {SIZE}] x, {STATE} h, {STATE} c) => ({STATE} y) {{
    y, last = Loop (three, true, h, c) <body = step (int64 i, bool go, {STATE} a, {STATE} b)
        => (bool again, {STATE} d, {STATE} e) {{ again = Identity(go)
            [one] all, d, e = LSTM <hidden_size = {HIDDEN}> (x, w, r, , , a, b) }}> }}"""


@pytest.mark.parametrize(("text", "changed"), [(IN_AN_IF, ("one", "two")), (IN_A_LOOP, ("one",))], ids=["If", "Loop"])
def test_cells_in_bodies_read_codes_from_around_them(text: str, changed: tuple[str, ...]) -> None:
    sizes = {"w": SIZE, "r": HIDDEN}
    weights = {name: values(1, 4 * HIDDEN, size, scale=0.2) for name, size in sizes.items()}
    loop = {"three": np.array(3), "true": np.array(True)} if text is IN_A_LOOP else {}
    made = model(text, **weights, **loop)
    graph, changes = quantized(made)
    assert changes.changed == changed
    names = {f"{name}.{part}" for name in weights for part in ("codes", "scale", "zero_point")}
    assert {tensor.name for tensor in constants(graph)} - {"three", "true"} == names
    for seed in range(2):
        inputs = sample(made, seed)
        assert 1e-4 < difference(outputs(graph, inputs), outputs(decoded(graph), inputs)) < NOISE


def test_the_order_of_weights_in_a_plan_does_not_matter() -> None:
    plan = make_plan(
        named_graph(cell()), Scheme((Rule(Mode.DYNAMIC),)), target_named("onnxruntime-cpu"), emit=AllowedOps.ORT
    )
    turned = replace(plan, decisions=tuple(replace(one, weights=one.weights[::-1]) for one in plan.decisions))
    names = []
    for found in (plan, turned):
        graph = named_graph(cell())
        QuantizeRecurrentCells(found, encode(found, graph)).apply(graph)
        names.append([tensor.name for tensor in node_named(graph, "cell").inputs])
    assert names[0] == names[1]
    assert names[0][-4:] == ["w.scale", "w.zero_point", "r.scale", "r.zero_point"]


# --- what is left ---------------------------------------------------------------------------------------------------


def test_a_cell_whose_weight_is_computed_is_left() -> None:
    graph = named_graph(cell())
    scheme = Scheme((Rule(Mode.DYNAMIC),))
    plan = make_plan(graph, scheme, target_named("onnxruntime-cpu"), emit=AllowedOps.ORT)
    encodings = encode(plan, graph)
    node_named(graph, "cell").inputs[1] = Variable("w")
    changes = QuantizeRecurrentCells(plan, encodings).apply(graph)
    assert changes == Changes((), (("cell", "its weight is computed at run time"),))
    assert node_named(graph, "cell").op == "LSTM"


def test_other_cells_and_other_modes_stay() -> None:
    made = model(
        f"""g (float[{STEPS}, {BATCH}, {SIZE}] x) => (float[1, {BATCH}, {HIDDEN}] y, float[1, {BATCH}, {HIDDEN}] z) {{
            [gru] a, y = GRU <hidden_size = {HIDDEN}> (x, wg, rg)
            [rnn] b, z = RNN <hidden_size = {HIDDEN}> (x, wr, rr)
        }}""",
        wg=values(1, 3 * HIDDEN, SIZE), rg=values(1, 3 * HIDDEN, HIDDEN),
        wr=values(1, HIDDEN, SIZE), rr=values(1, HIDDEN, HIDDEN),
    )  # fmt: skip
    graph, changes = quantized(made)
    assert (ops(graph), changes) == (["GRU", "RNN"], Changes())
