"""Fake quantization with gradients: functions, trainable channel scales, and the quantizers of a module.

The forward pass computes ``s * (clamp(round(x / s) + z) - z)`` in float32 with ties to even, as ONNX's QuantizeLinear
and DequantizeLinear do, to the last bit. In the backward pass, the gradient of values that are not clipped passes
straight through the rounding (Bengio et al. 2013). The gradient of the scale is LSQ's (Esser et al., "Learned Step Size
Quantization", 2020). That of the zero point is LSQ+'s (Bhalgat et al. 2020), as in PyTorch's
``_fake_quantize_learnable_per_tensor_affine``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onnxq.algorithms.encoders import fit_weight_pairs
from onnxq.algorithms.equalization import ChannelScales, WeightRescaling
from onnxq.ir import Node
from onnxq.numerics.affine import (
    LARGEST_BIAS,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    QTensor,
    QuantParams,
    block_range,
    even_blocks,
    params_from_range,
    params_of_blocks,
    quantize,
    quantize_bias,
)
from onnxq.numerics.blocks import block_shape
from onnxq.numerics.formats import QuantDType, format_named
from onnxq.numerics.pairs import MOST, Pairs, kernel_order, row_shape, search_pair_scales
from onnxq.numerics.spec import QuantSpec
from onnxq.planning.plan import Weight

_CPU = torch.device("cpu")


class _FakeQuantized(torch.autograd.Function):
    """See `fake_quantize`; scale and zero point broadcast with the values."""

    @staticmethod
    def forward(context: Any, values: Tensor, scale: Tensor, zero_point: Tensor, format: QuantDType) -> Tensor:
        decoded = _numbers(values / scale, zero_point, format).mul_(scale)
        context.save_for_backward(values, decoded, scale, zero_point)
        context.format = format
        return decoded

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (values, decoded, scale, zero_point) = gradients, context.saved_tensors
        wanted = context.needs_input_grad
        inside = _passed(gradient, values, scale, zero_point, context.format)
        of_scale = of_zero = None
        if wanted[1] or wanted[2]:
            clipped = gradient - inside
        if wanted[1]:
            # In quantization steps: the rounding error inside the range, and the limit where clipped.
            of_scale = (_sum(inside, decoded - values, scale) + _sum(clipped, decoded, scale)) / scale
        if wanted[2]:
            of_zero = -scale * clipped.sum_to_size(zero_point.shape)
        return inside if wanted[0] else None, of_scale, of_zero, None


def _numbers(scaled: Tensor, zero_point: Tensor, format: QuantDType) -> Tensor:
    """Return scaled values as quantized, minus the zero point."""
    if format.is_float:
        # The rounding of float formats works on arrays.
        return torch.from_numpy(format.numbers(format.round(scaled.detach().cpu().numpy()))).to(scaled.device)
    low, high = format.minimum - zero_point, format.maximum - zero_point
    # Numbers are faster than tensors on the processor; a GPU would wait for them.
    if low.numel() > 1 or scaled.device != _CPU:
        return scaled.round_().clamp_(low, high)
    return scaled.round_().clamp_(low.item(), high.item())


def _passed(gradient: Tensor, values: Tensor, scale: Tensor, zero_point: Tensor, format: QuantDType) -> Tensor:
    """Return the gradient where no value was clipped, else 0."""
    beyond = 0.0 if format.is_float else 0.5
    first, last = ((end - zero_point) * scale for end in (format.minimum - beyond, format.maximum + beyond))
    # Scales may be negative.
    if scale.numel() > 1 or format.is_float or scale.device != _CPU:
        return gradient * ((values >= torch.minimum(first, last)) & (values <= torch.maximum(first, last)))
    # One pass over memory, because fake quantization of activations is limited by it.
    low, high = sorted((first.item(), last.item()))
    passed: Tensor = torch.ops.aten.hardtanh_backward(gradient, values, low, high)
    return passed


def _sum(values: Tensor, factors: Tensor, scale: Tensor) -> Tensor:
    """Return the sum of products over the values that share a scale."""
    if scale.numel() > 1:
        return (values * factors).sum_to_size(scale.shape)
    return torch.dot(values.reshape(-1), factors.reshape(-1)).reshape(scale.shape)


def fake_quantize(values: Tensor, scale: Tensor, zero_point: Tensor, format: QuantDType) -> Tensor:
    """Quantize and dequantize values, with gradients of values, scale and zero point.

    Args:
        values: float32 of any shape.
        scale: float32 that broadcasts with the values.
        zero_point: whole numbers as float32 that broadcast with the values; 0 if the format has none.
        format: the number format.

    >>> from onnxq.numerics.formats import FORMATS
    >>> fake_quantize(torch.tensor([0.24, 9.0]), torch.tensor(0.1), torch.tensor(0.0), FORMATS["uint4"])
    tensor([0.2000, 1.5000])
    """
    quantized: Tensor = _FakeQuantized.apply(values, scale, zero_point, format)
    return quantized


def limit_pairs(values: Tensor, scale: Tensor, pairs: Pairs, axis: int, reduction_axis: int) -> Tensor:
    """Limit values so that pairs of quantized weights do not overflow, as `onnxq.numerics.pairs.fitted` does.

    Args:
        values: float32, of two axes or more if there are pairs.
        scale: float32, one for each channel with the values' rank, or one for all.
        pairs: which weights are multiplied as pairs.
        axis: axis of output channels.
        reduction_axis: axis that is summed over.

    >>> limit_pairs(torch.tensor([[100.0, 60.0, 100.0, -60.0]]), torch.tensor(1.0), Pairs.ROW, 0, 1)
    tensor([[ 84.,  44., 100., -60.]])
    """
    if len(pairs.each) != 1:
        for kind in pairs.each:
            values = limit_pairs(values, scale, kind, axis, reduction_axis)
        return values
    order = kernel_order(values.ndim, axis, reduction_axis)
    ordered = (values / scale).permute(order)
    rows = ordered.reshape(row_shape(tuple(ordered.shape), pairs))
    even = rows.shape[1] // 2 * 2
    both = rows[:, :even].reshape(len(rows), -1, 2)
    alike = (both[..., :1] > 0) == (both[..., 1:] > 0)
    excess = torch.relu(both.sum(-1, keepdim=True).abs() - MOST) * alike
    overflows = excess.any()
    if overflows.device == _CPU and not bool(overflows):
        return values
    kept = torch.cat([(both - both.sign() * excess / 2).reshape(len(rows), even), rows[:, even:]], 1)
    back = sorted(range(values.ndim), key=order.__getitem__)
    return torch.where(overflows, kept.reshape(ordered.shape).permute(back) * scale, values)


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return the rounded values, with the gradient of the exact ones.

    >>> x = torch.tensor(0.7, requires_grad=True)
    >>> straight_through(x, torch.round(x)).item()
    1.0
    """
    return exact + (rounded - exact).detach() if exact.requires_grad else rounded


