"""The operators that run in torch with gradients.

They are a table of functions and not a converter such as onnx2pytorch, because training needs tensors by their ONNX
names. A function takes its weight as an argument, which may come out of a fake quantizer, and every tensor between two
nodes can be an activation. Modules that own their weights hide both. onnx2pytorch also needs torchvision.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import onnx
import torch
import torch.nn.functional as f
from numpy.typing import NDArray
from torch import Tensor

from onnxq.ir import Constant, Node

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a node.

    Attributes:
        node: the operator and its attributes.
        inputs: a tensor for each input, None where an optional one is left out.
        opset: version of the operator's domain.
    """

    node: Node
    inputs: tuple[Tensor | None, ...]
    opset: int

    @functools.cached_property
    def device(self) -> torch.device:
        """The device that computes: whole numbers from shapes stay on the processor until they meet other tensors."""
        return next((tensor.device for tensor in self.inputs if tensor is not None and tensor.device != _CPU), _CPU)

    def __getitem__(self, index: int) -> Tensor:
        """Return a required input."""
        tensor = self.inputs[index]
        assert tensor is not None, f"{self.node.op} {self.node.name!r} has no input {index}"
        return tensor.to(self.device)

    def optional(self, index: int) -> Tensor | None:
        """Return an input, or None if it is left out."""
        tensor = self.inputs[index] if index < len(self.inputs) else None
        return None if tensor is None else tensor.to(self.device)

    @property
    def present(self) -> list[Tensor]:
        """The inputs that are present."""
        return [tensor.to(self.device) for tensor in self.inputs if tensor is not None]

    def array(self, index: int) -> NDArray[Any] | None:
        """Return the values of an input, or None if it is left out; a constant is read without waiting for a device."""
        tensor = self.inputs[index] if index < len(self.inputs) else None
        if tensor is None:
            return None
        source = self.node.inputs[index] if index < len(self.node.inputs) else None
        return source.values if isinstance(source, Constant) else tensor.detach().cpu().numpy()

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute; tensors as arrays."""
        value = self.node.attrs.get(name, default)
        return value.values if isinstance(value, Constant) else value

    def numbers(self, index: int, name: str = "") -> list[int] | None:
        """Return integers from an input, or from an attribute of older opsets; None if both are missing."""
        array = self.array(index)
        if array is not None:
            return [int(number) for number in array.reshape(-1).tolist()]
        value = self.attribute(name) if name else None
        return None if value is None else [int(number) for number in value]

    def number(self, index: int, name: str, default: Any) -> Any:
        """Return a number from an input, or from an attribute of older opsets."""
        array = self.array(index)
        return self.attribute(name, default) if array is None else array.item()


Function = Callable[[Call], Any]
"""Takes a call, and returns a tensor or one for each output."""

# Elementwise operators and reductions.

# Defaults of Selu in ONNX.
_ALPHA, _GAMMA = 1.6732632423543772, 1.0507009873554805


def _one(function: Callable[[Tensor], Tensor]) -> Function:
    return lambda call: function(call[0])


def _two(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    return lambda call: function(call[0], call[1])


def _all(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    return lambda call: functools.reduce(function, call.present)


def _reduced(function: Callable[[Tensor, list[int], bool], Tensor]) -> Function:
    def reduce(call: Call) -> Tensor:
        data, axes, keep = call[0], call.numbers(1, "axes"), bool(call.attribute("keepdims", 1))
        if not axes and call.attribute("noop_with_empty_axes", 0):
            return data
        return function(data, axes or list(range(data.ndim)), keep)

    return reduce


def torch_dtype(onnx_type: int) -> torch.dtype:
    """Return torch's dtype for a ``TensorProto.DataType``.

    >>> torch_dtype(onnx.TensorProto.INT64)
    torch.int64
    """
    if onnx_type == onnx.TensorProto.BFLOAT16:
        return torch.bfloat16
    return torch.from_numpy(onnx.numpy_helper.to_array(onnx.TensorProto(data_type=onnx_type, dims=[0]))).dtype


def _infinite(call: Call) -> Tensor:
    wanted = {torch.isposinf: "detect_positive", torch.isneginf: "detect_negative"}
    masks = (sign(call[0]) for sign, name in wanted.items() if call.attribute(name, 1))
    return functools.reduce(torch.logical_or, masks, torch.zeros_like(call[0], dtype=torch.bool))


def _divide(call: Call) -> Tensor:
    whole = not call[0].is_floating_point()
    return torch.div(call[0], call[1], rounding_mode="trunc" if whole else None)


def _root(data: Tensor) -> Tensor:
    """Return the square root with gradient 0 at 0, because an infinite one would spoil all others."""
    above = data > 0
    return torch.where(above, torch.sqrt(torch.where(above, data, 1)), torch.sqrt(data.detach()))


def _power(call: Call) -> Tensor:
    base, exponent = call[0], call[1]
    if exponent.numel() == 1 and not exponent.requires_grad:
        power = call.number(1, "", None)
        if power == 0.5 and exponent.ndim <= base.ndim:
            return _root(base)
        # The gradient of a square is finite at 0 this way.
        return torch.pow(base, power).to(base.dtype).expand(torch.broadcast_shapes(base.shape, exponent.shape))
    return torch.pow(base, exponent).to(base.dtype)


def _clip(call: Call) -> Tensor:
    low, high = (call.number(index, name, None) for index, name in ((1, "min"), (2, "max")))
    if low is not None and high is not None and call[0].is_floating_point() and low <= high:
        # The gradient of this is one pass over memory, that of clamp several.
        return f.hardtanh(call[0], low, high)
    return call[0] if low is None and high is None else torch.clamp(call[0], low, high)


def _softmax(function: Callable[..., Tensor]) -> Function:
    def apply(call: Call) -> Tensor:
        data = call[0]
        if call.opset >= 13:
            return function(data, dim=call.attribute("axis", -1))
        # Before, all axes from this one on were one.
        return function(data.flatten(call.attribute("axis", 1)), dim=-1).reshape(data.shape)

    return apply


def _extreme(function: Callable[..., Tensor]) -> Function:
    def apply(call: Call) -> Tensor:
        data, axis, keep = call[0], call.attribute("axis", 0), bool(call.attribute("keepdims", 1))
        if not call.attribute("select_last_index", 0):
            return function(data, axis, keep)
        last = data.shape[axis] - 1 - function(data.flip(axis), axis, True)
        return last if keep else last.squeeze(axis)

    return apply


def _cumulative(call: Call) -> Tensor:
    axis, data = int(call.number(1, "", 0)), call[0]
    data = data.flip(axis) if call.attribute("reverse", 0) else data
    total = data.cumsum(axis) - (data if call.attribute("exclusive", 0) else 0)
    return total.flip(axis) if call.attribute("reverse", 0) else total


# Operators that move elements, or read and make shapes.


def _reshape(call: Call) -> Tensor:
    wanted, data = call.numbers(1, "shape") or [], call[0]
    if not call.attribute("allowzero", 0):
        wanted = [data.shape[axis] if extent == 0 else extent for axis, extent in enumerate(wanted)]
    return data.reshape(wanted)


def _flatten(call: Call) -> Tensor:
    axis, shape = call.attribute("axis", 1), call[0].shape
    rows = math.prod(shape[: axis if axis >= 0 else len(shape) + axis])
    return call[0].reshape(rows, -1 if rows else math.prod(shape))


def _squeeze(call: Call) -> Tensor:
    axes = call.numbers(1, "axes")
    return call[0].squeeze() if axes is None else call[0].squeeze(axes)


def _unsqueeze(call: Call) -> Tensor:
    data, axes = call[0], call.numbers(1, "axes") or []
    rank = data.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        data = data.unsqueeze(axis)
    return data


def _shape(call: Call) -> Tensor:
    shape = torch.tensor(call[0].shape, dtype=torch.int64)
    return shape[call.attribute("start", 0) : call.attribute("end")]


def _slice(call: Call) -> Tensor:
    data, starts, ends = call[0], call.numbers(1, "starts") or [], call.numbers(2, "ends") or []
    axes, steps = call.numbers(3, "axes") or list(range(len(starts))), call.numbers(4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step > 0:
            places = [slice(None)] * data.ndim
            places[axis] = slice(start, end, step)
            data = data[tuple(places)]
        else:
            # torch has no slice that walks back.
            wanted = list(range(data.shape[axis]))[slice(start, None if end < -data.shape[axis] else end, step)]
            data = data.index_select(axis, torch.tensor(wanted, dtype=torch.int64, device=data.device))
    return data


def _split(call: Call) -> tuple[Tensor, ...]:
    data, axis, count = call[0], call.attribute("axis", 0), len(call.node.outputs)
    parts = call.numbers(1, "split")
    pieces: tuple[Tensor, ...] = data.split(-(-data.shape[axis] // count) if parts is None else parts, axis)
    return pieces


def _indices(call: Call, axis: int) -> Tensor:
    """Return the indices along an axis, the second input; negative ones count from the end."""
    indices = call[1].to(torch.int64)
    return torch.where(indices < 0, indices + call[0].shape[axis], indices)


def _gather(call: Call) -> Tensor:
    data, axis = call[0], call.attribute("axis", 0) % call[0].ndim
    indices = _indices(call, axis)
    rows = data.index_select(axis, indices.reshape(-1))
    return rows.reshape((*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]))


def _gather_elements(call: Call) -> Tensor:
    axis = call.attribute("axis", 0)
    return torch.gather(call[0], axis, _indices(call, axis))


def _gather_nd(call: Call) -> Tensor:
    data, indices, batch = call[0], call[1].to(torch.int64), call.attribute("batch_dims", 0)
    lead, depth = data.shape[:batch], indices.shape[-1]
    flat, places = data.reshape((-1, *data.shape[batch:])), indices.reshape(math.prod(lead), -1, depth)
    gathered = torch.stack([rows[tuple(place.unbind(-1))] for rows, place in zip(flat, places, strict=True)])
    return gathered.reshape((*indices.shape[:-1], *data.shape[batch + depth :]))


def _filled(call: Call) -> Tensor:
    value = call.attribute("value")
    filled = torch.zeros(1) if value is None else torch.from_numpy(value.copy())
    return filled.expand(call.numbers(0) or []).clone()


def _constant(call: Call) -> Tensor:
    value = next(call.attribute(name) for name in call.node.attrs)
    if isinstance(value, (int, float, list)):
        whole = isinstance(value, int) or (
            isinstance(value, list) and all(isinstance(element, int) for element in value)
        )
        return torch.tensor(value, dtype=torch.int64 if whole else torch.float32)
    return torch.from_numpy(value.copy())


def _pad(call: Call) -> Tensor:
    data, pads, axes = call[0], call.numbers(1, "pads") or [], call.numbers(3)
    mode = {"constant": "constant", "edge": "replicate", "reflect": "reflect", "wrap": "circular"}
    around = dict.fromkeys(range(data.ndim), (0, 0))
    for place, axis in enumerate(range(data.ndim) if axes is None else axes):
        around[axis % data.ndim] = pads[place], pads[place + len(pads) // 2]
    kind = mode[call.attribute("mode", "constant")]
    if kind == "constant":
        flat = [extent for axis in reversed(range(data.ndim)) for extent in around[axis]]
        return f.pad(data, flat, value=call.number(2, "value", 0.0))
    # torch pads the last axes of data with a batch and channels alone.
    for axis, (before, after) in around.items():
        if before or after:
            turned = data.movedim(axis, -1)
            padded = f.pad(turned.reshape(1, -1, turned.shape[-1]), (before, after), mode=kind)
            data = padded.reshape(*turned.shape[:-1], -1).movedim(-1, axis)
    return data


def _range(call: Call) -> Tensor:
    start, limit, delta = (call.number(index, "", 0) for index in range(3))
    return torch.arange(start, limit, delta, dtype=call[0].dtype, device=call.device)


def _one_hot(call: Call) -> Tensor:
    depth, axis = int(call.number(1, "", 0)), call.attribute("axis", -1)
    place = call[0].to(torch.int64)
    within = ((place >= -depth) & (place < depth)).unsqueeze(-1)
    hot = f.one_hot(place % depth, depth).bool() & within
    return torch.where(hot, call[2][1], call[2][0]).movedim(-1, axis)


def _top(call: Call) -> tuple[Tensor, Tensor]:
    count = (call.numbers(1, "k") or [call.attribute("k", 1)])[0]
    axis, largest = call.attribute("axis", -1), bool(call.attribute("largest", 1))
    # Of equal values the first come first, which torch.topk does not promise.
    ordered = torch.sort(call[0], dim=axis, descending=largest, stable=True)
    return ordered.values.narrow(axis, 0, count), ordered.indices.narrow(axis, 0, count)


def _triangle(call: Call) -> Tensor:
    diagonal = int(call.number(1, "", 0))
    return (torch.triu if call.attribute("upper", 1) else torch.tril)(call[0], diagonal)


def _depth_to_space(call: Call) -> Tensor:
    data, size = call[0], call.attribute("blocksize")
    if call.attribute("mode", "DCR") == "DCR":
        parts = data.unflatten(1, (size, size, -1)).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = data.unflatten(1, (-1, size, size)).permute(0, 1, 4, 2, 5, 3)
    return parts.flatten(4, 5).flatten(2, 3)


def _space_to_depth(call: Call) -> Tensor:
    size = call.attribute("blocksize")
    parts = call[0].unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return parts.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)


_SCATTERED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter_elements(call: Call) -> Tensor:
    data, axis, how = call[0], call.attribute("axis", 0), call.attribute("reduction", "none")
    indices = _indices(call, axis)
    if how == "none":
        return data.scatter(axis, indices, call[2])
    return data.scatter_reduce(axis, indices, call[2], _SCATTERED[how])


# Matrix multiplications, convolutions, pooling, normalization and resampling.

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
            max((-(-extent // step) - 1) * step + (size - 1) * apart + 1 - extent, 0)
            for extent, step, size, apart in parts
        ]
        less, more = [width // 2 for width in total], [width - width // 2 for width in total]
        pads = less + more if kind == "SAME_UPPER" else more + less
    return strides, dilations, [pads[axis + end * rank] for axis in reversed(range(rank)) for end in (0, 1)]


def _convolved(call: Call) -> Tensor:
    data, weight, bias, group = call[0], call[1], call.optional(2), call.attribute("group", 1)
    strides, dilations, pads = _window(call, list(weight.shape[2:]))
    both = pads[::2][::-1]
    if both != pads[1::2][::-1]:
        data, both = f.pad(data, pads), [0] * len(both)
    return torch.convolution(data, weight, bias, strides, both, dilations, False, [0] * len(both), group)


def _transposed(call: Call) -> Tensor:
    weight, bias, group = call[1], call.optional(2), call.attribute("group", 1)
    strides, dilations, pads = _window(call, list(weight.shape[2:]))
    none = [0] * len(strides)
    more = call.attribute("output_padding", none)
    whole = torch.convolution(call[0], weight, bias, strides, none, dilations, True, more, group)
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
    """Remove windows that begin in the padding at the end."""
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
    normalized = f.layer_norm(call[0], shape, eps=call.attribute("epsilon", 1e-5)) * call[1]
    return normalized if bias is None else normalized + bias


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
    scales = call.array(2 if last >= 2 else 1)
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
    """Return the source coordinate of each output index along an axis."""
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
    """Interpolate data at source coordinates along an axis."""
    last = data.shape[axis] - 1
    if mode == "nearest":
        nearest = _NEAREST[call.attribute("nearest_mode", "round_prefer_floor")](sources)
        return data.index_select(axis, nearest.clamp(0, last).to(torch.int64).to(data.device))
    below, shape = torch.floor(sources), [-1 if dim == axis else 1 for dim in range(data.ndim)]
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
    """Return the cubic weight of a value less than one index away."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _far(x: Tensor, a: float) -> Tensor:
    """Return the cubic weight of a value one to two indices away."""
    return ((x - 5) * x + 8) * x * a - 4 * a


