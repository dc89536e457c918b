"""Operators that compute each element by itself, or reduce along axes: one line each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import onnx
import torch
import torch.nn.functional as f
from torch import Tensor

from onnxq.training.calls import Call

Function = Callable[[Call], Any]
# What ONNX says of Selu where the model says nothing.
_ALPHA, _GAMMA = 1.6732632423543772, 1.0507009873554805


def _one(function: Callable[[Tensor], Tensor]) -> Function:
    return lambda call: function(call[0])


def _two(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    return lambda call: function(call[0], call[1])


def _all(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    return lambda call: functools.reduce(function, call.given)


def _reduced(function: Callable[[Tensor, list[int], bool], Tensor]) -> Function:
    def reduce(call: Call) -> Tensor:
        data, axes, keep = call[0], call.numbers(1, "axes"), bool(call.attribute("keepdims", 1))
        if not axes and call.attribute("noop_with_empty_axes", 0):
            return data
        return function(data, axes or list(range(data.ndim)), keep)

    return reduce


def torch_dtype(onnx_type: int) -> torch.dtype:
    """Return the dtype that torch has for a ``TensorProto.DataType``.

    >>> torch_dtype(onnx.TensorProto.INT64)
    torch.int64
    """
    if onnx_type == onnx.TensorProto.BFLOAT16:
        return torch.bfloat16
    return torch.from_numpy(onnx.numpy_helper.to_array(onnx.TensorProto(data_type=onnx_type, dims=[0]))).dtype


def _infinite(call: Call) -> Tensor:
    wanted = {torch.isposinf: "detect_positive", torch.isneginf: "detect_negative"}
    found = (sign(call[0]) for sign, name in wanted.items() if call.attribute(name, 1))
    return functools.reduce(torch.logical_or, found, torch.zeros_like(call[0], dtype=torch.bool))


def _divide(call: Call) -> Tensor:
    whole = not call[0].is_floating_point()
    return torch.div(call[0], call[1], rounding_mode="trunc" if whole else None)


def _root(data: Tensor) -> Tensor:
    """Return the square root, whose gradient is 0 at 0 in the place of an infinite one that would spoil all others."""
    above = data > 0
    return torch.where(above, torch.sqrt(torch.where(above, data, 1)), torch.sqrt(data.detach()))


def _power(call: Call) -> Tensor:
    base, exponent = call[0], call[1]
    if exponent.numel() == 1 and not exponent.requires_grad:
        if exponent.item() == 0.5 and exponent.ndim <= base.ndim:
            return _root(base)
        # The gradient of a square is finite at 0 this way.
        return (
            torch.pow(base, exponent.item()).to(base.dtype).expand(torch.broadcast_shapes(base.shape, exponent.shape))
        )
    return torch.pow(base, exponent).to(base.dtype)


def _clip(call: Call) -> Tensor:
    low, high = (call.number(index, name, None) for index, name in ((1, "min"), (2, "max")))
    if low is not None and high is not None and call[0].is_floating_point() and low <= high:
        # The gradient of this is one pass over memory, that of clamp several.
        return f.hardtanh(call[0], low, high)
    return call[0] if low is None and high is None else torch.clamp(call[0], low, high)


def _cast(call: Call) -> Tensor:
    return call[0].to(torch_dtype(call.attribute("to")))


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
        if call.attribute("select_last_index", 0):
            flipped = function(call[0].flip(call.attribute("axis", 0)), call.attribute("axis", 0), True)
            found = call[0].shape[call.attribute("axis", 0)] - 1 - flipped
            return found if call.attribute("keepdims", 1) else found.squeeze(call.attribute("axis", 0))
        return function(call[0], call.attribute("axis", 0), bool(call.attribute("keepdims", 1)))

    return apply


def _hard_sigmoid(call: Call) -> Tensor:
    return torch.clamp(call.attribute("alpha", 0.2) * call[0] + call.attribute("beta", 0.5), 0, 1)


def _modulo(call: Call) -> Tensor:
    return (torch.fmod if call.attribute("fmod", 0) else torch.remainder)(call[0], call[1])


def _cumulative(call: Call) -> Tensor:
    axis, data = int(call[1].item()), call[0]
    data = data.flip(axis) if call.attribute("reverse", 0) else data
    total = data.cumsum(axis) - (data if call.attribute("exclusive", 0) else 0)
    return total.flip(axis) if call.attribute("reverse", 0) else total


ELEMENTWISE: Mapping[str, Function] = MappingProxyType(
    {
        "Abs": _one(torch.abs),
        "Acos": _one(torch.acos),
        "Acosh": _one(torch.acosh),
        "Add": _two(torch.add),
        "And": _two(torch.logical_and),
        "ArgMax": _extreme(torch.argmax),
        "ArgMin": _extreme(torch.argmin),
        "Asin": _one(torch.asin),
        "Asinh": _one(torch.asinh),
        "Atan": _one(torch.atan),
        "Atanh": _one(torch.atanh),
        "Cast": _cast,
        "CastLike": lambda call: call[0].to(call[1].dtype),
        "Ceil": _one(torch.ceil),
        "Celu": lambda call: f.celu(call[0], call.attribute("alpha", 1.0)),
        "Clip": _clip,
        "Cos": _one(torch.cos),
        "Cosh": _one(torch.cosh),
        "CumSum": _cumulative,
        "Div": _divide,
        "Dropout": _one(lambda data: data),
        "Elu": lambda call: f.elu(call[0], call.attribute("alpha", 1.0)),
        "Equal": _two(torch.eq),
        "Erf": _one(torch.erf),
        "Exp": _one(torch.exp),
        "Floor": _one(torch.floor),
        "Gelu": lambda call: f.gelu(call[0], approximate=call.attribute("approximate", "none")),
        "Greater": _two(torch.gt),
        "GreaterOrEqual": _two(torch.ge),
        "HardSigmoid": _hard_sigmoid,
        "HardSwish": lambda call: call[0] * torch.clamp(call[0] / 6 + 0.5, 0, 1),
        "Identity": _one(lambda data: data),
        "IsInf": _infinite,
        "IsNaN": _one(torch.isnan),
        "LeakyRelu": lambda call: f.leaky_relu(call[0], call.attribute("alpha", 0.01)),
        "Less": _two(torch.lt),
        "LessOrEqual": _two(torch.le),
        "Log": _one(torch.log),
        "LogSoftmax": _softmax(torch.log_softmax),
        "Max": _all(torch.maximum),
        "Mean": lambda call: functools.reduce(torch.add, call.given) / len(call.given),
        "Min": _all(torch.minimum),
        "Mish": _one(f.mish),
        "Mod": _modulo,
        "Mul": _two(torch.mul),
        "Neg": _one(torch.neg),
        "Not": _one(torch.logical_not),
        "Or": _two(torch.logical_or),
        "PRelu": lambda call: torch.where(call[0] < 0, call[0] * call[1], call[0]),
        "Pow": _power,
        "Reciprocal": _one(torch.reciprocal),
        "ReduceL1": _reduced(lambda data, axes, keep: data.abs().sum(axes, keep)),
        "ReduceL2": _reduced(lambda data, axes, keep: _root(data.square().sum(axes, keep))),
        "ReduceLogSum": _reduced(lambda data, axes, keep: data.sum(axes, keep).log()),
        "ReduceLogSumExp": _reduced(torch.logsumexp),
        "ReduceMax": _reduced(torch.amax),
        "ReduceMean": _reduced(lambda data, axes, keep: data.mean(axes, keep)),
        "ReduceMin": _reduced(torch.amin),
        "ReduceSum": _reduced(lambda data, axes, keep: data.sum(axes, keep)),
        "ReduceSumSquare": _reduced(lambda data, axes, keep: data.square().sum(axes, keep)),
        "Relu": _one(torch.relu),
        "Round": _one(torch.round),
        "Selu": lambda call: call.attribute("gamma", _GAMMA) * f.elu(call[0], call.attribute("alpha", _ALPHA)),
        "Sigmoid": _one(torch.sigmoid),
        "Sign": _one(torch.sign),
        "Sin": _one(torch.sin),
        "Sinh": _one(torch.sinh),
        "Softmax": _softmax(torch.softmax),
        "Softplus": _one(f.softplus),
        "Softsign": _one(f.softsign),
        "Sqrt": _one(_root),
        "Sub": _two(torch.sub),
        "Sum": _all(torch.add),
        "Tan": _one(torch.tan),
        "Tanh": _one(torch.tanh),
        "ThresholdedRelu": lambda call: torch.where(call[0] > call.attribute("alpha", 1.0), call[0], 0),
        "Where": lambda call: torch.where(call[0], call[1], call[2]),
        "Xor": _two(torch.logical_xor),
    }
)
"""The function of each operator of ONNX's own domain by its name."""
