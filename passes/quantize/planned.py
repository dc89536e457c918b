"""What the passes share that carry out a plan: which nodes it means, and new nodes in their place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from onnxq.algorithms.encodings import Encodings
from onnxq.config.scheme import Mode
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    all_graphs,
    constant,
    insert_nodes,
    is_constant,
    optional_input,
    replace_nodes,
)
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.planning.planner import bias_of
from onnxq.rewrite import Changes


@dataclass(frozen=True)
class NodeReplacement:
    """The new nodes of one planned node.

    Attributes:
        instead: what takes its place and makes its outputs; the node stays where there is nothing.
        first: what computes from constants what the node reads, and goes to the beginning of its graph.
    """

    instead: Sequence[Node] = ()
    first: Sequence[Node] = ()


def copy_of(data: Tensor, name: str, names: Names) -> Node:
    """Return a node that copies a tensor in each run, so that a runtime does not take what reads the copy together.

    Args:
        data: the tensor, which nobody reads the copy of yet.
        name: what the copy is called after.
        names: of the graph.
    """
    copy = Variable(names.unique(f"{name}.copy"), data.dtype, data.shape)
    # The sum of one tensor is no no-op to a runtime, unlike Identity.
    return Node("Sum", names.unique(f"{name}.share"), {}, [data], [copy])


def planned_nodes(
    graph: Graph, plan: Plan, mode: Mode, op_types: Collection[str] | None = None
) -> Iterator[tuple[Graph, Node, Decision]]:
    """Yield the nodes of a graph and its bodies to which a plan gives a mode, with the graph that lists each.

    Args:
        graph: the graph.
        plan: names the nodes.
        mode: of the nodes that are meant.
        op_types: their operators; None means all.
    """
    for scope in all_graphs(graph):
        for node in scope.nodes:
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
    """Rewrite the planned nodes of one weight, and leave those whose weight is codes already.

    Args:
        graph: the graph, which is edited in place with its bodies when all nodes have been looked at.
        plan: names the nodes and their weights.
        mode: of the nodes that are meant.
        rewrite: takes the graph that lists a node, the node, its float weight, and what is planned for that; returns
            the new nodes, or the reason why it leaves the node as it is.
        op_types: the operators that are meant; None means all.
    """
    changed: list[str] = []
    left: list[tuple[str, str]] = []
    instead: dict[Node, Sequence[Node]] = {}
    first: dict[Graph, list[Node]] = {}
    for scope, node, decision in planned_nodes(graph, plan, mode, op_types):
        weight = decision.weights[0]
        source = node.inputs[weight.index]
        made = rewrite(scope, node, source, weight) if is_constant(source) else "its weight is codes already"
        if isinstance(made, str):
            left.append((node.name, made))
            continue
        if made.instead:
            instead[node] = made.instead
        first.setdefault(scope, []).extend(made.first)
        changed.append(node.name)
    replace_nodes(graph, instead)
    for scope, nodes in first.items():
        insert_nodes(scope, first=nodes)
    return Changes(tuple(changed), tuple(left))


def correct_bias(node: Node, codes: Encodings, names: Names) -> None:
    """Let a product have the bias that makes up for the rounding of its weight, where there is one.

    A bias that several nodes share becomes one for each, called ``b.corrected``; a convolution that had none gets one.

    Args:
        node: the product, which still reads its float weight.
        codes: hold the bias.
        names: of the graph.
    """
    bias = codes.biases.get(node.name)
    place = bias_of(node) if bias is not None and bias.values is not None else None
    if bias is None or bias.values is None or place is None:
        return
    owner, index = place
    found = optional_input(owner, index)
    made = constant(names.unique(f"{found.name if found is not None else node.name + '.bias'}.corrected"), bias.values)
    owner.inputs = [*owner.inputs[:index], made, *owner.inputs[index + 1 :]]
