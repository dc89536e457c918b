"""Which factors of channels cost nothing: those that products take in on all sides."""

from __future__ import annotations

from onnxq.algorithms.migration import Migration, divided_tensors, is_static
from onnxq.algorithms.sites import sites
from onnxq.ir import Graph, Variable, nodes
from onnxq.planning.plan import Plan


def folded(graph: Graph, plan: Plan, migration: Migration) -> Migration:
    """Return the factors that need no node, and no scale for each channel of data, in a plan's model.

    Others multiply or divide where floats become codes or codes floats. Tensors that pass factors on to each other keep
    them together or not at all.

    Args:
        graph: the prepared graph.
        plan: made for it.
        migration: the factors.
    """
    paid = _paid(graph, plan, migration)
    found = sites(graph, plan).found
    return migration.select({name for site in found if not site.tensors.keys() & paid for name in site.tensors})


def costly(graph: Graph, plan: Plan, migration: Migration) -> list[frozenset[str]]:
    """Return the tensors whose factors need a node or scales of their own, by what has them together or not at all.

    Args:
        graph: the prepared graph.
        plan: made for it.
        migration: the factors.
    """
    paid = _paid(graph, plan, migration)
    found = (frozenset(site.tensors) for site in sites(graph, plan).found if site.tensors.keys() & paid)
    return [names & migration.factors.keys() for names in found]


def _paid(graph: Graph, plan: Plan, migration: Migration) -> set[str]:
    """Return the tensors with factors that not all of what reads them takes in."""
    divided = divided_tensors(graph, plan, migration)
    tensors = {tensor.name: tensor for _, node in nodes(graph) for tensor in node.outputs}
    free = {name for name in divided if _read_as_codes(tensors[name], plan)}
    return (migration.factors.keys() & tensors.keys()) - free


def _read_as_codes(tensor: Variable, plan: Plan) -> bool:
    """Whether all that reads a tensor computes with its codes."""
    return not tensor.returned_by and all(is_static(plan, reader) for reader in tensor.outputs)
