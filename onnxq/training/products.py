"""Operators that multiply, pool, normalize and resample: a few lines each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor

from onnxq.training.calls import Call

Function = Callable[[Call], Any]
_CONVOLUTIONS = (f.conv1d, f.conv2d, f.conv3d)
_TRANSPOSED = (f.conv_transpose1d, f.conv_transpose2d, f.conv_transpose3d)
_MAX_POOLS = (f.max_pool1d, f.max_pool2d, f.max_pool3d)
_NEAREST: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "ceil": torch.ceil,
        "floor": torch.floor,
        "round_prefer_ceil": lambda sources: torch.floor(sources + 0.5),
        "round_prefer_floor": lambda sources: torch.ceil(sources - 0.5),
    }
)
_MEAN_POOLS = (f.avg_pool1d, f.avg_pool2d, f.avg_pool3d)


def _window(call: Call, kernel: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return strides, dilations, and padding in torch's order, the last axis first."""
    rank = len(kernel)
    strides, dilations = call.attribute("strides", [1] * rank), call.attribute("dilations", [1] * rank)
    pads, kind = call.attribute("pads", [0] * 2 * rank), call.attribute("auto_pad", "NOTSET")
    if kind == "VALID":
        pads = [0] * 2 * rank
    elif kind.startswith("SAME"):
        extents = call[0].shape[2:]
        parts = list(zip(extents, strides, kernel, dilations, strict=True))
        total = [
            max((-(-one // step) - 1) * step + (size - 1) * apart + 1 - one, 0) for one, step, size, apart in parts
        ]
        less, more = [one // 2 for one in total], [one - one // 2 for one in total]
        pads = less + more if kind == "SAME_UPPER" else more + less
    return strides, dilations, [pads[axis + end * rank] for axis in reversed(range(rank)) for end in (0, 1)]


def _convolved(call: Call) -> Tensor:
    data, weight, bias = call[0], call[1], call.optional(2)
    strides, dilations, pads = _window(call, list(weight.shape[2:]))
    both = pads[::2][::-1]
    if both != pads[1::2][::-1]:
        data, both = f.pad(data, pads), [0] * len(both)
    return _CONVOLUTIONS[len(both) - 1](data, weight, bias, strides, both, dilations, call.attribute("group", 1))


def _transposed(call: Call) -> Tensor:
    weight = call[1]
    strides, dilations, pads = _window(call, list(weight.shape[2:]))
    more = call.attribute("output_padding", [0] * len(strides))
    function = _TRANSPOSED[len(strides) - 1]
    whole = function(call[0], weight, call.optional(2), strides, 0, more, call.attribute("group", 1), dilations)
    return f.pad(whole, [-pad for pad in pads])


def _max_pooled(call: Call) -> Tensor:
    kernel = call.attribute("kernel_shape")
    strides, dilations, pads = _window(call, kernel)
    data = f.pad(call[0], pads, value=-math.inf) if any(pads) else call[0]
    ceiling = bool(call.attribute("ceil_mode", 0))
    pooled = _MAX_POOLS[len(kernel) - 1](data, kernel, strides, 0, dilations, ceiling)
    return _begun(pooled, call[0], strides, pads) if ceiling else pooled


def _mean_pooled(call: Call) -> Tensor:
    kernel = call.attribute("kernel_shape")
    strides, _, pads = _window(call, kernel)
    pool, ceiling = _MEAN_POOLS[len(kernel) - 1], bool(call.attribute("ceil_mode", 0))
    if not any(pads):
        return pool(call[0], kernel, strides, 0, ceiling)
    counted = float(call.attribute("count_include_pad", 0))
    share = pool(f.pad(torch.ones_like(call[0][:1, :1]), pads, value=counted), kernel, strides, 0, ceiling)
    pooled = pool(f.pad(call[0], pads), kernel, strides, 0, ceiling) / share
    return _begun(pooled, call[0], strides, pads) if ceiling else pooled


def _begun(pooled: Tensor, data: Tensor, strides: list[int], pads: list[int]) -> Tensor:
    """Return what was pooled without windows that begin behind the data, in the padding at its end."""
    begins = pads[::2][::-1]
    counts = [-(-(size + begin) // step) for size, begin, step in zip(data.shape[2:], begins, strides, strict=True)]
    return pooled[(..., *(slice(count) for count in counts))]


def _places(data: Tensor) -> list[int]:
    return list(range(2, data.ndim))


def _gemm(call: Call) -> Tensor:
    left = call[0].T if call.attribute("transA", 0) else call[0]
    right = call[1].T if call.attribute("transB", 0) else call[1]
    alpha, beta, bias = call.attribute("alpha", 1.0), call.attribute("beta", 1.0), call.optional(2)
    product = left @ right if alpha == 1 else alpha * (left @ right)
    return product if bias is None else product + (bias if beta == 1 else beta * bias)


def _channels(values: Tensor, data: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (data.ndim - 2))


def _batch_normalized(call: Call) -> Tensor:
    scale, bias, mean, variance = (_channels(call[index], call[0]) for index in range(1, 5))
    return (call[0] - mean) / torch.sqrt(variance + call.attribute("epsilon", 1e-5)) * scale + bias


def _instance_normalized(call: Call) -> Tensor:
    data, places = call[0], _places(call[0])
    # torch's own refuses images of one place.
    centred = data - data.mean(places, keepdim=True)
    scale = torch.sqrt(centred.square().mean(places, keepdim=True) + call.attribute("epsilon", 1e-5))
    return centred / scale * _channels(call[1], data) + _channels(call[2], data)


def _layer_normalized(call: Call) -> Tensor:
    shape = call[0].shape[call.attribute("axis", -1) :]
    bias = call.optional(2)
    found = f.layer_norm(call[0], shape, eps=call.attribute("epsilon", 1e-5)) * call[1]
    return found if bias is None else found + bias


def _group_normalized(call: Call) -> Tensor:
    groups = call.attribute("num_groups")
    # Before opset 21 scale and bias were those of groups.
    each = call[0].shape[1] // call[1].numel()
    scale, bias = (call[index].repeat_interleave(each) for index in (1, 2))
    return f.group_norm(call[0], groups, scale, bias, call.attribute("epsilon", 1e-5))


def _root_mean_square(call: Call) -> Tensor:
    axes = list(range(call.attribute("axis", -1) % call[0].ndim, call[0].ndim))
    squares = call[0].square().mean(axes, keepdim=True)
    return call[0] * torch.rsqrt(squares + call.attribute("epsilon", 1e-5)) * call[1]


def _local_response(call: Call) -> Tensor:
    size, alpha = call.attribute("size"), call.attribute("alpha", 1e-4)
    return f.local_response_norm(call[0], size, alpha, call.attribute("beta", 0.75), call.attribute("bias", 1.0))


def _resized(call: Call) -> Tensor:
    data, mode = call[0], call.attribute("mode", "nearest")
    last = len(call.inputs) - 1
    sizes = call.numbers(3) if last >= 3 else None
    scales = call.optional(2) if last >= 2 else call.optional(1)
    axes = call.attribute("axes", list(range(data.ndim)))
    for place, axis in enumerate(axes):
        extent = data.shape[axis]
        if sizes is not None:
            wanted, factor = sizes[place], sizes[place] / extent
        else:
            assert scales is not None, "a Resize has sizes or scales"
            factor = float(scales[place])
            wanted = math.floor(extent * factor)
        if factor != 1:
            data = _along(call, data, axis, _sources(call, extent, wanted, factor), mode)
    return data


def _sources(call: Call, extent: int, wanted: int, factor: float) -> Tensor:
    """Return where each new place along an axis lies among the old ones."""
    places = torch.arange(wanted, dtype=torch.float64)
    match call.attribute("coordinate_transformation_mode", "half_pixel"):
        case "asymmetric":
            return places / factor
        case "align_corners":
            return places * (extent - 1) / max(wanted - 1, 1)
        case "pytorch_half_pixel" if wanted == 1:
            return torch.zeros(1, dtype=torch.float64)
        case "tf_half_pixel_for_nn":
            return (places + 0.5) / factor
        case _:
            return (places + 0.5) / factor - 0.5


def _along(call: Call, data: Tensor, axis: int, sources: Tensor, mode: str) -> Tensor:
    """Return data at fractional places along an axis."""
    last = data.shape[axis] - 1
    if mode == "nearest":
        nearest = _NEAREST[call.attribute("nearest_mode", "round_prefer_floor")](sources)
        return data.index_select(axis, nearest.clamp(0, last).to(torch.int64).to(data.device))
    below, shape = torch.floor(sources), [-1 if one == axis else 1 for one in range(data.ndim)]
    part, a = sources - below, call.attribute("cubic_coeff_a", -0.75)
    if mode == "linear":
        taps = {0: 1 - part, 1: part}
    else:
        taps = {-1: _far(1 + part, a), 0: _near(part, a), 1: _near(1 - part, a), 2: _far(2 - part, a)}
    total: Tensor = torch.zeros(())
    for away, share in taps.items():
        source = (below + away).clamp(0, last).to(torch.int64).to(data.device)
        total = total + data.index_select(axis, source) * share.to(data).reshape(shape)
    return total


def _near(x: Tensor, a: float) -> Tensor:
    """Return the share of a value less than one place away, in cubic interpolation."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _far(x: Tensor, a: float) -> Tensor:
    """Return the share of a value one to two places away."""
    return ((x - 5) * x + 8) * x * a - 4 * a


PRODUCTS: Mapping[str, Function] = MappingProxyType(
    {
        "AveragePool": _mean_pooled,
        "BatchNormalization": _batch_normalized,
        "Conv": _convolved,
        "ConvTranspose": _transposed,
        "Einsum": lambda call: torch.einsum(call.attribute("equation"), *call.given),
        "Gemm": _gemm,
        "GlobalAveragePool": lambda call: call[0].mean(_places(call[0]), keepdim=True),
        "GlobalMaxPool": lambda call: call[0].amax(_places(call[0]), keepdim=True),
        "GroupNormalization": _group_normalized,
        "InstanceNormalization": _instance_normalized,
        "LRN": _local_response,
        "LayerNormalization": _layer_normalized,
        "MatMul": lambda call: call[0] @ call[1],
        "MaxPool": _max_pooled,
        "RMSNormalization": _root_mean_square,
        "Resize": _resized,
    }
)
"""The function of each operator of ONNX's own domain by its name."""

PLAIN: Mapping[str, Callable[[Call], bool]] = MappingProxyType(
    {
        "AveragePool": lambda call: max(call.attribute("dilations", [1])) == 1,
        "BatchNormalization": lambda call: not call.attribute("training_mode", 0),
        "ConvTranspose": lambda call: not call.node.attrs.keys() & {"output_shape", "auto_pad"},
        "LayerNormalization": lambda call: len(call.node.outputs) == 1,
        "MaxPool": lambda call: len(call.node.outputs) == 1,
        "Resize": lambda call: (
            not call.node.attrs.keys() & {"antialias", "exclude_outside", "keep_aspect_ratio_policy"}
            and call.attribute("coordinate_transformation_mode", "")
            not in ("tf_crop_and_resize", "half_pixel_symmetric")
        ),
    }
)
"""Whether the table's function does what a call asks for, where it does not always."""
