"""Windows over images: padding, pooling, and convolutions in the form that a runtime computes fastest."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from onnxq.ir import Constant, Graph, Node, Tensor, is_constant
from onnxq.rewrite import Call, Changes, Match, New, Operators, Pass, RewriteRule, RewriteRules
from onnxq.rewrite.patterns import Capture

Pads: TypeAlias = "list[tuple[int, int]]"
"""Elements before and after, for each axis."""

_NEVER_NEGATIVE: Final = frozenset(
    {"Abs", "Exp", "HardSigmoid", "ReduceL1", "ReduceL2", "Relu", "Sigmoid", "Softmax", "Softplus", "Sqrt"}
)
_KEEPING_SIGN: Final = frozenset(
    {"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Identity", "MaxPool", "Reshape", "Slice", "Transpose"}
)
_MOST_FOLLOWED: Final = 16


class FoldPads(RewriteRule):
    """Padding in front of a convolution or pooling becomes its own; padding by nothing goes.

    Only zeros around the image fold: a mean must count them, and for a maximum nothing may lie below them (or they are
    minus infinity). What is padded in front of a ConvTranspose is cropped less behind it.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for a Pad that feeds one of the operators, and for any Pad."""
        padded = op.Pad(op.any("x"), ..., name="pad", shared=True)
        return (
            op.Conv(padded, op.any("w"), op.optional("b"), name="window"),
            op.ConvTranspose(padded, op.any("w"), op.optional("b"), name="window"),
            op.AveragePool(padded, name="window"),
            op.MaxPool(padded, name="window"),
            op.Pad(op.any("x"), ..., name="pad"),
        )

    def obstacle(self, found: Match) -> str:
        """Return why the padding stays."""
        pads = _pads_of(found.pad, _rank(found))
        if isinstance(pads, str):
            return pads
        if found.root is found.pad:
            return "it pads something" if any(map(any, pads)) else ""
        if any(map(any, pads[:2])):
            return "it pads the batch or the channels"
        if min(map(min, pads)) < 0:
            return "it crops"
        window = found.window
        if _text(window.attrs.get("auto_pad", "NOTSET")) not in ("NOTSET", "VALID"):
            return f"{window.name} pads by itself, by a size that is not known"
        if window.op == "MaxPool" and _value_of(found.pad) == -np.inf:
            return _pooling_obstacle(found, pads)
        if _value_of(found.pad) != 0:
            return "it does not pad with zeros"
        if window.op == "ConvTranspose":
            return _cropping_obstacle(window, pads)
        return _pooling_obstacle(found, pads) if window.op.endswith("Pool") else ""

    def replacement(self, new: New, found: Match) -> Any:
        """Make the operator with pads of its own."""
        if found.root is found.pad:
            return found.x
        window, pads = found.window, _pads_of(found.pad, _rank(found))
        assert not isinstance(pads, str), "looked at before"
        own = _own_pads(window, len(pads) - 2)
        steps = [1] * len(own)
        if window.op == "ConvTranspose":
            steps = [-step for step in window.attrs.get("strides", steps)]
        sums = [
            (first + step * before, last + step * after)
            for (first, last), step, (before, after) in zip(own, steps, pads[2:], strict=True)
        ]
        counted = {"count_include_pad": 1} if window.op == "AveragePool" else {}
        flat = [before for before, _ in sums] + [after for _, after in sums]
        return new.like(window, found.x, *window.inputs[1:], pads=flat, auto_pad=None, **counted)


def _rank(found: Match) -> int | None:
    """Return the rank of what is padded, as far as it is known."""
    for tensor in (found.x, found.pad.outputs[0], found.values.get("w")):
        if tensor is not None and tensor.shape is not None:
            return len(tensor.shape)
    kernel = found.root.attrs.get("kernel_shape")
    return None if kernel is None else len(kernel) + 2


def _pads_of(pad: Node, rank: int | None) -> Pads | str:
    """Return what a Pad adds along each axis, or why that is not known or no constant is added."""
    if _text(pad.attrs.get("mode", "constant")) != "constant":
        return f"it pads by mode {_text(pad.attrs['mode'])}"
    flat = _numbers(pad, 1, pad.attrs.get("pads", pad.attrs.get("paddings")))
    axes = _numbers(pad, 3, range(len(flat or ()) // 2))
    if flat is None or axes is None or _value_of(pad) is None:
        return "its pads are computed"
    if len(pad.inputs) < 4:
        rank = len(axes)
    if rank is None or len(flat) != 2 * len(axes) or any(not -rank <= axis < rank for axis in axes):
        return "its pads do not fit its data, whose rank must be known"
    pads = [(0, 0)] * rank
    for axis, before, after in zip(axes, flat, flat[len(axes) :], strict=False):
        pads[axis] = (before, after)
    return pads


def _value_of(pad: Node) -> float | None:
    value = _numbers(pad, 2, [pad.attrs.get("value", 0.0)])
    return value[0] if value is not None and len(value) == 1 else None


def _numbers(node: Node, index: int, default: Any) -> list[Any] | None:
    """Return what a constant input holds, the default where it is left out, or None where it is computed."""
    tensor = node.inputs[index] if index < len(node.inputs) and node.inputs[index].name else None
    if tensor is None:
        return None if default is None else list(default)
    fixed = isinstance(tensor, Constant) and tensor.overridable_input is None
    return list(tensor.values.reshape(-1).tolist()) if fixed else None


def _own_pads(window: Node, axes: int) -> Pads:
    valid = _text(window.attrs.get("auto_pad", "NOTSET")) == "VALID"
    flat = [0] * 2 * axes if valid else list(window.attrs.get("pads", [0] * 2 * axes))
    return list(zip(flat[:axes], flat[axes:], strict=True))


def _cropping_obstacle(window: Node, pads: Pads) -> str:
    if window.attrs.get("output_shape"):
        return f"{window.name} fixes the shape of its output"
    own = _own_pads(window, len(pads) - 2)
    strides = window.attrs.get("strides", [1] * len(own))
    enough = all(
        step * before <= first and step * after <= last
        for (first, last), step, (before, after) in zip(own, strides, pads[2:], strict=True)
    )
    return "" if enough else f"{window.name} does not crop what it would add"


def _pooling_obstacle(found: Match, pads: Pads) -> str:
    window, name = found.window, found.window.name
    kernel = window.attrs.get("kernel_shape", ())
    if len(kernel) != len(pads) - 2:
        return f"{name} has no kernel of its rank"
    if not all(isinstance(length, int) and length > 0 for length in (found.x.shape or (None,))[2:]):
        return f"its data may be empty, which {name} only takes padded"
    own = _own_pads(window, len(kernel))
    if any(
        first + before >= size or last + after >= size
        for (first, last), size, (before, after) in zip(own, kernel, pads[2:], strict=True)
    ):
        return f"{name} cannot pad as much as its kernel is wide"
    if window.attrs.get("ceil_mode", 0) or any(step != 1 for step in window.attrs.get("dilations", ())):
        return f"{name} rounds up or skips elements"
    if window.op == "AveragePool":
        uncounted = any(map(any, own)) and not window.attrs.get("count_include_pad", 0)
        if uncounted:
            return f"{name} pads too, and does not count that"
        return "" if found.opset >= 7 else "means of this opset cannot count zeros"
    if any(output.name for output in window.outputs[1:]):
        return f"{name} gives positions in the padded data"
    negative = _value_of(found.pad) == 0 and not _is_never_negative(found.x)
    return "its zeros may be the largest of a window" if negative else ""


def _is_never_negative(tensor: Tensor) -> bool:
    for _ in range(_MOST_FOLLOWED):
        producer = tensor.inputs[0] if tensor.inputs else None
        if producer is None or producer.domain or not producer.inputs:
            return False
        if producer.op in _NEVER_NEGATIVE:
            return True
        if producer.op == "Clip":
            lowest = _numbers(producer, 1, [producer.attrs.get("min", -np.inf)])
            return lowest is not None and lowest[0] >= 0
        if producer.op not in _KEEPING_SIGN:
            return False
        tensor = producer.inputs[0]
    return False


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class ResolveAutomaticPadding(RewriteRule):
    """The attribute auto_pad of a convolution or pooling becomes the pads that it means."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for each operator with each way to pad."""
        return tuple(
            getattr(op, name)(op.any("x"), ..., name="window", auto_pad=way)
            for name in ("Conv", "AveragePool", "MaxPool")
            for way in ("SAME_UPPER", "SAME_LOWER", "VALID")
        )

    def obstacle(self, found: Match) -> str:
        """Return why the pads are not known."""
        if found.window.attrs.get("ceil_mode", 0):
            return "it rounds up"
        # Of pooling onnxruntime then pads as if there were none, and a convolution of these it refuses.
        has_gaps = any(step != 1 for step in found.window.attrs.get("dilations", ()))
        if has_gaps and found.window.attrs["auto_pad"] != "VALID":
            return "its window has gaps"
        return "" if _pads(found) is not None else "the size of its data or kernel is not known"

    def replacement(self, new: New, found: Match) -> Any:
        """Make the same operator with pads."""
        return new.like(found.window, *found.window.inputs, auto_pad=None, pads=_pads(found))


