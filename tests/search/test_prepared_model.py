"""Tests of prepared_model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import MODELS, Build
from onnx import ModelProto

from onnxq.algorithms.activation_params import channel_means, corrected_biases
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.calibration.accumulators import ChannelMeans, Request
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.data.inputs import Sample
from onnxq.errors import (
    CandidateError,
    DataError,
    ModelError,
    OnnxqError,
    PassError,
    SchemeError,
)
from onnxq.ir import load, read_model, save
from onnxq.lowering import AllowedOps
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Demotion
from onnxq.runtime.sessions import open_session, run
from onnxq.runtime.targets import TARGETS
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.resources import silent

SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:8]]


@pytest.fixture
def bench(tmp_path: Path) -> PreparedModel:
    path = tmp_path / "prepared.onnx"
    save(prepare(load(MODELS / "resnet.onnx")), path, external_data=True)
    return PreparedModel(path, PRESETS["int8"], TARGETS["onnxruntime-cpu"])


def test_building_does_not_change_the_prepared_model(bench: PreparedModel, tmp_path: Path) -> None:
    before = bench.prepared.read_bytes()
    plan = bench.plan({})
    statistics = bench.calibrate(plan, SAMPLES, silent)
    assert {request.tensor for request in plan.requests} == set(statistics.by_tensor)
    bench.build(plan, statistics, EncodingConfig(), tmp_path / "a.onnx", external_data=False)
    bench.build(plan, statistics, EncodingConfig(), tmp_path / "b.onnx", external_data=False)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert bench.prepared.read_bytes() == before


@pytest.mark.parametrize("opset", [11, 17])
def test_nodes_that_were_fused_are_still_selected_by_name(opset: int, build, quantize_to, tmp_path: Path) -> None:
    model = build(
        """(float[4,64] x) => (float[4,64] y) {
            [a] p = MatMul(x, w) [b] q = Add(p, c) [r] s = Relu(q) [d] t = MatMul(s, v) [e] y = Add(t, c)
        }""",
        w=(64, 64), v=(64, 64), c=(64,),
    )  # fmt: skip
    model.opset_import[0].version = opset
    report = quantize_to(model, tmp_path / "q.onnx", scheme=PRESETS["int8"].excluding("b")).report
    assert [(one.node, one.op_type, one.mode) for one in report.plan.decisions if one.op_type == "Gemm"] == [
        ("a", "Gemm", Mode.FLOAT),
        ("d", "Gemm", Mode.STATIC),
    ]
    with pytest.raises(SchemeError, match="node pattern 'z' matches nothing in the model"):
        quantize_to(model, tmp_path / "q.onnx", scheme=PRESETS["int8"].excluding("z"))


def test_a_plan_without_activations_and_corrections_needs_no_calibration(bench: PreparedModel) -> None:
    storage = PreparedModel(bench.prepared, replace(PRESETS["int8-storage"], correct_biases=False), bench.target)
    assert storage.calibrate(storage.plan({}), SAMPLES, silent) == CalibrationStatistics()


@pytest.mark.parametrize(
    ("emit", "found", "decoded"),
    [
        (AllowedOps.QDQ, "DequantizeLinear", {Mode.WEIGHT_ONLY}),
        (AllowedOps.ORT, "MatMulNBits", {Mode.WEIGHT_ONLY}),
    ],
)
def test_weights_are_decoded_as_the_bench_is_told(
    emit: AllowedOps, found: str, decoded: set[Mode], tmp_path: Path
) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(load(MODELS / "vit.onnx"), opset=21), path, external_data=True)
    bench = PreparedModel(path, PRESETS["int4-block32"], TARGETS["onnxruntime-cpu"], emit=emit)
    plan = bench.plan({})
    built = bench.build(plan, CalibrationStatistics(), EncodingConfig(), tmp_path / "q.onnx", external_data=False)
    assert sum(node.op == found for node in built.nodes) == sum(map(plan.count, decoded)) > 10


@pytest.mark.parametrize("fault", [ModelError, PassError, DataError])
def test_a_graph_that_onnxq_makes_and_that_is_not_whole_is_a_candidate_that_is_left_out(
    fault: type[OnnxqError], bench: PreparedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = bench.plan({})
    statistics = bench.calibrate(plan, SAMPLES, silent)

    def broken(*given: object) -> None:
        raise fault("node 'conv' reads the tensor 'lost', which nothing produces where it could see it")

    for owner in ("PlanApplier.quantized", "InsertFakeQuantSwitches.apply"):
        monkeypatch.setattr(f"onnxq.search.prepared_model.{owner}", broken)
    given = plan, statistics, EncodingConfig(), tmp_path / "q.onnx"
    with pytest.raises(CandidateError, match="which nothing produces"):
        bench.build(*given, external_data=False)
    with pytest.raises(CandidateError, match="which nothing produces"):
        bench.build_switched(*given)


def test_a_weight_that_has_no_codes_is_the_users(build: Build, tmp_path: Path) -> None:
    weight = np.full((64, 64), np.nan, np.float32)
    bench = bench_of(build("(float[4,64] x) => (float[4,64] y) { y = MatMul(x, w) }", w=weight), "int8", tmp_path)
    plan = bench.plan({})
    statistics = bench.calibrate(plan, [{"x": np.ones((4, 64), np.float32)}], silent)
    with pytest.raises(ModelError, match="holds NaN or infinity") as raised:
        bench.build(plan, statistics, EncodingConfig(), tmp_path / "q.onnx", external_data=False)
    assert not isinstance(raised.value, CandidateError)


CODES = Demotion(Mode.WEIGHT_ONLY, "for the test", weight=QuantSpec("int4", (32,)))


def test_only_a_model_with_blocks_of_codes_gets_the_opset_that_they_need(
    perceptron: ModelProto, samples_for: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    path, output = tmp_path / "prepared.onnx", tmp_path / "out.onnx"
    save(prepare(read_model(perceptron)), path, external_data=True)
    before = path.read_bytes()
    bench = PreparedModel(path, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    samples = samples_for(perceptron, 2)
    statistics = bench.calibrate(bench.plan({}), samples, silent)
    for plan, opset in ((bench.plan({}), 17), (bench.plan({"first": CODES}), 21), (bench.plan({}), 17)):
        assert bench.expresses(plan)
        bench.build(plan, statistics, EncodingConfig(), output, external_data=False)
        assert onnx.load(output).opset_import[0].version == opset
        assert np.isfinite(run(open_session(output), samples[0])[0]).all()
    assert path.read_bytes() == before


def test_a_plan_that_a_later_opset_has_other_nodes_for_cannot_be_built(
    build: Callable[..., ModelProto], tmp_path: Path
) -> None:
    text = "(float[2,3,64] x) => (float[2,3,64] y) { [first] h = MatMul(x, w) [soft] y = Softmax(h) }"
    for opset, whether in ((12, False), (13, True)):
        path = tmp_path / f"{opset}" / "prepared.onnx"
        path.parent.mkdir()
        save(prepare(read_model(build(text, opset=opset, w=(64, 64)))), path)
        bench = PreparedModel(path, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
        # Before opset 13 Softmax flattens its data, which the converter writes as nodes of their own.
        assert bench.expresses(bench.plan({}))
        assert bench.expresses(bench.plan({"first": CODES})) is whether


def test_runtime_operators_of_codes_need_no_later_opset(perceptron: ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(read_model(perceptron)), path)
    bench = PreparedModel(path, PRESETS["int8"], TARGETS["onnxruntime-cpu"], emit=AllowedOps.ORT)
    assert bench.expresses(bench.plan({"first": CODES}))
    assert [found.name for found in tmp_path.iterdir()] == ["prepared.onnx"]


def test_nodes_of_idle_bodies_stay_out_whatever_is_wished(build, tmp_path: Path) -> None:
    model = build(
        """(float[4,32] x, bool c) => (float[4,32] y) {
            [outer] a = MatMul(x, w)
            y = If (c) <
                then_branch = t () => (float[4,32] u) { [one] b = MatMul(a, w) d = Neg(b) [two] u = MatMul(d, w) },
                else_branch = e () => (float[4,32] v) { v = Tanh(a) }>
        }""",
        w=(32, 32),
    )
    path = tmp_path / "prepared.onnx"
    save(prepare(read_model(model)), path)
    bench = PreparedModel(path, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    plan = bench.plan({})
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    ran, idle = (bench.calibrate(plan, [{"x": x, "c": np.array(flag)}], silent) for flag in (True, False))
    assert bench.without_idle_nodes(plan, ran) is bench
    without = bench.without_idle_nodes(plan, idle)
    assert {name: without.plan({}).by_node[name].mode for name in ("outer", "one", "two")} == {
        "outer": Mode.STATIC, "one": Mode.STORAGE, "two": Mode.STORAGE
    }  # fmt: skip
    wished = without.plan({"one": Demotion(Mode.STATIC, "for the test")})
    assert wished.by_node["one"].mode is Mode.STORAGE


def bench_of(model: ModelProto, scheme: str, folder: Path) -> PreparedModel:
    path = folder / "prepared.onnx"
    save(prepare(read_model(model), opset=21), path, external_data=True)
    return PreparedModel(path, PRESETS[scheme], TARGETS["onnxruntime-cpu"])


def test_means_along_another_axis_than_the_plans_correct_nothing(
    build: Callable[..., ModelProto], tmp_path: Path
) -> None:
    text = """(float[2,32,32] x) => (float[2,32,32] y, float[2,32,32] z) {
        [conv] y = Conv <group=32, pads=[1, 1]>(x, k, c) [product] p = MatMul(x, w) z = Add(p, b)
    }"""
    model = build(text, k=(32, 1, 3), c=(32,), w=(32, 32), b=(32,))
    bench = bench_of(model, "int8", tmp_path)
    x = np.random.default_rng(0).normal(1, 1, (2, 32, 32)).astype(np.float32)
    first, other = bench.plan({}), bench.plan({"conv": Demotion(Mode.STORAGE, "too small to be stored")})
    means = [[one for one in plan.requests if one.kind == "channel-means"] for plan in (first, other)]
    assert means == [[Request("x", "channel-means", 1)], [Request("x", "channel-means", -1)]]
    statistics, fitting = (bench.calibrate(plan, [{"x": x}], silent) for plan in (first, other))
    bare = statistics.select(one for one in statistics.statistics if one.kind != "channel-means")

    def built(found: CalibrationStatistics) -> np.ndarray:
        bench.build(other, found, EncodingConfig(), tmp_path / "q.onnx", external_data=False)
        return np.asarray(run(open_session(tmp_path / "q.onnx"), {"x": x}, ("z",))[0])

    np.testing.assert_array_equal(built(statistics), built(bare))
    assert np.abs(built(fitting) - built(statistics)).max() > 1e-4


def test_a_tensor_of_which_only_means_are_wanted_may_hold_infinity(
    build: Callable[..., ModelProto], tmp_path: Path
) -> None:
    text = "(float[4,64] x) => (float[4,64] y) { l = Log(x) p = MatMul(l, w) s = Add(p, b) y = Sigmoid(s) }"
    bench = bench_of(build(text, w=(64, 64), b=(64,)), "int4-block32", tmp_path)
    plan = bench.plan({})
    assert plan.requests == (Request("l", "channel-means", -1),)
    statistics = bench.calibrate(plan, [{"x": np.zeros((4, 64), np.float32)}], silent)
    assert len(statistics.of("l").find(ChannelMeans, -1).means) == 0
    bench.build(plan, statistics, EncodingConfig(), tmp_path / "q.onnx", external_data=False)


def test_nothing_but_sums_is_kept_of_what_is_not_quantized(bench: PreparedModel) -> None:
    storage = replace(bench, scheme=PRESETS["int8-storage"])
    plan = storage.plan({})
    seen = storage.calibrate(plan, SAMPLES, silent).statistics
    assert set(seen) == set(plan.requests)
    assert all(isinstance(one, ChannelMeans) and len(one.means) for one in seen.values())


@pytest.mark.parametrize(("scheme", "kept"), [("int8", True), ("int8-storage", False)])
def test_means_of_a_large_model_are_kept_where_it_runs_anyway(
    scheme: str, kept: bool, bench: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxq.search.prepared_model.is_large", lambda path: True)
    large = replace(bench, scheme=PRESETS[scheme])
    plan = large.plan({})
    found = channel_means(plan, large.calibrate(plan, SAMPLES, silent))
    assert bool(found) == kept
    assert set(found) == ({one.tensor for one in plan.requests if one.kind == "channel-means"} if kept else set())


def test_codes_of_a_large_model_are_chosen_once_and_wait_in_a_file(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("onnxq.search.prepared_model.is_large", lambda path: True)
    bench = bench_of(
        build("(float[1,1024] x) => (float[1,1024] y) { y = MatMul(x, w) }", w=(1024, 1024)), "int8", tmp_path
    )
    plan = bench.plan({})
    statistics = bench.calibrate(plan, [{"x": np.ones((1, 1024), np.float32)}], silent)
    bench.build(plan, statistics, EncodingConfig(), tmp_path / "first.onnx", external_data=True)
    (quantized,) = bench.encodings_of(plan, statistics, EncodingConfig()).weights.values()
    assert isinstance(quantized.values, np.memmap)
    monkeypatch.setattr("onnxq.algorithms.encode.encode_weight", None)
    bench.build(plan, statistics, EncodingConfig(), tmp_path / "second.onnx", external_data=True)
    first, second = ((tmp_path / f"{name}.onnx.data").read_bytes() for name in ("first", "second"))
    assert first == second
    assert bench.prepared.with_name("codes.data").stat().st_size == 1 << 20


@pytest.mark.parametrize("bias", [(64,), (1, 64)])
@pytest.mark.parametrize(
    ("scheme", "emit"),
    [
        ("int8", AllowedOps.QDQ),
        ("int8-storage", AllowedOps.QDQ),
        ("int8-dynamic", AllowedOps.QDQ),
        ("int4-block32", AllowedOps.QDQ),
        ("int4-block32", AllowedOps.ORT),
    ],
)
def test_built_models_have_corrected_biases_whatever_reads_them(
    scheme: str, emit: AllowedOps, bias: tuple[int, ...], build: Callable[..., ModelProto], tmp_path: Path
) -> None:
    text = "(float[64,64] x) => (float[64,64] y) { p = MatMul(x, w) y = Add(p, b) }"
    bench = replace(bench_of(build(text, w=(64, 64), b=np.ones(bias, np.float32)), scheme, tmp_path), emit=emit)
    x = np.random.default_rng(0).normal(2, 0.1, (64, 64)).astype(np.float32)
    plan = bench.plan({})
    statistics = bench.calibrate(plan, [{"x": x}], silent)
    assert corrected_biases(plan, statistics) == 1
    built = bench.build(plan, statistics, EncodingConfig(), tmp_path / "q.onnx", external_data=False)
    # The product adds it, or what stands behind the product.
    read = {tensor.name.removesuffix(".dequantized") for node in built.nodes for tensor in node.inputs}
    assert sum(name.endswith(".corrected") for name in read) == 1
    assert "b" not in read
