"""Small models for the tests of passes, each written in a few lines of ONNX's text form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, numpy_helper, parser

from onnxq.graph import Changes, Graph, Node, Pass, scopes
from onnxq.modelfile import as_graph, to_model
from onnxq.onnx_tools import infer_shapes
from onnxq.passes import NameNodes
from onnxq.runtime import open_session, run

Array = npt.NDArray[Any]

TRAINED = Path(__file__).parents[1] / "models"
_ZOO: dict[str, Callable[[], ModelProto]] = {}


def values(*shape: int, seed: int = 0, dtype: npt.DTypeLike = np.float32, scale: float = 0.5) -> Array:
    """Normally distributed numbers, the same for the same arguments."""
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(dtype)


def variances(*shape: int, seed: int = 0, dtype: npt.DTypeLike = np.float32) -> Array:
    return np.random.default_rng([seed, *shape]).uniform(0.5, 2.0, shape).astype(dtype)


def model(text: str, *, opset: int = 17, ir_version: int = 8, functions: str = "", **weights: Array) -> ModelProto:
    """A model of a graph in text form; the keywords become its initializers."""
    header = f'<ir_version: {ir_version}, opset_import: ["" : {opset}, "local" : 1]>'
    made = parser.parse_model(f"{header} {text} {functions}")
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return made


def batch_norm(prefix: str, channels: int, seed: int = 0, dtype: npt.DTypeLike = np.float32) -> dict[str, Array]:
    """Scale, shift, mean and variance of a BatchNormalization, named after ``prefix``."""
    return {
        f"{prefix}s": values(channels, seed=seed, dtype=dtype) + np.array(1, dtype),
        f"{prefix}b": values(channels, seed=seed + 1, dtype=dtype),
        f"{prefix}m": values(channels, seed=seed + 2, dtype=dtype),
        f"{prefix}v": variances(channels, seed=seed + 3, dtype=dtype),
    }


def sample(model: ModelProto, seed: int = 0, free: int = 2) -> dict[str, Array]:
    """Random inputs; free dimensions get the extent ``free``, conditions are true for even seeds."""
    generator = np.random.default_rng(seed)
    stored = {tensor.name for tensor in model.graph.initializer}
    found = {}
    for info in model.graph.input:
        if info.name in stored:
            continue
        shape = [dimension.dim_value or free for dimension in info.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        if dtype == np.bool_:
            found[info.name] = np.full(shape, seed % 2 == 0)
        else:
            found[info.name] = np.asarray(generator.normal(size=shape)).astype(dtype)
    return found


def outputs(model: ModelProto | Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What onnxruntime computes, by output name, without optimisation, so that a difference is the model's."""
    proto = to_model(model) if isinstance(model, Graph) else model
    session = open_session(proto, threads=1, optimize=False)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, run(session, inputs), strict=True))


