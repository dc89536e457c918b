"""Let the bodies of loops read what never changes from around them instead of handing it on."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import defs

from onnxq.ir import Graph, Node, Tensor, Variable, replace_uses, scopes
from onnxq.rewrite import Changes, Pass


@dataclass(frozen=True)
class LiftInvariants(Pass):
    """Take states out of a Loop or Scan that each iteration hands on as it found them.

    The body reads what the state began with, and so does whatever read the last one: Loops of TensorFlow hand their
    weights on so, which are computed at run time as long as they are states. Leaves states that a graph returns, and
    as many as the operator needs at this opset; the model then reads what the last of these began with.
    """

    def apply(self, graph: Graph) -> Changes:
        """Lift; ``changed`` holds the names of the loops."""
        changed: list[str] = []
        for scope in scopes(graph):
            for node in scope.nodes:
                states = _states(node)
                places = [place for place in states if _is_invariant(node, place, states)]
                lifted = [_lift(node, place, states, scope.opset) for place in reversed(places)]
                if any(lifted):
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
    # What a graph returns must be made in it, so a state that is another result as well stays.
    if len(state.returned_by) > (handed_on is state) or not node.inputs[place].name:
        return False
    while handed_on is not state and (maker := _identity(handed_on)) is not None:
        handed_on = maker.inputs[0]
    last = _last(node, place, states)
    return handed_on is state and not (last and last.returned_by)


def _identity(tensor: Tensor) -> Node | None:
    maker = tensor.inputs[0] if isinstance(tensor, Variable) and tensor.inputs else None
    return maker if maker is not None and maker.op == "Identity" and not maker.domain else None


def _last(node: Node, place: int, states: range) -> Tensor | None:
    """Return what the node gives of a state in the end, where it is named."""
    index = place - states.start
    return node.outputs[index] if index < len(node.outputs) and node.outputs[index].name else None


def _lift(node: Node, place: int, states: range, opset: int) -> bool:
    """Take a state out, or where the operator needs it only the reads of its last value; return what changed."""
    (body,) = node.bodies()
    first, last = node.inputs[place], _last(node, place, states)
    read = last is not None and bool(last.outputs)
    if last is not None:
        replace_uses(last, first)
    outputs = len(node.outputs) - (place - states.start < len(node.outputs))
    schema = defs.get_schema(node.op, opset)
    if len(node.inputs) <= schema.min_input or outputs < schema.min_output:
        return read
    del body.outputs[_handed_on(node, place, states)]
    replace_uses(body.inputs[place], first)
    del body.inputs[place]
    if place - states.start < len(node.outputs):
        del node.outputs[place - states.start]
    del node.inputs[place]
    return True
