"""Write recurrent cells with large weights as a Scan of products, where a runtime multiplies codes in bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.errors import ModelError
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    is_fixed,
    joined_origins,
    nodes,
    optional,
    replace_nodes,
)
from onnxq.lowering import Chain
from onnxq.onnx_api import infer_shapes
from onnxq.passes.prepare.upgrade_opset import UpgradeOpset
from onnxq.rewrite import Changes, Pass
from onnxq.runtime.targets import LARGE_WEIGHT

# Split and Squeeze take sizes and axes as inputs since this opset.
_OPSET = 13
_GATES = 3
_USUAL = {"direction", "hidden_size", "linear_before_reset"}
_REVERSE = {"forward": 0, "reverse": 1}


class ScanCells(Pass):
    """GRU becomes one product of all steps with the weight of what it reads, and a Scan over what follows.

    Each step reads the whole weight of the state. OpenVINO's cell reads floats, also where the model stores codes, and
    a product in a body the codes themselves, a quarter of the bytes: nsnet2 takes half the time. Weights that stay in
    the cache of a core gain nothing. Leaves cells of several directions, of other activations, of sequences of unequal
    lengths, and those that reset the state before it is multiplied.
    """

    def apply(self, graph: Graph) -> Changes:
        """Rewrite; ``changed`` holds the names of the cells, which the Scans keep."""
        found = _large_cells(graph)
        left = {node: problem for node in found if (problem := _obstacle(node))}
        reasons = tuple((_name(node), problem) for node, problem in left.items())
        if len(left) == len(found):
            return Changes(left=reasons)
        try:
            UpgradeOpset(_OPSET).apply(graph)
        except ModelError as error:
            return Changes(left=(*reasons, *((_name(node), str(error)) for node in found if node not in left)))
        infer_shapes(graph)
        names = Names(graph)
        # The upgrade makes new nodes.
        cells = {node: scope for node, scope in _large_cells(graph).items() if not _obstacle(node)}
        changed = tuple(_name(node) for node in cells)
        replace_nodes(graph, {node: _scan(node, scope, names) for node, scope in cells.items()})
        return Changes(changed, reasons)


def _large_cells(graph: Graph) -> dict[Node, Graph]:
    return {node: scope for scope, node in nodes(graph) if node.op == "GRU" and not node.domain and _is_large(node)}


def _name(node: Node) -> str:
    """Return the name, or for a node without one its operator and first output."""
    return node.name or f"{node.op}_{next((tensor.name for tensor in node.outputs if tensor.name), '')}"


def _is_large(node: Node) -> bool:
    weight = node.inputs[2]
    return is_fixed(weight) and weight.values.size >= LARGE_WEIGHT


def _obstacle(node: Node) -> str:
    """Return why a cell stays, or an empty string."""
    if not node.attrs.get("linear_before_reset", 0):
        return "it resets the state before it multiplies it"
    if set(node.attrs) - _USUAL or node.attrs.get("direction", "forward") not in _REVERSE:
        return "it has other directions or activations than the usual ones"
    if optional(node, 4) is not None:
        return "its sequences have lengths of their own"
    if not all(is_fixed(tensor) for tensor in (node.inputs[1], *node.inputs[3:4]) if tensor.name):
        return "its weights are computed at run time"
    if node.inputs[0].dtype != np.float32:
        return "it does not compute in float32"
    state = optional(node, 5)
    return "the rank of its first state is not known" if state is not None and state.shape is None else ""


def _scan(node: Node, scope: Graph, names: Names) -> list[Node]:
    """Return the nodes that make what a cell makes."""
    data, weight, recurrent = node.inputs[:3]
    size = recurrent.shape[-1]
    made = _Made(node, names)
    bias = optional(node, 3)
    biases = np.zeros(2 * _GATES * size, np.float32) if bias is None else bias.values[0]
    product = made("MatMul", "of_data", data, made.store("of_data.values", np.ascontiguousarray(weight.values[0].T)))
    given = made("Add", "given", product, made.store("given.values", biases[: _GATES * size]))
    state = optional(node, 5)
    first = _zeros(made, data, size) if state is None else made("Squeeze", "first", state, made.numbers(0))

    of_state = made.store("of_state.values", np.ascontiguousarray(recurrent.values[0].T))
    body = _step(node, names, of_state, biases[_GATES * size :])
    body.parent, body.opset_imports = scope, scope.opset_imports
    direction = _REVERSE[node.attrs.get("direction", "forward")]
    attributes = {"body": body, "num_scan_inputs": 1}
    attributes.update(scan_input_directions=[direction], scan_output_directions=[direction])
    last, every = (made.variable(role, np.float32) for role in ("last", "every"))
    made.append(Node("Scan", node.name, attributes, [first, given], [last, every]))
    outputs, (all_steps, last_step) = list(node.outputs), (*node.outputs, None, None)[:2]
    node.outputs.clear()
    for tensor, source, axis in ((all_steps, every, 1), (last_step, last, 0)):
        if tensor in outputs and tensor is not None and tensor.name:
            made("Unsqueeze", "outputs", source, made.numbers(axis), output=tensor)
    return made.nodes


def _step(node: Node, names: Names, recurrent: Constant, bias: npt.NDArray[Any]) -> Graph:
    """Return the body: a state and what is given at a step become the next state, twice."""
    size = recurrent.shape[0]
    made = _Made(node, names)
    state, given = (made.variable(role, np.float32) for role in ("state", "step"))
    product = made("MatMul", "of_state", state, recurrent)
    wanted = made("Add", "wanted", product, made.store("wanted.values", bias))
    thirds = made.numbers(size, size, size)
    kept_given, reset_given, new_given = made.split(given, thirds)
    kept_wanted, reset_wanted, new_wanted = made.split(wanted, thirds)
    # Gates apart: what follows the products is one kernel then.
    kept = made("Sigmoid", "kept", made("Add", "kept", kept_given, kept_wanted))
    reset = made("Sigmoid", "reset", made("Add", "reset", reset_given, reset_wanted))
    new = made("Tanh", "new", made("Add", "new", new_given, made("Mul", "new", reset, new_wanted)))
    following = made("Add", "following", made("Mul", "kept", kept, made("Sub", "change", state, new)), new)
    output = made("Identity", "output", following)
    # onnxruntime runs no Scan whose body does not say how many axes its outputs have.
    following.shape, output.shape = [None, size], [None, size]
    return Graph(made.nodes, [state, given], [following, output], made.named("body"))


def _zeros(made: _Made, data: Tensor, size: int) -> Tensor:
    """Return a state of zeros for each row of a batch."""
    rows = made("Gather", "rows", made("Shape", "shape", data, dtype=np.int64), made.numbers(1), dtype=np.int64)
    shape = made("Concat", "state_shape", rows, made.numbers(size), dtype=np.int64, axis=0)
    return made("Expand", "first", made.store("first.values", np.zeros((1, size), np.float32)), shape)


class _Made(Chain):
    """Nodes that take the place of a cell, named after it; what they make is float32 where nothing else is said."""

    def __init__(self, cell: Node, names: Names) -> None:
        super().__init__(cell.name, names, joined_origins((cell,)))

    def __call__(
        self,
        op: str,
        role: str,
        *inputs: Tensor,
        output: Variable | None = None,
        dtype: type = np.float32,
        **attributes: Any,
    ) -> Variable:
        made = self.variable(role, dtype) if output is None else output
        self.append(Node(op, self.named(role), attributes, list(inputs), [made]))
        return made

    def split(self, data: Tensor, sizes: Constant) -> Sequence[Variable]:
        parts = [self.variable("part", np.float32) for _ in sizes.values]
        self.append(Node("Split", self.named("split"), {"axis": -1}, [data, sizes], parts))
        return parts

    def numbers(self, *values: int) -> Constant:
        return self.store("numbers", np.array(values, np.int64))
