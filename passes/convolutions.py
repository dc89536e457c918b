"""Windows over images: padding, pooling, and convolutions in the variant that a runtime computes fastest."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from onnxq.ir import Node, is_constant, numbers_of
from onnxq.rewrite import Match, NodePattern, OpsetPatternBuilder, RewriteContext, RewriteRule, RoundingRule
from onnxq.rewrite.soundness import range_of

Pads: TypeAlias = "list[tuple[int, int]]"
"""Elements before and after, for each axis."""


class FoldPads(RewriteRule):
    """``Conv(Pad(x, p), W, pads=q) -> Conv(x, W, pads=p + q)``.

    Fold a Pad into the convolution or pooling behind it; drop a Pad of zero width.

    Only for zeros around the image, or minus infinity in front of MaxPool. AveragePool then counts its padding. For
    zeros in front of MaxPool, data must not be negative. A ConvTranspose must crop at least what the Pad adds.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        padded = op.Pad(op.any("x"), ..., name="pad", allow_other_consumers=True)
        return (
            op.Conv(padded, op.any("w"), op.optional("b"), name="window"),
            op.ConvTranspose(padded, op.any("w"), op.optional("b"), name="window"),
            op.AveragePool(padded, name="window"),
            op.MaxPool(padded, name="window"),
            op.Pad(op.any("x"), ..., name="pad"),
        )

    def check(self, match: Match) -> str:
        pads = _pads_of(match.pad, _rank(match))
        if isinstance(pads, str):
            return pads
        if match.root is match.pad:
            return "it pads something" if any(map(any, pads)) else ""
        if any(map(any, pads[:2])):
            return "it pads the batch or the channels"
        if min(map(min, pads)) < 0:
            return "it crops"
        window = match.window
        if window.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            return f"{window.name} pads by itself, by a size that is not known"
        if window.op == "MaxPool" and _value_of(match.pad) == -np.inf:
            return _pooling_obstacle(match, pads)
        if _value_of(match.pad) != 0:
            return "it does not pad with zeros"
        if window.op == "ConvTranspose":
            return _cropping_obstacle(window, pads)
        return _pooling_obstacle(match, pads) if window.op.endswith("Pool") else ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        if match.root is match.pad:
            return match.x
        window, pads = match.window, _pads_of(match.pad, _rank(match))
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
        return new.like(window, match.x, *window.inputs[1:], pads=flat, auto_pad=None, **counted)


def _rank(match: Match) -> int | None:
    for tensor in (match.x, match.pad.outputs[0], match.values.get("w")):
        if tensor is not None and tensor.shape is not None:
            return len(tensor.shape)
    kernel = match.root.attrs.get("kernel_shape")
    return None if kernel is None else len(kernel) + 2


