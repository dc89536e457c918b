"""Functions, branches, loops and recurrent cells."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from onnx import defs

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    all_graphs,
    all_nodes,
    constant_values,
    is_constant,
    optional_input,
    producer,
    replace_nodes,
    replace_uses,
    without_absent,
)
from onnxq.onnx_api import inline_functions
from onnxq.ops import facts_of
from onnxq.rewrite import Changes, Match, NodePattern, OpsetPatternBuilder, Pass, RewriteContext, RewriteRule
from onnxq.rewrite.soundness import is_float


class InlineFunctions(Pass):
    """Inline every model-local function, so that its nodes can be quantized."""

    def apply(self, graph: Graph) -> Changes:
        functions = tuple(function.name for function in graph.functions)
        if functions:
            graph.adopt(inline_functions(graph))
        return Changes(functions)


# Branches -------------------------------------------------------------------------------------------------------------


class InlineIfs(Pass):
    """Replace an If with a constant condition by the nodes of the branch that it takes.

    ``If(true, then, else) -> nodes of then``

    Nodes and tensors of the branch get new names where names clash. Not for conditions that a caller may override.
    """

    def apply(self, graph: Graph) -> Changes:
        defined = Counter(part.name for scope in all_graphs(graph) for part in (*_tensors_of(scope), *scope.nodes))
        names = Names(graph)
        changed: list[str] = []
        pending = [graph]
        while pending:
            scope = pending.pop()
            branches = {node: branch for node in scope.nodes if (branch := _taken(node)) is not None}
            moved = {node: _moved(node, branch, scope, names, defined) for node, branch in branches.items()}
            replace_nodes(scope, moved)
            changed.extend(node.name for node in branches)
            # The inlined nodes may contain more Ifs.
            pending.extend([scope] if branches else [body for node in scope.nodes for body in node.subgraphs()])
        return Changes(tuple(changed))


def _tensors_of(scope: Graph) -> list[Tensor]:
    return [*scope.inputs, *scope.initializers, *(tensor for node in scope.nodes for tensor in node.outputs)]


def _taken(node: Node) -> Graph | None:
    if node.op != "If" or node.domain or not node.inputs:
        return None
    condition = constant_values(node.inputs[0])
    if condition is None or len(condition) != 1:
        return None
    branch = node.attrs.get("then_branch" if condition[0] else "else_branch")
    if not isinstance(branch, Graph) or branch.inputs or len(branch.outputs) != len(node.outputs):
        return None
    return branch if all(tensor.name for tensor in branch.outputs) else None


def _moved(node: Node, branch: Graph, scope: Graph, names: Names, defined: Counter[str]) -> list[Node]:
    """Return the nodes of a branch, rewired to make the outputs of the If, and move its constants."""
    nodes, results = list(branch.nodes), list(branch.outputs)
    for part in (*_tensors_of(branch), *nodes):
        if defined[part.name] > 1 and part.name:
            part.name = names.unique(part.name)
    scope.initializers.extend(branch.initializers)
    scope.sparse_initializers.extend(branch.sparse_initializers)
    for inner in nodes:
        for body in inner.subgraphs():
            body.parent = scope
    inside = set(nodes)
    branch.outputs, branch.nodes[:] = [], []
    for old, new in zip(node.outputs, results, strict=True):
        fresh = isinstance(new, Variable) and bool(new.inputs) and new.inputs[0] in inside and not new.graph_output_of
        if old.graph_output_of and not fresh:
            # A graph output has its own name, which no input or constant can take.
            twin = Variable(names.unique(old.name))
            nodes.append(Node("Identity", names.unique(f"{node.name}.Identity"), {}, [new], [twin]))
            new = twin
        if old.graph_output_of:
            new.take_type(old)
        replace_uses(old, new, graph_outputs=True)
    return nodes


# Loops ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LiftInvariants(Pass):
    """Remove states of a Loop or Scan that no iteration changes.

    ``Loop(n, c, s; body(i, c, s) -> (c, s)) -> Loop(n, c; body(i, c) -> (c))``

    The body and the readers of the final state read the initial value instead. TensorFlow passes weights through Loops
    as states, and as states they cannot be quantized as weights. Not for states that are graph outputs. If the operator
    needs the state at this opset, only the readers change.
    """

    def apply(self, graph: Graph) -> Changes:
        changed: list[str] = []
        for scope, node in all_nodes(graph):
            invariant = [state for state in _states(node) if _is_invariant(state)]
            lifted = [_lift(state, scope.opset) for state in reversed(invariant)]
            if any(lifted):
                changed.append(node.name)
        return Changes(tuple(changed))


class _State(NamedTuple):
    """A state of a Loop or Scan.

    Attributes:
        node: the operator.
        body: its body.
        place: index among the inputs of both.
        result: index among the outputs of the operator.
        handed_on: index among the outputs of the body.
    """

    node: Node
    body: Graph
    place: int
    result: int
    handed_on: int

    @property
    def last(self) -> Tensor | None:
        """The final value; None if it is omitted."""
        outputs = self.node.outputs
        return outputs[self.result] if self.result < len(outputs) and outputs[self.result].name else None


def _states(node: Node) -> list[_State]:
    if node.domain or node.op not in ("Loop", "Scan"):
        return []
    (body,) = node.subgraphs()
    if len(body.inputs) != len(node.inputs):
        return []  # Scans of opset 8 have the lengths of their sequences besides.
    is_loop = node.op == "Loop"
    places = range(2, len(node.inputs)) if is_loop else range(len(node.inputs) - node.attrs["num_scan_inputs"])
    # A Loop's body returns its condition first.
    return [_State(node, body, place, index, index + is_loop) for index, place in enumerate(places)]


def _is_invariant(state: _State) -> bool:
    value, handed_on = state.body.inputs[state.place], state.body.outputs[state.handed_on]
    # A graph must make its outputs, so a state that is also another output stays.
    if len(value.graph_output_of) > (handed_on is value) or not state.node.inputs[state.place].name:
        return False
    while handed_on is not value and (maker := _identity(handed_on)) is not None:
        handed_on = maker.inputs[0]
    return handed_on is value and (state.last is None or not state.last.graph_output_of)


def _identity(tensor: Tensor) -> Node | None:
    maker = producer(tensor)
    return maker if maker is not None and maker.op == "Identity" and not maker.domain else None


def _lift(state: _State, opset: int) -> bool:
    """Remove a state, or only the reads of its final value if the operator needs it; return whether it changed."""
    node, body, place = state.node, state.body, state.place
    first, last = node.inputs[place], state.last
    read = last is not None and bool(last.outputs)
    if last is not None:
        replace_uses(last, first)
    has_output = state.result < len(node.outputs)
    schema = defs.get_schema(node.op, opset)
    if len(node.inputs) <= schema.min_input or len(node.outputs) - has_output < schema.min_output:
        return read
    del body.outputs[state.handed_on]
    replace_uses(body.inputs[place], first)
    del body.inputs[place]
    if has_output:
        del node.outputs[state.result]
    del node.inputs[place]
    return True


# Recurrent cells ------------------------------------------------------------------------------------------------------

_STATES = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
"""Indices of the inputs that are initial states."""


class DropInitialStates(RewriteRule):
    """``GRU(x, W, R, B, lengths, zeros) -> GRU(x, W, R, B, lengths)``.

    Remove initial states of LSTM, GRU and RNN that are zero, the default.

    The nodes that computed the zeros from an unknown batch size are then unused.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        return tuple(getattr(op, cell)(..., name="cell") for cell in _STATES)

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        states = {index: optional_input(match.cell, index) for index in _STATES[match.cell.op]}
        zeros = {index for index, state in states.items() if state is not None and _holds_zeros(state)}
        if not zeros:
            return "none of its initial states is zero"
        inputs = [
            None if index in zeros or not tensor.name else tensor for index, tensor in enumerate(match.cell.inputs)
        ]
        return new.like(match.cell, *without_absent(inputs))


def _holds_zeros(tensor: Any) -> bool:
    while not isinstance(tensor, Constant):
        maker = producer(tensor)
        if maker is None or maker.domain or not maker.inputs:
            return False
        if maker.op == "ConstantOfShape":
            filling = maker.attrs.get("value")
            return filling is None or (isinstance(filling, Constant) and not filling.values.any())
        if not facts_of(maker).keeps_range:
            return False
        tensor = maker.inputs[0]
    return is_constant(tensor) and is_float(tensor) and not tensor.values.any()
