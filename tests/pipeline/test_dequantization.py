"""dequantize() gives back the float model, whichever quantizer wrote the quantized values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from dequantized_models import (
    CONVOLUTIONS,
    EMBEDDING,
    PRODUCTS,
    SUMS,
    Array,
    Samples,
    bits,
    check,
    decoded_by_onnxruntime,
    difference,
    ops,
    tensors_of,
    with_weights_of,
)
from onnx import ModelProto, helper, numpy_helper
from onnxruntime.quantization import (
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

import onnxq
from onnxq.config.presets import PRESETS
from onnxq.errors import ModelError, OutputError
from onnxq.ir import as_graph, constants, load, save
from onnxq.lowering import AllowedOps
from onnxq.pipeline.dequantization import dequantize
from onnxq.planning.plan import METADATA_KEY


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def convolutions(build: Callable[..., ModelProto]) -> ModelProto:
    limits = {"low": np.array(0, np.float32), "high": np.array(6, np.float32)}
    generator = np.random.default_rng(3)
    first = generator.normal(size=(8, 3, 3, 3)).astype(np.float32)
    return build(
        CONVOLUTIONS, w1=first, b1=(8,), w2=(8, 8, 3, 3), b2=(8,), w3=(16, 12), b3=(12,), w4=(12, 10), **limits
    )


@pytest.fixture(scope="module")
def embedding(build: Callable[..., ModelProto]) -> ModelProto:
    return build(EMBEDDING, table=(20, 8), wl=(1, 24, 8), rl=(1, 24, 6), bl=(1, 48), w=(6, 5), axes=np.array([1]))


@pytest.fixture(scope="module")
def products(build: Callable[..., ModelProto]) -> ModelProto:
    return build(PRODUCTS, w1=(64, 64), w2=(64, 48))


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("activations", [QuantType.QInt8, QuantType.QUInt8])
@pytest.mark.parametrize("format", list(QuantFormat))
def test_what_quantize_static_wrote_gets_back_every_node_of_the_float_model(
    convolutions: ModelProto, format: QuantFormat, activations: QuantType, per_channel: bool, tmp_path: Path
) -> None:
    onnx.save(convolutions, tmp_path / "float.onnx")
    quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "q.onnx",
        Samples(convolutions),
        quant_format=format,
        activation_type=activations,
        weight_type=QuantType.QInt8,
        per_channel=per_channel,
    )
    graph = check(tmp_path / "q.onnx", tmp_path / "back.onnx", decoded_by_onnxruntime)
    assert sorted(ops(graph)) == sorted(node.op_type for node in convolutions.graph.node)
    assert difference(with_weights_of(graph, convolutions), tmp_path / "back.onnx") <= SUMS


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", ["convolutions", "embedding", "products"])
def test_what_quantize_dynamic_wrote_gets_back_every_node_of_the_float_model(
    name: str, per_channel: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    original = request.getfixturevalue(name)
    onnx.save(original, tmp_path / "float.onnx")
    wanted = ["Conv", "Gather", "LSTM", "MatMul"]
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "q.onnx", wanted, per_channel=per_channel)
    graph = check(tmp_path / "q.onnx", tmp_path / "back.onnx", decoded_by_onnxruntime)
    # Its preparation writes a Gemm as MatMul and Add, and the bias of a Conv as Reshape and Add.
    left = set(ops(graph)) ^ {node.op_type for node in original.graph.node}
    assert left <= {"Gemm", "Add", "Reshape"}
    assert difference(with_weights_of(graph, original), tmp_path / "back.onnx") <= SUMS


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "format"), [(4, QuantFormat.QOperator), (8, QuantFormat.QOperator), (4, QuantFormat.QDQ)]
)
def test_what_the_n_bits_quantizer_wrote_computes_the_same(
    products: ModelProto, bits: int, format: QuantFormat, symmetric: bool, tmp_path: Path
) -> None:
    # It needs a package of its own, which onnxruntime does not ask for.
    pytest.importorskip("onnx_ir")
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = ModelProto()
    model.CopyFrom(products)
    quantizer = MatMulNBitsQuantizer(
        model, bits=bits, block_size=32, is_symmetric=symmetric, accuracy_level=0, quant_format=format
    )
    quantizer.process()
    onnx.save(quantizer.model.model, tmp_path / "q.onnx")
    graph = dequantize(tmp_path / "q.onnx", tmp_path / "back.onnx")
    assert ops(graph) == ["MatMul", "Relu", "MatMul"]
    assert difference(tmp_path / "q.onnx", tmp_path / "back.onnx") <= SUMS


@pytest.mark.parametrize("preset", PRESETS)
def test_what_onnxq_wrote_gets_back_every_node_and_is_quantized_again(
    preset: str,
    perceptron: ModelProto,
    samples_for: Callable[..., list[dict[str, Array]]],
    quantize_to: Callable[..., Any],
    tmp_path: Path,
) -> None:
    quantize_to(perceptron, tmp_path / "q.onnx", scheme=preset)
    graph = check(
        tmp_path / "q.onnx", tmp_path / "back.onnx", lambda path: tensors_of(path) + decoded_by_onnxruntime(path)
    )
    # A dynamic Gemm is written as MatMul and Add.
    assert ops(graph) in (["MatMul", "Relu", "Gemm"], ["MatMul", "Relu", "MatMul", "Add"])
    assert METADATA_KEY not in graph.metadata
    again = quantize_to(onnx.load(tmp_path / "back.onnx"), tmp_path / "again.onnx")
    assert again.report.agreement.worst_sqnr > 30


LOOKUP = """(int64[2,3] x) => (float[2,3,48] y) {
    [rows] a = Gather(table, x)
    [product] y = MatMul(a, w)
}"""


@pytest.mark.parametrize("preset", PRESETS)
def test_every_way_to_write_a_weight_gives_the_same_weight_back(
    preset: str, build: Callable[..., ModelProto], quantize_to: Callable[..., Any], tmp_path: Path
) -> None:
    model = build(LOOKUP, table=(20, 64), w=(64, 48))
    samples = [{"x": np.random.default_rng(seed).integers(0, 20, (2, 3))} for seed in range(3)]
    found = set()
    # The type of 6-bit floats belongs to an opset that onnxruntime does not load.
    for emit in [AllowedOps.QDQ, AllowedOps.ORT] if preset == "mxfp6" else AllowedOps:
        quantize_to(model, tmp_path / "q.onnx", samples=samples, scheme=preset, emit=emit)
        graph = dequantize(tmp_path / "q.onnx")
        assert ops(graph) == ["Gather", "MatMul"]
        weights = [graph.nodes[0].inputs[0], graph.nodes[1].inputs[1]]
        found.add(tuple(bits(np.asarray(weight.values)) for weight in weights))
    assert len(found) == 1


def test_recurrent_cells_of_integers_give_the_weights_that_stored_ones_give(
    build: Callable[..., ModelProto], quantize_to: Callable[..., Any], tmp_path: Path
) -> None:
    text = "(float[8,2,32] x) => (float[8,1,2,24] y) { [cell] y = LSTM <hidden_size = 24> (x, w, r, b) }"
    # Neighbours of different signs, so that no two products are too much for 16 bits.
    signs, generator = np.float32([1, -1] * 16), np.random.default_rng(0)
    w, r = (np.abs(generator.normal(size=(1, 96, size))).astype(np.float32) * signs[:size] for size in (32, 24))
    model = build(text, w=w, r=r, b=(1, 192))
    found = []
    for scheme, emit, written in (
        ("int8", AllowedOps.ORT, "DynamicQuantizeLSTM"),
        ("int8-storage", AllowedOps.QDQ, "LSTM"),
    ):
        quantize_to(model, tmp_path / "q.onnx", scheme=scheme, emit=emit)
        assert ops(load(tmp_path / "q.onnx"))[-1] == written
        graph = dequantize(tmp_path / "q.onnx", tmp_path / "back.onnx")
        assert ops(graph) == ["LSTM"]
        found.append({tensor.name: bits(np.asarray(tensor.values)) for tensor in constants(graph)})
    assert found[0] == found[1]
    assert found[0].keys() == {"w", "r", "b"}


@pytest.mark.parametrize("preset", ["int8-storage"])
def test_stored_weights_leave_no_other_noise(
    preset: str, residual: ModelProto, quantize_to: Callable[..., Any], tmp_path: Path
) -> None:
    quantize_to(residual, tmp_path / "q.onnx", scheme=preset)
    dequantize(tmp_path / "q.onnx", tmp_path / "back.onnx")
    assert difference(tmp_path / "q.onnx", tmp_path / "back.onnx") <= SUMS


def test_other_metadata_and_the_users_own_model_stay_as_they_are(
    perceptron: ModelProto, quantize_to: Callable[..., Any], tmp_path: Path
) -> None:
    quantize_to(perceptron, tmp_path / "q.onnx")
    model = onnx.load(tmp_path / "q.onnx")
    model.metadata_props.add(key="author", value="me")
    before = model.SerializeToString(deterministic=True)
    assert dequantize(model).metadata == {"author": "me"}
    assert model.SerializeToString(deterministic=True) == before


def test_it_is_public_and_gives_the_graph_of_the_file(perceptron: ModelProto, quantize_to: Any, tmp_path: Path) -> None:
    quantize_to(perceptron, tmp_path / "q.onnx")
    graph = onnxq.dequantize(tmp_path / "q.onnx", tmp_path / "back.onnx")
    assert ops(graph) == ops(load(tmp_path / "back.onnx"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.onnx", "q.onnx"]


def test_external_data_stays_external_and_is_decoded_one_tensor_at_a_time(
    products: ModelProto, quantize_to: Any, tmp_path: Path
) -> None:
    quantize_to(products, tmp_path / "inline.onnx", scheme="int8-storage")
    save(load(tmp_path / "inline.onnx"), tmp_path / "q.onnx", external_data=True)
    dequantize(tmp_path / "q.onnx", tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx.data").stat().st_size >= 4 * (64 * 64 + 64 * 48)
    assert difference(tmp_path / "q.onnx", tmp_path / "back.onnx") <= SUMS
    (tmp_path / "next.onnx.data").symlink_to(tmp_path / "q.onnx.data")
    with pytest.raises(OutputError, match="external data of the model itself"):
        dequantize(tmp_path / "q.onnx", tmp_path / "next.onnx")


@pytest.mark.parametrize("dead", [False, True])
def test_a_float_model_is_refused(products: ModelProto, dead: bool, tmp_path: Path) -> None:
    model = ModelProto()
    model.CopyFrom(products)
    if dead:
        model.graph.node.append(helper.make_node("Neg", ["x"], ["unread"]))
    with pytest.raises(ModelError, match="so there is nothing to dequantize"):
        dequantize(model, tmp_path / "back.onnx")
    assert not list(tmp_path.iterdir())


def test_codes_that_are_measured_and_computed_with_are_named_and_nothing_is_written(
    build: Callable[..., ModelProto], tmp_path: Path
) -> None:
    text = """(float[2,4] x) => (float[2,4] y) {
        [quantize] a, s, z = DynamicQuantizeLinear(x)
        [odd] b = BitShift <direction = "LEFT"> (a, one)
        [dequantize] y = DequantizeLinear(b, s, z)
    }"""
    model = build(text, one=np.array(1, np.uint8))
    with pytest.raises(ModelError, match=r"node odd \(BitShift\) reads the integers a, whose scale is computed"):
        dequantize(model, tmp_path / "back.onnx")
    assert not list(tmp_path.iterdir())


def test_an_operator_without_a_float_form_is_named(build: Callable[..., ModelProto]) -> None:
    model = build("(float[2,4] x) => (float[2,4] y) { [odd] y = Relu(x) }")
    model.graph.node[0].op_type = "QOrderedGelu"
    model.graph.node[0].domain = "com.microsoft"
    model.metadata_props.add(key=METADATA_KEY, value="int8")
    with pytest.raises(ModelError, match="node odd is QOrderedGelu, which has no float counterpart"):
        dequantize(model)


def test_codes_inside_of_local_functions_are_found() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        g (float[2,4] x) => (float[2,4] y) { y = local.noise(x, s, z) }
        <domain: "local", opset_import: ["" : 17]>
        noise (p, s, z) => (r) { q = QuantizeLinear(p, s, z)  r = DequantizeLinear(q, s, z) }"""
    model = onnx.parser.parse_model(text)
    stored = {"s": np.array(0.5, np.float32), "z": np.array(3, np.uint8)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored.items())
    graph = dequantize(model)
    assert ops(graph) == ["Identity"]
    assert [as_graph(model).outputs[0].name, graph.outputs[0].name] == ["y", "y"]
