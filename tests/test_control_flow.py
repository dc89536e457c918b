"""Models with If, Loop and Scan end to end: bodies run on integer kernels, and give what they gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from models_with_bodies import BRANCHES, IDLE, IMAGE, KERNEL, PADS, STATIC, STORAGE, checked, varied
from onnx import parser

from onnxq.calibration.accumulators import Range
from onnxq.calibration.data import Data
from onnxq.calibration.statistics import load_statistics, save_statistics
from onnxq.config.scheme import Mode
from onnxq.errors import DataError
from onnxq.pipeline.quantization import calibrate, plan, quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.runtime.sessions import open_session, run


@pytest.fixture
def branches(build) -> onnx.ModelProto:
    return build(BRANCHES, w0=KERNEL, w1=KERNEL, w2=KERNEL, w3=KERNEL)


def test_both_branches_are_integer_when_both_ran(branches: onnx.ModelProto, quantize_to, tmp_path: Path) -> None:
    samples = varied(IMAGE, {"c": [True, False] * 3})
    report = checked(tmp_path / "m", quantize_to(branches, tmp_path / "m", samples=samples).report)
    assert report.plan.count(STATIC) == 6
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (5, 0)
    assert set(report.plan.observed) >= {"x", "a", "q", "u", "r", "v"}


def test_what_several_bodies_read_is_quantized_once(branches: onnx.ModelProto, quantize_to, tmp_path: Path) -> None:
    quantize_to(branches, tmp_path / "m", samples=varied(IMAGE, {"c": [True, False] * 3}))
    graph = onnx.load(tmp_path / "m").graph
    assert sum(node.op_type == "QuantizeLinear" for node in graph.node) == 2
    bodies = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    stored = [tensor for scope in (graph, *bodies) for tensor in scope.initializer if len(tensor.dims) == 4]
    assert len(stored) == 4
    assert all(tensor.data_type == onnx.TensorProto.INT8 for tensor in stored)


def test_a_branch_that_never_ran_stays_float(branches: onnx.ModelProto, quantize_to, tmp_path: Path) -> None:
    samples = varied(IMAGE, {"c": [True] * 6})
    report = checked(tmp_path / "m", quantize_to(branches, tmp_path / "m", samples=samples).report)
    assert {name: report.plan.by_node[name].mode for name in ("stem", "t1", "t2", "e1", "e2")} == {
        "stem": STATIC, "t1": STATIC, "t2": STATIC, "e1": STORAGE, "e2": STORAGE
    }  # fmt: skip
    assert report.plan.by_node["e1"].reason == report.plan.by_node["e2"].reason == IDLE
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (3, 2)


def test_the_search_leaves_a_branch_that_never_ran_float(branches: onnx.ModelProto, quantize_to, tmp_path) -> None:
    samples = varied(IMAGE, {"c": [False] * 4})
    report = quantize_to(branches, tmp_path / "m", samples=samples, goal=34, budget=Budget(latency_seconds=0)).report
    assert {report.plan.by_node[name].reason for name in ("t1", "t2")} == {IDLE}
    assert report.agreement.worst_sqnr >= 34


# Tokens go to the expert of their larger score.
EXPERTS = """(float[tokens,32] x) => (float[tokens,32] y) {
    scores = MatMul(x, router) chosen = ArgMax <axis = 1, keepdims = 0> (scores) none = Mul(x, half)
    is0 = Equal(chosen, zero) at0 = NonZero(is0) rows0 = Transpose(at0)
    own0 = GatherND(x, rows0) [first] made0 = MatMul(own0, w0) y0 = ScatterND(none, rows0, made0)
    is1 = Equal(chosen, one) at1 = NonZero(is1) rows1 = Transpose(at1)
    own1 = GatherND(x, rows1) [second] made1 = MatMul(own1, w1) y1 = ScatterND(y0, rows1, made1)
    [last] y = MatMul(y1, w2)
}"""


def test_an_expert_that_no_token_is_sent_to_has_no_scales_of_data(build, quantize_to, tmp_path: Path) -> None:
    router = np.zeros((32, 2), np.float32)
    router[0] = 1, -1
    constants = {"half": np.float32(0.5), "zero": np.array(0), "one": np.array(1)}
    model = build(EXPERTS, router=router, w0=(32, 32), w1=(32, 32), w2=(32, 32), **constants)
    samples = varied((6, 32), {"unused": [0] * 6})
    samples = [{"x": np.concatenate([np.abs(one["x"][:, :1]), one["x"][:, 1:]], axis=1)} for one in samples]
    report = quantize_to(model, tmp_path / "m", samples=samples).report
    found = report.plan.by_node
    assert (found["first"].mode, found["second"].mode, found["last"].mode) == (STATIC, STORAGE, STATIC)
    assert found["second"].reason.endswith("no sample reached it")
    data = {"x": samples[0]["x"] * np.float32([-1, *[1] * 31])}
    onnx.save(model, tmp_path / "float.onnx")
    expected, [made] = (run(open_session(tmp_path / one), data) for one in ("float.onnx", "m"))
    assert np.square(made - expected[0]).sum() < 0.01 * np.square(expected[0]).sum()


def test_a_loop_is_integer(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        """(float[4,32] x, int64 n) => (float[4,32] y) {
            y = Loop (n, go, x) <body = b (int64 i, bool g, float[4,32] s) => (bool h, float[4,32] t) {
                h = Identity(g) [first] a = MatMul(s, w) [relu] r = Relu(a) [second] o = Gemm(r, v, k) t = Tanh(o)
            }>
        }""",
        w=(32, 32), v=(32, 32), k=(32,), go=np.array(True),
    )  # fmt: skip
    report = quantize_to(model, tmp_path / "m", samples=varied((4, 32), {"n": [1, 2, 3, 4]})).report
    checked(tmp_path / "m", report)
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (2, 0)


def test_a_scan_is_integer(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        """(float[4,32] s, float[5,4,32] x) => (float[4,32] y, float[5,4,32] z) {
            y, z = Scan (s, x) <num_scan_inputs = 1, body = b (float[4,32] p, float[4,32] e)
                => (float[4,32] t, float[4,32] o) {
                [first] a = Gemm(e, w, k) d = Tanh(a) t = Sub(p, d) [second] o = Gemm(t, v, k)
            }>
        }""",
        w=(32, 32), v=(32, 32), k=(32,),
    )  # fmt: skip
    starts = [np.zeros((4, 32), np.float32)] * 4
    report = quantize_to(model, tmp_path / "m", samples=varied((5, 4, 32), {"s": starts})).report
    checked(tmp_path / "m", report)
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (2, 0)


def test_branches_inside_a_loop_are_integer(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        f"""(float[1,8,8,8] x, int64 n) => (float[1,8,8,8] y) {{
            [stem] a = Conv {PADS} (x, w0)
            y = Loop (n, go, a) <body = b (int64 i, bool g, float[1,8,8,8] s) => (bool h, float[1,8,8,8] t) {{
                h = Identity(g) z = Mod(i, two) even = Equal(z, zero)
                t = If (even) <
                    then_branch = tb () => (float[1,8,8,8] u) {{
                        [t1] p = Conv {PADS} (s, w1) [tr] q = Relu(p) [t2] u = Conv {PADS} (q, w2)
                    }},
                    else_branch = eb () => (float[1,8,8,8] v) {{ [e1] r = Conv {PADS} (a, w1) v = Sub(r, s) }}>
            }}>
        }}""",
        w0=KERNEL, w1=KERNEL, w2=KERNEL, go=np.array(True), two=np.array(2), zero=np.array(0),
    )  # fmt: skip
    report = quantize_to(model, tmp_path / "m", samples=varied(IMAGE, {"n": [1, 2, 3, 2]})).report
    checked(tmp_path / "m", report)
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (4, 0)


def test_a_weight_is_stored_once_for_the_graph_and_its_bodies(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        """(float[4,32] x, bool c) => (float[4,32] y) {
            [outer] a = MatMul(x, w) h = Tanh(a)
            y = If (c) <
                then_branch = t () => (float[4,32] u) { [one] u = MatMul(h, w) },
                else_branch = e () => (float[4,32] v) { [two] k = MatMul(h, w) v = Neg(k) }>
        }""",
        w=(32, 32),
    )
    report = quantize_to(model, tmp_path / "m", samples=varied((4, 32), {"c": [True, False] * 2})).report
    checked(tmp_path / "m", report)
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (3, 0)
    assert (tmp_path / "m").read_bytes().count(b"w.codes") == 4  # one initializer, three readers
    tensors = {tensor.name: tuple(tensor.dims) for tensor in onnx.load(tmp_path / "m").graph.initializer}
    assert list(tensors.values()).count((32, 32)) == 1


def test_what_stands_in_a_function_is_integer(quantize_to, tmp_path: Path) -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        main (float[4,32] x, float[32,32] w, bool c) => (float[4,32] y) {
            a = local.layer(x, w)
            y = If (c) <
                then_branch = t () => (float[4,32] u) { u = local.layer(a, w) },
                else_branch = e () => (float[4,32] v) { v = Neg(a) }>
        }
        <domain: "local", opset_import: ["" : 17]>
        layer (data, weight) => (result) { product = MatMul(data, weight) result = Tanh(product) }"""
    )
    del model.graph.input[1]
    weight = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32) / 6
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    report = quantize_to(model, tmp_path / "m", samples=varied((4, 32), {"c": [True, False]})).report
    checked(tmp_path / "m", report)
    assert [one.mode for one in report.plan.decisions if one.op_type == "MatMul"] == [STATIC, STATIC]
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (2, 0)


