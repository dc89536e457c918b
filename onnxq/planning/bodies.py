"""Bodies of control flow: which of their nodes can be integer, and which are left because they never ran."""

from __future__ import annotations

from onnxq.calibration.body_taps import CARRYING
from onnxq.calibration.evidence import Evidence
from onnxq.calibration.value_range import Range
from onnxq.config.scheme import Mode
from onnxq.errors import DataError
from onnxq.ir import Graph, Node, scopes
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.targets import Target

_IDLE = "its body did not run on any sample"


def body_obstacles(graph: Graph, target: Target) -> dict[Graph, str]:
    """Return why no node of a graph can be integer, for a main graph and its bodies; an empty string where nodes can.

    Args:
        graph: the main graph.
        target: the runtime.
    """
    reasons = {graph: ""}
    scanned = {graph: False}
    for scope in scopes(graph):
        for node in scope.nodes:
            for body in node.bodies() if node.attrs else ():
                reasons[body] = reasons[scope] or _body_obstacle(node, target, in_scan=scanned[scope])
                scanned[body] = scanned[scope] or node.op == "Scan"
    return reasons


def leave_idle_bodies(graph: Graph, plan: Plan, evidence: Evidence) -> dict[str, Demotion]:
    """Return what takes the static nodes out of bodies that did not run in calibration, which says nothing of them.

    A body ran when any of its own tensors was seen. One in which nothing has to be calibrated, because its static nodes
    read what the graphs around it make, or what has a fixed range, is not asked.

    Args:
        graph: the prepared graph.
        plan: whose nodes are static where they can be.
        evidence: of the plan's taps.
    """
    ranges = {name: evidence.of(name).find(Range) for name in plan.taps}
    unseen = {name for name, found in ranges.items() if found is not None and not found.count}
    found: dict[str, Demotion] = {}
    idle: set[Graph] = set()
    for scope in scopes(graph) if unseen else ():
        own = {tensor.name for node in scope.nodes for tensor in node.outputs} | {one.name for one in scope.inputs}
        tapped = own.intersection(plan.taps)
        if scope.parent is None or not (scope.parent in idle or (tapped and tapped <= unseen)):
            continue
        idle.add(scope)
        for node in scope.nodes:
            if plan.by_node[node.name].mode is Mode.STATIC:
                found[node.name] = Demotion(Mode.STORAGE, _IDLE)
    return found


def refuse_idle_bodies(graph: Graph, plan: Plan, evidence: Evidence) -> None:
    """Refuse a plan to be carried out as it is that has static nodes in bodies of which calibration says nothing.

    Args:
        graph: the prepared graph.
        plan: what is to be carried out.
        evidence: of the plan's taps.

    Raises:
        DataError: it has; the message names the first.
    """
    for name in leave_idle_bodies(graph, plan, evidence):
        raise DataError(
            f"node {name!r} is static in the plan, but {_IDLE}, expected values to set its scales by; give samples "
            "that run it, or make the nodes of the body storage"
        )


def _body_obstacle(node: Node, target: Target, *, in_scan: bool) -> str:
    """Return why nodes in the bodies of a node cannot be integer, or an empty string."""
    if not target.kernels.in_bodies:
        return f"stands in a body of {node.op}, where {target.name} is not known to have integer kernels"
    if node.domain or node.op not in CARRYING:
        return f"stands in a body of {node.op}, where activations are not calibrated"
    if in_scan and node.op != "Scan":
        return f"stands in a body of {node.op} inside a Scan, where activations are not calibrated"
    return ""
