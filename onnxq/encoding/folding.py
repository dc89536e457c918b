"""Which factors of channels cost nothing: those that products take in on all sides."""

from __future__ import annotations

from onnxq.encoding.migration import Migration, divided_tensors, is_static
from onnxq.encoding.sites import sites
from onnxq.graph import Graph, Variable, nodes
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
    divided = divided_tensors(graph, plan, migration)
    tensors = {tensor.name: tensor for _, node in nodes(graph) for tensor in node.outputs}
    free = {name for name in divided if _read_as_codes(tensors[name], plan)}
    computed = migration.factors.keys() & tensors.keys()
    kept = {
        name for site in sites(graph, plan).found if free >= site.tensors.keys() & computed for name in site.tensors
    }
    return migration.select(kept)


def _read_as_codes(tensor: Variable, plan: Plan) -> bool:
    """Whether all that reads a tensor computes with its codes."""
    return not tensor.returned_by and all(is_static(plan, reader) for reader in tensor.outputs)
