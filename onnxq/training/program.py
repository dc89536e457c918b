"""Running a graph in torch, node by node, with hooks that replace inputs; and cutting it into subgraphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from onnxq.errors import DataError, ModelError, OnnxqError
from onnxq.ir import Constant, Graph, Node, Variable, to_model
from onnxq.ir import Tensor as GraphTensor
from onnxq.ir.order import tensors_read
from onnxq.runtime.sessions import Array, Session, open_session, run
from onnxq.training.operators import Call, function_of

# As many weights as the blocks of residual networks and transformers have.
_MAX_WEIGHTS = 4


@dataclass(frozen=True, eq=False)
class Subgraph:
    """Consecutive nodes of a main graph.

    Attributes:
        nodes: the nodes.
        inputs: tensors that they read: inputs of the graph, and outputs of earlier subgraphs.
        outputs: tensors that later subgraphs read, or that are outputs of the graph.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]

    @classmethod
    def whole(cls, graph: Graph) -> Subgraph:
        """Return all of a graph."""
        return cls(tuple(graph.nodes), tuple(graph.inputs), tuple(graph.outputs))


def cut_graph(graph: Graph, weights: Mapping[Node, int]) -> tuple[Subgraph, ...]:
    """Cut a graph into subgraphs of one to four quantized weights, where the fewest tensors cross.

    If several places have the fewest tensors, the last one is taken. Tensors that quantization does not change, such as
    masks, are not counted.

    Args:
        graph: the graph, with its nodes in order.
        weights: number of quantized weights of each node of the main graph that has any quantizer.
    """
    nodes = list(graph.nodes)
    crossing = _crossing(nodes, weights)
    counts = [0, *accumulate(weights.get(node, 0) for node in nodes)]
    bounds = [0]
    while bounds[-1] < len(nodes):
        start = bounds[-1]
        places = [end for end in range(start + 1, len(nodes) + 1) if 0 < counts[end] - counts[start] <= _MAX_WEIGHTS]
        # The rest has no weight, or one node has more than the maximum.
        best = min(places, key=lambda end: (crossing[end - 1], -end), default=_behind_next(counts, start))
        bounds.append(best if counts[best] < counts[-1] else len(nodes))
    return tuple(_subgraph(graph, start, end) for start, end in pairwise(bounds))


def _behind_next(counts: list[int], start: int) -> int:
    """Return the end of a subgraph of one node with too many weights."""
    return next((end for end in range(start + 1, len(counts)) if counts[end] > counts[start]), len(counts) - 1)


def _crossing(nodes: list[Node], weights: Mapping[Node, int]) -> list[int]:
    """Return how many tensors changed by quantization are live after each node."""
    last = {tensor: index for index, node in enumerate(nodes) for tensor in tensors_read(node)}
    changed, live, counts = set[GraphTensor](), set[GraphTensor](), []
    for index, node in enumerate(nodes):
        if node in weights or any(tensor in changed for tensor in tensors_read(node)):
            changed.update(node.outputs)
            live.update(node.outputs)
        live = {tensor for tensor in live if last.get(tensor, -1) > index}
        counts.append(len(live))
    return counts


def _subgraph(graph: Graph, start: int, end: int) -> Subgraph:
    nodes = tuple(graph.nodes[start:end])
    outputs = dict.fromkeys(tensor for node in nodes for tensor in node.outputs if tensor.name)
    later = {tensor for node in graph.nodes[end:] for tensor in tensors_read(node)} | set(graph.outputs)
    before = {tensor for node in graph.nodes[:start] for tensor in node.outputs} | set(graph.inputs)
    read = dict.fromkeys(
        tensor for node in nodes for tensor in tensors_read(node) if isinstance(tensor, Variable) and tensor in before
    )
    return Subgraph(nodes, tuple(read), tuple(tensor for tensor in outputs if tensor in later))