# Recurrent cells, step by step, so that gradients pass through time.

State = tuple[Tensor, ...]
Cell = Callable[[Call, "Weights", Tensor, State], State]
# Rows of each weight for one direction, in multiples of the hidden size.
_GATES: Mapping[str, int] = MappingProxyType({"GRU": 3, "LSTM": 4, "RNN": 1})
_USUAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh"), "RNN": ("Tanh",)}
)
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh}
)


class Weights:
    """The weights of one direction of a cell.

    Attributes:
        data: of shape [gates * size, inputs].
        hidden: of shape [gates * size, size].
        data_bias: of shape [gates * size].
        hidden_bias: likewise.
        peepholes: of shape [3 * size], of an LSTM; zero where there are none.
        functions: the activations, in ONNX's order.
    """

    def __init__(self, call: Call, direction: int) -> None:
        size = call.attribute("hidden_size")
        self.data, self.hidden = call[1][direction], call[2][direction]
        bias, peepholes = call.optional(3), call.optional(7)
        rows = _GATES[call.node.op] * size
        both = torch.zeros(2 * rows).to(self.data) if bias is None else bias[direction]
        self.data_bias, self.hidden_bias = both[:rows], both[rows:]
        self.peepholes = torch.zeros(3 * size).to(self.data) if peepholes is None else peepholes[direction]
        names, each = call.attribute("activations"), len(_USUAL[call.node.op])
        names = names[direction * each : (direction + 1) * each] if names else _USUAL[call.node.op]
        self.functions = [_FUNCTIONS[name] for name in names]