def dynamic_fake_quantize(values: Tensor) -> Tensor:
    """Quantize as ONNX's DynamicQuantizeLinear and dequantize; the gradient passes straight through."""
    with torch.no_grad():
        low, high = values.amin().clamp(max=0), values.amax().clamp(min=0)
        scale = (high - low) / 255
        scale = torch.where(scale > 0, scale, 1)
        zero_point = torch.round((-low / scale).clamp(0, 255))
        quantized = (torch.round(values / scale) + zero_point).clamp(0, 255)
        decoded = (quantized - zero_point) * scale
    return straight_through(values, decoded)


def spread(grid: Tensor, block: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Repeat one entry for each block, so that the result broadcasts with a tensor.

    Args:
        grid: an entry for each block along each axis, or a scalar.
        block: extents of a block; the last block of an axis may be partial.
        shape: shape of the tensor.

    >>> spread(torch.tensor([[1.0], [2.0]]), (2, 3), (3, 3)).flatten().tolist()
    [1.0, 1.0, 2.0]
    """
    if not grid.ndim:
        return grid
    for axis, (length, extent) in enumerate(zip(block, shape, strict=True)):
        if length > 1 and grid.shape[axis] > 1:
            grid = grid.repeat_interleave(length, axis).narrow(axis, 0, extent)
    return grid


# Trainable channel scales: an activation is divided by them before it is quantized, and the weights on both sides
# compensate for it.


class SharedChannelScales(nn.Module):
    """The channel scales that the tensors of an equalization group share.

    Each is its initial value times the exponential of a parameter. None grows beyond 1, so that the range of a clamp
    never grows.

    Attributes:
        log_channel_scales: parameter with one entry a channel, initially 0.
    """

    base: Tensor
    free: Tensor

    def __init__(self, factors: NDArray[np.floating], free: NDArray[np.bool_]) -> None:
        super().__init__()
        self.register_buffer("base", torch.from_numpy(factors.astype(np.float32)))
        self.register_buffer("free", torch.from_numpy(free.astype(np.float32)))
        self.log_channel_scales = nn.Parameter(torch.zeros_like(self.base), bool(free.any()))

    def forward(self) -> Tensor:
        """Return the channel scales."""
        return (self.base * torch.exp(self.log_channel_scales * self.free)).minimum(self.base.clamp(min=1))

    def start_from(self, factors: Tensor) -> None:
        """Replace the trainable channel scales."""
        self.base.copy_(torch.where(self.free > 0, factors, self.base))
        self.log_channel_scales.zero_()


@dataclass(frozen=True, eq=False)
class TensorChannelScales:
    """The channel scales of one tensor.

    Attributes:
        shared: the channel scales of its equalization group.
        places: index into `shared` for each channel, or for each entry along a weight.
        axis: axis of the channels in the tensor.
    """

    shared: SharedChannelScales
    places: Tensor
    axis: int

    def __call__(self) -> Tensor:
        """Return a scale for each of `places`."""
        scales: Tensor = self.shared()[self.places]
        return scales

    def now(self) -> ChannelScales:
        """Return the current values, as they are written."""
        return ChannelScales(self.axis, self().detach().cpu().numpy().astype(np.float64))

    def in_weight(self, node: Node, index: int, *, read: bool) -> TensorChannelScales:
        """Return the scales along the weight of a compute node that reads the tensor, or makes it."""
        # With the indices (from 1) as scales, the weight shows which one each of its values is scaled with.
        count = len(self.places)
        numbers, ones = ChannelScales(self.axis, np.arange(1.0, count + 1)), np.ones(node.inputs[index].shape)
        indices = (
            WeightRescaling(numbers).weight(node, index, ones)
            if read
            else 1 / WeightRescaling(made=numbers).weight(node, index, ones)
        )
        for axis in range(indices.ndim):
            if (first := indices.take([0], axis)).size and (indices == first).all():
                indices = first
        return replace(self, places=self.places[torch.from_numpy(np.rint(indices).astype(np.int64) - 1)])


@dataclass(frozen=True, eq=False)
class WeightChannelScales:
    """The factors of a weight before it is quantized, which broadcast with the weight.

    Attributes:
        read: channel scales of the activation, which multiply the columns.
        output: channel scales of the output, which divide the rows.
    """

    read: TensorChannelScales | None = None
    output: TensorChannelScales | None = None

    def __call__(self) -> Tensor:
        """Return `read` divided by `output`."""
        scales = torch.ones(()) if self.read is None else self.read()
        return scales if self.output is None else scales / self.output()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the result depends on."""
        return tuple(
            tensor
            for own in (self.read, self.output)
            if own
            for tensor in (own.shared.log_channel_scales, own.shared.base)
        )


# The quantizers of a module, with trainable scales, zero points, weights and biases.

# Weight of a new range in the moving average, as in PyTorch's observers.
_AVERAGING = 0.01
_ALONE = WeightRescaling()


class FakeQuantize(nn.Module):
    """The fake quantizer of a tensor, or of tensors that share a scale.

    A scale is its initial value times the exponential of a parameter: steps of an optimizer change large and small
    scales alike, and no scale falls to zero.

    Attributes:
        spec: how the tensor is quantized.
        fake_quant_enabled: True to quantize and dequantize; False to pass values unchanged.
        observer_enabled: True to set the scale by the values that pass.
        log_scale: parameter of the scales' shape, initially 0.
        zero_point: parameter of the same shape, in quantization steps; it is rounded where it is used.
    """

    base: Tensor
    tensor_scale: Tensor
    range: Tensor

    def __init__(self, spec: QuantSpec, parameters: QuantParams, *, learns: bool = True, grows: bool = True) -> None:
        """Create the quantizer from initial parameters.

        Args:
            spec: how the tensor is quantized.
            parameters: initial scale and zero point.
            learns: True to train them, unless scales have another type than float32.
            grows: True if the scale may become larger than its initial value.
        """
        super().__init__()
        self.spec, self.format, self.block = spec, format_named(spec.format), parameters.block
        self.fake_quant_enabled, self.observer_enabled = True, False
        self._grows, self._two_levels = grows, parameters.tensor_scale is not None
        self._affine = parameters.zero_point is not None
        self.register_buffer("base", torch.from_numpy(np.array(parameters.scale, np.float32)))
        self.register_buffer("tensor_scale", torch.tensor(float(parameters.tensor_scale or 1)))
        self.register_buffer("range", torch.tensor([np.inf, -np.inf]))
        learns = learns and spec.scale == "float32"
        self.log_scale = nn.Parameter(torch.zeros_like(self.base), learns)
        zero = np.zeros(self.base.shape) if parameters.zero_point is None else parameters.zero_point
        start = torch.from_numpy(np.array(zero, np.float32))
        # A zero point at a limit shows that a clamp at 0 does nothing, and runtimes drop the clamp by it, so it stays.
        inside = bool(((start > self.format.minimum) & (start < self.format.maximum)).all())
        self.zero_point = nn.Parameter(start, learns and self._affine and (inside or start.ndim > 0))

    @property
    def scale(self) -> Tensor:
        """The scales, in float32, as they are written."""
        change = self.log_scale if self._grows else self.log_scale.clamp(max=0)
        size = (self.base.abs() * torch.exp(change)).clamp(SMALLEST_SCALE, LARGEST_SCALE)
        return torch.copysign(size, self.base)

    @property
    def whole_zero_point(self) -> Tensor:
        """The zero points, rounded."""
        rounded = torch.round(self.zero_point).clamp(self.format.minimum, self.format.maximum)
        return straight_through(self.zero_point, rounded) if self._affine else self.zero_point

    def forward(self, values: Tensor) -> Tensor:
        """Quantize and dequantize values."""
        if self.observer_enabled:
            self.observe(values.detach())
        if not self.fake_quant_enabled:
            return values
        values, shape = self._fitted(values), tuple(values.shape)
        # With two levels of scales, values are divided by their product.
        scale, zero = self.scale * self.tensor_scale if self._two_levels else self.scale, self.whole_zero_point
        if scale.ndim:
            block = even_blocks(tuple(scale.shape), shape) if self.block is None else self.block
            scale, zero = spread(scale, block, shape), spread(zero, block, shape)
        return fake_quantize(values, scale, zero, self.format)

    def _fitted(self, values: Tensor) -> Tensor:
        """Return the values to quantize."""
        return values

    @property
    def is_range_free(self) -> bool:
        """True if the zero point may change and the range may grow."""
        return self._grows and self._affine and not self.base.ndim and self.zero_point.requires_grad

    def observe(self, values: Tensor) -> None:
        """Average the observed range with that of new values, and set the scale by it."""
        seen = torch.stack([values.amin(), values.amax()])
        has_range = bool(torch.isfinite(self.range).all())
        self.range.copy_(self.range + _AVERAGING * (seen - self.range) if has_range else seen)
        low, high = self.range.tolist()
        self.start_from(params_from_range(low, high, self.format, symmetric=self.spec.symmetric))

    def start_from(self, parameters: QuantParams) -> None:
        """Replace scales and zero points."""
        with torch.no_grad():
            self.base.copy_(torch.from_numpy(np.array(parameters.scale, np.float32)))
            self.log_scale.zero_()
            if parameters.zero_point is not None:
                self.zero_point.copy_(torch.from_numpy(np.array(parameters.zero_point, np.float32)))

    def parameters_now(self) -> QuantParams:
        """Return scale and zero point as they are written."""
        scale, zero = (tensor.detach().cpu().numpy() for tensor in (self.scale, self.whole_zero_point))
        level = np.float32(self.tensor_scale.item()) if self._two_levels else None
        return QuantParams(scale, zero.astype(self.format.dtype) if self._affine else None, level, self.block)


class FakeQuantizedWeight(FakeQuantize):
    """A trainable weight with its scales.

    Attributes:
        values: parameter of the weight's shape; at first it is quantized as post-training quantization did.
        once: True if all runs until `release` share one dequantized weight, and accumulate its gradient.
        channel_scales: factors of the weight before it is quantized; None without equalization.
    """

    def __init__(
        self,
        weight: Weight,
        values: np.ndarray[Any, Any],
        quantized: QTensor,
        channel_scales: WeightChannelScales | None = None,
    ) -> None:
        super().__init__(weight.spec, quantized.parameters)
        self._weight = weight
        self._decoded: tuple[object, Tensor] | None = None
        self._shared: tuple[Tensor, Tensor] | None = None
        self.once = False
        self.channel_scales = channel_scales
        around = None if channel_scales is None else channel_scales().detach().numpy()
        moved = values if around is None else values * around
        nearest = quantize(moved, quantized.parameters, quantized.format).values
        # GPTQ chose other values than the nearest, for the sum; they stay.
        same = (
            nearest.view(np.uint8) == quantized.values.view(np.uint8)
            if nearest.itemsize == 1
            else nearest == quantized.values
        )
        start = np.where(same, moved, quantized.dequantize())
        start = start if around is None else start / around
        self.values = nn.Parameter(torch.from_numpy(start.astype(np.float32)))

    @property
    def product(self) -> Tensor:
        """The float weight to quantize."""
        return self.values if self.channel_scales is None else self.values * self.channel_scales()

    @property
    def step(self) -> float:
        """Mean quantization step, in units of the values."""
        apart: float = (self.format.maximum - self.format.minimum) / (2**self.format.bits - 1)
        size = 1.0 if self.channel_scales is None else float(self.channel_scales().detach().abs().mean())
        return apart * float((self.scale.detach() * self.tensor_scale).abs().mean()) / size

    def forward(self, values: Tensor | None = None) -> Tensor:
        """Return the dequantized weight, which is cached while nothing is trained."""
        around = () if self.channel_scales is None else self.channel_scales.tensors
        held = (*self.parameters(recurse=False), *self.buffers(recurse=False), *around)
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in held)
        if values is not None or learns or self.observer_enabled:
            self._decoded = None
            if values is not None or not self.once:
                return self._unscaled(super().forward(self.product if values is None else values))
            if self._shared is None:
                decoded = self._unscaled(super().forward(self.product))
                self._shared = decoded, decoded.detach().requires_grad_(decoded.requires_grad)
            return self._shared[1]
        state = (self.fake_quant_enabled, *((tensor.device, tensor.data_ptr(), tensor._version) for tensor in held))
        if self._decoded is None or self._decoded[0] != state:
            self._decoded = state, self._unscaled(super().forward(self.product).detach())
        return self._decoded[1]

    def release(self) -> None:
        """Propagate the accumulated gradients to the parameters."""
        if self._shared is not None and self._shared[1].grad is not None:
            self._shared[0].backward(self._shared[1].grad)
        self._shared, self.once = None, False

    def _unscaled(self, decoded: Tensor) -> Tensor:
        """Divide by the channel scales."""
        return decoded if self.channel_scales is None else decoded / self.channel_scales()

    def observe(self, values: Tensor) -> None:
        """Set the scales by the range of the weight."""
        array, weight = values.cpu().numpy(), self._weight
        axes = weight.axis, weight.reduction_axis
        block = block_shape(self.spec.granularity, array.shape, channel_axis=axes[0], reduction_axis=axes[1])
        parameters = params_of_blocks(*block_range(array, block), self.spec, block)
        self.start_from(replace(parameters, scale=search_pair_scales(array, parameters.scale, weight.pairs, *axes)))

    def _fitted(self, values: Tensor) -> Tensor:
        weight = self._weight
        return limit_pairs(values, self.scale, weight.pairs, weight.axis, weight.reduction_axis)

    def quantized(self) -> QTensor:
        """Return the quantized weight, as it is written."""
        values = self._fitted(self.product).detach().cpu().numpy()
        return fit_weight_pairs(quantize(values, self.parameters_now(), self.format), self._weight)


