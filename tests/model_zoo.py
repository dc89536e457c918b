"""Small models for the tests of passes, each written in a few lines of ONNX's text form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from coded_models import quantized_in_each_run, quantized_operators, quantized_pairs, quantized_weights_in_a_body
from model_texts import batch_norm, model, values
from onnx import ModelProto

TRAINED = Path(__file__).parents[1] / "models"
_ZOO: dict[str, Callable[[], ModelProto]] = {}


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


for _build in (quantized_pairs, quantized_operators, quantized_in_each_run, quantized_weights_in_a_body):
    _entry(_build)


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