def test_products_in_bodies_may_have_dynamic_scales(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        """(float[4,32] x, bool c) => (float[4,32] y) {
            y = If (c) <
                then_branch = t () => (float[4,32] u) { u = MatMul(x, w) },
                else_branch = e () => (float[4,32] v) { k = MatMul(x, w) v = Neg(k) }>
        }""",
        w=(32, 32),
    )
    samples = varied((4, 32), {"c": [True, False]})
    report = quantize_to(model, tmp_path / "m", samples=samples, scheme="int8-dynamic").report
    checked(tmp_path / "m", report)
    assert report.plan.count(Mode.DYNAMIC) == 2
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (2, 0)


def test_a_plan_with_bodies_is_replayed_to_the_same_bytes(branches: onnx.ModelProto, quantize_to, tmp_path) -> None:
    samples = varied(IMAGE, {"c": [True, False] * 3})
    report = quantize_to(branches, tmp_path / "first", samples=samples).report
    save_plan(report.plan, tmp_path / "plan.toml")
    again = load_plan(tmp_path / "plan.toml")
    quantize_to(branches, tmp_path / "second", samples=samples, scheme=again)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_a_plan_with_integers_in_a_branch_that_no_sample_runs_is_refused(
    branches: onnx.ModelProto, quantize_to, tmp_path: Path
) -> None:
    both, one = varied(IMAGE, {"c": [True, False] * 3}), varied(IMAGE, {"c": [False] * 6})
    found = quantize_to(branches, tmp_path / "first", samples=both).report.plan
    replay = replace(found, activations=tuple(replace(one, found_range=None) for one in found.activations))
    with pytest.raises(DataError) as caught:
        quantize_to(branches, tmp_path / "second", samples=one, scheme=replay)
    assert str(caught.value) == (
        "node 't1' is static in the plan, but its subgraph ran on no sample; give samples "
        "that run it, or change the mode of these nodes to storage"
    )
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("stored", ["t = Constant <value_floats = [1.0]> ()", ""], ids=["Constant", "initializer"])
def test_a_constant_of_one_branch_may_be_called_like_a_tensor_of_another(
    stored: str, build, quantize_to, tmp_path: Path
) -> None:
    model = build(
        f"""(float[4,32] x, bool c) => (float[4,32] y) {{
            y = If (c) <
                then_branch = yes () => (float[4,32] u) {{ [one] t = MatMul(x, w) [two] u = MatMul(t, v) }},
                else_branch = no () => (float[4,32] k) {{ {stored} s = Add(x, t) [three] k = MatMul(s, w) }}>
        }}""",
        w=(32, 32), v=(32, 32),
    )  # fmt: skip
    if not stored:
        bodies = {attribute.name: attribute.g for attribute in model.graph.node[0].attribute}
        bodies["else_branch"].initializer.append(onnx.numpy_helper.from_array(np.float32([1]), "t"))
    samples = varied((4, 32), {"c": [True, False] * 3})
    report = checked(tmp_path / "m", quantize_to(model, tmp_path / "m", samples=samples).report)
    assert {name: report.plan.by_node[name].mode for name in ("one", "two", "three")} == {
        "one": STATIC, "two": STATIC, "three": STATIC
    }  # fmt: skip