InputHook = Callable[[Node, int, Tensor], Tensor]
"""Takes a node, the index of an input and its tensor, and returns the tensor that the node computes with."""


def unchanged(node: Node, index: int, value: Tensor) -> Tensor:
    """Return a tensor as it is."""
    return value


_MAX_REASON_LENGTH = 200


@dataclass(eq=False)
class Program:
    """A graph that runs in torch. Operators that torch lacks run in onnxruntime, without gradients.

    Attributes:
        graph: the graph, which is only read.
        sessions: sessions of the nodes that run in onnxruntime, opened on first use.
    """

    graph: Graph
    sessions: dict[Node, Session] = field(default_factory=dict)

    def run(
        self,
        fed: Mapping[str, Tensor],
        constants: Mapping[Constant, Tensor],
        input_hook: InputHook = unchanged,
        output_hook: InputHook = unchanged,
        subgraph: Subgraph | None = None,
    ) -> dict[str, Tensor]:
        """Run the graph, or a subgraph, once.

        Args:
            fed: tensors by input name.
            constants: tensors by constant.
            input_hook: called for each input of each node.
            output_hook: called for each output of the graph, with the node that makes it and the index there.
            subgraph: the part to run; None runs the whole graph.

        Returns:
            Tensors by output name.

        Raises:
            DataError: an input is missing, or a node fails on the values of the sample.
            ModelError: a node makes something other than a numeric tensor.
        """
        subgraph = subgraph or Subgraph.whole(self.graph)
        values: dict[Any, Tensor] = {}
        for tensor in subgraph.inputs:
            if tensor.name not in fed:
                raise DataError(f"input {tensor.name!r} is missing, found {', '.join(fed) or 'nothing'}; feed it")
            values[tensor] = fed[tensor.name]
        execution = _Execution(self, constants, input_hook, values, _device(fed.values()))
        execution.nodes(subgraph.nodes)
        outputs = {}
        for tensor in subgraph.outputs:
            value = execution.value(tensor)
            if isinstance(tensor, Variable) and tensor.inputs:
                value = output_hook(tensor.inputs[0], tensor.inputs[0].outputs.index(tensor), value)
            outputs[tensor.name] = value
        return outputs


def _device(tensors: Iterable[Tensor]) -> torch.device:
    cpu = torch.device("cpu")
    return next((tensor.device for tensor in tensors if tensor.device != cpu), cpu)


@dataclass(eq=False)
class _Execution:
    """One run, with the values so far, also of subgraphs of nodes."""

    program: Program
    constants: Mapping[Constant, Tensor]
    input_hook: InputHook
    values: dict[Any, Tensor]
    device: torch.device

    def value(self, tensor: Any) -> Tensor:
        value = self.constants.get(tensor) if isinstance(tensor, Constant) else self.values.get(tensor)
        if value is None:
            raise ModelError(f"tensor {tensor.name!r} is not a numeric array, which training needs; remove it")
        return value

    def nodes(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            outputs = self._outputs(node)
            for tensor, value in zip(node.outputs, outputs, strict=False):
                if tensor.name:
                    # Quantizers meet floats, also those that are made of shapes.
                    self.values[tensor] = value.to(self.device) if value.is_floating_point() else value

    def body(self, graph: Graph, arguments: Sequence[Tensor] = ()) -> list[Tensor]:
        self.values.update(zip(graph.inputs, arguments, strict=True))
        self.nodes(graph.nodes)
        return [self.value(tensor) for tensor in graph.outputs]

    def _outputs(self, node: Node) -> Sequence[Tensor]:
        inputs = tuple(
            self.input_hook(node, index, self.value(tensor)) if tensor.name else None
            for index, tensor in enumerate(node.inputs)
        )
        call = Call(node, inputs, self.program.graph.opset_imports.get(node.domain, 0))
        flow = None if node.domain else _FLOW.get(node.op)
        try:
            if flow is not None:
                return flow(self, call)
            function = function_of(call)
            result = self._run_in_onnxruntime(call) if function is None else function(call)
        except OnnxqError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError) as error:
            reason = " ".join(str(error).split())[:_MAX_REASON_LENGTH]
            raise DataError(f"torch cannot compute the {node.op} {node.name!r}: {reason}; check the sample") from error
        return result if isinstance(result, tuple) else (result,)

    def _run_in_onnxruntime(self, call: Call) -> tuple[Tensor, ...]:
        node, sessions = call.node, self.program.sessions
        fed = {
            f"i{index}": tensor.detach().cpu().numpy() for index, tensor in enumerate(call.inputs) if tensor is not None
        }
        if node not in sessions:
            sessions[node] = open_session(to_model(_alone(node, fed, self.program.graph)))
        arrays = iter(run(sessions[node], fed))
        return tuple(
            torch.from_numpy(next(arrays)).to(call.device) if tensor.name else torch.empty(0) for tensor in node.outputs
        )


