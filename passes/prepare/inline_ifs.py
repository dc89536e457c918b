"""Put the branch that an If always takes in its place."""

from __future__ import annotations

from collections import Counter

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    replace_nodes,
    replace_uses,
    scopes,
)
from onnxq.rewrite import Changes, Pass


class InlineIfs(Pass):
    """Replace an If whose condition is a constant by the nodes of the branch that it takes.

    What the branch holds gets new names where others have the same. Leaves conditions that a caller may override.
    """

    def apply(self, graph: Graph) -> Changes:
        """Inline; ``changed`` holds the names of the Ifs."""
        defined = Counter(part.name for scope in scopes(graph) for part in (*_made(scope), *scope.nodes))
        names = Names(graph)
        changed: list[str] = []
        pending = [graph]
        while pending:
            scope = pending.pop()
            found = {node: branch for node in scope.nodes if (branch := _taken(node)) is not None}
            moved = {node: _moved(node, branch, scope, names, defined) for node, branch in found.items()}
            replace_nodes(scope, moved)
            changed.extend(node.name for node in found)
            # What was inlined may hold more of them.
            pending.extend([scope] if found else [body for node in scope.nodes for body in node.bodies()])
        return Changes(tuple(changed))


def _made(scope: Graph) -> list[Tensor]:
    return [*scope.inputs, *scope.initializers, *(tensor for node in scope.nodes for tensor in node.outputs)]


def _taken(node: Node) -> Graph | None:
    """Return the branch that an If always takes, if there is one."""
    if node.op != "If" or node.domain or not node.inputs:
        return None
    condition = node.inputs[0]
    if not isinstance(condition, Constant) or condition.input_source is not None or condition.values.size != 1:
        return None
    branch = node.attrs.get("then_branch" if condition.values.all() else "else_branch")
    if not isinstance(branch, Graph) or branch.inputs or len(branch.outputs) != len(node.outputs):
        return None
    return branch if all(tensor.name for tensor in branch.outputs) else None


def _moved(node: Node, branch: Graph, scope: Graph, names: Names, defined: Counter[str]) -> list[Node]:
    """Return the nodes of a branch, which now make what the If made, and move its constants."""
    made, results = list(branch.nodes), list(branch.outputs)
    for part in (*_made(branch), *made):
        if defined[part.name] > 1 and part.name:
            part.name = names.fresh(part.name)
    scope.initializers.extend(branch.initializers)
    scope.sparse_initializers.extend(branch.sparse_initializers)
    for inner in made:
        for body in inner.bodies():
            body.parent = scope
    inside = set(made)
    branch.outputs, branch.nodes[:] = [], []
    for old, new in zip(node.outputs, results, strict=True):
        fresh = isinstance(new, Variable) and bool(new.inputs) and new.inputs[0] in inside and not new.returned_by
        if old.returned_by and not fresh:
            # An output of the graph has a name of its own, which no input and no constant can take.
            twin = Variable(names.fresh(old.name))
            made.append(Node("Identity", names.fresh(f"{node.name}.Identity"), {}, [new], [twin]))
            new = twin
        if old.returned_by:
            new.dtype, new.shape, new.source = old.dtype, old.shape, old.source
        replace_uses(old, new, graph_outputs=True)
    return made