class FakeQuantizedBias(nn.Module):
    """A trainable bias; that of an integer kernel is rounded to the steps of the accumulator.

    Attributes:
        values: parameter of the bias's shape.
    """

    def __init__(
        self,
        values: np.ndarray[Any, Any],
        weight: FakeQuantizedWeight,
        data: FakeQuantize | None,
        output_scales: TensorChannelScales | None = None,
    ) -> None:
        """Create the bias; `data` is the activation's quantizer, or None if the bias stays in float."""
        super().__init__()
        self.values = nn.Parameter(torch.from_numpy(np.array(values, np.float32)))
        # In a tuple, they are no submodules.
        self._counted, self._output_scales = (weight, data), output_scales

    def forward(self) -> Tensor:
        """Return the dequantized bias."""
        weight, data = self._counted
        if data is None or not weight.fake_quant_enabled:
            return self.values
        # As `quantized` and `dequantize`, on the device of the values.
        with torch.no_grad():
            exact = torch.float32 if self.values.device.type == "mps" else torch.float64
            output_scales = (
                None if self._output_scales is None else self._output_scales().reshape(self.values.shape).to(exact)
            )
            moved = self.values if output_scales is None else (self.values / output_scales).to(torch.float32)
            moved = moved.reshape(-1)
            scales = weight.scale.reshape(-1 if weight.scale.numel() > 1 else ())
            scale = (data.scale * scales).clamp(min=SMALLEST_SCALE)
            scale = scale.repeat(moved.numel() // scale.numel()) if scale.ndim else scale
            whole = torch.round((moved.to(exact) / scale.to(exact)).clamp(-LARGEST_BIAS, LARGEST_BIAS))
            decoded = (whole.to(torch.float32) * scale).reshape(self.values.shape)
            decoded = decoded if output_scales is None else (decoded * output_scales).to(torch.float32)
        return straight_through(self.values, decoded)

    def _around(self) -> WeightRescaling:
        return _ALONE if self._output_scales is None else WeightRescaling(made=self._output_scales.now())

    @property
    def moved(self) -> np.ndarray[Any, Any]:
        """The bias in float, divided by the channel scales of the output."""
        return self._around().bias(np.array(self.values.detach().cpu().numpy()))

    def quantized(self) -> QTensor | None:
        """Return the quantized bias, or None if it stays in float."""
        weight, data = self._counted
        if data is None:
            return None
        return quantize_bias(
            self.moved,
            QTensor(np.empty(0), weight.parameters_now(), weight.format),
            float(data.scale.detach()),
        )