def _rnn(call: Call, weights: Weights, data: Tensor, state: State) -> State:
    return (weights.functions[0](data + state[0] @ weights.hidden.T + weights.hidden_bias),)


def _gru(call: Call, weights: Weights, data: Tensor, state: State) -> State:
    (hidden,), (gate, change) = state, weights.functions
    size = hidden.shape[-1]
    if call.attribute("linear_before_reset", 0):
        shown = hidden @ weights.hidden.T + weights.hidden_bias
        update, reset = gate(data[:, : 2 * size] + shown[:, : 2 * size]).split(size, -1)
        new = change(data[:, 2 * size :] + reset * shown[:, 2 * size :])
    else:
        rows, bias = weights.hidden, weights.hidden_bias
        shown = hidden @ rows[: 2 * size].T + bias[: 2 * size]
        update, reset = gate(data[:, : 2 * size] + shown).split(size, -1)
        new = change(data[:, 2 * size :] + (reset * hidden) @ rows[2 * size :].T + bias[2 * size :])
    return ((1 - update) * new + update * hidden,)


def _lstm(call: Call, weights: Weights, data: Tensor, state: State) -> State:
    (hidden, cell), (gate, change, shown) = state, weights.functions
    into, out, forget, new = (data + hidden @ weights.hidden.T + weights.hidden_bias).chunk(4, -1)
    into_peep, out_peep, forget_peep = weights.peepholes.chunk(3)
    into = gate(into + into_peep * cell)
    kept = 1 - into if call.attribute("input_forget", 0) else gate(forget + forget_peep * cell)
    cell = kept * cell + into * change(new)
    return gate(out + out_peep * cell) * shown(cell), cell


