"""Islands of integer nodes: which neighbours stay integer together, and which clamps vanish into their quantizers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnxq.config.scheme import Spec
from onnxq.ir import (
    Constant,
    Graph,
    Node,
    Variable,
    is_fixed,
    operator_key,
    optional,
    owner_graphs,
    producer,
    scopes,
)
from onnxq.ops import OPERATORS, Role, operator_of
from onnxq.planning.obstacles import data_inputs
from onnxq.runtime.targets import Target

Limits = tuple[float, float]
UNLIMITED: Limits = (-math.inf, math.inf)

NO_KERNEL_IN_FRONT = "it vanishes only into a quantizer behind an integer kernel, and none stands in front of it"
"""Why a clamp stays whose neighbour in front stays in float."""

NO_CODES_BEHIND = "it vanishes only into a quantizer in front of integer kernels, and none reads what it gives"
"""Why a clamp stays whose neighbours behind stay in float."""


def absorbed_clamps(obstacles: Mapping[Node, str]) -> dict[Node, Node]:
    """Map a clamp to the node in front of it, of which it is the only consumer, when a quantizer can stand for it.

    Args:
        obstacles: of each clamp, see `clamp_obstacles`.
    """
    found = {clamp: producer(clamp.inputs[0]) for clamp, why in obstacles.items() if not why}
    return {clamp: maker for clamp, maker in found.items() if maker is not None}


def clamp_obstacles(graph: Graph, specs: Mapping[Node, Spec], target: Target) -> dict[Node, str]:
    """Return of each clamp why no quantizer can stand for it, or an empty string.

    It and the node in front of it stand in one graph, for a runtime does not look across the border of a body.

    Args:
        graph: the graph, bodies included.
        specs: the wanted activation spec of each node that may become an integer kernel.
        target: the runtime.
    """
    homes = owner_graphs(graph)
    returned = {tensor for scope in scopes(graph) for tensor in scope.outputs}

    def why(clamp: Node) -> str:
        source, limits = clamp.inputs[0], clamp_limits(clamp)
        maker = producer(source)
        if limits is None:
            return f"the limits of {clamp.op} are computed at run time, where the end of a range is fixed"
        if limits[0] != 0.0:
            return f"{clamp.op} has no integer kernel on {target.name}, and no range of codes stands for its limits"
        if maker is None or maker not in specs or homes[maker] is not homes[clamp] or not _ends_in_codes(maker, target):
            return NO_KERNEL_IN_FRONT
        if specs[maker].symmetric:
            return "symmetric codes do not begin where it clamps"
        if len(source.outputs) != 1 or source in returned:
            return "others read what it clamps"
        return ""

    fused = target.kernels.fused.clamps
    return {node: why(node) for node in homes if node.op in fused and not node.domain and node in specs}


def _ends_in_codes(node: Node, target: Target) -> bool:
    """Return whether a node has an integer kernel that computes what it gives."""
    operator = operator_of(node)
    computes = operator is not None and operator.role in (Role.COMPUTE, Role.ARITHMETIC)
    return computes and node.op in target.kernels.fused.ops


def clamp_limits(clamp: Node) -> Limits | None:
    """Return the least and greatest value that a clamp lets through, or None when they are computed at run time."""
    if clamp.op == "Relu":
        return 0.0, math.inf
    limits = list(UNLIMITED)
    for index in range(2):
        bound = optional(clamp, 1 + index)
        if bound is None:
            continue
        if not is_fixed(bound) or bound.nbytes == 0:
            return None
        limits[index] = float(bound.values.reshape(-1)[0])
    return limits[0], limits[1]


def integer_nodes(
    graph: Graph, obstacles: Mapping[Node, str], absorbed: Mapping[Node, Node], target: Target
) -> set[Node]:
    """Return the largest set of nodes in which every carrier and arithmetic node has integers before and behind it.

    Codes pass into bodies, which read the tensors of the graphs around them, but neither out of them nor through what
    they carry from iteration to iteration.
    """
    nodes = list(owner_graphs(graph))
    integer = {node for node in nodes if node not in obstacles and node not in absorbed}
    pending = [node for node in nodes if node in integer]
    while pending:
        node = pending.pop()
        if node not in integer or OPERATORS[operator_key(node)].role is Role.COMPUTE:
            continue
        before, behind = _before(node, absorbed), _behind(node, absorbed)
        if (
            all(neighbour in integer and neighbour.op not in target.kernels.fused.float_output for neighbour in before)
            and len(before) == sum(not isinstance(tensor, Constant) for tensor in data_inputs(node))
            and any(neighbour in integer for neighbour in behind)
        ):
            continue
        integer.discard(node)
        pending.extend((*before, *behind))
    return integer


def _before(node: Node, absorbed: Mapping[Node, Node]) -> list[Node]:
    """Return the nodes whose codes a node reads, looking through absorbed clamps."""
    producers = (producer(tensor) for tensor in data_inputs(node))
    return [absorbed.get(maker, maker) for maker in producers if maker is not None]


def _behind(node: Node, absorbed: Mapping[Node, Node]) -> list[Node]:
    """Return the nodes that read the codes of a node, looking through absorbed clamps."""
    return [consumer for tensor in quantized_outputs(node, absorbed) for consumer in tensor.outputs]


def quantized_outputs(node: Node, absorbed: Mapping[Node, Node]) -> list[Variable]:
    """Return the outputs that carry codes: behind the clamp when one is absorbed."""
    found = []
    for tensor in node.outputs:
        clamp = tensor.outputs[0] if len(tensor.outputs) == 1 else None
        found.append(clamp.outputs[0] if clamp is not None and absorbed.get(clamp) is node else tensor)
    return found
