"""Shared by the passes that apply a plan: select its nodes and replace them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from onnxq.algorithms.encodings import Encodings
from onnxq.config.scheme import Mode
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    NodeBuilder,
    Tensor,
    Variable,
    all_nodes,
    insert_nodes,
    is_constant,
    optional_input,
    replace_nodes,
)
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.planning.planner import bias_of
from onnxq.rewrite import Changes, Pass


@dataclass(frozen=True, eq=False)
class PlannedPass(Pass):
    """A pass that applies a plan.

    Attributes:
        plan: names the nodes, their weights and activations.
    """

    plan: Plan


@dataclass(frozen=True, eq=False)
class EncodedPass(PlannedPass):
    """A pass that writes the quantized values of a plan.

    Attributes:
        encodings: encodings of the weights and activations, and corrected biases.
    """

    encodings: Encodings


@dataclass(frozen=True)
class NodeReplacement:
    """The new nodes of one planned node.

    Attributes:
        instead: nodes that replace it and produce its outputs; if empty, the node stays.
        first: nodes that compute its inputs from constants, for the beginning of its graph.
    """

    instead: Sequence[Node] = ()
    first: Sequence[Node] = ()


def copy_of(data: Tensor, new: NodeBuilder) -> Variable:
    """Append a node that copies a tensor in each run, so that a runtime does not fuse its readers with its producer."""
    # A runtime removes an Identity, but not a Sum of one tensor.
    return new.node("Sum", "share", [data], "copy", like=data)


def planned_nodes(
    graph: Graph, plan: Plan, mode: Mode, op_types: Collection[str] | None = None
) -> Iterator[tuple[Graph, Node, Decision]]:
    """Yield the nodes of a graph and its bodies that a plan gives a mode, each with its graph.

    `op_types` restricts the operators; None means all.
    """
    for scope, node in all_nodes(graph):
        decision = plan.by_node.get(node.name)
        if decision is not None and decision.mode is mode and (op_types is None or node.op in op_types):
            yield scope, node, decision


def rewrite_planned(
    graph: Graph,
    plan: Plan,
    mode: Mode,
    rewrite: Callable[[Graph, Node, Constant, Weight], NodeReplacement | str],
    op_types: Collection[str] | None = None,
) -> Changes:
    """Rewrite planned nodes with one weight; skip nodes whose weight is already quantized.

    Args:
        graph: edited in place with its bodies, after all nodes were visited.
        plan: names the nodes and their weights.
        mode: the wanted mode.
        rewrite: takes a graph, its node, the float weight and its plan. Returns the new nodes, or why it skips the
            node.
        op_types: the wanted operators; None means all.
    """
    changed: list[str] = []
    skipped: list[tuple[str, str]] = []
    instead: dict[Node, Sequence[Node]] = {}
    first: dict[Graph, list[Node]] = defaultdict(list)
    for scope, node, decision in planned_nodes(graph, plan, mode, op_types):
        weight = decision.weights[0]
        source = node.inputs[weight.index]
        replacement = rewrite(scope, node, source, weight) if is_constant(source) else "its weight is quantized already"
        if isinstance(replacement, str):
            skipped.append((node.name, replacement))
            continue
        if replacement.instead:
            instead[node] = replacement.instead
        first[scope] += replacement.first
        changed.append(node.name)
    replace_nodes(graph, instead)
    insert_nodes(graph, first=first)
    return Changes(tuple(changed), tuple(skipped))


def correct_bias(node: Node, encodings: Encodings, names: Names) -> None:
    """Replace the bias of a compute node by the corrected one, if there is one.

    A shared bias becomes a separate `b.corrected` for each node. A node without a bias gets one.
    """
    bias = encodings.biases.get(node.name)
    place = bias_of(node) if bias is not None and bias.values is not None else None
    if bias is None or bias.values is None or place is None:
        return
    owner, index = place
    float_bias = optional_input(owner, index)
    base = f"{node.name}.bias" if float_bias is None else float_bias.name
    corrected = names.store(f"{base}.corrected", bias.values)
    owner.inputs = [*owner.inputs[:index], corrected, *owner.inputs[index + 1 :]]