_CELLS: Mapping[str, tuple[Cell, int]] = MappingProxyType({"GRU": (_gru, 1), "LSTM": (_lstm, 2), "RNN": (_rnn, 1)})


def _run(call: Call) -> tuple[Tensor, ...]:
    """Return all hidden states, and the last state of each kind."""
    (cell, kinds), size = _CELLS[call.node.op], call.attribute("hidden_size")
    # onnxruntime has no kernels for other layouts.
    data, lengths = call[0], call.optional(4)
    steps, batch, _ = data.shape
    direction = call.attribute("direction", "forward")
    count = 2 if direction == "bidirectional" else 1
    initial = [call.optional(5 + kind) for kind in range(kinds)]
    shown, last = [], []
    for number in range(count):
        weights = Weights(call, number)
        back = direction == "reverse" or number == 1
        zeros = torch.zeros(batch, size).to(data)
        state: State = tuple(zeros if tensor is None else tensor[number] for tensor in initial)
        # Products with the inputs do not depend on the step before, so all are computed at once.
        inputs = data @ weights.data.T + weights.data_bias
        hidden_states: list[Tensor] = [zeros] * steps
        for step in reversed(range(steps)) if back else range(steps):
            new = cell(call, weights, inputs[step], state)
            if lengths is not None:
                there = (step < lengths.to(data.device)).unsqueeze(-1)
                hidden_states[step] = torch.where(there, new[0], 0)
                state = tuple(torch.where(there, updated, old) for updated, old in zip(new, state, strict=True))
            else:
                hidden_states[step], state = new[0], new
        shown.append(torch.stack(hidden_states) if hidden_states else data.new_zeros(0, batch, size))
        last.append(state)
    every = torch.stack(shown, 1)
    ends = [torch.stack([state[kind] for state in last]) for kind in range(kinds)]
    return every, *ends


