"""Fake quantization with gradients: what codes mean, and how a change of scale or zero point changes that.

Forward it computes ``s * (clamp(round(x / s) + z) - z)`` in float32 with ties to even, as ONNX's QuantizeLinear and
DequantizeLinear do, to the last bit. Backward the gradient passes straight through the rounding (Bengio et al. 2013)
where nothing is clipped; that of the scale is LSQ's (Esser et al., "Learned Step Size Quantization", 2020), that of the
zero point LSQ+'s (Bhalgat et al. 2020), as in PyTorch's ``_fake_quantize_learnable_per_tensor_affine``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onnxq.numerics.formats import Format
from onnxq.numerics.pairs import MOST, Pairs, kernel_order, row_shape


class _FakeQuantized(torch.autograd.Function):
    """See `fake_quantized`; scale and zero point broadcast with the values."""

    @staticmethod
    def forward(context: Any, values: Tensor, scale: Tensor, zero_point: Tensor, format: Format) -> Tensor:
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
            # In codes: how far rounding moved a value, and the last code of what is clipped.
            of_scale = (_sum(inside, decoded - values, scale) + _sum(clipped, decoded, scale)) / scale
        if wanted[2]:
            of_zero = -scale * clipped.sum_to_size(zero_point.shape)
        return inside if wanted[0] else None, of_scale, of_zero, None


def _numbers(scaled: Tensor, zero_point: Tensor, format: Format) -> Tensor:
    """Return the numbers that codes stand for, in units of the scale, where the scaled values are."""
    if format.is_float:
        # Formats round in one place alone, which knows arrays.
        return torch.from_numpy(format.numbers(format.round(scaled.detach().cpu().numpy()))).to(scaled.device)
    low, high = format.minimum - zero_point, format.maximum - zero_point
    return scaled.round_().clamp_(low, high) if low.numel() > 1 else scaled.round_().clamp_(low.item(), high.item())


def _passed(gradient: Tensor, values: Tensor, scale: Tensor, zero_point: Tensor, format: Format) -> Tensor:
    """Return the gradient where no value was clipped, and 0 elsewhere."""
    beyond = 0.0 if format.is_float else 0.5
    low, high = ((end - zero_point) * scale for end in (format.minimum - beyond, format.maximum + beyond))
    if scale.numel() > 1 or format.is_float:
        return gradient * ((values >= low) & (values <= high))
    # In one pass over memory, which is what fake quantization of data spends its time on.
    found: Tensor = torch.ops.aten.hardtanh_backward(gradient, values, low.item(), high.item())
    return found


def _sum(one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    """Return the sum of products over the values that share a scale."""
    if scale.numel() > 1:
        return (one * other).sum_to_size(scale.shape)
    return torch.dot(one.reshape(-1), other.reshape(-1)).reshape(scale.shape)


def fake_quantized(values: Tensor, scale: Tensor, zero_point: Tensor, format: Format) -> Tensor:
    """Return what codes of the values stand for, with gradients of all three.

    Args:
        values: float32 of any shape.
        scale: float32, positive, which broadcasts with the values.
        zero_point: float32 that holds whole numbers, likewise; 0 where the format has none.
        format: the codes'.

    >>> from onnxq.numerics.formats import FORMATS
    >>> fake_quantized(torch.tensor([0.24, 9.0]), torch.tensor(0.1), torch.tensor(0.0), FORMATS["uint4"])
    tensor([0.2000, 1.5000])
    """
    found: Tensor = _FakeQuantized.apply(values, scale, zero_point, format)
    return found


def fitted_values(values: Tensor, scale: Tensor, pairs: Pairs, axis: int, reduction_axis: int) -> Tensor:
    """Return values whose codes fit in pairs, as `onnxq.numerics.pairs.fitted` has it, with gradients of both.

    Args:
        values: float32, of two axes or more where there are pairs.
        scale: float32, one for each channel with the values' rank, or one.
        pairs: which are pairs.
        axis: of output channels.
        reduction_axis: that is summed over.

    >>> fitted_values(torch.tensor([[100.0, 60.0, 100.0, -60.0]]), torch.tensor(1.0), Pairs.ROW, 0, 1)
    tensor([[ 84.,  44., 100., -60.]])
    """
    if pairs is Pairs.NONE:
        return values
    order = kernel_order(values.ndim, axis, reduction_axis)
    ordered = (values / scale).permute(order)
    rows = ordered.reshape(row_shape(tuple(ordered.shape), pairs))
    even = rows.shape[1] // 2 * 2
    both = rows[:, :even].reshape(len(rows), -1, 2)
    alike = (both[..., :1] > 0) == (both[..., 1:] > 0)
    excess = torch.relu(both.sum(-1, keepdim=True).abs() - MOST) * alike
    if not bool(excess.any()):
        return values
    kept = torch.cat([(both - both.sign() * excess / 2).reshape(len(rows), even), rows[:, even:]], 1)
    back = sorted(range(values.ndim), key=order.__getitem__)
    return kept.reshape(ordered.shape).permute(back) * scale


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return the rounded values, whose gradient goes to the exact ones as it is.

    >>> x = torch.tensor(0.7, requires_grad=True)
    >>> straight_through(x, torch.round(x)).item()
    1.0
    """
    return exact + (rounded - exact).detach() if exact.requires_grad else rounded


def dynamically_quantized(values: Tensor) -> Tensor:
    """Return what ONNX's DynamicQuantizeLinear makes of a tensor, decoded; the gradient passes straight through."""
    with torch.no_grad():
        low, high = values.amin().clamp(max=0), values.amax().clamp(min=0)
        scale = (high - low) / 255
        scale = torch.where(scale > 0, scale, 1)
        zero_point = torch.round((-low / scale).clamp(0, 255))
        codes = (torch.round(values / scale) + zero_point).clamp(0, 255)
        decoded = (codes - zero_point) * scale
    return straight_through(values, decoded)


def spread(grid: Tensor, block: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Return the entries of blocks so that they broadcast with the values of a tensor of a shape.

    Args:
        grid: an entry for each block along each axis; a scalar serves all.
        block: extents of a block; the last of an axis may be partial.
        shape: of the values.

    >>> spread(torch.tensor([[1.0], [2.0]]), (2, 3), (3, 3)).flatten().tolist()
    [1.0, 1.0, 2.0]
    """
    if not grid.ndim:
        return grid
    for axis, (length, extent) in enumerate(zip(block, shape, strict=True)):
        if length > 1 and grid.shape[axis] > 1:
            grid = grid.repeat_interleave(length, axis).narrow(axis, 0, extent)
    return grid
