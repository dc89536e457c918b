"""A Graph run in torch, node by node, so that gradients reach whatever a node reads in the place of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onnxq.errors import DataError, ModelError, OnnxqError
from onnxq.ir import Constant, Graph, Node, Variable, to_model
from onnxq.runtime.sessions import Session, open_session, run
from onnxq.training.calls import Call
from onnxq.training.operators import function_of
from onnxq.training.parts import Part

Reader = Callable[[Node, int, Tensor], Tensor]
"""Takes a node, the index of an input and the tensor there, and returns what the node computes with instead."""

_LONGEST_REASON = 200


@dataclass(eq=False)
class Program:
    """A graph as something to run, whose operators without a function in torch onnxruntime runs, without gradients.

    Attributes:
        graph: the graph, which is read only.
        frozen: sessions of the nodes that onnxruntime runs, by node, as they are met.
    """

    graph: Graph
    frozen: dict[Node, Session] = field(default_factory=dict)

    def run(
        self,
        fed: Mapping[str, Tensor],
        constants: Mapping[Constant, Tensor],
        read: Reader,
        result: Reader,
        part: Part | None = None,
    ) -> dict[str, Tensor]:
        """Run the graph once, or a part of it.

        Args:
            fed: tensors by input.
            constants: tensors by constant.
            read: says what a node computes with.
            result: says what an output is; asked with the node that makes it and the index of its output.
            part: what is run; None runs all.

        Returns:
            Tensors by output.

        Raises:
            DataError: an input is missing, or a node cannot be computed with what the sample makes of its inputs.
            ModelError: a node makes something that is no tensor of numbers.
        """
        part = part or Part.whole(self.graph)
        values: dict[Any, Tensor] = {}
        for tensor in part.inputs:
            if tensor.name not in fed:
                raise DataError(f"input {tensor.name!r} is missing, found {', '.join(fed) or 'nothing'}; feed it")
            values[tensor] = fed[tensor.name]
        execution = _Execution(self, constants, read, values)
        execution.nodes(part.nodes)
        found = {}
        for tensor in part.outputs:
            value = execution.value(tensor)
            if isinstance(tensor, Variable) and tensor.inputs:
                value = result(tensor.inputs[0], tensor.inputs[0].outputs.index(tensor), value)
            found[tensor.name] = value
        return found


@dataclass(eq=False)
class _Execution:
    """One run: the values so far, those of bodies among them."""

    program: Program
    constants: Mapping[Constant, Tensor]
    read: Reader
    values: dict[Any, Tensor]

    def value(self, tensor: Any) -> Tensor:
        found = self.constants.get(tensor) if isinstance(tensor, Constant) else self.values.get(tensor)
        if found is None:
            raise ModelError(f"tensor {tensor.name!r} is no array of numbers, which training needs; leave it out")
        return found

    def nodes(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            outputs = self._outputs(node)
            for tensor, value in zip(node.outputs, outputs, strict=False):
                if tensor.name:
                    self.values[tensor] = value

    def body(self, graph: Graph, arguments: Sequence[Tensor] = ()) -> list[Tensor]:
        self.values.update(zip(graph.inputs, arguments, strict=True))
        self.nodes(graph.nodes)
        return [self.value(tensor) for tensor in graph.outputs]

    def _outputs(self, node: Node) -> Sequence[Tensor]:
        inputs = tuple(
            self.read(node, index, self.value(tensor)) if tensor.name else None
            for index, tensor in enumerate(node.inputs)
        )
        call = Call(node, inputs, self.program.graph.opset_imports.get(node.domain, 0))
        flow = None if node.domain else _FLOW.get(node.op)
        try:
            if flow is not None:
                return flow(self, call)
            function = function_of(call)
            found = self._frozen(call) if function is None else function(call)
        except OnnxqError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError) as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
            raise DataError(f"torch cannot compute the {node.op} {node.name!r}: {reason}; check the sample") from error
        return found if isinstance(found, tuple) else (found,)

    def _frozen(self, call: Call) -> tuple[Tensor, ...]:
        """Compute a node in onnxruntime."""
        node, sessions = call.node, self.program.frozen
        names = [f"i{index}" if tensor is not None else "" for index, tensor in enumerate(call.inputs)]
        fed = {
            name: tensor.detach().cpu().numpy()
            for name, tensor in zip(names, call.inputs, strict=True)
            if tensor is not None
        }
        if node not in sessions:
            if node.bodies():
                raise ModelError(f"{node.op} {node.name!r} has bodies that training does not know; leave it out")
            given = [
                Variable(name, fed[name].dtype, [None] * fed[name].ndim) if name else Variable("") for name in names
            ]
            made = [Variable(f"o{index}" if tensor.name else "") for index, tensor in enumerate(node.outputs)]
            for variable, tensor in zip(made, node.outputs, strict=True):
                variable.dtype = tensor.dtype
            twin = Node(node.op, node.name, dict(node.attrs), given, made, node.domain)
            inputs, outputs = ([one for one in some if one.name] for some in (given, made))
            alone = Graph([twin], inputs, outputs, ir_version=self.program.graph.ir_version)
            alone.opset_imports = self.program.graph.opset_imports
            sessions[node] = open_session(to_model(alone))
        found = iter(run(sessions[node], fed))
        device = next((one.device for one in call.given), torch.device("cpu"))
        return tuple(torch.from_numpy(next(found)).to(device) if one.name else torch.empty(0) for one in node.outputs)


def _branch(execution: _Execution, call: Call) -> list[Tensor]:
    taken = "then_branch" if bool(call[0].item()) else "else_branch"
    return execution.body(call.node.attrs[taken])


def _loop(execution: _Execution, call: Call) -> list[Tensor]:
    body, most, go = call.node.attrs["body"], call.optional(0), call.optional(1)
    states, step = [call[index] for index in range(2, len(call.inputs))], 0
    count, going = len(states), go is None or bool(go.item())
    shown: list[list[Tensor]] = [[] for _ in body.outputs[1 + count :]]
    while going and (most is None or step < int(most.item())):
        again = torch.tensor(going)
        condition, *found = execution.body(body, [torch.tensor(step), again, *states])
        going, states, step = bool(condition.item()), found[:count], step + 1
        for kept, one in zip(shown, found[count:], strict=True):
            kept.append(one)
    return [*states, *(torch.stack(kept) if kept else torch.empty(0) for kept in shown)]


def _scan(execution: _Execution, call: Call) -> list[Tensor]:
    body, scanned = call.node.attrs["body"], call.attribute("num_scan_inputs")
    if call.node.attrs.keys() - {"body", "num_scan_inputs"} or call.opset < 9:
        raise ModelError(f"Scan {call.node.name!r} runs along other axes than the first, which training does not know")
    count = len(call.inputs) - scanned
    states, rows = [call[index] for index in range(count)], [call[index] for index in range(count, len(call.inputs))]
    shown: list[list[Tensor]] = [[] for _ in body.outputs[count:]]
    for step in range(rows[0].shape[0]):
        found = execution.body(body, [*states, *(row[step] for row in rows)])
        states = found[:count]
        for kept, one in zip(shown, found[count:], strict=True):
            kept.append(one)
    return [*states, *(torch.stack(kept) if kept else torch.empty(0) for kept in shown)]


_FLOW: Mapping[str, Callable[[_Execution, Call], list[Tensor]]] = {"If": _branch, "Loop": _loop, "Scan": _scan}
