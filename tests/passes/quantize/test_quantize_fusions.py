"""What onnxruntime fuses, and what it must not fuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, running, sample, values
from onnx import ModelProto, defs, helper
from rule_cases import Case, Rule, table

from onnxq.algorithms.encode import encode
from onnxq.config.scheme import Mode, QuantSpec, Scheme
from onnxq.config.scheme import Rule as SchemeRule
from onnxq.ir import Graph, as_graph, constants, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import DecodeWeights, FuseBiases, IsolateFloats, IsolateProducts
from onnxq.planning.plan import Plan
from onnxq.planning.planner import make_plan
from onnxq.rewrite import Changes
from onnxq.runtime.sessions import open_session
from onnxq.runtime.targets import target_named

# FuseBiases -----------------------------------------------------------------------------------------------------------

CODES = np.random.default_rng(0).integers(-127, 128, (32, 16)).astype(np.int8)
fuse = Rule(
    FuseBiases(), "float[2, 5, 32] x", s=0.02, t=np.linspace(0.004, 0.006, 16).astype(np.float32),
    z=np.array(128, np.uint8), k=CODES, b=values(16), wrong=values(5, 1),
    tall=values(1, 1, 1, 16), huge=np.full(16, 1e9, np.float32),
)  # fmt: skip
DECODED = "c = QuantizeLinear(x, s, z) d = DequantizeLinear(c, s, z) w = DequantizeLinear <axis = 1> (k, t)"


def product(body: str, expected: str | None = None, *, shape: str = "2, 5, 32", fed: str = "", **options: Any) -> Case:
    """A product of quantized values called p, and what stands behind it; a bias is half a step away."""
    return fuse(f"{DECODED} [product] p = MatMul(d, w) {body}", None, inputs=f"float[{shape}] x{fed}", error=1e-4,
                holds=None if expected is None else written(*expected.split()), **options)  # fmt: skip


def written(*expected: str) -> object:
    return lambda graph: [op for op in ops(graph) if not op.endswith("Linear")] == list(expected)


def overridable(made: ModelProto) -> None:
    made.graph.input.append(helper.make_tensor_value_info("b", 1, [16]))


MANY = "N, M, 32"
BIASES = [
    *(product(f"y = {add}", expected, shape=shape, changed="product") for add in ("Add(p, b)", "Add(b, p)")
      for shape, expected in [
          ("32", "Reshape Gemm Reshape"),
          ("5, 32", "Gemm"),
          ("2, 5, 32", "Reshape Gemm Reshape"),
          ("N, 5, 32", "Reshape Gemm Reshape"),
          ("2, 3, N, 32", "Reshape Gemm Reshape"),
          (MANY, "Reshape Shape Slice Concat Gemm Reshape")]),
    # Products of the same data share its matrix.
    fuse(f"{DECODED} [one] p = MatMul(d, w) e = Add(p, b) [two] q = MatMul(d, w) f = Add(q, b) y = Mul(e, f)",
         inputs=f"float[{MANY}] x", changed="one two", error=1e-4,
         holds=lambda graph: [ops(graph).count(op) for op in ("Reshape", "Shape", "Slice", "Gemm")] == [3, 1, 1, 2]),
    product("y = Add(p, wrong)", stays="its bias is no vector of 16 values"),
    product("y = Add(p, tall)", stays="its bias has more axes than its data"),
    product("y = Add(p, huge)", stays="its bias is too large for its accumulator"),
    *(product(body, fed=", float[16] x2", stays="")
      for body in ("e = Add(p, b) y = Add(e, p)", "y = Add(p, x2)", "y = Sub(p, b)", "y = Add(p, p)")),
    product("y = Add(p, b)", damage=overridable, stays="its bias can be overridden by an input"),
    fuse("p = MatMul(x, v) y = Add(p, b)", v=values(32, 16), stays=""),
    # A body has matrices of its own.
    fuse("""(float[2, 5, 32] x, bool o) => (y) { c = QuantizeLinear(x, s, z) w = DequantizeLinear <axis = 1> (k, t)
         y = If (o) <
         then_branch = a () => (u) { d = DequantizeLinear(c, s, z) [one] p = MatMul(d, w) u = Add(p, b) },
         else_branch = e () => (v) { f = DequantizeLinear(c, s, z) [two] q = MatMul(f, w) v = Add(q, b) }> }""",
         changed="one two", error=1e-4),
]  # fmt: skip


@table(BIASES)
def test_the_product_and_its_bias_become_a_gemm(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("shape", ["32", "5, 32", "2, 5, 32"])
def test_data_of_unknown_rank_is_measured_when_it_runs(shape: str) -> None:
    made = product("y = Add(p, b)", shape=shape).made
    graph = named_graph(made)
    for node in graph.nodes:
        for tensor in node.outputs:
            tensor.shape = None
    assert apply_once(FuseBiases(), graph) == Changes(("product",))
    assert "Shape" in ops(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-4


@pytest.mark.parametrize("data", ["float[2,5,32] x", "float[N,M,32] x"])
@pytest.mark.parametrize(
    "behind",
    [
        "y = Identity(a)",
        "y = Relu(a)",
        "y = Tanh(a)",
        "h = Relu(a) y = MatMul(h, v)",
        "y = MatMul(a, v)",
        "y = Add(a, x)",
    ],
)
def test_one_kernel_multiplies_and_adds_whatever_follows(
    data: str, behind: str, build, quantize_to, running_graph, tmp_path: Path
) -> None:
    made = build(f"({data}) => (y) {{ p = MatMul(x, w) a = Add(p, b) {behind} }}", w=(32, 32), b=(32,), v=(32, 32))

    quantize_to(made, tmp_path / "q.onnx")

    found = [node.op_type for node in running_graph(tmp_path / "q.onnx").node]
    assert found.count("QGemm") == 1
    assert found.count("MatMulIntegerToFloat") == behind.count("MatMul")
    assert not {"DequantizeLinear", "Sum"} & set(found)


# IsolateProducts hides what stands behind a product where onnxruntime would not multiply the product's quantized
# values.

# The oldest supported onnxruntime multiplies no quantized values in a Gemm.
NEW_RUNTIME = defs.onnx_opset_version() > 24
SCHEME = Scheme((SchemeRule(Mode.WEIGHT_ONLY, weight=QuantSpec("int4", (16,))),))


def graph_with_products(body: str, dtype: type = np.float32) -> tuple[Graph, Plan]:
    name = "float16" if dtype is np.float16 else "float"
    made = model(
        f"({name}[3, 32] x) => ({name}[3, 16] y) {{ {body} }}",
        opset=21, w=values(32, 32, dtype=dtype), v=values(32, 16, dtype=dtype),
        b=values(32, dtype=dtype), row=values(1, 32, dtype=dtype),
        low=np.array(-0.25, dtype), high=np.array(0.5, dtype),
    )  # fmt: skip
    graph = as_graph(made)
    infer_shapes(graph)
    return graph, make_plan(graph, SCHEME, target_named("onnxruntime-cpu"))


FIRST = ["[p] a = MatMul(x, w)", "[p] a = Gemm(x, w, b)", "[p] m = MatMul(x, w) [a] a = Add(m, b)"]
CLAMPS = {
    "Relu(a)": ["Max"],
    "Clip(a, low, high)": ["Max", "Min"],
    "Clip(a, low)": ["Max"],
    "Clip(a, , high)": ["Min"],
}
HIDDEN = [
    *((f"{first} [s] r = {clamp}", written) for first in FIRST for clamp, written in CLAMPS.items()),
    # A sum of matrices stays apart from the product.
    *((f"[n] n = Neg(x) [p] a = MatMul(x, w) [s] t = Add(a, {other}) [c] r = {clamp}(t)", ["Sum"])
      for other in ("n", "row", "x") for clamp in ("Relu", "Tanh")),
]  # fmt: skip


@pytest.mark.parametrize(("body", "written"), HIDDEN)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_both_products_are_multiplied_as_codes(body: str, written: list[str], dtype: type, tmp_path: Path) -> None:
    graph, plan = graph_with_products(f"{body} [q] y = MatMul(r, v)", dtype)
    before = to_model(graph)
    assert apply_once(IsolateProducts(plan), graph).changed == ("s",)
    assert [op for op in ops(graph) if op in ("Max", "Min", "Clip", "Sum")] == written
    inputs = sample(before)
    # Between float16 operators the runtime keeps float32, more or less often.
    assert difference(outputs(graph, inputs), outputs(before, inputs)) <= (0 if dtype is np.float32 else 1e-3)
    DecodeWeights(plan, encode(plan, graph)).apply(graph)
    assert ops(running(graph, tmp_path)).count("MatMulNBits") == 2 or not NEW_RUNTIME


@pytest.mark.parametrize(
    "body",
    [
        "[p] a = MatMul(x, v) [c] y = Relu(a)",
        "[p] a = MatMul(x, w) [t] t = Tanh(a) [c] r = Relu(t) [q] y = MatMul(r, v)",
        "[p] a = MatMul(x, w) [c] r = Relu(a) [s] s = Add(r, a) [q] y = MatMul(s, v)",
        "[n] a = Neg(x) [c] r = Relu(a) [q] y = MatMul(r, v)",
    ],
    ids=["last", "not behind", "not alone", "no product"],
)
def test_other_clamps_are_left(body: str) -> None:
    graph, plan = graph_with_products(body)
    assert not apply_once(IsolateProducts(plan), graph)
    assert "Relu" in ops(graph)


def test_a_vector_is_still_added_by_the_product() -> None:
    graph, plan = graph_with_products("[p] a = MatMul(x, w) [s] t = Add(a, b) [c] u = Tanh(t) [q] y = MatMul(u, v)")
    assert not apply_once(IsolateProducts(plan), graph)


IN_BODIES = {
    "clamp": "t = Relu(m) u = Neg(t)",
    "two clamps": "t = Clip(m, low, high) u = Neg(t)",
    "bias": "s = Add(m, b) t = Relu(s) u = Neg(t)",
    "matrix": "s = Add(m, x) u = Neg(s)",
}


@pytest.mark.parametrize("body", IN_BODIES)
@pytest.mark.parametrize("preset", ["int8", "int4-block32"])
def test_what_stands_in_a_body_is_not_taken_for_the_end_of_a_product_around_it(
    body: str, preset: str, build, quantize_to, tmp_path: Path
) -> None:
    made = build(
        f"""(float[4,64] x, bool c) => (float[4,64] y) {{
            [p] m = MatMul(x, w)
            y = If (c) <
                then_branch = yes () => (float[4,64] u) {{ {IN_BODIES[body]} }},
                else_branch = no () => (float[4,64] v) {{ v = Neg(x) }}>
        }}""",
        w=(64, 64), b=(64,), low=np.float32([-0.25]).reshape(()), high=np.float32([0.5]).reshape(()),
    )  # fmt: skip
    generator = np.random.default_rng(0)
    samples = [
        {"x": generator.standard_normal((4, 64)).astype(np.float32), "c": np.array(index % 2 == 0)}
        for index in range(4)
    ]
    report = quantize_to(made, tmp_path / "q.onnx", scheme=preset, samples=samples).report
    assert report.plan.by_node["p"].mode is (Mode.STATIC if preset == "int8" else Mode.WEIGHT_ONLY)
    assert report.agreement.worst_sqnr > 10


CHAINS = {
    "plain": "[a] p = MatMul(x, w0) [b] q = MatMul(p, w1) [c] y = MatMul(q, w2)",
    "clamps": "[a] p = MatMul(x, w0) [r] pr = Relu(p) [b] q = MatMul(pr, w1) [s] qr = Relu(q) [c] y = MatMul(qr, w2)",
    "biases": "[a] p0 = MatMul(x, w0) [d] p = Add(p0, b0) [b] q0 = MatMul(p, w1) [e] q = Add(q0, b1)"
    "[c] y = MatMul(q, w2)",
    "matrices": "[a] p = MatMul(x, w0) [b] q0 = MatMul(p, w1) [e] q = Add(q0, p) [c] y = MatMul(q, w2)",
    "readers": "[a] p = MatMul(x, w0) [t] t = Tanh(p) [b] q0 = MatMul(p, w1) [m] q = Mul(q0, t) [c] y = MatMul(q, w2)",
}


@pytest.mark.skipif(not NEW_RUNTIME, reason="the oldest supported onnxruntime multiplies no quantized values of 8 bits")
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("modes", ["sss", "sww", "sws", "sdw", "wss", "wsw", "wws", "dsd", "dws"])
def test_products_of_codes_in_different_modes_keep_their_kernels(
    chain: str, modes: str, build, quantize_to, running_graph, tmp_path: Path
) -> None:
    made = build(
        f"(float[1,64] x) => (float[1,64] y) {{ {CHAINS[chain]} }}",
        w0=(64, 64), w1=(64, 64), w2=(64, 64), b0=(64,), b1=(64,),
    )  # fmt: skip
    kinds = {"s": Mode.STATIC, "d": Mode.DYNAMIC, "w": Mode.WEIGHT_ONLY}
    stored = QuantSpec("int8-narrow", (128,))
    rules = [
        SchemeRule(kinds[kind], nodes=(node,), weight=stored if kind == "w" else None)
        for node, kind in zip("abc", modes, strict=True)
    ]
    path = tmp_path / "q.onnx"
    quantized = quantize_to(made, path, scheme=Scheme((*rules, SchemeRule(Mode.STATIC))))
    assert [quantized.report.plan.by_node[node].mode for node in "abc"] == [kinds[kind] for kind in modes]
    runs = [node.op_type for node in running_graph(path).node]
    assert not {"MatMul", "Gemm"} & set(runs)
    assert runs.count("MatMulNBits") == modes.count("w")


# IsolateFloats hides products of floats between quantized values, whose weights onnxruntime would make quantized values
# of.

NOTHING_STATIC = Plan((), (), "", "onnxruntime-cpu")
ONE, CHANNELS = "(c, s, z)", "<axis=1>(c, ss, zz)"
IMAGES = {
    "convolution": "[p] c = Conv(a, w)",
    "bias": "[p] c = Conv(a, w, b)",
    "Relu": "[p] d = Conv(a, w) c = Relu(d)",
    "Clip": "[p] d = Conv(a, w) c = Clip(d, low, high)",
    "moved": "t = Transpose<perm=[0,1,3,2]>(a) [p] d = Conv(t, w) c = Transpose<perm=[0,1,3,2]>(d)",
    "transposed": "[p] c = ConvTranspose(a, w)",
}
ROWS = {"product": "[p] c = Gemm(a, m)", "product and bias": "[p] c = Gemm(a, m, b)"}


def between_codes(body: str, shape: str, quantizer: str = ONE) -> ModelProto:
    return model(
        f"(float[{shape}] x) => (float[{shape}] y) {{ q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z)"
        f" {body} r = QuantizeLinear{quantizer} y = DequantizeLinear{quantizer.replace('c,', 'r,')} }}",
        opset=21, w=values(4, 4, 1, 1), m=values(4, 4), b=values(4),
        s=np.array(0.05, np.float32), z=np.array(7, np.uint8),
        ss=np.array([0.01, 0.02, 0.03, 0.04], np.float32), zz=np.full(4, 7, np.uint8),
        low=np.array(0, np.float32), high=np.array(6, np.float32),
    )  # fmt: skip


CASES = [
    *((body, "1, 4, 6, 6", quantizer) for body in IMAGES.values() for quantizer in (ONE, CHANNELS)),
    *((body, "3, 4", ONE) for body in ROWS.values()),
]


@pytest.mark.parametrize(("body", "shape", "quantizer"), CASES)
def test_a_product_of_floats_stays_one_between_codes(body: str, shape: str, quantizer: str, tmp_path: Path) -> None:
    made = between_codes(body, shape, quantizer)
    graph = as_graph(made)
    infer_shapes(graph)
    assert apply_once(IsolateFloats(NOTHING_STATIC), graph).changed == ("p",)
    inputs = sample(made)
    expected = open_session(made, optimize=False).run(None, inputs)[0]
    assert np.array_equal(open_session(to_model(graph)).run(None, inputs)[0], expected)
    stored = constants(running(graph, tmp_path))
    assert not any(len(tensor.shape) > 1 and tensor.dtype != np.float32 for tensor in stored)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        pytest.param("[p] c = MatMul(a, m)", "3, 4", id="onnxruntime leaves it as it is"),
        pytest.param(
            "[p] d = Conv(a, w) c = Tanh(d)", "1, 4, 6, 6", id="what it makes is not made quantized values of"
        ),
        pytest.param("e = Tanh(a) [p] c = Conv(e, w)", "1, 4, 6, 6", id="what it reads was not decoded"),
        pytest.param("[p] c0 = Conv(a, w) c1 = Tanh(c0) c = Add(c0, c1)", "1, 4, 6, 6", id="others read it"),
    ],
)
def test_all_else_is_left(body: str, shape: str) -> None:
    graph = as_graph(between_codes(body, shape))
    infer_shapes(graph)
    assert not apply_once(IsolateFloats(NOTHING_STATIC), graph).changed


# For OpenVINO what stands in front gives floats, so that onnxruntime makes no integer kernel of it.
@pytest.mark.parametrize(("target", "kernels"), [("onnxruntime-cpu", (2, 1)), ("openvino", (0, 3))])
@pytest.mark.parametrize("middle", [Mode.FLOAT, Mode.STORAGE])
def test_what_a_scheme_leaves_in_float_is_computed_in_float(
    middle: Mode, target: str, kernels: tuple[int, int], build, quantize_to, running_graph, tmp_path: Path
) -> None:
    made = build(
        "(float[1, 32, 6, 6] x) => (float[1, 32, 6, 6] y)"
        "{ [a] p = Conv(x, w0) [b] q = Conv(p, w1) [c] y = Conv(q, w2) }",
        w0=(32, 32, 1, 1), w1=(32, 32, 1, 1), w2=(32, 32, 1, 1),
    )  # fmt: skip
    scheme = Scheme((SchemeRule(middle, nodes=("b",)), SchemeRule(Mode.STATIC)))
    plan = quantize_to(made, tmp_path / "q.onnx", scheme=scheme, target=target).report.plan
    assert [plan.by_node[node].mode for node in "abc"] == [Mode.STATIC, middle, Mode.STATIC]
    runs = [node.op_type for node in running_graph(tmp_path / "q.onnx").node]
    assert (runs.count("QLinearConv"), runs.count("Conv") + runs.count("FusedConv")) == kernels
