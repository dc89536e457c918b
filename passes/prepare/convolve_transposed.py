"""Compute a few large channels as more small ones, where a runtime pads channels to whole blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.ir import Graph, is_fixed
from onnxq.rewrite import Call, Changes, Match, New, Operators, Pass, RewriteRule, RewriteRules

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
        return "" if found.bias is None or is_fixed(found.bias) else "its bias is computed"

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
