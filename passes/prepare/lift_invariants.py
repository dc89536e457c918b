"""Let the bodies of loops read what never changes from around them instead of handing it on."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.graph import Changes, Graph, Node, Pass, Tensor, Variable, replace_uses, scopes


@dataclass(frozen=True)
class LiftInvariants(Pass):
    """Take states out of a Loop or Scan that each iteration hands on as it found them.

    The body reads what the state began with, and so does whatever read the last one: Loops of TensorFlow hand their
    weights on so, which are computed at run time as long as they are states. Leaves states that a graph returns.
    """

    def apply(self, graph: Graph) -> Changes:
        """Lift; ``changed`` holds the names of the loops."""
        changed: list[str] = []
        for scope in scopes(graph):
            for node in scope.nodes:
                states = _states(node)
                places = [place for place in states if _is_invariant(node, place, states)]
                for place in reversed(places):
                    _lift(node, place, states)
                if places:
                    changed.append(node.name)
        return Changes(tuple(changed))


def _states(node: Node) -> range:
    """Return the places of a loop's states among what it and its body are given."""
    if node.domain or node.op not in ("Loop", "Scan"):
        return range(0)
    (body,) = node.bodies()
    if len(body.inputs) != len(node.inputs):
        return range(0)  # Scans of opset 8 have the lengths of their sequences besides.
    if node.op == "Loop":
        return range(2, len(node.inputs))
    return range(len(node.inputs) - node.attrs["num_scan_inputs"])


def _handed_on(node: Node, place: int, states: range) -> int:
    """Return where the body returns the state that is given at a place; a Loop's returns its condition first."""
    return place - states.start + (node.op == "Loop")


def _is_invariant(node: Node, place: int, states: range) -> bool:
    (body,) = node.bodies()
    state, handed_on = body.inputs[place], body.outputs[_handed_on(node, place, states)]
    while handed_on is not state and (maker := _identity(handed_on)) is not None:
        handed_on = maker.inputs[0]
    last = _last(node, place, states)
    return handed_on is state and sum(one is state for one in body.outputs) <= 1 and not (last and last.returned_by)


def _identity(tensor: Tensor) -> Node | None:
    maker = tensor.inputs[0] if isinstance(tensor, Variable) and tensor.inputs else None
    return maker if maker is not None and maker.op == "Identity" and not maker.domain else None


def _last(node: Node, place: int, states: range) -> Tensor | None:
    """Return what the node gives of a state in the end, where it is named."""
    index = place - states.start
    return node.outputs[index] if index < len(node.outputs) and node.outputs[index].name else None


def _lift(node: Node, place: int, states: range) -> None:
    (body,) = node.bodies()
    first, last = node.inputs[place], _last(node, place, states)
    del body.outputs[_handed_on(node, place, states)]
    replace_uses(body.inputs[place], first)
    del body.inputs[place]
    if last is not None:
        replace_uses(last, first)
    if place - states.start < len(node.outputs):
        del node.outputs[place - states.start]
    del node.inputs[place]
