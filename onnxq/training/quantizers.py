"""What stands in a module where a plan makes codes: scales, zero points, weights and biases that learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onnxq.algorithms.encoders import paired
from onnxq.algorithms.migration import Around
from onnxq.numerics.affine import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    Parameters,
    QTensor,
    block_range,
    parameters_from_range,
    quantize,
    quantize_bias,
    spec_parameters,
)
from onnxq.numerics.blocks import block_shape
from onnxq.numerics.formats import format_named
from onnxq.numerics.pairs import scales_for_pairs
from onnxq.numerics.spec import Spec
from onnxq.planning.plan import Weight
from onnxq.training.factors import Own, Times
from onnxq.training.rounding import fake_quantized, fitted_values, spread, straight_through

# As PyTorch's moving averages of minima and maxima.
_SHARE_OF_NEW = 0.01
_ALONE = Around()


class FakeQuantize(nn.Module):
    """Codes of one tensor, or of tensors that share a scale, as floats.

    A scale is what post-training quantization found times the exponential of a parameter, so that steps of an optimiser
    change scales of all sizes alike, and none falls to zero.

    Attributes:
        spec: how the tensor is quantized.
        fake_quant_enabled: whether values become what codes stand for; else they pass as they are.
        observer_enabled: whether what passes sets the scale.
        log_scale: parameter of the scales' shape, 0 to begin with.
        zero_point: parameter of the same shape, in codes; whole numbers are taken.
    """

    base: Tensor
    tensor_scale: Tensor
    range: Tensor

    def __init__(self, spec: Spec, parameters: Parameters, *, learns: bool = True, grows: bool = True) -> None:
        """Take what was found.

        Args:
            spec: how the tensor is quantized.
            parameters: scale and zero point to begin with.
            learns: whether they learn; those of a range that is known, and scales of other types than float32, do not.
            grows: whether the scale may become larger than it is.
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
        # At an end of the codes it says that no value lies beyond zero, by which runtimes tell a clamp that is none.
        inside = bool(((start > self.format.minimum) & (start < self.format.maximum)).all())
        self.zero_point = nn.Parameter(start, learns and self._affine and (inside or start.ndim > 0))

    @property
    def scale(self) -> Tensor:
        """The scales, in float32, as they are written."""
        change = self.log_scale if self._grows else self.log_scale.clamp(max=0)
        return (self.base * torch.exp(change)).clamp(SMALLEST_SCALE, LARGEST_SCALE)

    @property
    def whole_zero_point(self) -> Tensor:
        """The zero points as codes."""
        rounded = torch.round(self.zero_point).clamp(self.format.minimum, self.format.maximum)
        return straight_through(self.zero_point, rounded) if self._affine else self.zero_point

    def forward(self, values: Tensor) -> Tensor:
        """Return what the codes of values stand for."""
        if self.observer_enabled:
            self.observe(values.detach())
        if not self.fake_quant_enabled:
            return values
        values, shape = self._fitted(values), tuple(values.shape)
        # With two levels, what is rounded is divided by their product.
        scale, zero = self.scale * self.tensor_scale if self._two_levels else self.scale, self.whole_zero_point
        if scale.ndim:
            block = self.parameters_now().block_in(shape) if self.block is None else self.block
            scale, zero = spread(scale, block, shape), spread(zero, block, shape)
        return fake_quantized(values, scale, zero, self.format)

    def _fitted(self, values: Tensor) -> Tensor:
        """Return the values of which codes are made."""
        return values

    @property
    def moves(self) -> bool:
        """Whether zero may become another code, and the range larger."""
        return self._grows and self._affine and not self.base.ndim and self.zero_point.requires_grad

    def observe(self, values: Tensor) -> None:
        """Move the range that was seen towards that of new values, and take its scale."""
        seen = torch.stack([values.amin(), values.amax()])
        known = bool(torch.isfinite(self.range).all())
        self.range.copy_(self.range + _SHARE_OF_NEW * (seen - self.range) if known else seen)
        low, high = self.range.tolist()
        self.start_from(parameters_from_range(low, high, self.format, symmetric=self.spec.symmetric))

    def start_from(self, parameters: Parameters) -> None:
        """Take other scales and zero points."""
        with torch.no_grad():
            self.base.copy_(torch.from_numpy(np.array(parameters.scale, np.float32)))
            self.log_scale.zero_()
            if parameters.zero_point is not None:
                self.zero_point.copy_(torch.from_numpy(np.array(parameters.zero_point, np.float32)))

    def parameters_now(self) -> Parameters:
        """Return scale and zero point as they are to be written."""
        scale, zero = (one.detach().cpu().numpy() for one in (self.scale, self.whole_zero_point))
        level = np.float32(self.tensor_scale.item()) if self._two_levels else None
        return Parameters(scale, zero.astype(self.format.dtype) if self._affine else None, level, self.block)


