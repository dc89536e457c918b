"""Regions of integer nodes in a finished plan, and what each takes beside the same nodes in float."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.graph import Graph
from onnxq.planning.groups import Groups
from onnxq.planning.plan import Plan
from onnxq.scheme import Mode
from onnxq.searching.kernel_times import NodeTimes


@dataclass(frozen=True)
class Region:
    """Integer nodes that pass codes to one another, or a node with dynamic scales.

    Attributes:
        first: the region's first node.
        nodes: how many it has.
        mode: static or dynamic.
        float_milliseconds: time of these nodes in the float model.
        milliseconds: their time as integers, with the region's borders.
    """

    first: str
    nodes: int
    mode: Mode
    float_milliseconds: float
    milliseconds: float


def find_regions(graph: Graph, plan: Plan, floats: NodeTimes, integers: NodeTimes) -> tuple[Region, ...]:
    """Return the regions of a plan, the longest in float first.

    Args:
        graph: the prepared graph.
        plan: what became of its nodes.
        floats: times of the float model.
        integers: times of the plan's model.
    """
    modes = {one.node: one.mode for one in plan.decisions if one.mode in (Mode.STATIC, Mode.DYNAMIC)}
    integer = [node for node in graph.nodes if node.name in modes]
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
    found = []
    for names in members.values():
        touched = set().union(*(tensors[name] for name in names))
        time = sum(integers.nodes.get(name, 0.0) for name in names)
        time += sum(border for tensor, border in integers.borders.items() if tensor in touched)
        before = sum(floats.nodes.get(name, 0.0) for name in names)
        found.append(Region(names[0], len(names), modes[names[0]], before / 1e6, time / 1e6))
    return tuple(sorted(found, key=lambda region: -region.float_milliseconds))
