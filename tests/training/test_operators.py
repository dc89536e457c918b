"""Operators compute in torch what they compute in onnxruntime."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
import torch
from model_texts import model
from numpy.typing import NDArray
from onnx import ModelProto
from onnx_cases import feeds_of, operator_cases

from onnxq.errors import OnnxqError
from onnxq.ir import Node, as_graph, constant
from onnxq.ops import OPERATORS
from onnxq.training.operators import TORCH, Call, function_of, torch_dtype
from training.modules import difference

KINDS = (np.float32, np.float64, np.int64, np.int32, np.bool_)
"""The types of data that are compared; torch has the smaller ones not or not everywhere."""


def test_every_operator_whose_weights_become_quantized_values_can_be_trained() -> None:
    weighted = {op for (domain, op), row in OPERATORS.items() if row.weights and not domain}
    assert weighted - set(TORCH) <= {"QLinearConv", "ScatterND"}


@pytest.mark.parametrize(
    ("node", "known"),
    [
        (Node("Relu"), True),
        (Node("Relu", domain="com.example"), False),
        (Node("NonMaxSuppression"), False),
        *((Node(op), True) for op in ("Resize", "LSTM", "GRU", "ConvTranspose", "AveragePool")),
        (Node("Resize", attrs={"antialias": 1}), False),
        (Node("LSTM", attrs={"clip": 1.0}), False),
        (Node("GRU", attrs={"activations": ["Affine", "Tanh"]}), False),
        (Node("GRU", attrs={"activation_alpha": [0.1]}), False),
        (Node("ConvTranspose", attrs={"output_shape": [3, 3]}), False),
        (Node("AveragePool", attrs={"dilations": [2, 2]}), False),
    ],
)
def test_what_torch_does_not_compute_is_told(node: Node, known: bool) -> None:
    assert (function_of(Call(node, (), 17)) is not None) == known


def test_inputs_and_numbers_of_a_call() -> None:
    node = Node("Pad", attrs={"pads": [1, 2], "value": constant("v", 3.0)})
    call = Call(node, (torch.zeros(2), None, torch.tensor([4])), 17)
    assert call[0].tolist() == [0, 0]
    assert (call.optional(1), call.optional(7)) == (None, None)
    assert [tensor.numel() for tensor in call.present] == [2, 1]
    assert (call.numbers(2, "pads"), call.numbers(1, "pads"), call.numbers(1)) == ([4], [1, 2], None)
    assert (call.number(2, "value", 0), call.number(5, "other", 7)) == (4, 7)
    assert call.attribute("value").item() == 3.0


# The operator tests that onnx ships -----------------------------------------------------------------------------------

# onnx has no case of these that onnxruntime runs on such data; they are written below.
WITHOUT = {"CumSum", "LayerNormalization", "OneHot", "Range"}
# Torch has no kernel for the type of the one, and the operator no mode "CRD" yet for the other.
LEFT = {"test_spacetodepth_crd_mode_example", "test_cast_FLOAT_to_BFLOAT16"}


def comparable(case: ModelProto, feeds: Mapping[str, object]) -> bool:
    plain = as_graph(case)
    known = all(function_of(Call(inner, (), plain.opset)) is not None for inner in plain.nodes)
    return known and all(isinstance(array, np.ndarray) and array.dtype in KINDS for array in feeds.values())


@pytest.mark.parametrize("op", sorted(TORCH))
def test_torch_gives_what_onnxruntime_gives_in_the_cases_of_onnx(op: str) -> None:
    compared = 0
    for name, (case, data) in operator_cases().items():
        if [(node.domain, node.op_type) for node in case.graph.node] != [("", op)] or name in LEFT:
            continue
        feeds = feeds_of(case, data[0][0])
        if not comparable(case, feeds):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert difference(case, feeds) < 1e-5, name
        except OnnxqError:
            # onnxruntime has no kernel for it.
            continue
        compared += 1
    assert bool(compared) != (op in WITHOUT)


# What these cases leave out -------------------------------------------------------------------------------------------


def ints(name: str, *numbers: int) -> str:
    return f"{name} = Constant<value = int64[{len(numbers)}] {{{', '.join(map(str, numbers))}}}>()  "


ONE_HOT = "d = Constant<value = int64 {3}>()  v = Constant<value = float[2] {0, 5}>()  y = OneHot(i, d, v)"
TO_SIZE = ints("size", 1, 4, 5, 13)
NODES = {
    "IsInf": "o = Sub(x, x)  i = Div(x, o)  a = IsInf(i)  y = Cast<to = 1>(a)",
    "IsInf above": "o = Sub(x, x)  m = Neg(x)  i = Div(m, o)  a = IsInf<detect_negative = 0>(i)  y = Cast<to = 1>(a)",
    "Div of negative integers": ints("a", -7, 7) + "c = Constant<value = int64 {2}>()  y = Div(a, c)",
    "Range": "a = Constant<value = float {1.0}>()  e = Constant<value = float {4.0}>()  y = Range(a, e, a)",
    "Clip from below": "l = Constant<value = float {0.2}>()  y = Clip(x, l)",
    "CumSum backwards": "a = Constant<value = int64 {1}>()  y = CumSum<exclusive = 1, reverse = 1>(x, a)",
    "ArgMax of equal values": "r = Round(x)  y = ArgMax<axis = 1, select_last_index = 1>(r)",
    "OneHot": ints("i", 1, -1) + ONE_HOT,
    "OneHot beyond its depth": ints("i", 5, 1, -4) + ONE_HOT,
    "TopK of equal values": ints("k", 3) + "r = Round(x)  v, places = TopK(r, k)  y = Cast<to = 1>(places)",
    "Split evenly": "y, rest = Split<axis = 2>(x)",
    "LayerNormalization": "y = LayerNormalization(x, n, n)",
    "InstanceNormalization of one place": "o = GlobalAveragePool(x)  y = InstanceNormalization(o, s, b)",
    "LRN": "y = LRN<size = 3, alpha = 0.1>(x)",
    "AveragePool of what is left": "y = AveragePool<kernel_shape = [2,2], strides = [2,2], ceil_mode = 1>(x)",
    "AveragePool to its end": "y = AveragePool<kernel_shape=[2,2], pads=[1,1,1,1], strides=[2,2], ceil_mode=1>(x)",
    "MaxPool": "y = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1], strides = [2,2], ceil_mode = 1>(x)",
    "MaxPool to its end": "y = MaxPool<kernel_shape = [2,2], pads = [1,1,1,1], strides = [2,2], ceil_mode = 1>(x)",
    "Conv": "y = Conv<group = 2, pads = [1,1,1,1], strides = [2,1], dilations = [1,2]>(x, w, b)",
    "Conv padded as tensorflow does": 'y = Conv<group = 2, auto_pad = "SAME_UPPER", strides = [2,2]>(x, w, b)',
    "Conv with more on one side": "y = Conv<group = 2, pads = [0,1,2,3]>(x, w)",
    "ConvTranspose": "y = ConvTranspose<strides = [2,2], pads = [1,0,0,1], output_padding = [1,0]>(x, t)",
    "Resize to corners": TO_SIZE + 'y = Resize<mode = "linear", HOW = "align_corners">(x, , , size)',
    "Resize by cubes": TO_SIZE + 'y = Resize<mode = "cubic", HOW = "pytorch_half_pixel">(x, , , size)',
    "Resize to the nearest": TO_SIZE + 'y = Resize<nearest_mode = "round_prefer_ceil">(x, , , size)',
}
WEIGHTS = {"w": (4, 2, 3, 3), "t": (4, 3, 3, 3), "b": (4,), "s": (4,), "n": (9,)}


def data(*shape: int) -> dict[str, NDArray[np.float32]]:
    return {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


@pytest.mark.parametrize("case", NODES)
def test_torch_gives_what_onnxruntime_gives(case: str) -> None:
    body = NODES[case].replace("HOW", "coordinate_transformation_mode")
    assert difference(model(f"(float[1,4,8,9] x) => (y) {{ {body} }}", **WEIGHTS), data(1, 4, 8, 9)) < 1e-5


@pytest.mark.parametrize(
    ("text", "opset", "weights", "shape"),
    [
        # Before opset 13 Softmax took all axes from one on as one.
        *((f"(float[2,3,4] x) => (y) {{ y = Softmax<axis = {axis}>(x) }}", 11, {}, (2, 3, 4)) for axis in (0, 1, 2)),
        # Groups have numbers of their own, and from opset 21 on each channel has.
        *(("(float[1,4,3,3] x) => (y) { y = GroupNormalization<num_groups = 2>(x, s, b) }", opset,
           {"s": (each,), "b": (each,)}, (1, 4, 3, 3)) for opset, each in ((18, 2), (21, 4))),
        ("(float[2,5] x) => (y) { y = RMSNormalization(x, s) }", 23, {"s": (5,)}, (2, 5)),
        # The reset gate may come behind the product.
        ("(float[5,2,3] x) => (y) { y = GRU<hidden_size = 4, linear_before_reset = 1>(x, w, r, b) }", 17,
         {"w": (1, 12, 3), "r": (1, 12, 4), "b": (1, 24)}, (5, 2, 3)),
    ],
)  # fmt: skip
def test_torch_computes_each_opset_as_onnxruntime(
    text: str, opset: int, weights: dict[str, tuple[int, ...]], shape: tuple[int, ...]
) -> None:
    assert difference(model(text, opset=opset, **weights), data(*shape)) < 1e-5


GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("more", ["", "lengths", "starts"])
def test_torch_runs_recurrent_cells_as_onnxruntime(op: str, direction: str, more: str) -> None:
    count, rows = 2 if direction == "bidirectional" else 1, GATES[op] * 4
    lengths = "l" if more == "lengths" else ""
    starts = ", s, s" if more == "starts" and op == "LSTM" else ", s" if more == "starts" else ""
    text = f"""(float[5,2,3] x) => (y, h) {{
        l = Constant<value = int32[2] {{5, 3}}>()
        y, h = {op}<hidden_size = 4, direction = "{direction}">(x, w, r, b, {lengths}{starts}) }}"""
    cell = model(text, w=(count, rows, 3), r=(count, rows, 4), b=(count, 2 * rows), s=(count, 2, 4))
    assert difference(cell, data(5, 2, 3)) < 1e-5


# Gradients, types and what is left to onnxruntime ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("Sqrt", ()),
        ("Pow", (torch.tensor(0.5),)),
        ("Pow", (torch.tensor(2.0),)),
        ("ReduceL2", (torch.tensor([1]),)),
    ],
)
def test_the_gradient_of_a_root_and_of_a_square_is_finite_at_zero(op: str, inputs: tuple[torch.Tensor, ...]) -> None:
    x = torch.tensor([[0.0, 0.0], [0.0, 4.0]], requires_grad=True)
    TORCH[op](Call(Node(op), (x, *inputs), 18)).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    assert float(x.grad[1, 1]) > 0


def test_gradients_reach_the_first_step() -> None:
    x = torch.randn(6, 1, 3, requires_grad=True)
    call = Call(Node("GRU", attrs={"hidden_size": 2}), (x, torch.randn(1, 6, 3), torch.randn(1, 6, 2)), 17)
    TORCH["GRU"](call)[1].sum().backward()
    assert x.grad is not None
    assert float(x.grad[0].abs().sum()) > 0


@pytest.mark.parametrize(
    ("onnx_type", "expected"), [(1, torch.float32), (7, torch.int64), (9, torch.bool), (16, torch.bfloat16)]
)
def test_types_have_their_counterparts(onnx_type: int, expected: torch.dtype) -> None:
    assert onnx.TensorProto.DataType.Name(onnx_type)
    assert torch_dtype(onnx_type) == expected
