"""Islands of integer nodes: which neighbours stay integer together, and which clamps vanish into their quantizers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnxq.graph import (
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
from onnxq.operators import OPERATORS, Role, operator_of
from onnxq.planning.obstacles import data_inputs
from onnxq.scheme import Spec
from onnxq.targets import Target

Limits = tuple[float, float]
UNLIMITED: Limits = (-math.inf, math.inf)


def absorbed_clamps(graph: Graph, specs: Mapping[Node, Spec], target: Target) -> dict[Node, Node]:
    """Map a clamp to the node in front of it, of which it is the only consumer, when a quantizer can stand for it.

    Both stand in one graph, for a runtime does not look across the border of a body.

    Args:
        graph: the graph, bodies included.
        specs: the wanted activation spec of each node that may become an integer kernel.
        target: the runtime.
    """
    homes = owner_graphs(graph)
    outputs = {tensor for scope in scopes(graph) for tensor in scope.outputs}
    found = {}
    for node in homes:
        if node.op not in target.kernels.fused.clamps or node.domain or node not in specs:
            continue
        source = node.inputs[0]
        maker = producer(source)
        limits = clamp_limits(node)
        if (
            maker not in specs
            or maker is None
            or homes[maker] is not homes[node]
            or len(source.outputs) != 1
            or source in outputs
            or limits is None
            or limits[0] != 0.0
        ):
            continue
        operator = operator_of(maker)
        affine = not specs[maker].symmetric
        if (
            affine
            and operator
            and maker.op in target.kernels.fused.ops
            and operator.role in (Role.COMPUTE, Role.ARITHMETIC)
        ):
            found[node] = maker
    return found


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