# The table of all operators.

# torch computes these under the same name.
_UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh"),
    *("Erf", "Exp", "Floor", "IsNaN", "Log", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid"),
    *("Sign", "Sin", "Sinh", "Tan", "Tanh"),
)
_BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "Add": torch.add,
        "And": torch.logical_and,
        "Equal": torch.eq,
        "Greater": torch.gt,
        "GreaterOrEqual": torch.ge,
        "Less": torch.lt,
        "LessOrEqual": torch.le,
        "Mul": torch.mul,
        "Or": torch.logical_or,
        "Sub": torch.sub,
        "Xor": torch.logical_xor,
    }
)
_REDUCTIONS: Mapping[str, Callable[[Tensor, list[int], bool], Tensor]] = MappingProxyType(
    {
        "ReduceL1": lambda data, axes, keep: data.abs().sum(axes, keep),
        "ReduceL2": lambda data, axes, keep: _root(data.square().sum(axes, keep)),
        "ReduceLogSum": lambda data, axes, keep: data.sum(axes, keep).log(),
        "ReduceLogSumExp": torch.logsumexp,
        "ReduceMax": torch.amax,
        "ReduceMean": lambda data, axes, keep: data.mean(axes, keep),
        "ReduceMin": torch.amin,
        "ReduceSum": lambda data, axes, keep: data.sum(axes, keep),
        "ReduceSumSquare": lambda data, axes, keep: data.square().sum(axes, keep),
    }
)