def test_statistics_of_bodies_are_kept_in_files(branches: onnx.ModelProto, tmp_path: Path) -> None:
    samples = varied(IMAGE, {"c": [True, False]})
    seen = calibrate(branches, samples)
    save_statistics(seen, tmp_path / "s.npz")
    assert load_statistics(tmp_path / "s.npz") == seen
    counts = {name: seen.of(name).need(Range).count for name in "qra"}
    assert counts["q"] == counts["r"] == counts["a"] // 2
    quantized = quantize(branches, Data(samples, statistics=seen), budget=Budget(search="off", latency_seconds=0))
    assert quantized.report.performance.kernels.heavy_float == 0


def test_float_nodes_of_bodies_read_what_integer_nodes_outside_give(build, quantize_to, tmp_path: Path) -> None:
    model = build(
        f"""(float[1,8,8,8] x, bool c) => (float[1,8,8,8] y) {{
            [stem] a = Conv {PADS} (x, w0)
            y = If (c) <
                then_branch = t () => (float[1,8,8,8] u) {{ n = Neg(a) [one] u = Conv {PADS} (n, w1) }},
                else_branch = e () => (float[1,8,8,8] v) {{ v = Abs(a) }}>
        }}""",
        w0=KERNEL, w1=KERNEL,
    )  # fmt: skip
    report = quantize_to(model, tmp_path / "m", samples=varied(IMAGE, {"c": [True, False]})).report
    checked(tmp_path / "m", report)
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (2, 0)