def _alone(node: Node, fed: Mapping[str, Array], graph: Graph) -> Graph:
    """Return a graph of one node of another graph, whose inputs are called by their indices."""
    if node.subgraphs():
        raise ModelError(f"{node.op} {node.name!r} has subgraphs that training does not support; remove it")
    names = [f"i{index}" for index in range(len(node.inputs))]
    inputs = [
        Variable(name, fed[name].dtype, [None] * fed[name].ndim) if name in fed else Variable("") for name in names
    ]
    outputs = [Variable(f"o{index}" if tensor.name else "", tensor.dtype) for index, tensor in enumerate(node.outputs)]
    twin = Node(node.op, node.name, dict(node.attrs), inputs, outputs, node.domain)
    read, made = ([variable for variable in variables if variable.name] for variables in (inputs, outputs))
    alone = Graph([twin], read, made, ir_version=graph.ir_version)
    alone.opset_imports = graph.opset_imports
    return alone


def _branch(execution: _Execution, call: Call) -> list[Tensor]:
    taken = "then_branch" if call.number(0, "", None) else "else_branch"
    return execution.body(call.node.attrs[taken])


def _loop(execution: _Execution, call: Call) -> list[Tensor]:
    body, most, go = call.node.attrs["body"], call.number(0, "", math.inf), call.number(1, "", True)
    states, rows = [call[index] for index in range(2, len(call.inputs))], list[list[Tensor]]()
    count = len(states)
    while go and len(rows) < most:
        condition, *results = execution.body(body, [torch.tensor(len(rows)), torch.tensor(bool(go)), *states])
        go, states = condition.item(), results[:count]
        rows.append(results[count:])
    return [*states, *_stacked(rows, len(body.outputs) - 1 - count)]


def _scan(execution: _Execution, call: Call) -> list[Tensor]:
    body, scanned = call.node.attrs["body"], call.attribute("num_scan_inputs")
    if call.node.attrs.keys() - {"body", "num_scan_inputs"} or call.opset < 9:
        raise ModelError(
            f"Scan {call.node.name!r} scans along another axis than the first, which training does not support"
        )
    inputs, count, rows = [call[index] for index in range(len(call.inputs))], len(call.inputs) - scanned, []
    states = inputs[:count]
    for step in zip(*inputs[count:], strict=True):
        results = execution.body(body, [*states, *step])
        states = results[:count]
        rows.append(results[count:])
    return [*states, *_stacked(rows, len(body.outputs) - count)]


def _stacked(rows: Sequence[Sequence[Tensor]], count: int) -> list[Tensor]:
    """Return the outputs of all steps, `count` of each, stacked along a new first axis."""
    return [torch.stack([row[index] for row in rows]) if rows else torch.empty(0) for index in range(count)]


_FLOW: Mapping[str, Callable[[_Execution, Call], list[Tensor]]] = {"If": _branch, "Loop": _loop, "Scan": _scan}
