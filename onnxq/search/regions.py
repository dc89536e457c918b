"""Regions of integer nodes in a finished plan, and what each takes beside the same nodes in float."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from onnxq.config.scheme import Mode
from onnxq.ir import Graph, scopes
from onnxq.planning.activations import Groups
from onnxq.planning.plan import DECODING, Plan
from onnxq.search.kernel_times import NodeTimes


@dataclass(frozen=True)
class Region:
    """Integer nodes that pass codes to one another, or a node that works on codes among floats.

    Attributes:
        first: the region's first node.
        nodes: how many it has.
        mode: static, dynamic or weight-only.
        float_milliseconds: time of these nodes in the float model.
        milliseconds: their time as integers, with the region's borders; of one that several share each has its part.
    """

    first: str
    nodes: int
    mode: Mode
    float_milliseconds: float
    milliseconds: float


@dataclass(frozen=True)
class NodeTime:
    """What a node takes in the float model and in the plan's.

    Attributes:
        node: its name.
        float_milliseconds: in the float model; 0 where it was fused into another.
        milliseconds: in the plan's model, without its borders.
    """

    node: str
    float_milliseconds: float
    milliseconds: float


def node_times(plan: Plan, floats: NodeTimes, integers: NodeTimes) -> tuple[NodeTime, ...]:
    """Return the times of a plan's nodes in its order, of those that were seen to run in either model.

    Args:
        plan: what became of the nodes.
        floats: times of the float model.
        integers: times of the plan's model.
    """
    return tuple(
        NodeTime(one.node, floats.nodes.get(one.node, 0.0) / 1e6, integers.nodes.get(one.node, 0.0) / 1e6)
        for one in plan.decisions
        if one.node in floats.nodes or one.node in integers.nodes
    )


def find_regions(graph: Graph, plan: Plan, floats: NodeTimes, integers: NodeTimes) -> tuple[Region, ...]:
    """Return the regions of a plan, the longest in float first.

    Args:
        graph: the prepared graph.
        plan: what became of its nodes.
        floats: times of the float model.
        integers: times of the plan's model.
    """
    modes = {one.node: one.mode for one in plan.decisions if one.mode in DECODING}
    integer = [node for scope in scopes(graph) for node in scope.nodes if node.name in modes]
    groups = Groups[str]()
    tensors: dict[str, set[str]] = {}
    for node in integer:
        tensors[node.name] = {tensor.name for tensor in (*node.inputs, *node.outputs)}
        readers = (reader for tensor in node.outputs for reader in tensor.outputs)
        for reader in readers:
            if modes[node.name] is modes.get(reader.name) is Mode.STATIC:
                groups.join(node.name, reader.name)
    members: dict[str, list[str]] = {}
    for node in integer:
        members.setdefault(groups.find(node.name), []).append(node.name)
    touched = {first: set().union(*(tensors[name] for name in names)) for first, names in members.items()}
    sharing = Counter(tensor for region in touched.values() for tensor in region)
    found = []
    for first, names in members.items():
        time = sum(integers.nodes.get(name, 0.0) for name in names)
        time += sum(integers.borders.get(tensor, 0.0) / sharing[tensor] for tensor in touched[first])
        before = sum(floats.nodes.get(name, 0.0) for name in names)
        found.append(Region(names[0], len(names), modes[names[0]], before / 1e6, time / 1e6))
    return tuple(sorted(found, key=lambda region: -region.float_milliseconds))
