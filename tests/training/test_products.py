"""Products, pools, normalizations and Resize give in torch what they give in onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Build

from onnxq.ir import Node
from onnxq.training.operators import PLAIN, PRODUCTS, Call
from training.modules import difference

WEIGHTS = {"w": (4, 2, 3, 3), "t": (4, 3, 3, 3), "b": (4,), "s": (4,), "g": (9, 5), "h": (7, 9), "c": (5,), "n": (9,)}
SIZES = "z = Constant<value = int64[4] {1, 4, 5, 13}>()  "
SCALES = "z = Constant<value = float[4] {1, 1, 2, 1.5}>()  "
CASES = {
    "AveragePool": "y = AveragePool<kernel_shape = [3,2], pads = [1,0,1,1], strides = [2,2]>(x)",
    "AveragePool with its padding": "y = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1>(x)",
    "AveragePool of what is left": "y = AveragePool<kernel_shape = [2,2], strides = [2,2], ceil_mode = 1>(x)",
    "AveragePool to its end": "y = AveragePool<kernel_shape=[2,2], pads=[1,1,1,1], strides=[2,2], ceil_mode=1>(x)",
    "BatchNormalization": "v = Abs(b)  y = BatchNormalization(x, s, b, b, v)",
    "Conv": "y = Conv<group = 2, pads = [1,1,1,1], strides = [2,1], dilations = [1,2]>(x, w, b)",
    "Conv padded as tensorflow does": 'y = Conv<group = 2, auto_pad = "SAME_UPPER", strides = [2,2]>(x, w, b)',
    "Conv with more on one side": "y = Conv<group = 2, pads = [0,1,2,3]>(x, w)",
    "ConvTranspose": "y = ConvTranspose<strides = [2,2], pads = [1,0,0,1], output_padding = [1,0]>(x, t)",
    "Einsum": 'y = Einsum<equation = "bchw,cd->bdhw">(x, e)',
    "Gemm": "f = Reshape(x, q)  y = Gemm<alpha = 0.5, beta = 2.0>(f, g, c)",
    "Gemm transposed": "f = Reshape(x, q)  y = Gemm<transB = 1>(f, h)",
    "GlobalAveragePool": "y = GlobalAveragePool(x)",
    "GlobalMaxPool": "y = GlobalMaxPool(x)",
    "InstanceNormalization": "y = InstanceNormalization(x, s, b)",
    "InstanceNormalization of one place": "o = GlobalAveragePool(x)  y = InstanceNormalization(o, s, b)",
    "LRN": "y = LRN<size = 3, alpha = 0.1>(x)",
    "LayerNormalization": "y = LayerNormalization(x, n, n)",
    "MatMul": "y = MatMul(x, g)",
    "MaxPool": "y = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1], strides = [2,2], ceil_mode = 1>(x)",
    "MaxPool to its end": "y = MaxPool<kernel_shape = [2,2], pads = [1,1,1,1], strides = [2,2], ceil_mode = 1>(x)",
    "Resize": SIZES + 'y = Resize<mode = "linear">(x, , , z)',
    "Resize by scales": SCALES + 'y = Resize<mode = "nearest", HOW = "asymmetric", nearest_mode = "floor">(x, , z)',
    "Resize to corners": SIZES + 'y = Resize<mode = "linear", HOW = "align_corners">(x, , , z)',
    "Resize by cubes": SIZES + 'y = Resize<mode = "cubic", HOW = "pytorch_half_pixel">(x, , , z)',
    "Resize to the nearest": SIZES + 'y = Resize<nearest_mode = "round_prefer_ceil">(x, , , z)',
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_torch_gives_what_onnxruntime_gives(case: str, build: Build) -> None:
    text = f"(float[1,4,7,9] x) => (float[?] y) {{ q = Constant<value = int64[2] {{-1, 9}}>()  {CASES[case]} }}"
    model = build(text.replace("HOW", "coordinate_transformation_mode"), e=(4, 3), **WEIGHTS)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    sample = {"x": np.random.default_rng(0).standard_normal((1, 4, 7, 9)).astype(np.float32)}
    assert difference(model, sample) < 1e-5


@pytest.mark.parametrize(("opset", "each"), [(18, 2), (21, 4)])
def test_groups_have_numbers_of_their_own_or_each_channel(opset: int, each: int, build: Build) -> None:
    text = "(float[1,4,3,3] x) => (float[1,4,3,3] y) { y = GroupNormalization<num_groups = 2>(x, s, b) }"
    sample = {"x": np.random.default_rng(0).standard_normal((1, 4, 3, 3)).astype(np.float32)}
    assert difference(build(text, opset=opset, s=(each,), b=(each,)), sample) < 1e-5


def test_root_mean_squares(build: Build) -> None:
    text = "(float[2,5] x) => (float[2,5] y) { y = RMSNormalization(x, s) }"
    sample = {"x": np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)}
    assert difference(build(text, opset=23, s=(5,)), sample) < 1e-5


@pytest.mark.parametrize(
    ("op", "attributes"),
    [("ConvTranspose", {"output_shape": [3, 3]}), ("Resize", {"antialias": 1}), ("AveragePool", {"dilations": [2, 2]})],
)
def test_what_the_table_does_otherwise_is_left_to_onnxruntime(op: str, attributes: dict[str, object]) -> None:
    assert op in PRODUCTS
    assert PLAIN[op](Call(Node(op), (), 19))
    assert not PLAIN[op](Call(Node(op, attrs=attributes), (), 19))
