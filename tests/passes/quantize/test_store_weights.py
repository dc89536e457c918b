"""StoreWeights keeps codes in the file, and onnxruntime decodes them once, when it loads the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
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
from model_zoo import float16_weights, if_bodies_that_share_a_captured_weight, recurrent_layers, unrolled_recurrence
from onnx import ModelProto, TensorProto
from stored_weights import PER_CHANNEL, PER_TENSOR, decisions, decoded_by, largest_float, store

from onnxq.algorithms.encode import encode
from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import Mode, Rule, Scheme, Spec, Storage
from onnxq.ir import Constant, as_graph, constants, to_model
from onnxq.lowering import AllowedOps
from onnxq.onnx_api import infer_shapes, upgrade_opset
from onnxq.passes import RemoveUnused, StoreWeights
from onnxq.planning.plan import Weight
from onnxq.planning.planner import make_plan
from onnxq.runtime.sessions import open_session
from onnxq.runtime.targets import target_named


@pytest.mark.parametrize("spec", [PER_CHANNEL, PER_TENSOR])
def test_codes_and_scales_equal_the_reference_bit_for_bit(spec: Spec) -> None:
    weight = values(16, 24)
    made = model("g (float[3, 16] x) => (float[3, 24] y) { [dot] y = MatMul(x, w) }", w=weight)
    graph = as_graph(made)
    plan = decisions(("dot", Weight(1, "w", spec, -1)))
    StoreWeights(plan, encode(plan, graph)).apply(graph)
    cast, decode = decoded_by(graph, "dot")
    largest = np.abs(weight).max(axis=0 if spec is PER_CHANNEL else None, keepdims=True)
    scale = (largest.astype(np.float64) / 127).astype(np.float32)
    codes = np.rint(weight / scale).astype(np.int8)
    assert [cast.op, decode.op] == ["Cast", "Mul"]
    np.testing.assert_array_equal(cast.inputs[0].values, codes, strict=True)
    np.testing.assert_array_equal(decode.inputs[1].values, scale, strict=True)
    assert [cast.inputs[0].name, decode.inputs[1].name, decode.outputs[0].name] == ["w.codes", "w.scale", "w.decoded"]
    expected = sample(made)["x"] @ (codes.astype(np.float32) * scale)
    assert difference(outputs(graph, sample(made)), {"y": expected}) <= 1e-6


def test_a_weight_that_several_nodes_read_is_stored_once() -> None:
    made = unrolled_recurrence()
    graph, changes = store(made)
    assert changes.changed == ("w2", "w")
    assert ops(graph).count("Cast") == ops(graph).count("Mul") == 2
    assert len({node_named(graph, f"in{step}").inputs[1] for step in range(3)}) == 1
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.03


def test_nodes_that_want_other_scales_of_one_weight_get_codes_of_their_own() -> None:
    made = model(
        """g (float[3, 16] x) => (float[3, 16] y, float[3, 16] z) {
            [a] y = MatMul(x, w)  [b] z = Gemm <transB = 1> (x, w)
        }""",
        w=values(16, 16),
    )
    graph = as_graph(made)
    plan = decisions(("a", Weight(1, "w", PER_CHANNEL, -1)), ("b", Weight(1, "w", PER_CHANNEL, 0)))
    assert StoreWeights(plan, encode(plan, graph)).apply(graph).changed == ("w", "w")
    assert decoded_by(graph, "a")[1].inputs[1].shape == (1, 16)
    assert decoded_by(graph, "b")[1].inputs[1].shape == (16, 1)
    assert decoded_by(graph, "b")[0].inputs[0].name == "w.codes.1"


def test_axes_that_mean_the_same_share_their_codes() -> None:
    made = model(
        "g (float[3, 16] x) => (float[3, 16] y, float[3, 16] z) { [a] y = MatMul(x, w) [b] z = Gemm(x, w) }",
        w=values(16, 16),
    )
    graph = as_graph(made)
    plan = decisions(("a", Weight(1, "w", PER_CHANNEL, -1)), ("b", Weight(1, "w", PER_CHANNEL, 1)))
    assert StoreWeights(plan, encode(plan, graph)).apply(graph).changed == ("w",)
    assert node_named(graph, "a").inputs[1] is node_named(graph, "b").inputs[1]


def test_a_node_that_is_not_in_the_plan_keeps_the_float_weight() -> None:
    made = model(
        "g (float[3, 16] x) => (float[3, 16] y, float[3, 16] z) { [a] y = MatMul(x, w) [b] z = MatMul(x, w) }",
        w=values(16, 16),
    )
    graph = as_graph(made)
    plan = decisions(("a", Weight(1, "w", PER_CHANNEL, -1)))
    StoreWeights(plan, encode(plan, graph)).apply(graph)
    assert node_named(graph, "b").inputs[1].name == "w"
    assert node_named(graph, "a").inputs[1].name == "w.decoded"


# --- types and operators ------------------------------------------------------------------------------------------


def test_float16_weights_stay_float16_and_near_their_values() -> None:
    made = float16_weights()
    graph, changes = store(made)
    assert changes.changed == ("w",)
    decoder = decoded_by(graph, "conv")
    assert [node.op for node in decoder] == ["Cast", "Mul", "Cast"]
    assert node_named(graph, "conv").inputs[1].dtype == np.float16
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.03


@pytest.mark.parametrize("size", [1e-6, 1.0, 6e4])
def test_float16_weights_decode_near_their_values_even_when_their_scale_is_no_float16(size: float) -> None:
    weight = (np.linspace(-1, 1, 256).reshape(16, 16) * size).astype(np.float16)
    made = model("g (float16[16, 16] x) => (float16[16, 16] y) { [dot] y = MatMul(x, w) }", w=weight)
    graph, _ = store(made)
    assert node_named(graph, "dot").inputs[1].name == "w.rounded"
    graph.outputs = [node_named(graph, "dot").inputs[1]]
    RemoveUnused().apply(graph)
    (decoded,) = outputs(graph, {"x": np.eye(16, dtype=np.float16)}).values()
    assert decoded.dtype == np.float16
    assert decoded.any()
    step = np.abs(weight.astype(np.float64)).max(axis=0) / 127
    # Half a step of the codes, and half a step of float16, whose smallest number is 2**-24.
    allowed = 0.51 * step + np.abs(weight.astype(np.float64)) * 2.0**-11 + 2.0**-25
    assert (np.abs(decoded.astype(np.float64) - weight) <= allowed).all()


def test_bfloat16_weights_stay_bfloat16() -> None:
    made = model("g (bfloat16[3, 16] x) => (bfloat16[3, 16] y) { [dot] y = MatMul(x, w) }")
    made.graph.initializer.append(onnx.numpy_helper.from_array(values(16, 16).astype(ml_dtypes.bfloat16), "w"))
    graph, changes = store(made)
    assert changes.changed == ("w",)
    assert decoded_by(graph, "dot")[-1].attrs["to"] == TensorProto.BFLOAT16
    assert node_named(graph, "dot").inputs[1].dtype == ml_dtypes.bfloat16


def test_recurrent_weights_have_one_scale_for_each_row_of_the_gates() -> None:
    made = recurrent_layers()
    graph, changes = store(made)
    assert changes.changed == ("wl", "rl", "wg", "rg")
    for node, index, rows in (("lstm", 1, 64), ("lstm", 2, 64), ("gru", 1, 48), ("gru", 2, 48)):
        assert decoded_by(graph, node, index)[1].inputs[1].shape == (1, rows, 1)
    assert largest_float(graph) == 128 * 4, "the bias stays"
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.03


@pytest.mark.parametrize(
    ("spec", "wider"), [(PER_CHANNEL, TensorProto.INT32), (Spec("float8e4m3fn"), TensorProto.FLOAT16)]
)
def test_codes_that_a_runtime_does_not_fold_by_itself_pass_through_a_wider_type(spec: Spec, wider: int) -> None:
    made = recurrent_layers()
    graph = upgrade_opset(named_graph(made), 19)
    infer_shapes(graph)
    plan = make_plan(graph, Scheme((Rule(Mode.STORAGE, weight=spec),)), target_named("openvino"))
    apply_once(StoreWeights(plan, encode(plan, graph), constants=frozenset({"LSTM"})), graph)
    assert [one.attrs["to"] for one in decoded_by(graph, "lstm")[:2]] == [wider, TensorProto.FLOAT]
    assert [one.op for one in decoded_by(graph, "gru")] == ["Cast", "Mul"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.15


def test_tables_of_embeddings_are_stored() -> None:
    made = model("g (int64[N] i) => (float[N, 8] y) { [look] y = Gather(w, i) }", w=values(64, 8))
    graph, changes = store(made)
    assert changes.changed == ("w",)
    indices = {"i": np.array([0, 5, 63])}
    assert difference(outputs(graph, indices), outputs(made, indices)) < 0.02


def test_a_channel_of_zeros_decodes_to_zeros() -> None:
    weight = values(16, 16)
    weight[:, 3] = 0
    made = model("g (float[3, 16] x) => (float[3, 16] y) { [dot] y = MatMul(x, w) }", w=weight)
    graph, _ = store(made)
    assert not outputs(graph, sample(made))["y"][:, 3].any()


# --- what onnxruntime makes of it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [unrolled_recurrence, recurrent_layers, if_bodies_that_share_a_captured_weight, float16_weights],
)
def test_onnxruntime_decodes_when_it_loads_and_never_again(build: Any, tmp_path: Path) -> None:
    graph, _ = store(build())
    assert "Cast" in ops(graph)
    open_session(to_model(graph), optimized_copy=tmp_path / "runs.onnx")
    runs = as_graph(onnx.load(tmp_path / "runs.onnx"))
    left = [
        node.name
        for node in nodes(runs)
        if node.op in ("Cast", "Mul") and all(isinstance(tensor, Constant) for tensor in node.inputs)
    ]
    assert not left
    stored = [tensor.name for tensor in constants(runs) if tensor.dtype == np.int8]
    assert not stored


def test_the_file_is_about_a_quarter_of_the_size() -> None:
    made = model("g (float[3, 64] x) => (float[3, 64] y) { [dot] y = MatMul(x, w) }", w=values(64, 64))
    graph, _ = store(made)
    weights: list[Array] = [tensor.values for tensor in constants(graph)]
    assert sum(array.nbytes for array in weights) == 64 * 64 + 64 * 4


# --- other formats --------------------------------------------------------------------------------------------------

BLOCKS = Spec("int4", (16,))
NVFP4 = Spec("float4e2m1", (16,), scale="ue4m3", two_level=True)
WORDS = Spec("uint4", (8,), symmetric=False, storage=Storage.WORDS)


@pytest.mark.parametrize("spec", [BLOCKS, NVFP4, WORDS], ids=["blocks", "two levels", "words"])
@pytest.mark.parametrize("build", [recurrent_layers, if_bodies_that_share_a_captured_weight])
def test_any_format_is_decoded_where_the_weight_is_declared(
    build: Callable[[], ModelProto], spec: Spec, tmp_path: Path
) -> None:
    graph, plain = (upgrade_opset(as_graph(build()), 21) for _ in range(2))
    infer_shapes(graph)
    plan = make_plan(graph, Scheme((Rule(Mode.STORAGE, weight=spec),)), target_named("onnxruntime-cpu"))
    float_weights = {tensor.name: tensor.values for tensor in constants(plain)}
    for node in nodes(plain):
        for weight in plan.by_node[node.name].weights:
            axes = {"channel_axis": weight.axis, "reduction_axis": weight.reduction_axis}
            node.inputs[weight.index].values = encode_array(
                float_weights[weight.tensor], weight.spec, **axes
            ).dequantize()
    assert StoreWeights(plan, encode(plan, graph)).apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    inputs = sample(build())
    assert difference(outputs(graph, inputs), outputs(plain, inputs)) <= 1e-6
    open_session(to_model(graph), optimized_copy=tmp_path / "runs.onnx")
    runs = as_graph(onnx.load(tmp_path / "runs.onnx"))
    assert not {"Cast", "Reshape", "BitShift", "DequantizeLinear"} & set(ops(runs))


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (PER_CHANNEL, ["DequantizeLinear"]),
        (BLOCKS, ["DequantizeLinear"]),
        (NVFP4, ["DequantizeLinear", "DequantizeLinear"]),
        (Spec("int4", (4, 2, 4)), ["Cast", "Reshape", "Mul", "Reshape"]),
    ],
    ids=["channels", "blocks", "two levels", "rectangles"],
)
def test_strict_decodes_by_dequantizelinear_where_one_axis_has_blocks(spec: Spec, found: list[str]) -> None:
    made = model(
        "g (float[1, 32, 4, 8] x) => (float[1, 8, 1, 1] y) { [conv] y = Conv(x, w) }",
        opset=23, ir_version=11, w=values(8, 32, 4, 8),
    )  # fmt: skip
    graph = as_graph(made)
    plan = decisions(("conv", Weight(1, "w", spec, 0, reduction_axis=1)))
    StoreWeights(plan, encode(plan, graph), AllowedOps.STRICT).apply(graph)
    assert ops(graph) == [*found, "Conv"]
    onnx.checker.check_model(to_model(graph))
