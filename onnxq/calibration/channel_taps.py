"""Channel taps: tensors of bodies, carried outwards as matrices with one column for each channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import onnx
from onnx import GraphProto, TensorProto, helper

from onnxq.calibration.body_taps import with_body_taps


class ChannelTap(NamedTuple):
    """Where the channels of a tensor lie.

    Attributes:
        axis: of the channels, counted from the front.
        rank: how many axes the tensor has.
        channels: how many there are.
    """

    axis: int
    rank: int
    channels: int


def with_channel_taps(
    model: onnx.ModelProto, taps: Mapping[str, ChannelTap]
) -> tuple[onnx.ModelProto, Mapping[str, str]]:
    """Return a model whose main graph makes, of tensors of bodies, all values of a run as a matrix [., channels].

    Tensors of bodies are otherwise carried outwards with all their values in one dimension, in which channels cannot be
    told apart.

    Args:
        model: The model; it is not changed.
        taps: The tensors of bodies by name, float32, see `with_body_taps`.

    Returns:
        The model, and the name of the matrix by the name of the tensor.

    Raises:
        ModelError: A tensor cannot be carried out, see `with_body_taps`.
    """
    if not taps:
        return model, {}
    turned = onnx.ModelProto()
    turned.CopyFrom(model)
    last = {name: f"{name}/last" for name in taps}
    for body in _bodies(turned.graph):
        inside = {*(name for node in body.node for name in node.output), *(value.name for value in body.input)}
        for name in sorted(inside & taps.keys()):
            tap = taps[name]
            order = [*(place for place in range(tap.rank) if place != tap.axis), tap.axis]
            body.node.append(helper.make_node("Transpose", [name], [last[name]], perm=order))
    carried = with_body_taps(turned, last.values())
    matrices = {name: f"{name}/channels" for name in taps}
    for name, tap in taps.items():
        shape = helper.make_tensor(f"{name}/matrix", TensorProto.INT64, [2], [-1, tap.channels])
        carried.graph.initializer.append(shape)
        carried.graph.node.append(helper.make_node("Reshape", [last[name], shape.name], [matrices[name]]))
        carried.graph.value_info.append(
            helper.make_tensor_value_info(matrices[name], TensorProto.FLOAT, [None, tap.channels])
        )
    return carried, matrices


def _bodies(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield the bodies inside a graph, and those inside them."""
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                if body.node:
                    yield body
                    yield from _bodies(body)
