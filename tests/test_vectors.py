"""Every published vector that arrays alone decide, bit for bit.

Left out are ``torch_lsq_grads`` and ``torch_fused_symmetric_weight``, which belong to training, and the histogram of
``torch_blog2022``, which PyTorch merges from batch to batch. How ``torch_hist_outlier_seed0`` is searched is tested
with calibration, and here what its range becomes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch_kernels import dynamic_parameters

from onnxq.algorithms.encoders import encode_array
from onnxq.numerics import burn
from onnxq.numerics.affine import QTensor, QuantParams, block_range, quantize
from onnxq.numerics.formats import FORMATS, SCALE_FORMATS
from onnxq.numerics.packing import pack_words
from onnxq.numerics.spec import Method, QuantSpec, Rounding
from onnxq.numerics.torch_observers import Observer

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text(encoding="utf-8"))
ELEMENTS = {
    "e2m1": "float4e2m1",
    "e2m3": "float6e2m3",
    "e3m2": "float6e3m2",
    "e4m3": "float8e4m3fn",
    "e5m2": "float8e5m2",
    "int8": "int8-narrow",
}
BURN_VALUES = {
    "Q8S": "int8-narrow",
    "Q8F": "int8",
    "Q4S": "int4-narrow",
    "Q4F": "int4",
    "Q2S": "int2-narrow",
    "Q2F": "int2",
}
BURN_SCALES = {"F16": "float16", "BF16": "bfloat16", "UE4M3": "ue4m3", "UE8M0": "e8m0"}
MICROSCALING = [name for name in VECTORS if name.startswith("mx_")]
AFFINE = [name for name in VECTORS if name.startswith("burn_affine_")]

USED = {
    *(f"burn_{value}" for value in BURN_VALUES),
    *AFFINE,
    *MICROSCALING,
    "burn_pack",
    "burn_block_2x4",
    "burn_scale_round_up",
    "burn_two_level",
    "torch_blog2022",
    "torch_choose_qparams",
    "torch_fake_quant",
    "torch_hist_outlier_seed0",
    "nvfp4",
}
LEFT = {"torch_lsq_grads", "torch_fused_symmetric_weight", "torch_fused_symmetric_weight2"}


def single(values: object) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def patterns(tensor: QTensor) -> NDArray[np.uint8]:
    return tensor.values.view(np.uint8) & np.uint8(2**tensor.format.bits - 1)


def test_no_vector_is_forgotten() -> None:
    assert set(VECTORS) == USED | LEFT
    assert not USED & LEFT


# --- Burn -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", BURN_VALUES)
def test_burn_symmetric(value: str) -> None:
    vector = VECTORS[f"burn_{value}"]
    tensor = burn.encode(single(vector["x"]), QuantSpec(BURN_VALUES[value]))
    assert tensor.parameters.scale.tolist() == [np.float32(vector["scale"])]
    assert tensor.values.tolist() == vector["q"]
    np.testing.assert_array_equal(tensor.dequantize(), single(vector["dq"]))


@pytest.mark.parametrize("value", BURN_VALUES)
def test_a_spec_of_method_burn_gives_the_codes_of_burn(value: str) -> None:
    vector = VECTORS[f"burn_{value}"]
    spec = QuantSpec(BURN_VALUES[value], method=Method.BURN)
    assert encode_array(single(vector["x"]), spec, channel_axis=0, reduction_axis=0).values.tolist() == vector["q"]


@pytest.mark.parametrize("name", AFFINE)
def test_burn_affine(name: str) -> None:
    vector = VECTORS[name]
    low, high = (float(end) for end in name.removeprefix("burn_affine_").split("_"))
    values = single([*vector["x"], low, high])
    tensor = burn.encode(values, QuantSpec("int8", symmetric=False))
    assert tensor.parameters.scale.tolist() == [np.float32(vector["scale"])]
    assert tensor.parameters.zero_point is not None
    assert tensor.parameters.zero_point.tolist() == [vector["zero_point"]]
    assert tensor.values[:-2].tolist() == vector["q"]
    np.testing.assert_array_equal(tensor.dequantize()[:-2], single(vector["dq"]))


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_burn_words(name: str) -> None:
    codes, words = VECTORS["burn_pack"][f"Q{FORMATS[name].bits}"]
    assert pack_words(np.array(codes, np.int8), FORMATS[name]).tolist() == words


def test_burn_blocks_are_rectangles() -> None:
    vector = VECTORS["burn_block_2x4"]
    tensor = burn.encode(single(vector["w"]), QuantSpec("int8-narrow", granularity=(2, 4)))
    np.testing.assert_array_equal(tensor.parameters.scale, single(vector["rect_scales"]))


@pytest.mark.parametrize("vector", VECTORS["burn_scale_round_up"], ids=lambda vector: str(vector["s"]))
@pytest.mark.parametrize("name", BURN_SCALES)
def test_burn_rounds_scales_up(vector: dict[str, float], name: str) -> None:
    scale = single([vector["s"]])
    for rounded in (burn.stored_scale(scale, BURN_SCALES[name]), SCALE_FORMATS[BURN_SCALES[name]].round_up(scale)):
        assert rounded.tolist() == [vector[name]]


def test_burn_two_levels() -> None:
    vector = VECTORS["burn_two_level"]
    values = np.zeros((4, 4), np.float32)
    values[:, 1] = vector["block_max"]
    spec = QuantSpec("int8-narrow", granularity=(4,), scale="ue4m3", two_level=True)
    for tensor in (burn.encode(values, spec), encode_array(values, spec, channel_axis=0, reduction_axis=1)):
        assert tensor.parameters.tensor_scale == np.float32(vector["global_scale"])
        assert tensor.parameters.scale.ravel().tolist() == vector["stored_ue4m3"]
    np.testing.assert_array_equal(
        burn.symmetric_scale(*(end.astype(np.float32) for end in block_range(values, (1, 4))), FORMATS["int8-narrow"]),
        single(vector["raw"]).reshape(4, 1),
    )


# --- microscaling and NVFP4 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MICROSCALING)
def test_microscaling(name: str) -> None:
    vector, (element, mode) = VECTORS[name], name.removeprefix("mx_").split("_")
    format, values = FORMATS[ELEMENTS[element]], np.zeros((1, 32), np.float32)
    values[0, : len(vector["x"])] = vector["x"]
    # The standard counts the quantized values of int8 in 64ths.
    power = 2.0 ** (vector["e8m0"] - 127 - (6 if element == "int8" else 0))
    if mode in ("floor", "rceil"):
        rounding = Rounding.FLOOR if mode == "floor" else Rounding.UP
        spec = QuantSpec(format.name, granularity=(32,), scale="e8m0", scale_rounding=rounding)
        tensor = encode_array(values, spec, channel_axis=0, reduction_axis=1)
    else:
        tensor = quantize(values, QuantParams(single([[power]]), None), format)
    assert tensor.parameters.scale.tolist() == [[power]]
    count = len(vector["x"])
    codes = tensor.values if element == "int8" else patterns(tensor)
    assert codes[0, :count].tolist() == vector["codes"]
    decoded = tensor.dequantize()[0, :count]
    assert decoded.tobytes() == single(vector["dq"]).tobytes()


@pytest.mark.parametrize("rounding", [Rounding.UP, Rounding.NEAREST])
def test_nvfp4(rounding: Rounding) -> None:
    vector = VECTORS["nvfp4"]
    spec = QuantSpec("float4e2m1", granularity=(16,), scale="ue4m3", scale_rounding=rounding, two_level=True)
    tensor = encode_array(single(vector["x"]), spec, channel_axis=0, reduction_axis=1)
    assert tensor.parameters.tensor_scale == np.float32(vector["global_scale"])
    assert tensor.parameters.scale.ravel().tolist() == vector["block_scales"]
    stored = tensor.parameters.scale.astype(SCALE_FORMATS["ue4m3"].dtype).view(np.uint8)
    assert stored.ravel().tolist() == vector["block_scale_codes"]
    assert patterns(tensor).tolist() == vector["codes"]
    # The vector multiplies quantized values and block scales first; ONNX, and so dequantize, the two scales.
    decoded = tensor.values.astype(np.float32) * tensor.parameters.scale * np.float32(vector["global_scale"])
    np.testing.assert_array_equal(decoded, single(vector["dq"]))
    np.testing.assert_array_almost_equal_nulp(tensor.dequantize(), single(vector["dq"]), 1)


# --- PyTorch --------------------------------------------------------------------------------------------------------


def blog_range(**axes: object) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the moving average of the minimum and maximum of the two published inputs."""
    (first_low, low), (first_high, high) = (
        [np.atleast_1d(reduced(single(one), **axes)) for one in VECTORS["torch_blog2022"]["inputs"]]
        for reduced in (np.min, np.max)
    )
    constant = np.float32(0.01)
    return first_low + constant * (low - first_low), first_high + constant * (high - first_high)