TORCH: Mapping[str, Function] = MappingProxyType(
    {
        **{name: _one(getattr(torch, name.lower())) for name in _UNARY},
        **{name: _two(function) for name, function in _BINARY.items()},
        **{name: _reduced(function) for name, function in _REDUCTIONS.items()},
        **dict.fromkeys(_CELLS, _run),
        "ArgMax": _extreme(torch.argmax),
        "ArgMin": _extreme(torch.argmin),
        "AveragePool": _mean_pooled,
        "BatchNormalization": _batch_normalized,
        "Cast": lambda call: call[0].to(torch_dtype(call.attribute("to"))),
        "CastLike": lambda call: call[0].to(call[1].dtype),
        "Celu": lambda call: f.celu(call[0], call.attribute("alpha", 1.0)),
        "Clip": _clip,
        "Concat": lambda call: torch.cat(call.present, call.attribute("axis")),
        "Constant": _constant,
        "ConstantOfShape": _filled,
        "Conv": _convolved,
        "ConvTranspose": _transposed,
        "CumSum": _cumulative,
        "DepthToSpace": _depth_to_space,
        "Div": _divide,
        "Dropout": _one(lambda data: data),
        "Einsum": lambda call: torch.einsum(call.attribute("equation"), *call.present),
        "Elu": lambda call: f.elu(call[0], call.attribute("alpha", 1.0)),
        "Expand": lambda call: call[0].expand(torch.broadcast_shapes(call[0].shape, call.numbers(1) or [])),
        "Flatten": _flatten,
        "Gather": _gather,
        "GatherElements": _gather_elements,
        "GatherND": _gather_nd,
        "Gelu": lambda call: f.gelu(call[0], approximate=call.attribute("approximate", "none")),
        "Gemm": _gemm,
        "GlobalAveragePool": lambda call: call[0].mean(_places(call[0]), keepdim=True),
        "GlobalMaxPool": lambda call: call[0].amax(_places(call[0]), keepdim=True),
        "GroupNormalization": _group_normalized,
        "HardSigmoid": lambda call: torch.clamp(
            call.attribute("alpha", 0.2) * call[0] + call.attribute("beta", 0.5), 0, 1
        ),
        "HardSwish": lambda call: call[0] * torch.clamp(call[0] / 6 + 0.5, 0, 1),
        "Identity": _one(lambda data: data),
        "InstanceNormalization": _instance_normalized,
        "IsInf": _infinite,
        "LRN": _local_response,
        "LayerNormalization": _layer_normalized,
        "LeakyRelu": lambda call: f.leaky_relu(call[0], call.attribute("alpha", 0.01)),
        "LogSoftmax": _softmax(torch.log_softmax),
        "MatMul": lambda call: call[0] @ call[1],
        "Max": _all(torch.maximum),
        "MaxPool": _max_pooled,
        "Mean": lambda call: functools.reduce(torch.add, call.present) / len(call.present),
        "Min": _all(torch.minimum),
        "Mish": _one(f.mish),
        "Mod": lambda call: (torch.fmod if call.attribute("fmod", 0) else torch.remainder)(call[0], call[1]),
        "NonZero": lambda call: torch.nonzero(call[0]).T,
        "Not": _one(torch.logical_not),
        "OneHot": _one_hot,
        "PRelu": lambda call: torch.where(call[0] < 0, call[0] * call[1], call[0]),
        "Pad": _pad,
        "Pow": _power,
        "RMSNormalization": _root_mean_square,
        "Range": _range,
        "Reshape": _reshape,
        "Resize": _resized,
        "ScatterElements": _scatter_elements,
        "Selu": lambda call: call.attribute("gamma", _GAMMA) * f.elu(call[0], call.attribute("alpha", _ALPHA)),
        "Shape": _shape,
        "Size": lambda call: torch.tensor(call[0].numel()),
        "Slice": _slice,
        "Softmax": _softmax(torch.softmax),
        "Softplus": _one(f.softplus),
        "Softsign": _one(f.softsign),
        "SpaceToDepth": _space_to_depth,
        "Split": _split,
        "Sqrt": _one(_root),
        "Squeeze": _squeeze,
        "Sum": _all(torch.add),
        "ThresholdedRelu": lambda call: torch.where(call[0] > call.attribute("alpha", 1.0), call[0], 0),
        "Tile": lambda call: call[0].repeat(call.numbers(1) or []),
        "TopK": _top,
        "Transpose": lambda call: call[0].permute(call.attribute("perm", list(reversed(range(call[0].ndim))))),
        "Trilu": _triangle,
        "Unsqueeze": _unsqueeze,
        "Where": lambda call: torch.where(call[0], call[1], call[2]),
    }
)
"""The function of each operator of the domain ai.onnx."""


def _is_usual_cell(call: Call) -> bool:
    """Return whether a cell has only the usual three activations, without parameters and clipping."""
    names = set(call.attribute("activations") or ())
    return names <= _FUNCTIONS.keys() and not call.node.attrs.keys() & {"clip", "activation_alpha", "activation_beta"}


PLAIN: Mapping[str, Callable[[Call], bool]] = MappingProxyType(
    {
        **dict.fromkeys(_CELLS, _is_usual_cell),
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
"""For operators that a function supports only in part: returns True if it supports the call."""


def function_of(call: Call) -> Function | None:
    """Return the torch function of a call, or None if only onnxruntime can run it.

    >>> from onnxq.ir import Node
    >>> function_of(Call(Node("NonMaxSuppression"), (), 17)) is None
    True
    """
    name = "" if call.node.domain else call.node.op
    supports = PLAIN.get(name)
    return TORCH.get(name) if supports is None or supports(call) else None