def _pads_of(pad: Node, rank: int | None) -> Pads | str:
    if pad.attrs.get("mode", "constant") != "constant":
        return f"it pads by mode {pad.attrs['mode']}"
    flat = numbers_of(pad, 1, "pads")
    axes = numbers_of(pad, 3, "axes", range(len(flat or ()) // 2))
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
    value = numbers_of(pad, 2, "value", [0.0])
    return value[0] if value is not None and len(value) == 1 else None


def _own_pads(window: Node, axes: int) -> Pads:
    valid = window.attrs.get("auto_pad") == "VALID"
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
    return "" if enough else f"{window.name} does not crop the padding"


def _pooling_obstacle(match: Match, pads: Pads) -> str:
    window, name = match.window, match.window.name
    kernel = window.attrs.get("kernel_shape", ())
    if len(kernel) != len(pads) - 2:
        return f"{name} has no kernel of its rank"
    if not all(isinstance(length, int) and length > 0 for length in (match.x.shape or (None,) * 3)[2:]):
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
        return f"{name} pads too, and does not count that" if uncounted else ""
    if any(output.name for output in window.outputs[1:]):
        return f"{name} gives positions in the padded data"
    negative = _value_of(match.pad) == 0 and range_of(match.x)[0] < 0
    return "its zeros may be the largest of a window" if negative else ""


class ResolveAutomaticPadding(RewriteRule):
    """``Conv(x, W, auto_pad="SAME_UPPER") -> Conv(x, W, pads=[0, 0, 1, 1])``.

    Replace the attribute auto_pad of a convolution or pooling by explicit pads.

    Not with ``ceil_mode``. SAME_UPPER and SAME_LOWER need known sizes of image and kernel, and no dilations.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        return tuple(
            getattr(op, name)(op.any("x"), ..., name="window", auto_pad=way)
            for name in ("Conv", "AveragePool", "MaxPool")
            for way in ("SAME_UPPER", "SAME_LOWER", "VALID")
        )

    def check(self, match: Match) -> str:
        if match.window.attrs.get("ceil_mode", 0):
            return "it rounds up"
        # With dilations, onnxruntime pads a pooling as if there were none, and refuses a convolution.
        has_gaps = any(step != 1 for step in match.window.attrs.get("dilations", ()))
        return "its window has gaps" if has_gaps and match.window.attrs["auto_pad"] != "VALID" else ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        pads = _pads(match)
        if pads is None:
            return "the size of its data or kernel is not known"
        return new.like(match.window, *match.window.inputs, auto_pad=None, pads=pads)


def _pads(match: Match) -> list[int] | None:
    """Return the pads: all before the data, then all behind it."""
    window, data = match.window, match.x.shape
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

# ReduceMean adds pairwise, GlobalAveragePool one by one, which is less exact for large images.
_LARGEST: Final = 64 * 64


class UseGlobalAveragePool(RewriteRule):
    """``Reshape(ReduceMean(x, [2, 3]), [0, -1]) -> Flatten(GlobalAveragePool(x))``.

    Replace a mean over the whole image by GlobalAveragePool, and a Squeeze or Reshape behind it by Flatten.

    It shares the layout of convolutions and has an integer kernel. A Flatten goes if the axes are restored at once. Not
    for a ReduceMean over unknown sizes or more than 64 x 64 pixels, where GlobalAveragePool is less exact.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        pooled = op.GlobalAveragePool(op.any("x"), name="pool", allow_other_consumers=True)
        flat = op.Flatten(op.any("x"), axis=1, allow_other_consumers=True)
        return (
            op.ReduceMean(op.any("x"), ..., name="mean"),
            op.AveragePool(op.any("x"), name="mean"),
            op.Squeeze(pooled, ..., name="drop"),
            op.Reshape(pooled, op.constant("target"), name="drop"),
            op.Reshape(flat, op.constant("target"), name="restore"),
            op.Unsqueeze(flat, ..., name="restore"),
        )

    def check(self, match: Match) -> str:
        if match.x.shape is None or not 3 <= len(match.x.shape) <= 5:
            return "its data is not known to be an image"
        if "restore" in match.values:
            return _restore_obstacle(match)
        if match.root.op == "Reshape":
            return _target_obstacle(match, [])
        if match.root.op == "Squeeze":
            return _squeeze_obstacle(match)
        if match.x.dtype not in (np.float32, np.float16):
            return "its data is not known to be of single or half precision"
        if match.root.op == "AveragePool":
            return _window_obstacle(match)
        return _axes_obstacle(match) or _size_obstacle(match.x.shape)

    def rounds(self, match: Match) -> bool:
        return match.root.op in ("ReduceMean", "AveragePool")

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        if "restore" in match.values:
            return match.x
        if match.root.op in ("Squeeze", "Reshape"):
            return new.Flatten(match.pool.outputs[0], axis=1)
        pooled = new.GlobalAveragePool(match.x)
        keeps = match.root.op == "AveragePool" or match.root.attrs.get("keepdims", 1)
        return pooled if keeps else new.Flatten(pooled, axis=1)


def _axes_obstacle(match: Match) -> str:
    if match.root.op == "ReduceMean" and len(match.x.shape) == 3:
        return "its data may be a sequence"
    axes, rank = numbers_of(match.root, 1, "axes", []), len(match.x.shape)
    whole = axes is not None and sorted({axis % rank for axis in axes}) == list(range(2, rank))
    return "" if whole else "it is not known to be over all axes of an image and no other"


def _size_obstacle(shape: Sequence[Any]) -> str:
    if not all(isinstance(size, int) for size in shape[2:]):
        return "the size of its image is not known"
    # Without channels the mean is empty, which onnxruntime refuses to pool.
    if not isinstance(shape[1], int):
        return "the number of its channels is not known"
    if not prod(shape[1:]):
        return "its image is empty"
    return "" if prod(shape[2:]) <= _LARGEST else "its image is large, and its sum would be less exact"


def _squeeze_obstacle(match: Match) -> str:
    if numbers_of(match.root, 1, "axes", []) == []:
        return "" if all(isinstance(size, int) and size != 1 for size in match.x.shape[:2]) else "it may drop more axes"
    return _axes_obstacle(match)


def _window_obstacle(match: Match) -> str:
    attributes = match.root.attrs
    if any(attributes.get("pads", ())) or attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return "it pads"
    if any(step != 1 for step in attributes.get("dilations", ())):
        return "it skips elements"
    whole = list(attributes.get("kernel_shape", ())) == list(match.x.shape[2:]) and 0 not in match.x.shape
    return "" if whole else "its window is not known to be the whole image"


def _restore_obstacle(match: Match) -> str:
    if [producer.op for producer in match.x.inputs] != ["GlobalAveragePool"]:
        return "it restores the axes of something else"
    if match.root.op == "Unsqueeze":
        return _axes_obstacle(match)
    return _target_obstacle(match, [1] * (len(match.x.shape) - 2))


def _target_obstacle(match: Match, behind: Sequence[int]) -> str:
    """Return why a Reshape is not known to make batch, channels and the given sizes."""
    target, (batch, channels) = match.target.values.tolist(), match.x.shape[:2]
    empties = 0 in target and match.root.attrs.get("allowzero", 0)
    if len(target) < 2 or target[2:] != list(behind) or empties:
        return "it does more than dropping or restoring axes"
    keeps_batch = target[0] == 0 or (isinstance(batch, int) and batch == target[0] != 0)
    keeps_channels = target[1] == 0 or (isinstance(channels, int) and channels == target[1] != 0)
    rest = target[1] == -1 if keeps_batch else target[0] == -1
    keeps = (keeps_batch or keeps_channels) and (rest or (keeps_batch and keeps_channels))
    return "" if keeps else "it is not known to keep batch and channels"


# Convolutions for OpenVINO --------------------------------------------------------------------------------------------


class ConvolvePooled(RoundingRule):
    """``Gemm(Flatten(GlobalAveragePool(x)), W, B) -> Flatten(Conv(GlobalAveragePool(x), W, B))``.

    Replace a Gemm behind GlobalAveragePool by a convolution of one pixel and a Flatten.

    OpenVINO's integer convolution is faster than its matrix multiplication of one row: resnet is 1.1 times as fast. Not
    for several images at once: there a matrix multiplication reads its weights once for all.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        pooled = op.GlobalAveragePool(op.any("x"), name="pool", allow_other_consumers=True)
        flat = op.Flatten(pooled, axis=1, allow_other_consumers=True)
        bias = op.optional("bias", constant=True)
        return op.Gemm(flat, op.constant("weight"), bias, name="gemm", alpha=1.0, beta=1.0, transA=0)

    def check(self, match: Match) -> str:
        shape, weight = match.x.shape, match.weight
        if shape is None or len(shape) != 4:
            return "its data is not known to be an image"
        if isinstance(shape[0], int) and shape[0] > 1:
            return "it multiplies several images at once"
        if len(set(weight.outputs)) > 1:
            return "others read its weight, which would be there twice"
        rows = weight.shape[0 if match.gemm.attrs.get("transB", 0) else 1]
        if match.bias is not None and match.bias.shape not in ((rows,), (1, rows)):
            return "its bias is not one value for each channel"
        return ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        rows = match.weight.values if match.gemm.attrs.get("transB", 0) else match.weight.values.T
        inputs = [match.pool.outputs[0], new.constant(rows[:, :, None, None], "weight")]
        if match.bias is not None:
            inputs.append(new.constant(match.bias.values.reshape(-1), "bias"))
        return new.Flatten(new.named(match.gemm, new.Conv(*inputs)), axis=1)


_BLOCK = 16
_MODE_IS_KNOWN = 11
_ACTIVATIONS = ("LeakyRelu", "Relu", "Sigmoid", "Tanh")
# Attributes of a transposed convolution besides its stride, and their allowed values.
_PLAIN = {"auto_pad": ("NOTSET", "VALID"), "group": (1,), "output_padding": ([0, 0],), "dilations": ([1, 1],)}


class ConvolveTransposed(RoundingRule):
    """``Relu(ConvTranspose(x, W, B)) -> DepthToSpace(Relu(Conv(x, W, B)))``.

    Replace a ConvTranspose of few channels without overlapping windows by Conv and DepthToSpace.

    OpenVINO pads channels to blocks of 16, so one channel takes the time and memory of 16, also in the activation. The
    last layer of ppocr-det took 5.8 ms of 45, and takes 1.4 of 41. With 16 channels or more, ConvTranspose is as fast.
    Each position of a window is a channel until DepthToSpace.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        layer = op.ConvTranspose(op.any("x"), op.constant("weight"), op.optional("bias"), name="layer")
        return (*(getattr(op, name)(layer) for name in _ACTIVATIONS), layer)

    def check(self, match: Match) -> str:
        attributes, shape = match.layer.attrs, match.weight.shape
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
        if match.root is match.layer and any(reader.op in _ACTIVATIONS for reader in match.layer.outputs[0].outputs):
            return "its activation goes with it"
        return "" if match.bias is None or is_constant(match.bias) else "its bias is computed"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        rows, channels, size, _ = match.weight.shape
        weight = match.weight.values.transpose(2, 3, 1, 0).reshape(size * size * channels, rows, 1, 1)
        inputs = [match.x, new.constant(np.ascontiguousarray(weight), "weight")]
        if match.bias is not None:
            inputs.append(new.constant(np.tile(match.bias.values, size * size), "bias"))
        small = new.named(match.layer, new.Conv(*inputs))
        if match.root is not match.layer:
            small = new.like(match.root, small)
        # Before opset 11 it had no other mode.
        return new.DepthToSpace(small, blocksize=size, mode="DCR" if match.opset >= _MODE_IS_KNOWN else None)
