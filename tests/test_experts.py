"""The experts of a MoE: what QMoE multiplies is what numpy decodes, and a MoE that it does not take keeps its form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_texts import Array, difference, model, named_graph, ops, outputs
from onnx import ModelProto, TensorProto, numpy_helper

from onnxq.algorithms.encode import encode
from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme, Storage
from onnxq.errors import ModelError
from onnxq.ir import Graph, Variable, load, to_model
from onnxq.lowering import AllowedOps
from onnxq.passes import DecodeWeights, RemoveUnused, ReplaceWithContrib
from onnxq.passes.dequantize.stored_weights import stored_weights
from onnxq.pipeline.dequantization import dequantize
from onnxq.planning import experts
from onnxq.planning.plan import Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.sessions import multiplies_experts
from onnxq.runtime.targets import target_named

EXPERTS, HIDDEN, INNER = 4, 64, 96
SWIGLU = (
    'activation_type = "swiglu", swiglu_fusion = 1, activation_alpha = 1.7, activation_beta = 1.0, swiglu_limit = 7.0'
)
ALONE = 'activation_type = "identity", normalize_routing_weights = 1'
INT4, UINT4 = QuantSpec("int4", (32,)), QuantSpec("uint4", (16,), symmetric=False)
INT8, UINT8 = QuantSpec("int8-narrow", (32,), scale="e8m0"), QuantSpec("uint8", (32,), symmetric=False)
recent = pytest.mark.skipif(not multiplies_experts(), reason="an old onnxruntime")


def moe(
    build: Callable[..., ModelProto], attributes: str = 'activation_type = "silu"', *, chosen: int = 2, **changed: Any
) -> ModelProto:
    """Six tokens, each of which goes to two of four experts."""
    width = 2 * INNER if "swiglu" in attributes else INNER
    weights = {"w1": (EXPERTS, width, HIDDEN), "b1": (EXPERTS, width), "w2": (EXPERTS, HIDDEN, INNER)}
    made = build(
        f"(float[6,{HIDDEN}] x, float[6,{EXPERTS}] r) => (float[6,{HIDDEN}] y) {{"
        f"[experts] y = com.microsoft.MoE <k = {chosen}, {attributes}> (x, r, w1, b1, w2, b2) }}",
        **(weights | {"b2": (EXPERTS, HIDDEN)} | changed),
    )
    made.opset_import.add(domain="com.microsoft", version=1)
    return made


def planned(made: ModelProto, spec: QuantSpec, emit: AllowedOps) -> tuple[Graph, Plan]:
    graph = named_graph(made)
    scheme = Scheme((Rule(Mode.WEIGHT_ONLY, weight=spec),))
    return graph, make_plan(graph, scheme, target_named("onnxruntime-cpu"), emit=emit)


def with_qmoe(made: ModelProto, spec: QuantSpec) -> Graph:
    graph, plan = planned(made, spec, AllowedOps.FASTEST)
    step = ReplaceWithContrib(plan, encode(plan, graph), AllowedOps.FASTEST)
    assert step.apply(graph).changed == ("experts",)
    RemoveUnused().apply(graph)
    return graph


def tokens() -> dict[str, Array]:
    generator = np.random.default_rng(2)
    return {
        "x": generator.standard_normal((6, HIDDEN), np.float32),
        "r": generator.standard_normal((6, EXPERTS), np.float32),
    }


def decoded(made: ModelProto, spec: QuantSpec) -> ModelProto:
    """The same MoE with the values of its quantized weights, as numpy decodes them."""
    graph = named_graph(made)
    for index in (2, 4):
        tensor = graph.nodes[0].inputs[index]
        tensor.values = (
            encode_array(tensor.values, spec, channel_axis=1, reduction_axis=2).dequantize().astype(tensor.dtype)
        )
    return to_model(graph)


@recent
@pytest.mark.parametrize("spec", [INT4, UINT4, INT8, UINT8], ids=lambda spec: spec.format)
def test_a_qmoe_decodes_the_weights_of_numpy_bit_for_bit(spec: QuantSpec, build, monkeypatch) -> None:
    # Without the kernels that round activations, each token picks a column of a weight between identities.
    monkeypatch.setenv("ORT_QMOE_CPU_QNBIT_GEMM", "0")
    square, none = (np.stack([np.eye(HIDDEN, dtype=np.float32)] * EXPERTS), np.zeros((EXPERTS, HIDDEN), np.float32))
    weight = np.random.default_rng(0).standard_normal((EXPERTS, HIDDEN, HIDDEN), np.float32)
    inputs = {"x": np.eye(HIDDEN, dtype=np.float32), "r": np.float32([[9, 0, 0, 0]] * HIDDEN)}
    for first, second in ((weight, square), (square, weight)):
        made = moe(build, ALONE, chosen=1, w1=first, w2=second, b1=none, b2=none)
        graph = with_qmoe(made, spec)
        graph.inputs[0].shape, graph.inputs[1].shape, graph.outputs[0].shape = [HIDDEN, HIDDEN], [HIDDEN, EXPERTS], None
        expected = np.eye(HIDDEN, dtype=np.float32)
        for one in (first, second):
            expected = expected @ encode_array(one, spec, channel_axis=1, reduction_axis=2).dequantize()[0].T
        np.testing.assert_array_equal(outputs(graph, inputs)["y"], expected)


@recent
@pytest.mark.parametrize(
    ("spec", "kernel", "tolerance"),
    [(INT4, "fp32", 2e-5), (UINT8, "0", 2e-5), (UINT4, "int8", 0.03), (INT8, "int8", 0.03)],
    ids=["int4", "uint8", "rounded-uint4", "rounded-int8"],
)
@pytest.mark.parametrize("attributes", ["", "normalize_routing_weights = 1, "], ids=["all", "chosen"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity", "swiglu"])
def test_a_qmoe_computes_what_the_moe_of_decoded_weights_computes(
    activation: str, attributes: str, spec: QuantSpec, kernel: str, tolerance: float, build, monkeypatch
) -> None:
    made = moe(build, attributes + (SWIGLU if activation == "swiglu" else f'activation_type = "{activation}"'))
    expected = outputs(decoded(made, spec), tokens())
    monkeypatch.setenv("ORT_QMOE_CPU_QNBIT_GEMM", kernel)
    graph = with_qmoe(made, spec)
    assert ops(graph) == (["QMoE"] if attributes else ["Softmax", "QMoE"])
    # The fastest kernels round blocks of activations to 8 bits, as those of MatMulNBits do.
    assert difference(outputs(graph, tokens()), expected) < tolerance


@recent
def test_biases_may_be_missing(build) -> None:
    made = moe(build)
    for index in (5, 3):
        made.graph.node[0].input[index] = ""
    expected = outputs(decoded(made, INT4), tokens())
    assert difference(outputs(with_qmoe(made, INT4), tokens()), expected) < 0.03


@recent
def test_float16_experts_get_float16_scales(build) -> None:
    made, data = moe(build), {name: array.astype(np.float16) for name, array in tokens().items()}
    for tensor in made.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    graph = with_qmoe(made, INT4)
    assert {str(tensor.dtype) for tensor in graph.nodes[-1].inputs[3::3] if tensor.name} == {"float16"}
    expected = outputs(decoded(made, INT4), data)
    assert difference(outputs(graph, data), expected) < 0.03


@recent
@pytest.mark.parametrize(
    ("attributes", "spec", "emit", "reason"),
    [
        ("", INT4, AllowedOps.QDQ, "standard ONNX multiplies no quantized experts; onnxruntime's QMoE does"),
        ("", QuantSpec("int2", (32,)), AllowedOps.ORT, "QMoE takes experts of 4 or 8 bits in blocks"),
        ("", QuantSpec("int8", Granularity.CHANNEL), AllowedOps.ORT, "QMoE takes experts of 4 or 8 bits in blocks"),
        ("", replace(INT4, storage=Storage.WORDS), AllowedOps.ORT, "QMoE takes experts of 4 or 8 bits in blocks"),
        ("", QuantSpec("int4", (64,)), AllowedOps.ORT, "and 96 values are not whole blocks of 64"),
        ("", replace(UINT4, granularity=(64,)), AllowedOps.ORT, "QMoE takes whole blocks"),
        (', activation_type = "relu2"', INT4, AllowedOps.ORT, "QMoE has no kernel for relu2 with swiglu_fusion 0"),
        (', activation_type = "swiglu"', INT4, AllowedOps.ORT, "QMoE has no kernel for swiglu with swiglu_fusion 0"),
        (", use_sparse_mixer = 1", INT4, AllowedOps.ORT, "QMoE has no kernel for use_sparse_mixer"),
    ],
)  # fmt: skip
def test_a_moe_that_no_kernel_takes_computes_in_float(
    attributes: str, spec: QuantSpec, emit: AllowedOps, reason: str, build
) -> None:
    _, plan = planned(moe(build, f"normalize_routing_weights = 1{attributes}"), spec, emit)
    (decision,) = plan.decisions
    assert decision.mode is Mode.STORAGE
    assert reason in decision.reason


@recent
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"inner": 32}, "QMoE takes zero points of two blocks and more"),
        ({"third": True}, "QMoE has no kernel for a third weight of each expert"),
        ({"computed": True}, "QMoE takes experts whose weights both are constants"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_experts_of_another_form_compute_in_float(change: dict[str, Any], reason: str, build) -> None:
    inner = change.get("inner", INNER)
    made = moe(build, w1=(EXPERTS, inner, HIDDEN), b1=(EXPERTS, inner), w2=(EXPERTS, HIDDEN, inner))
    graph = named_graph(made)
    node = graph.nodes[0]
    if "third" in change:
        node.inputs.append(node.inputs[2])
    if "computed" in change:
        node.inputs[4] = Variable("w", np.dtype(np.float32), [EXPERTS, HIDDEN, inner])
    scheme = Scheme((Rule(Mode.WEIGHT_ONLY, weight=replace(UINT4, granularity=(32,))),))
    plan = make_plan(graph, scheme, target_named("onnxruntime-cpu"), emit=AllowedOps.ORT)
    assert plan.by_node["experts"].mode is Mode.STORAGE
    assert reason in plan.by_node["experts"].reason


def test_an_old_runtime_and_a_body_get_no_qmoe(build, monkeypatch) -> None:
    graph = named_graph(moe(build))
    monkeypatch.setattr(experts, "multiplies_experts", lambda: True)
    assert "bodies" in experts.experts_obstacle(graph.nodes[0], (), AllowedOps.ORT, in_body=True)
    monkeypatch.setattr(experts, "multiplies_experts", lambda: False)
    assert "since onnxruntime 1.32" in experts.experts_obstacle(graph.nodes[0], (), AllowedOps.ORT, in_body=False)


@recent
def test_a_plan_for_qmoe_is_also_written_in_standard_onnx(build) -> None:
    made = moe(build)
    graph, plan = planned(made, INT4, AllowedOps.ORT)
    graph.opset = 21
    DecodeWeights(plan, encode(plan, graph)).apply(graph)
    RemoveUnused().apply(graph)
    assert ops(graph) == ["DequantizeLinear", "DequantizeLinear", "MoE"]
    assert difference(outputs(graph, tokens()), outputs(decoded(made, INT4), tokens())) < 1e-6


@recent
@pytest.mark.parametrize("normalized", [0, 1])
@pytest.mark.parametrize("preset", ["int4-block32-rtn", "uint4-block32", "mxint8"])
def test_a_qmoe_gives_the_weights_back_that_stored_ones_give(
    preset: str, normalized: int, build, quantize_to, tmp_path: Path
) -> None:
    made = moe(build, f'activation_type = "relu", normalize_routing_weights = {normalized}')
    found = []
    for emit, written in ((AllowedOps.ORT, "QMoE"), (AllowedOps.QDQ, "MoE")):
        quantize_to(made, tmp_path / "q.onnx", scheme=preset, emit=emit)
        graph = load(tmp_path / "q.onnx")
        assert ops(graph)[-1] == written
        assert {(one.node.op, one.bits) for one in stored_weights(graph)} == {(written, 8 if preset == "mxint8" else 4)}
        back = dequantize(tmp_path / "q.onnx", tmp_path / "back.onnx")
        assert ops(back) == ["MoE"]
        assert back.nodes[0].attrs["normalize_routing_weights"] == normalized
        found.append({tensor.name: tensor.values.tobytes() for tensor in back.nodes[0].inputs[2:5:2]})
    assert found[0] == found[1]
    assert list(found[0]) == ["w1", "w2"]


@recent
@pytest.mark.parametrize("change", ["shares", "packing", "bits"])
def test_a_qmoe_of_another_form_is_refused_by_name(change: str, build) -> None:
    graph = with_qmoe(moe(build, 'activation_type = "relu"'), INT4)
    node = graph.nodes[-1]
    if change == "shares":
        node.inputs[14] = node.inputs[1]
    else:
        node.attrs["weights_prepacked" if change == "packing" else "fc1_expert_weight_bits"] = 1
    with pytest.raises(ModelError, match=r"\(QMoE\) has three weights, bits or packing of one of them"):
        dequantize(to_model(graph))


@recent
@pytest.mark.parametrize("bits", [4, 8])
def test_a_qmoe_of_others_with_one_scale_a_row_is_read(bits: int) -> None:
    generator = np.random.default_rng(0)
    weights = []
    for rows, columns in ((INNER, HIDDEN), (HIDDEN, INNER)):
        stored = generator.integers(0, 256, (EXPERTS, rows, columns * bits // 8), np.uint8)
        scales = generator.uniform(0.01, 0.02, (EXPERTS, rows)).astype(np.float32)
        weights += [(stored, scales, generator.integers(0, 256, (EXPERTS, rows * bits // 8), np.uint8))]
    (w1, s1, z1), (w2, s2, z2) = weights
    made = model(
        f"""g (float[6,{HIDDEN}] x, float[6,{EXPERTS}] r) => (float[6,{HIDDEN}] y) {{
            y = com.microsoft.QMoE <k = 2, activation_type = "relu", expert_weight_bits = {bits}>
                (x, r, w1, s1, "", w2, s2, "", "", "", "", z1, z2) }}""",
        w1=w1, s1=s1, z1=z1, w2=w2, s2=s2, z2=z2,
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    assert difference(outputs(dequantize(made), tokens()), outputs(made, tokens())) < 1e-5
