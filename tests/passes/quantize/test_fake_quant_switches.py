"""InsertFakeQuantSwitches lets one session answer for all quantized values of a plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import model, outputs, sample, values
from onnx import ModelProto

from onnxq.algorithms.encode import encode
from onnxq.algorithms.encoding_config import DEFAULT_CONFIG
from onnxq.algorithms.encodings import Encodings
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.ir import Graph, load, save, to_model
from onnxq.passes import InsertFakeQuantSwitches
from onnxq.passes.preparing.preparation import prepare
from onnxq.passes.quantize.fake_quant_switches import FakeQuantSwitches, switches_for
from onnxq.planning.plan import Plan
from onnxq.runtime.sessions import open_session, run
from onnxq.runtime.targets import target_named
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.resources import silent

CONVOLUTIONS = model(
    """g (float[1,8,6,6] x) => (float[1,8,6,6] y) {
        [a] t = Conv <pads = [1,1,1,1]> (x, w, b) [relu] r = Relu(t)
        [b] u = Conv <pads = [1,1,1,1]> (r, v) [sum] s = Add(u, r) [c] y = Conv <pads = [1,1,1,1]> (s, z)
    }""",
    w=values(8, 8, 3, 3),
    b=values(8),
    v=values(8, 8, 3, 3),
    z=values(8, 8, 3, 3),
)
PRODUCTS = model(
    "g (float[4,32] x) => (float[4,16] y) { [a] t = MatMul(x, w) [n] u = Tanh(t) [b] y = Gemm(u, v, b) }",
    w=values(32, 32),
    v=values(32, 16),
    b=values(16),
)
TABLE = model(
    "g (int64[4] i) => (float[4,64] y) { [look] t = Gather(e, i) [m] y = MatMul(t, w) }",
    e=values(64, 64),
    w=values(64, 64),
)
IN_BODY = model(
    """g (float[4,32] x, bool c) => (float[4,32] y) {
        y = If (c) <
            then_branch = yes () => (float[4,32] u) { [p] h = MatMul(x, w) [q] u = MatMul(h, v) },
            else_branch = no () => (float[4,32] k) { [r] k = MatMul(x, w) }>
    }""",
    w=values(32, 32),
    v=values(32, 32),
)
HALF = model("g (float16[4,32] x) => (float16[4,64] y) { [m] y = MatMul(x, w) }", w=values(32, 64).astype(np.float16))
MODELS = {"convolutions": CONVOLUTIONS, "products": PRODUCTS, "table": TABLE, "body": IN_BODY}


def workbench(made: ModelProto, scheme: str, folder: Path) -> tuple[PreparedModel, Plan, Encodings]:
    save(prepare(load_model(made, folder), opset=13), folder / "prepared.onnx")
    bench = PreparedModel(folder / "prepared.onnx", preset_named(scheme), target_named("onnxruntime-cpu"))
    plan = bench.plan({})
    statistics = bench.calibrate(plan, [sample(made, seed) for seed in (0, 1)], silent)
    return bench, plan, encode(plan, bench.graph, statistics)


def load_model(made: ModelProto, folder: Path) -> Graph:
    onnx.save(made, folder / "given.onnx")
    return load(folder / "given.onnx")


def switched(bench: PreparedModel, plan: Plan, encodings: Encodings) -> tuple[ModelProto, FakeQuantSwitches]:
    graph = bench.graph.copy()
    switches = switches_for(graph, plan)
    step = InsertFakeQuantSwitches(plan, encodings, switches)
    assert step.apply(graph).changed == (*switches.tensors, *switches.nodes)
    assert not step.apply(graph)
    found = to_model(graph)
    onnx.checker.check_model(found, full_check=True)
    return found, switches


def requested(made: ModelProto, given: dict, switches: FakeQuantSwitches, on: set[str]) -> dict:
    places = {**switches.tensors, **switches.nodes}
    assert list(places.values()) == list(range(len(switches)))
    fed = {switches.name: np.array([source in on for source in places])}
    session = open_session(made, threads=1)
    wanted = [output.name for output in made.graph.output]
    return dict(zip(wanted, run(session, {**given, **fed}, wanted), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_without_codes_nothing_changes_and_with_all_it_is_the_quantized_model(name: str, tmp_path: Path) -> None:
    made = MODELS[name]
    bench, plan, stored = workbench(made, "int8", tmp_path)
    found, switches = switched(bench, plan, stored)
    path = tmp_path / "quantized.onnx"
    bench.build(
        plan,
        bench.calibrate(plan, [sample(made, seed) for seed in (0, 1)], silent),
        DEFAULT_CONFIG,
        path,
        external_data=False,
    )
    given = sample(made, 0)
    floats = outputs(made, given)
    quantized = requested(found, given, switches, {*switches.tensors, *switches.nodes})
    session = open_session(path, threads=1)
    for output, expected in floats.items():
        np.testing.assert_allclose(
            requested(found, given, switches, set())[output], expected, rtol=0, atol=1e-5 * np.abs(expected).max()
        )
        (real,) = run(session, given, [output])
        # The kernels' integer sums and the emulation's floats round now and then to different quantized values.
        signal, gap, error = (np.square(one).sum() for one in (expected, quantized[output] - real, real - expected))
        assert gap < error / 4 or gap < 1e-6 * signal


def test_each_switch_adds_an_error_of_its_own(tmp_path: Path) -> None:
    bench, plan, stored = workbench(CONVOLUTIONS, "int8", tmp_path)
    found, switches = switched(bench, plan, stored)
    given = sample(CONVOLUTIONS, 0)
    floats = requested(found, given, switches, set())["y"]
    errors = {
        one: requested(found, given, switches, {one})["y"] - floats for one in (*switches.tensors, *switches.nodes)
    }
    assert set(errors) == {"x", "r", "u", "s", "y", "a", "b", "c"}
    assert all(np.square(error).sum() > 0 for error in errors.values())


def test_what_a_dynamic_node_reads_is_switched_with_its_weight(tmp_path: Path) -> None:
    bench, plan, stored = workbench(PRODUCTS, "int8-dynamic", tmp_path)
    assert plan.count(Mode.DYNAMIC) == 2
    found, switches = switched(bench, plan, stored)
    assert (tuple(switches.tensors), tuple(switches.nodes)) == ((), ("a", "b"))
    given = sample(PRODUCTS, 0)
    floats, quantized = (requested(found, given, switches, on)["y"] for on in (set(), {"a"}))
    assert 1e-6 < np.square(quantized - floats).sum() / np.square(floats).sum() < 1e-2


def test_tensors_that_only_get_codes_passed_on_have_no_switch(tmp_path: Path) -> None:
    made = model(
        """g (float[1,8,6,6] x) => (float[1,8,3,3] y) {
            [a] t = Conv <pads = [1,1,1,1]> (x, w) [pool] p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (t)
            [b] y = Conv <pads = [1,1,1,1]> (p, v)
        }""",
        w=values(8, 8, 3, 3),
        v=values(8, 8, 3, 3),
    )
    bench, plan, _ = workbench(made, "int8", tmp_path)
    assert set(plan.by_tensor) == {"x", "t", "p", "y"}
    assert set(switches_for(bench.graph, plan).tensors) == {"x", "t", "y"}
    assert switches_for(bench.graph, plan, {"b"}) == FakeQuantSwitches("switches", {}, {"b": 0})


def test_nodes_keep_the_type_that_they_compute_in(tmp_path: Path) -> None:
    bench, plan, stored = workbench(HALF, "int8-storage", tmp_path)
    found, switches = switched(bench, plan, stored)
    given = sample(HALF, 0)
    floats, quantized = (requested(found, given, switches, on)["y"] for on in (set(), set(switches.nodes)))
    assert floats.dtype == quantized.dtype == np.float16
    assert 0 < np.abs(floats - quantized).max() < np.abs(floats).max() / 20
