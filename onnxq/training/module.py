"""A prepared graph as a torch.nn.Module, with fake quantization exactly where a plan makes codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from onnxq.algorithms.codes import Codes
from onnxq.algorithms.migration import Around
from onnxq.algorithms.node_codes import Bias
from onnxq.config.scheme import Mode
from onnxq.errors import ModelError
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Variable,
    constant,
    constants,
    is_fixed,
    nodes,
    only_reader,
    optional,
    producer,
)
from onnxq.numerics.affine import QTensor, quantize
from onnxq.numerics.formats import FORMATS, format_named
from onnxq.ops import operator_of
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Decision, Plan
from onnxq.planning.planner import bias_of
from onnxq.runtime.targets import target_named
from onnxq.training.channels import Channels
from onnxq.training.parts import Part, parts
from onnxq.training.program import Program, Reader
from onnxq.training.quantizers import FakeQuantize, FakeQuantizedBias, FakeQuantizedWeight
from onnxq.training.rounding import dynamically_quantized

_WEIGHT = 1
_MATRIX = 2


class FakeQuantized(nn.Module):
    """A graph that computes in torch what the quantized model will compute, with gradients.

    Weights, biases, scales and zero points of whatever the plan makes codes of are parameters; all else stays. It is
    called with tensors in the order of the model's inputs, or by their names, and returns the model's output, or a
    tuple of outputs.

    Attributes:
        graph: the prepared float graph, which is read only.
        plan: says what becomes codes.
        names: of the inputs.
    """

    def __init__(self, graph: Graph, plan: Plan, codes: Codes) -> None:
        """Take a graph, what becomes of it, and the codes to begin with.

        Raises:
            ModelError: floats of the graph are not those that training computes with.
        """
        super().__init__()
        self.graph, self.plan = _with_biases(graph, codes), plan
        self.names = tuple(tensor.name for tensor in graph.inputs)
        self._program = Program(self.graph)
        self._static = {one.node for one in plan.decisions if one.mode is Mode.STATIC}
        self._every = {one.tensor for one in plan.activations if one.every_consumer}
        self._dynamic = set[str]()
        self._begun, self.channels = codes, Channels(self.graph, plan, codes)
        self._add_activations(codes)
        self._add_weights(codes)
        self._add_constants()

    def _add_activations(self, codes: Codes) -> None:
        """Add a quantizer for each group of activations that share a scale."""
        tensors = {tensor.name: tensor for _, node in nodes(self.graph) for tensor in node.outputs}
        groups: dict[str, FakeQuantize] = {}
        self._activations: dict[str, FakeQuantize] = {}
        fixed = {one.group for one in self.plan.activations if one.fixed_range is not None}
        clamped = {
            one.group
            for one in self.plan.activations
            if (maker := producer(tensors[one.tensor]) if one.tensor in tensors else None) is not None
            and maker.op == "Clip"
        }
        for one in self.plan.activations:
            if one.group not in groups:
                learns, grows = one.group not in fixed, one.group not in clamped
                found = FakeQuantize(one.spec, codes.activations[one.tensor], learns=learns, grows=grows)
                # Nodes that quantize data saturate where their type ends, whatever codes a range was chosen for.
                found.format = FORMATS.get(found.format.dtype.name, found.format)
                groups[one.group] = found
            self._activations[one.tensor] = groups[one.group]
        self.activations = nn.ModuleList(groups.values())

    def _add_weights(self, codes: Codes) -> None:
        """Add the weights and biases of what the plan quantizes; equal codes of one weight stay one."""
        shared: dict[object, FakeQuantizedWeight] = {}
        self._weights: dict[tuple[str, int], FakeQuantizedWeight] = {}
        self._biases: dict[tuple[str, int], tuple[str, FakeQuantizedBias]] = {}
        for node, decision in self._planned():
            if decision.mode is Mode.DYNAMIC and node.op in ("MatMul", "Gemm"):
                self._dynamic.add(node.name)
            for weight in decision.weights:
                found = codes.weights.get((node.name, weight.index))
                source = node.inputs[weight.index]
                if found is None:
                    continue
                # Products that share a weight have no factors around it.
                scales, times = found.parameters.scale.tobytes(), self.channels.times(node, decision, weight.index)
                key = source, weight.of_rank(len(source.shape)), scales, found.codes.tobytes(), times and node.name
                if key not in shared:
                    shared[key] = FakeQuantizedWeight(weight, source.values, found, times)
                self._weights[node.name, weight.index] = shared[key]
        for node, decision in self._planned():
            self._add_bias(node, decision, codes.biases.get(node.name))
        self.weights = nn.ModuleList(shared.values())
        self.biases = nn.ModuleList(bias for _, bias in self._biases.values())

    def _add_bias(self, node: Node, decision: Decision, bias: Bias | None) -> None:
        weight = self._weights.get((node.name, _WEIGHT))
        place = bias_of(node) if weight is not None else None
        source = optional(*place) if place is not None else None
        if weight is None or place is None or not is_fixed(source) or (place[0].name, place[1]) in self._weights:
            return
        made = self.channels.made(node)
        around = Around() if made is None else Around(made=made.now())
        values = source.values if bias is None or bias.values is None else around.own_bias(bias.values)
        coded = (bias is not None and bias.codes is not None) or self._is_fused(node, decision, source)
        data = self._activations[decision.data] if coded else None
        self._biases[place[0].name, place[1]] = node.name, FakeQuantizedBias(values, weight, data, made)

    def _is_fused(self, node: Node, decision: Decision, bias: Constant) -> bool:
        """Whether the bias behind a MatMul of codes is written as that of a Gemm, which makes codes of it."""
        weight = node.inputs[_WEIGHT]
        return (
            node.op == "MatMul"
            and decision.mode is Mode.STATIC
            and only_reader(node.outputs[0]) is not None
            and len(weight.shape) == _MATRIX
            and weight.shape[1:] == bias.shape[-1:] == (bias.values.size,)
            and target_named(self.plan.target).workarounds
        )

    def _add_constants(self) -> None:
        """Keep all other values as buffers, which are no part of the state."""
        self._constants: dict[Constant, str] = {}
        for place, tensor in enumerate(constants(self.graph)):
            values = np.array(tensor.values)
            if values.dtype == object or values.dtype.name in ("float16", "bfloat16"):
                raise ModelError(
                    f"tensor {tensor.name!r} is {values.dtype.name}, expected float32 to train in; convert the "
                    "model, or take a scheme of integers, which widens it"
                )
            self._constants[tensor] = f"constant{place}"
            self.register_buffer(f"constant{place}", torch.from_numpy(values), persistent=False)

    def _planned(self) -> Iterator[tuple[Node, Decision]]:
        for _, node in nodes(self.graph):
            decision = self.plan.by_node.get(node.name)
            if decision is not None and decision.mode is not Mode.FLOAT:
                yield node, decision

    @property
    def is_dynamic(self) -> bool:
        """Whether any data gets its scale from all that is run at once."""
        return bool(self._dynamic)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the nodes that torch has no function for, of those that ran; no gradient passes them."""
        return tuple(node.name for node in self._program.frozen)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the output, or the outputs in their order."""
        found = tuple(self.outputs({**dict(zip(self.names, inputs, strict=False)), **named}).values())
        return found[0] if len(found) == 1 else found

    def outputs(self, fed: Mapping[str, Tensor], part: Part | None = None) -> dict[str, Tensor]:
        """Return tensors by output for tensors by input, of all or of a part; those of a part are not yet codes."""
        return self._program.run(fed, self._held, self._read, self._made if part is None else _same, part)

    def exact(self, fed: Mapping[str, Tensor], part: Part, read: Reader | None = None) -> dict[str, Tensor]:
        """Return what the float model makes of tensors by input in a part; what its nodes read is told."""
        return self._program.run(fed, self._held, read or _same, _same, part)

    @property
    def _held(self) -> dict[Constant, Tensor]:
        return {tensor: getattr(self, name) for tensor, name in self._constants.items()}

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next((one.device for one in (*self.parameters(), *self.buffers())), torch.device("cpu"))

    def learners(self, node: Node) -> tuple[FakeQuantize | FakeQuantizedBias, ...]:
        """Return what makes codes of what a node of the main graph and its bodies read."""
        every = (node, *(inner for body in node.bodies() for _, inner in nodes(body)))
        found = (self._learner(one, index) for one in every for index in range(len(one.inputs)))
        return tuple(one for one in found if one is not None)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The graph as parts that can learn one after the other."""
        found = {node: learners for node in self.graph.nodes if (learners := self.learners(node))}
        weights = {node: sum(isinstance(one, FakeQuantizedWeight) for one in some) for node, some in found.items()}
        return parts(self.graph, weights)

    def _read(self, node: Node, index: int, value: Tensor) -> Tensor:
        """Return what a node computes with in the place of one of its inputs."""
        found = self._learner(node, index)
        if isinstance(found, FakeQuantizedWeight | FakeQuantizedBias):
            return found().reshape(value.shape)
        if found is not None:
            name = node.inputs[index].name
            return self.channels.coded(name, value, self._activations[name])
        if index == 0 and node.name in self._dynamic and self.fake_quant_enabled:
            return dynamically_quantized(value)
        return value

    def _learner(self, node: Node, index: int) -> FakeQuantize | FakeQuantizedBias | None:
        """Return what makes codes of an input of a node, or None for what stays as it is."""
        tensor, key = node.inputs[index], (node.name, index)
        if key in self._weights:
            return self._weights[key]
        if key in self._biases:
            return self._biases[key][1]
        own = isinstance(tensor, Variable) or tensor in data_inputs(node)
        if own and (node.name in self._static or (tensor.name in self._every and isinstance(tensor, Variable))):
            return self._activations.get(tensor.name)
        return None

    def _made(self, node: Node, index: int, value: Tensor) -> Tensor:
        """Return what an output of the model is."""
        name = node.outputs[index].name
        return self.channels.coded(name, value, self._activations[name]) if name in self._every else value

    @property
    def quantizers(self) -> Iterator[FakeQuantize]:
        """All fake quantizers."""
        return (one for one in self.modules() if isinstance(one, FakeQuantize))

    @property
    def tables(self) -> frozenset[FakeQuantizedWeight]:
        """The weights whose rows are looked up, and that nothing else reads."""
        held = {node.name: operator_of(node) for node, _ in self._planned()}
        looks_up = {name: operator is not None and operator.looks_up for name, operator in held.items()}
        found, other = (
            frozenset(one for (node, _), one in self._weights.items() if looks_up[node] is way) for way in (True, False)
        )
        return found - other

    def quantizer_of(self, tensor: str) -> FakeQuantize:
        """Return what makes codes of an activation of the plan."""
        return self._activations[tensor]

    @property
    def fake_quant_enabled(self) -> bool:
        """Whether any quantizer makes codes."""
        return any(one.fake_quant_enabled for one in self.quantizers)

    def codes(self) -> Codes:
        """Return the codes that are written: those that the module computes with."""
        activations = {name: one.parameters_now() for name, one in self._activations.items()}
        weights = {key: one.codes() for key, one in self._weights.items()}
        biases = {node: Bias(bias.moved, bias.codes()) for node, bias in self._biases.values()}
        stored: dict[str, QTensor] = {}
        for node, _ in self._planned():
            for tensor in data_inputs(node) if node.name in self._static else ():
                if isinstance(tensor, Constant) and tensor.name in activations:
                    format = format_named(self.plan.by_tensor[tensor.name].spec.format)
                    stored[tensor.name] = quantize(self.channels.divided(tensor), activations[tensor.name], format)
        found = replace(self._begun, activations=activations, constants=stored, weights=weights, biases=biases)
        return replace(found, factors=self.channels.factors())


def _same(node: Node, index: int, value: Tensor) -> Tensor:
    return value


def _with_biases(graph: Graph, codes: Codes) -> Graph:
    """Return a graph in which products have a bias that lack the one that they get, of zeros."""
    graph = graph.copy()
    names = Names(graph)
    for _, node in nodes(graph):
        bias, place = codes.biases.get(node.name), bias_of(node)
        if bias is not None and bias.values is not None and place is not None and optional(*place) is None:
            node.inputs = [*node.inputs[: place[1]], constant(names.fresh(f"{node.name}.bias"), 0 * bias.values)]
    return graph