MERGED = """(float[4,32] x, bool c) => (float[4,32] logits, float[4,32] state) {
    [stem] h = MatMul(x, w0)
    [choice] logits, state = If (c) <
        then_branch = first () => (float[4,32] logits, float[4,32] state) {
            [in] q = MatMul(h, w1) r = Relu(q) [mid] k = Gemm(r, w2) state = Tanh(k) [out] logits = MatMul(k, w3)
        },
        else_branch = next () => (float[4,32] logits, float[4,32] state) {
            [in] q = MatMul(h, w1) r = Relu(q) a = Add(r, h) [mid] k = Gemm(a, w2) state = Tanh(k)
            [out] logits = MatMul(k, w3)
        }>
}"""


@pytest.fixture
def merged(build) -> onnx.ModelProto:
    """A decoder merged with the one that has a cache: both branches name all alike and read weights outside."""
    return build(MERGED, **{f"w{index}": (32, 32) for index in range(4)})


def test_branches_that_name_their_tensors_alike_are_integer(merged, quantize_to, running_graph, tmp_path) -> None:
    onnx.save(merged, tmp_path / "float")
    samples = varied((4, 32), {"c": [True, False] * 3})
    report = checked(tmp_path / "m", quantize_to(merged, tmp_path / "m", samples=samples).report)
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (7, 0)
    written = onnx.load(tmp_path / "m").graph
    assert [output.name for output in written.output] == ["logits", "state"]
    assert sorted(tuple(one.dims) for one in written.initializer if len(one.dims) == 2) == [(32, 32)] * 4
    weights = 4 * 32 * 32
    assert (tmp_path / "float").stat().st_size - (tmp_path / "m").stat().st_size > 2 * weights