def difference(found: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """The largest error of any output, relative to that output's largest magnitude; infinite for another shape."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, array in expected.items():
        if found[name].shape != array.shape or found[name].dtype != array.dtype:
            return float("inf")
        if array.size:
            error = np.abs(found[name].astype(np.float64) - array.astype(np.float64)).max()
            worst = max(worst, float(error / max(np.abs(array.astype(np.float64)).max(), 1e-30)))
    return worst


def named_graph(made: ModelProto | Graph) -> Graph:
    """The model as most passes get it: every node has a name, every tensor a shape."""
    graph = as_graph(made)
    NameNodes().apply(graph)
    infer_shapes(graph)
    return graph


def apply_once(step: Pass, graph: Graph) -> Changes:
    """Apply a pass; a second time there is nothing left to do."""
    changes = step.apply(graph)
    assert not step.apply(graph)
    return changes


def nodes(graph: Graph, op: str = "") -> list[Node]:
    """The nodes of all scopes, or those of one op type."""
    return [node for scope in scopes(graph) for node in scope.nodes if op in ("", node.op)]


def ops(graph: Graph) -> list[str]:
    return [node.op for node in nodes(graph)]


def node_named(graph: Graph, name: str) -> Node:
    (found,) = (node for node in nodes(graph) if node.name == name)
    return found


def initializer_names(model: ModelProto) -> set[str]:
    return {tensor.name for tensor in model.graph.initializer}


def zoo() -> Iterator[tuple[str, Callable[[], ModelProto]]]:
    yield from _ZOO.items()


def _entry(build: Callable[[], ModelProto]) -> Callable[[], ModelProto]:
    _ZOO[build.__name__] = build
    return build


@_entry
def batch_norm_chain() -> ModelProto:
    return model(
        """g (float[N, 3, 8, 8] x) => (float[N, 8, 15, 15] y) {
            [conv] a = Conv <pads = [1, 1, 1, 1]> (x, w)
            [bn] b = BatchNormalization(a, ps, pb, pm, pv)
            [relu] c = Relu(b)
            [up] d = ConvTranspose <strides = [2, 2], group = 2> (c, u, ub)
            [scaled] e = Mul(d, f)
            [bn2] y = BatchNormalization(e, qs, qb, qm, qv)
        }""",
        w=values(16, 3, 3, 3), u=values(16, 4, 1, 1), ub=values(8), f=values(8, 1, 1),
        **batch_norm("p", 16), **batch_norm("q", 8),
    )  # fmt: skip


@_entry
def if_bodies_that_share_a_captured_weight() -> ModelProto:
    return model(
        """g (float[N, 16] x, bool c) => (float[N, 16] y) {
            [before] h = MatMul(x, w)
            [branch] y = If (c) <
                then_branch = yes () => (float[N, 16] t) { [yes] m = MatMul(h, w) n = Identity(m) t = Add(n, b) },
                else_branch = no () => (float[N, 16] e) { [no] k = MatMul(x, w) e = Mul(k, b) }>
        }""",
        w=values(16, 16), b=values(16),
    )  # fmt: skip


@_entry
def loop_with_a_captured_weight() -> ModelProto:
    return model(
        """g (float[2, 16] x) => (float[2, 16] y, float[T, 2, 16] steps) {
            trips = Constant <value = int64 {3}> ()
            keep = Constant <value = bool {1}> ()
            [loop] y, steps = Loop (trips, keep, x) <
                body = step (int64 i, bool going, float[2, 16] s) => (bool on, float[2, 16] next, float[2, 16] out) {
                    on = Identity(going)
                    [inner] m = MatMul(s, w)
                    two = Constant <value = float {0.5}> ()
                    half = Mul(two, two)
                    next = Mul(m, half)
                    out = Tanh(m) }>
        }""",
        w=values(16, 16),
    )  # fmt: skip


@_entry
def local_functions() -> ModelProto:
    return model(
        "g (float[N, 16] x) => (float[N, 16] y) { [one] h = local.layer(x, w) [two] y = local.layer(h, w) }",
        functions="""
            <domain: "local", opset_import: ["" : 17]>
            layer (p, q) => (r) { [product] m = MatMul(p, q) r = Relu(m) }""",
        w=values(16, 16),
    )  # fmt: skip


@_entry
def constant_nodes() -> ModelProto:
    numbers = ", ".join(f"{value:.4f}" for value in values(64))
    return model(
        """g (float[N, 16] x) => (float[N, 4] y, float[2] fixed) {
            w = Constant <value = float[16, 4] {WEIGHT}> ()
            b = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
            f = Constant <value_float = 2.0> ()
            to = Constant <value_ints = [-1, 4]> ()
            fixed = Constant <value_floats = [5.0, 6.0]> ()
            m = MatMul(x, w)  n = Add(m, b)  o = Mul(n, f)  y = Reshape(o, to)
        }""".replace("WEIGHT", numbers)
    )


@_entry
def identities() -> ModelProto:
    return model(
        """g (float[N, 16] x) => (float[N, 16] y, float[N, 16] z, float[16, 16] w2) {
            a = Identity(x)  b = Identity(a)  v = Identity(w)
            m = MatMul(b, v)
            y = Identity(m)  r = Relu(m)  s = Identity(r)  z = Identity(s)  w2 = Identity(w)
        }""",
        w=values(16, 16),
    )


@_entry
def dropouts() -> ModelProto:
    return model(
        """g (float[N, 16] x) => (float[N, 16] y, bool[N, 16] mask) {
            a = Dropout(x)
            b, unread = Dropout(a, ratio)
            m = MatMul(b, w)
            y, mask = Dropout(m, ratio, training)
        }""",
        w=values(16, 16), ratio=np.array(0.5, np.float32), training=np.array(False),
    )  # fmt: skip


@_entry
def mask_as_output() -> ModelProto:
    return model(
        """g (float[N, 16] x) => (float[N, 16] y, bool[N, 16] mask) {
            m = MatMul(x, w)  d, mask = Dropout(m)  y = Relu(d)
        }""",
        w=values(16, 16),
    )


@_entry
def repeated_and_empty_node_names() -> ModelProto:
    return model(
        """g (float[N, 16] x, bool c) => (float[N, 16] y) {
            [same] a = MatMul(x, w)  [same] b = Relu(a)  d = Tanh(b)
            [branch] y = If (c) <
                then_branch = yes () => (float[N, 16] t) { [same] t = MatMul(d, w) },
                else_branch = no () => (float[N, 16] e) { e = Neg(d) }>
        }""",
        w=values(16, 16),
    )


@_entry
def float16_weights() -> ModelProto:
    return model(
        """g (float16[N, 4, 8, 8] x) => (float16[N, 8, 6, 6] y) {
            [conv] a = Conv(x, w)
            [bn] b = BatchNormalization(a, ps, pb, pm, pv)
            y = Relu(b)
        }""",
        w=values(8, 4, 3, 3, dtype=np.float16), **batch_norm("p", 8, dtype=np.float16),
    )  # fmt: skip


@_entry
def unrolled_recurrence() -> ModelProto:
    steps = "".join(f"[in{i}] a{i} = MatMul(x, w) b{i} = Add(a{i}, h{i}) h{i + 1} = Tanh(b{i})" for i in range(3))
    return model(
        f"g (float[N, 16] x) => (float[N, 16] h3) {{ [start] h0 = MatMul(x, w2) {steps} }}",
        w=values(16, 16), w2=values(16, 16),
    )  # fmt: skip


@_entry
def odd_names() -> ModelProto:
    made = model(
        "g (float[N, 3, 8, 8] x) => (float[N, 8, 6, 6] y) { [conv] a = Conv(x, w, b) y = Relu(a) }",
        w=values(8, 3, 3, 3), b=values(8),
    )  # fmt: skip
    new = {"x": "serving:0", "a": "/layer;1/Größe", "y": "出力 1", "w": "w/read:0", "b": "b;[0]"}
    for node in made.graph.node:
        node.name = f"/{node.op_type}:0;é"
        node.input[:] = [new[name] for name in node.input]
        node.output[:] = [new[name] for name in node.output]
    for item in (*made.graph.input, *made.graph.output, *made.graph.initializer):
        item.name = new[item.name]
    return made


@_entry
def recurrent_layers() -> ModelProto:
    return model(
        """g (float[4, N, 8] x) => (float[4, 1, N, 16] y, float[1, N, 16] h) {
            [lstm] a, ah = LSTM <hidden_size = 16> (x, wl, rl, bl)
            axis = Constant <value_ints = [1]> ()
            s = Squeeze(a, axis)
            [gru] y, h = GRU <hidden_size = 16> (s, wg, rg)
        }""",
        wl=values(1, 64, 8), rl=values(1, 64, 16), bl=values(1, 128), wg=values(1, 48, 16), rg=values(1, 48, 16),
    )  # fmt: skip


@_entry
def shape_arithmetic() -> ModelProto:
    return model(
        """g (float[N, 4, 4] x) => (float[N, 16] y, float[2, 3] e) {
            shape = Shape(x)  first = Gather(shape, zero)  one = Unsqueeze(first, axes)
            ws = Shape <start = 0, end = 1> (w)
            doubled = Mul(ws, two)  rest = Div(doubled, two)
            to = Concat <axis = 0> (one, rest)
            flat = Reshape(x, to)
            y = MatMul(flat, w)
            small = Cast <to = 1> (sizes)  e = Mul(small, small)
        }""",
        w=values(16, 16), zero=np.array(0), axes=np.array([0]), two=np.array(2), sizes=np.arange(6).reshape(2, 3),
    )  # fmt: skip


@_entry
def branches_that_share_a_scale() -> ModelProto:
    return model(
        """g (float[N, 8, 8, 8] x) => (float[N, 16, 3, 3] y) {
            [first] a = Conv(x, w, b)  r = Relu(a)
            [pool] p = MaxPool <kernel_shape = [2, 2]> (r)
            [left] l = Conv(p, v)
            [right] i = Conv(p, u)
            [join] j = Concat <axis = 1> (l, i)
            one, other = Split <axis = 1> (j, halves)
            [sum] s = Add(one, other)
            [last] y = Conv(s, z, c)
        }""",
        w=values(8, 8, 3, 3), b=values(8), v=values(8, 8, 1, 1, seed=1), u=values(8, 8, 1, 1, seed=2),
        z=values(16, 8, 3, 3), c=values(16), halves=np.array([8, 8]),
    )  # fmt: skip


@_entry
def no_weights() -> ModelProto:
    return model("g (float[N, 4] x) => (float[N, 4] y) { y = Add(x, x) }")


def codes(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).integers(-127, 128, shape).astype(np.int8)


@_entry
def quantized_pairs() -> ModelProto:
    return model(
        """g (float[N, 16] x) => (float[N, 8] y) {
            q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)
            w = DequantizeLinear <axis = 1> (wq, ws)  b = DequantizeLinear(bq, bs)
            [dot] c = Gemm(a, w, b)  t = Tanh(c)
            r = QuantizeLinear(t, u, v)  m = Reshape(r, to)  y = DequantizeLinear(m, u, v)
        }""",
        wq=codes(16, 8), ws=np.linspace(0.002, 0.004, 8, dtype=np.float32), bq=codes(8).astype(np.int32),
        bs=np.array(0.001, np.float32), s=np.array(0.03, np.float32), z=np.array(120, np.uint8),
        u=np.array(1 / 128, np.float32), v=np.array(0, np.int8), to=np.array([-1, 8]),
    )  # fmt: skip


@_entry
def quantized_operators() -> ModelProto:
    return model(
        """g (float[N, 4, 6, 6] x) => (float[N, 8, 4, 4] y) {
            q = QuantizeLinear(x, s, z)
            [conv] r = QLinearConv(q, s, z, wq, ws, wz, t, z)
            y = DequantizeLinear(r, t, z)
        }""",
        wq=codes(8, 4, 3, 3), ws=np.full(8, 0.004, np.float32), wz=np.zeros(8, np.int8),
        s=np.array(0.03, np.float32), z=np.array(120, np.uint8), t=np.array(0.05, np.float32),
    )  # fmt: skip


@_entry
def quantized_in_each_run() -> ModelProto:
    return model(
        """g (float[N, 16] x) => (float[N, 8] y) {
            q, s, z = DynamicQuantizeLinear(x)  f = Mul(s, ws)
            [dot] a = MatMulInteger(q, wq, z)  b = Cast <to = 1> (a)  y = Mul(b, f)
        }""",
        wq=codes(16, 8), ws=np.linspace(0.002, 0.004, 8, dtype=np.float32),
    )  # fmt: skip


@_entry
def quantized_weights_in_a_body() -> ModelProto:
    return model(
        """g (float[N, 16] x, bool c) => (float[N, 8] y) {
            d = Cast <to = 1> (wq)  w = Mul(d, ws)
            [branch] y = If (c) <
                then_branch = yes () => (float[N, 8] t) { [yes] t = MatMul(x, w) },
                else_branch = no () => (float[N, 8] e) { [no] k = MatMul(x, w) e = Neg(k) }>
        }""",
        wq=codes(16, 8), ws=np.linspace(0.002, 0.004, 8, dtype=np.float32),
    )  # fmt: skip


def _at_opset(opset: int) -> ModelProto:
    """Convolutional classifier; Clip and Squeeze as the opset writes them, initializers as inputs in old files."""
    clip, limits = ("Clip(b, low, high)", "r") if opset >= 11 else ("Clip <min = 0.0, max = 6.0> (b)", "r")
    squeeze = "Squeeze(p, axes)" if opset >= 13 else "Squeeze <axes = [2, 3]> (p)"
    weights = {"w": values(8, 3, 3, 3), "v": values(8, 32), "vb": values(32), **batch_norm("p", 8)}
    if opset >= 11:
        weights |= {"low": np.array(0, np.float32), "high": np.array(6, np.float32)}
    if opset >= 13:
        weights["axes"] = np.array([2, 3])
    made = model(
        f"""g (float[N, 3, 8, 8] x) => (float[N, 32] y) {{
            a = Conv(x, w)  b = BatchNormalization(a, ps, pb, pm, pv)
            {limits} = {clip}  p = GlobalAveragePool(r)
            s = {squeeze}  two = Constant <value = float {{2.0}}> ()  t = Mul(s, two)
            y = Gemm(t, v, vb)
        }}""",
        opset=opset, ir_version=3 if opset < 9 else 7 if opset < 19 else 10, **weights,
    )  # fmt: skip
    if made.ir_version < 4:
        made.graph.input.extend(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            for tensor in made.graph.initializer
        )
    return made


def _add_opsets_and_trained_models() -> None:
    for opset in (7, 8, 9, 10, 11, 12, 13, 15, 18, 21):
        _ZOO[f"opset_{opset}"] = lambda opset=opset: _at_opset(opset)
    for name in ("gru", "mobilenet", "resnet", "vit"):
        _ZOO[f"trained_{name}"] = lambda name=name: onnx.load(TRAINED / f"{name}.onnx")


_add_opsets_and_trained_models()