class FakeQuantizedWeight(FakeQuantize):
    """A weight that learns, with its scales.

    Attributes:
        values: parameter of the weight's shape; its codes are at first those that post-training quantization chose.
        once: whether all runs until `release` share one decoding, and add up its gradients.
        times: what codes are of, in units of the weight, where channels migrate; None elsewhere.
    """

    def __init__(
        self,
        weight: Weight,
        values: np.ndarray[Any, Any],
        codes: QTensor,
        times: Times | None = None,
    ) -> None:
        """Take the float weight and its codes, of its shape, and factors around."""
        super().__init__(weight.spec, codes.parameters)
        self._weight = weight
        self._decoded: tuple[object, Tensor] | None = None
        self._shared: tuple[Tensor, Tensor] | None = None
        self.once = False
        self.times = times
        around = None if times is None else times().detach().numpy()
        moved = values if around is None else values * around
        nearest = quantize(moved, codes.parameters, codes.format).codes
        # Codes that were chosen for the sums that they make stay, though other ones are nearer.
        same = nearest.view(np.uint8) == codes.codes.view(np.uint8) if nearest.itemsize == 1 else nearest == codes.codes
        start = np.where(same, moved, codes.dequantize())
        start = start if around is None else start / around
        self.values = nn.Parameter(torch.from_numpy(start.astype(np.float32)))

    @property
    def product(self) -> Tensor:
        """The float weight that becomes codes."""
        return self.values if self.times is None else self.values * self.times()

    @property
    def step(self) -> float:
        """Mean distance of two codes, in units of the values."""
        apart: float = (self.format.maximum - self.format.minimum) / (2**self.format.bits - 1)
        size = 1.0 if self.times is None else float(self.times().detach().abs().mean())
        return apart * float((self.scale.detach() * self.tensor_scale).mean()) / size

    def forward(self, values: Tensor | None = None) -> Tensor:
        """Return what its codes stand for, which is computed once as long as nothing learns."""
        around = () if self.times is None else self.times.held
        held = (*self.parameters(recurse=False), *self.buffers(recurse=False), *around)
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in held)
        if values is not None or learns or self.observer_enabled:
            self._decoded = None
            if values is not None or not self.once:
                return self._own(super().forward(self.product if values is None else values))
            if self._shared is None:
                decoded = self._own(super().forward(self.product))
                self._shared = decoded, decoded.detach().requires_grad_(decoded.requires_grad)
            return self._shared[1]
        state = (self.fake_quant_enabled, *((one.device, one.data_ptr(), one._version) for one in held))
        if self._decoded is None or self._decoded[0] != state:
            self._decoded = state, self._own(super().forward(self.product).detach())
        return self._decoded[1]

    def release(self) -> None:
        """Let the gradients that were added up reach what learns."""
        if self._shared is not None and self._shared[1].grad is not None:
            self._shared[0].backward(self._shared[1].grad)
        self._shared, self.once = None, False

    def _own(self, decoded: Tensor) -> Tensor:
        """Return the weight as the float model has it."""
        return decoded if self.times is None else decoded / self.times()

    def observe(self, values: Tensor) -> None:
        """Take the scales of the weight's own range."""
        array, weight = values.cpu().numpy(), self._weight
        axes = weight.axis, weight.reduction_axis
        block = block_shape(self.spec.per, array.shape, channel_axis=axes[0], reduction_axis=axes[1])
        found = spec_parameters(*block_range(array, block), self.spec, block)
        self.start_from(replace(found, scale=scales_for_pairs(array, found.scale, weight.pairs, *axes)))

    def _fitted(self, values: Tensor) -> Tensor:
        weight = self._weight
        return fitted_values(values, self.scale, weight.pairs, weight.axis, weight.reduction_axis)

    def codes(self) -> QTensor:
        """Return the codes that are written."""
        values = self._fitted(self.product).detach().cpu().numpy()
        return paired(quantize(values, self.parameters_now(), self.format), self._weight)


class FakeQuantizedBias(nn.Module):
    """A bias that learns; of an integer kernel it is rounded to what the accumulator counts.

    Attributes:
        values: parameter of the bias's shape.
    """

    def __init__(
        self,
        values: np.ndarray[Any, Any],
        weight: FakeQuantizedWeight,
        data: FakeQuantize | None,
        made: Own | None = None,
    ) -> None:
        """Take the float bias, the weight and data whose scales count it, or None if it stays in float, and factors."""
        super().__init__()
        self.values = nn.Parameter(torch.from_numpy(np.array(values, np.float32)))
        # They belong to the module around this one.
        self._counted, self._made = (weight, data), made

    def forward(self) -> Tensor:
        """Return what its codes stand for."""
        found = self.codes()
        if found is None or not self._counted[0].fake_quant_enabled:
            return self.values
        decoded = torch.from_numpy(self._around().own_bias(found.dequantize().reshape(tuple(self.values.shape))))
        return straight_through(self.values, decoded.to(self.values.device))

    def _around(self) -> Around:
        return _ALONE if self._made is None else Around(made=self._made.now())

    @property
    def moved(self) -> np.ndarray[Any, Any]:
        """The bias that is written where it stays in float: what the product adds to what it makes."""
        return self._around().bias(np.array(self.values.detach().cpu().numpy()))

    def codes(self) -> QTensor | None:
        """Return the codes that are written, or None where it stays in float."""
        weight, data = self._counted
        if data is None:
            return None
        return quantize_bias(
            self.moved,
            QTensor(np.empty(0), weight.parameters_now(), weight.format),
            float(data.scale.detach()),
        )