def test_each_of_two_alike_branches_is_calibrated_by_the_samples_that_run_it(merged: onnx.ModelProto) -> None:
    samples = varied((4, 32), {"c": [True, True, False]})
    seen = calibrate(merged, samples)
    assert {name: seen.of(name).need(Range).count // (4 * 32) for name in ("h", "r", "k", "a", "k.1")} == {
        "h": 3, "r": 2, "k": 2, "a": 1, "k.1": 1
    }  # fmt: skip


def test_bodies_of_other_operators_stay_float() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        main (seq(float[4,32]) x, float[4,32] z) => (seq(float[4,32]) y, float[4,32] q) {
            [map] y = SequenceMap (x) <body = b (float[4,32] s) => (float[4,32] t) { [inner] t = MatMul(s, w) }>
            q = MatMul(z, w)
        }"""
    )
    weight = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    found = plan(model)
    assert "in a subgraph of SequenceMap, where activations are not calibrated" in found.by_node["inner"].reason


def test_other_runtimes_get_no_integers_in_bodies(branches: onnx.ModelProto) -> None:
    found = plan(branches, target="openvino")
    assert found.by_node["stem"].mode is STATIC
    expected = "in a subgraph of If, where openvino is not known to have integer kernels"
    assert expected in found.by_node["t1"].reason


@pytest.mark.parametrize(
    ("moved", "back"),
    [
        ("u = Unsqueeze(r, one)", "Squeeze(u, one)"),
        ("m = Unsqueeze(r, one) u = Transpose<perm = [0, 1, 3, 4, 2]>(m)", "Reshape(u, image)"),
        ("u = Reshape(r, flat)", "Reshape(u, image)"),
        ("u = Slice(r, zero, two, one)", "Pad(u, edges)"),
    ],
)
@pytest.mark.parametrize("is_integer", [False, True], ids=["float bodies", "integer bodies"])
def test_what_is_moved_for_bodies_alone_is_quantized_behind(
    build, quantize_to, tmp_path: Path, moved: str, back: str, *, is_integer: bool
) -> None:
    branch = "{name} () => (float[a,b,c,d] {name}y) {{ {name}s = {back} {name}y = {op}({name}s{weight}) }}"
    op, weight = (f"Conv{PADS}", ", w") if is_integer else ("Erf", "")
    then, other = (branch.format(name=name, back=back, op=op, weight=weight) for name in ("t", "e"))
    text = f"""(float[1,8,8,8] x, bool c) => (float[a,b,c,d] y) {{
        a = Conv{PADS}(x, v) r = Relu(a) {moved}
        y = If (c) <then_branch = {then}, else_branch = {other}> }}"""
    model = build(
        text, v=KERNEL, w=KERNEL, one=np.array([1]), zero=np.array([0]), two=np.array([8]), flat=np.array([1, 512]),
        image=np.array([1, 8, 8, 8]), edges=np.zeros(8, np.int64),
    )  # fmt: skip
    samples = varied(IMAGE, {"c": [True, False] * 3})
    quantize_to(model, tmp_path / "m", samples=samples)
    graph = onnx.load(tmp_path / "m").graph
    (choice,) = (node for node in graph.node if node.op_type == "If")
    captured = {name for attribute in choice.attribute for node in attribute.g.node for name in node.input}
    assert any(node.op_type == "QuantizeLinear" for node in graph.node)
    makers = {name: node for node in graph.node for name in node.output}
    for name in captured & makers.keys():
        # onnxruntime aborts on a DequantizeLinear in front of data movement that a body reads.
        maker = makers[name]
        while maker is not None and maker.op_type in ("Unsqueeze", "Transpose", "Reshape", "Slice"):
            maker = makers.get(maker.input[0])
            assert maker is None or maker.op_type != "DequantizeLinear"
    open_session(tmp_path / "m")