def _pads(found: Match) -> list[int] | None:
    """Return what comes before and after the data along each axis, the numbers before first."""
    window, data = found.window, found.x.shape
    way = window.attrs["auto_pad"]
    kernel = window.attrs.get("kernel_shape") or (
        window.inputs[1].shape[2:] if window.op == "Conv" and window.inputs[1].shape is not None else None
    )
    if kernel is None:
        return None
    if way == "VALID":
        return [0] * 2 * len(kernel)
    sizes = () if data is None else (*data[2:], *kernel)
    if len(sizes) != 2 * len(kernel) or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    strides = window.attrs.get("strides", [1] * len(kernel))
    before, after = [], []
    for size, wide, stride in zip(data[2:], kernel, strides, strict=True):
        missing = max(0, (-(-size // stride) - 1) * stride + wide - size)
        smaller, larger = missing // 2, missing - missing // 2
        before.append(smaller if way == "SAME_UPPER" else larger)
        after.append(larger if way == "SAME_UPPER" else smaller)
    return [*before, *after]


# Pooling --------------------------------------------------------------------------------------------------------------

# Kernels of ReduceMean add pairwise, those of GlobalAveragePool one by one, which is less exact for large images.
_LARGEST: Final = 64 * 64


_NOT_KNOWN: Final = "it is not known to keep batch and channels"


class UseGlobalAveragePool(RewriteRule):
    """A mean over the whole image is a GlobalAveragePool, and a Flatten behind it drops what is left of the image.

    ReduceMean and AveragePool become it, whose layout convolutions share and which computes with integers; Squeeze and
    Reshape behind it become the Flatten, which goes where the axes are restored at once.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for means, and for what drops axes behind them."""
        pooled = op.GlobalAveragePool(op.any("x"), name="pool", shared=True)
        flat = op.Flatten(op.any("x"), axis=1, shared=True)
        return (
            op.ReduceMean(op.any("x"), ..., name="mean"),
            op.AveragePool(op.any("x"), name="mean"),
            op.Squeeze(pooled, ..., name="drop"),
            op.Reshape(pooled, op.constant("target"), name="drop"),
            op.Reshape(flat, op.constant("target"), name="restore"),
            op.Unsqueeze(flat, ..., name="restore"),
        )

    def obstacle(self, found: Match) -> str:
        """Return why it is no mean over the whole image, or not known to be."""
        if found.x.shape is None or not 3 <= len(found.x.shape) <= 5:
            return "its data is not known to be an image"
        if "restore" in found.values:
            return _restore_obstacle(found)
        if found.root.op == "Reshape":
            return _reshape_obstacle(found)
        if found.root.op == "Squeeze":
            return _squeeze_obstacle(found)
        if found.x.dtype not in (np.float32, np.float16):
            return "its data is not known to be of single or half precision"
        if found.root.op == "AveragePool":
            return _window_obstacle(found)
        return _axes_obstacle(found) or _size_obstacle(found.x.shape)

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise, as means do."""
        return found.root.op in ("ReduceMean", "AveragePool")

    def replacement(self, new: New, found: Match) -> Any:
        """Make the GlobalAveragePool, or the Flatten behind it."""
        if "restore" in found.values:
            return found.x
        if found.root.op in ("Squeeze", "Reshape"):
            return new.Flatten(found.pool.outputs[0], axis=1)
        pooled = new.GlobalAveragePool(found.x)
        keeps = found.root.op == "AveragePool" or found.root.attrs.get("keepdims", 1)
        return pooled if keeps else new.Flatten(pooled, axis=1)


def _axes(found: Match) -> list[int] | None:
    """Return the axes of a ReduceMean or Squeeze, counted from the front; None where they are computed or not given."""
    given = found.root.attrs.get("axes")
    if len(found.root.inputs) > 1 and found.root.inputs[1].name:
        tensor = found.root.inputs[1]
        given = tensor.values.reshape(-1) if isinstance(tensor, Constant) and tensor.overridable_input is None else None
    return None if given is None else sorted({int(axis) % len(found.x.shape) for axis in given})


def _axes_obstacle(found: Match) -> str:
    if found.root.op == "ReduceMean" and len(found.x.shape) == 3:
        return "its data may be a sequence"
    whole = _axes(found) == list(range(2, len(found.x.shape)))
    return "" if whole else "it is not known to be over all axes of an image and no other"


def _size_obstacle(shape: Sequence[Any]) -> str:
    if not all(isinstance(size, int) for size in shape[2:]):
        return "the size of its image is not known"
    # A mean over channels that are not there is empty, and onnxruntime pools none.
    if not isinstance(shape[1], int):
        return "the number of its channels is not known"
    if not prod(shape[1:]):
        return "its image is empty"
    return "" if prod(shape[2:]) <= _LARGEST else "its image is large, and its sum would be less exact"


def _squeeze_obstacle(found: Match) -> str:
    if _axes(found) is None and len(found.root.inputs) < 2 and "axes" not in found.root.attrs:
        return "" if all(isinstance(size, int) and size != 1 for size in found.x.shape[:2]) else "it may drop more axes"
    return _axes_obstacle(found)


def _window_obstacle(found: Match) -> str:
    attributes = found.root.attrs
    if any(attributes.get("pads", ())) or attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return "it pads"
    if any(step != 1 for step in attributes.get("dilations", ())):
        return "it skips elements"
    whole = list(attributes.get("kernel_shape", ())) == list(found.x.shape[2:]) and 0 not in found.x.shape
    return "" if whole else "its window is not known to be the whole image"


def _restore_obstacle(found: Match) -> str:
    if [producer.op for producer in found.x.inputs] != ["GlobalAveragePool"]:
        return "it restores the axes of something else"
    if found.root.op == "Unsqueeze":
        return _axes_obstacle(found)
    image = [1] * (len(found.x.shape) - 2)
    return _target_obstacle(found, image)


def _reshape_obstacle(found: Match) -> str:
    return _target_obstacle(found, [])


def _target_obstacle(found: Match, behind: Sequence[int]) -> str:
    """Return why a Reshape is not known to make batch, channels and the given sizes."""
    target, (batch, channels) = found.target.values.tolist(), found.x.shape[:2]
    empties = 0 in target and found.root.attrs.get("allowzero", 0)
    if len(target) < 2 or target[2:] != list(behind) or empties:
        return "it does more than dropping or restoring axes"
    keeps_batch = target[0] == 0 or (isinstance(batch, int) and batch == target[0] != 0)
    keeps_channels = target[1] == 0 or (isinstance(channels, int) and channels == target[1] != 0)
    rest = target[1] == -1 if keeps_batch else target[0] == -1
    return "" if (keeps_batch or keeps_channels) and (rest or (keeps_batch and keeps_channels)) else _NOT_KNOWN


# Convolutions for OpenVINO --------------------------------------------------------------------------------------------


class ConvolvePooled(Pass):
    """Gemm of what GlobalAveragePool leaves of an image becomes a convolution of one pixel, and a Flatten behind it.

    OpenVINO's kernel of a convolution of codes takes less time than its kernel of a product with one row: resnet is 1.1
    times as fast with it. Where there are known to be several images, a product reads its weights once for all, and
    stays.
    """

    def apply(self, graph: Graph) -> Changes:
        """Rewrite; ``changed`` holds the names of the products, which the convolutions keep."""
        return RewriteRules((_ConvolveOnePixel(),)).apply(graph)


class _ConvolveOnePixel(RewriteRule):
    """Flatten and Gemm become Conv and Flatten."""

    def pattern(self, op: Operators) -> Call:
        """Return Gemm of a constant weight and bias behind pooling."""
        pooled = op.GlobalAveragePool(op.any("x"), name="pool", shared=True)
        flat = op.Flatten(pooled, axis=1, shared=True)
        bias = Capture("bias", constant=True, optional=True)
        return op.Gemm(flat, op.constant("weight"), bias, name="gemm", alpha=1.0, beta=1.0, transA=0)

    def obstacle(self, found: Match) -> str:
        """Refuse several images at once, and weights and biases that a convolution does not take."""
        shape, weight = found.x.shape, found.weight
        if shape is None or len(shape) != 4:
            return "its data is not known to be an image"
        if isinstance(shape[0], int) and shape[0] > 1:
            return "it multiplies several images at once"
        if len(set(weight.outputs)) > 1:
            return "others read its weight, which would be there twice"
        rows = weight.shape[0 if found.gemm.attrs.get("transB", 0) else 1]
        if found.bias is not None and found.bias.shape not in ((rows,), (1, rows)):
            return "its bias is not one value for each channel"
        return ""

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the convolution, and the Flatten."""
        rows = found.weight.values if found.gemm.attrs.get("transB", 0) else found.weight.values.T
        inputs = [found.pool.outputs[0], new.constant(rows[:, :, None, None], "weight")]
        if found.bias is not None:
            inputs.append(new.constant(found.bias.values.reshape(-1), "bias"))
        return new.Flatten(new.named(found.gemm, new.Conv(*inputs)), axis=1)


_BLOCK = 16
_MODE_IS_KNOWN = 11
_ACTIVATIONS = ("LeakyRelu", "Relu", "Sigmoid", "Tanh")
# What a transposed convolution says besides its stride, and what that has to be.
_PLAIN = {"auto_pad": ("NOTSET", "VALID"), "group": (1,), "output_padding": ([0, 0],), "dilations": ([1, 1],)}


class ConvolveTransposed(Pass):
    """ConvTranspose of few channels whose windows do not overlap becomes Conv and DepthToSpace, an activation between.

    OpenVINO lays channels in blocks of 16, so that one channel takes the time and memory of 16, in the activation
    behind it too: the last layer of ppocr-det took 5.8 ms of 45, and takes 1.4 of 41. Of many channels the transposed
    convolution is as fast.
    """

    def apply(self, graph: Graph) -> Changes:
        """Rewrite; ``changed`` holds the names of the layers, which the convolutions keep."""
        return RewriteRules((_ConvolveWindows(),)).apply(graph)


class _ConvolveWindows(RewriteRule):
    """Each place of a window is a channel of its own, until DepthToSpace lays them out."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return a transposed convolution of a constant weight, alone and with what follows it."""
        layer = op.ConvTranspose(op.any("x"), op.constant("weight"), op.optional("bias"), name="layer")
        return (*(getattr(op, name)(layer) for name in _ACTIVATIONS), layer)

    def obstacle(self, found: Match) -> str:
        """Refuse what is no image, windows that overlap, and channels that fill blocks."""
        attributes, shape = found.layer.attrs, found.weight.shape
        if len(shape) != 4 or shape[2] != shape[3]:
            return "its windows are no squares"
        if list(attributes.get("strides", [1, 1])) != list(shape[2:]) or shape[2] == 1:
            return "its windows overlap, or leave gaps"
        if "output_shape" in attributes or any(attributes.get("pads", ())):
            return "it cuts or adds at the borders"
        if any(name in attributes and attributes[name] not in allowed for name, allowed in _PLAIN.items()):
            return "it has groups or dilations"
        if shape[1] >= _BLOCK:
            return "its channels fill a block"
        if found.root is found.layer and any(reader.op in _ACTIVATIONS for reader in found.layer.outputs[0].outputs):
            return "its activation goes with it"
        return "" if found.bias is None or is_constant(found.bias) else "its bias is computed"

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the convolution, the activation and what lays out."""
        rows, channels, size, _ = found.weight.shape
        weight = found.weight.values.transpose(2, 3, 1, 0).reshape(size * size * channels, rows, 1, 1)
        inputs = [found.x, new.constant(np.ascontiguousarray(weight), "weight")]
        if found.bias is not None:
            inputs.append(new.constant(np.tile(found.bias.values, size * size), "bias"))
        small = new.named(found.layer, new.Conv(*inputs))
        if found.root is not found.layer:
            small = new.like(found.root, small)
        # Before opset 11 it had no other mode.
        return new.DepthToSpace(small, blocksize=size, mode="DCR" if found.opset >= _MODE_IS_KNOWN else None)