def test_torch_observers() -> None:
    vector = VECTORS["torch_blog2022"]
    inputs = single(vector["inputs"])
    for observer, found, expected in (
        (Observer("uint8"), (inputs.min(keepdims=True), inputs.max(keepdims=True)), vector["MinMax"]),
        (Observer("uint8"), blog_range(), vector["MovingAverage"]),
        (Observer("uint8", symmetric=True), blog_range(), vector["MovingAverage_sym"]),
        (Observer("uint8"), blog_range(axis=1), vector["MovingAveragePerChannel"]),
    ):
        parameters = observer.parameters(*found)
        assert parameters.zero_point is not None
        assert parameters.scale.ravel().tolist() == np.ravel(expected[0]).tolist()
        assert parameters.zero_point.ravel().tolist() == np.ravel(expected[1]).tolist()


def test_torch_parameters_of_a_searched_range() -> None:
    vector = VECTORS["torch_hist_outlier_seed0"]
    low, high = vector["searched"]
    found = Observer("uint8").parameters([low], [high])
    assert found.scale.tolist() == [vector["scale"]]
    assert found.zero_point is not None
    assert found.zero_point.tolist() == [vector["zp"]]


@pytest.mark.parametrize("vector", VECTORS["torch_choose_qparams"], ids=lambda one: f"{one['min']}..{one['max']}")
@pytest.mark.parametrize("codes", ["full", "reduce"])
def test_torch_dynamic_parameters(vector: dict[str, Any], codes: str) -> None:
    found = dynamic_parameters(vector["min"], vector["max"], reduce_range=codes == "reduce")
    scale, zero_point = vector[codes]
    assert found.scale == np.float32(scale)
    assert found.zero_point == zero_point


def test_torch_fake_quantization() -> None:
    vector = VECTORS["torch_fake_quant"]
    zero_point = np.array(vector["zp"], np.uint8)
    parameters = QuantParams(np.array(vector["scale"], np.float32), zero_point)
    # Unlike FBGEMM, it adds the zero point after rounding.
    unclipped = np.rint(single(vector["x"]) * (np.float32(1) / parameters.scale)) + vector["zp"]
    codes = np.clip(unclipped, vector["qmin"], vector["qmax"]).astype(np.uint8)
    decoded = QTensor(codes, parameters, FORMATS["uint8"]).dequantize()
    np.testing.assert_array_equal(decoded, single(vector["y"]))
    # The lowest code is reached from within as well, so the mask is of quantized values before they are clipped.
    assert ((unclipped >= vector["qmin"]) & (unclipped <= vector["qmax"])).tolist() == [
        one == 1 for one in vector["mask"]
    ]
