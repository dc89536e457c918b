"""A prepared graph as a torch.nn.Module, with fake quantization exactly where its plan quantizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onnxq.algorithms.encode import encode
from onnxq.algorithms.encoding_config import config_from_plan
from onnxq.algorithms.encodings import EncodedBias, Encodings
from onnxq.algorithms.equalization import ChannelScales, WeightRescaling, absorbing_producer, find_groups, read_factors
from onnxq.config.scheme import Mode
from onnxq.errors import ModelError, SchemeError, check_type
from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Variable,
    all_nodes,
    as_graph,
    constant,
    constants,
    is_constant,
    optional_input,
    producer,
    sole_consumer,
)
from onnxq.lowering import allowed_ops_named
from onnxq.numerics.affine import QTensor, quantize
from onnxq.numerics.formats import FORMATS, format_named
from onnxq.ops import operator_of
from onnxq.passes.preparing.preparation import check_float_model, check_plan
from onnxq.pipeline.request import QuantizationRequest
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Decision, Plan
from onnxq.planning.planner import bias_of
from onnxq.runtime.targets import target_named
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.system.publish import staging
from onnxq.training.program import InputHook, Program, Subgraph, cut_graph, unchanged
from onnxq.training.quantizers import (
    FakeQuantize,
    FakeQuantizedBias,
    FakeQuantizedWeight,
    SharedChannelScales,
    TensorChannelScales,
    WeightChannelScales,
    dynamic_fake_quantize,
)


class ChannelScaling(nn.Module):
    """The channel scales of a plan's encodings.

    Attributes:
        by_tensor: channel scales by the name of their tensor.
        shared: the channel scales of each equalization group.
    """

    def __init__(self, graph: Graph, plan: Plan, encodings: Encodings) -> None:
        super().__init__()
        self._begun, self._activation_params = encodings.factors, encodings.activations
        self.by_tensor = dict(_channel_scales(graph, plan, encodings.factors))
        self.shared = nn.ModuleList(dict.fromkeys(own.shared for own in self.by_tensor.values()))
        self._makers = {
            maker.name: self.by_tensor[tensor.name]
            for _, node in all_nodes(graph)
            for tensor in node.outputs
            if tensor.name in self.by_tensor
            and tensor.name in plan.by_tensor
            and (maker := absorbing_producer(tensor, plan)) is not None
        }

    def factors(self) -> Mapping[str, ChannelScales]:
        """Return the channel scales by tensor, as they are written."""
        return {name: own.now() for name, own in self.by_tensor.items()}

    def of_output(self, node: Node) -> TensorChannelScales | None:
        """Return the channel scales of the output of a compute node."""
        return self._makers.get(node.name)

    def of_weight(self, node: Node, decision: Decision, index: int) -> WeightChannelScales | None:
        """Return the factors of a weight before it is quantized; None without channel scales around it."""
        divided = read_factors(node, decision, self._begun, self._activation_params) is not None
        data = decision.data if decision.mode is Mode.STATIC else node.inputs[0].name
        read, output = self.by_tensor[data] if divided else None, self.of_output(node)
        if read is None and output is None:
            return None
        return WeightChannelScales(
            None if read is None else read.in_weight(node, index, read=True),
            None if output is None else output.in_weight(node, index, read=False),
        )

    def divided(self, tensor: Constant) -> NDArray[np.floating]:
        """Divide the values of a constant by its channel scales."""
        own = self.by_tensor.get(tensor.name)
        return tensor.values if own is None else own.now().divide(tensor.values)

    def fake_quantize(self, name: str, values: Tensor, quantizer: FakeQuantize) -> Tensor:
        """Fake-quantize an activation divided by its channel scales, and multiply the result with them."""
        own = self.by_tensor.get(name)
        if own is None:
            return quantizer(values)
        factors = own().reshape([-1 if axis == own.axis else 1 for axis in range(values.ndim)])
        return quantizer(values / factors) * factors


def _channel_scales(
    graph: Graph, plan: Plan, factors: Mapping[str, ChannelScales]
) -> Iterator[tuple[str, TensorChannelScales]]:
    """Yield the channel scales of each tensor; those of equalization groups are trainable."""
    left = dict(factors)
    for site in find_groups(graph, plan) if factors else ():
        begun = np.ones(len(site.free))
        named = {tensor: places for tensor, places in site.tensors.items() if tensor in factors}
        for tensor, channels in named.items():
            begun[channels.places] = left.pop(tensor).values
        shared = SharedChannelScales(begun, site.free & (len(named) == len(site.tensors)))
        for tensor, channels in named.items():
            yield tensor, TensorChannelScales(shared, torch.from_numpy(channels.places), channels.axis)
    for tensor, scales in left.items():
        count = len(scales.values)
        yield (
            tensor,
            TensorChannelScales(
                SharedChannelScales(scales.values, np.zeros(count, bool)), torch.arange(count), scales.axis
            ),
        )


_WEIGHT = 1
_MATRIX = 2
# Whole numbers of at most so many are extents, axes or indices of a shape.
_SHAPE_SIZE = 16


class FakeQuantizedModel(nn.Module):
    """A graph that computes in torch what the quantized model will compute, with gradients.

    The parameters are weights, biases, scales and zero points of all that the plan quantizes. Call it with tensors in
    the order of the model's inputs, or by their names. It returns the model's output, or a tuple of outputs.

    Attributes:
        graph: the prepared float graph, which is only read.
        plan: the plan of the graph.
        names: names of the inputs.
    """

    def __init__(self, graph: Graph, plan: Plan, encodings: Encodings) -> None:
        """Build the module from the initial encodings.

        Raises:
            ModelError: the graph has floats of another type than float32.
        """
        super().__init__()
        self.graph, self.plan = _with_biases(graph, encodings), plan
        self.names = tuple(tensor.name for tensor in graph.inputs)
        self._program = Program(self.graph)
        self._static = {decision.node for decision in plan.decisions if decision.mode is Mode.STATIC}
        self._every = {activation.tensor for activation in plan.activations if activation.every_consumer}
        self._dynamic = set[str]()
        self._begun, self.channels = encodings, ChannelScaling(self.graph, plan, encodings)
        self._add_activations(encodings)
        self._add_weights(encodings)
        self._add_constants()

    def _add_activations(self, encodings: Encodings) -> None:
        """Add a quantizer for each group of activations that share a scale."""
        tensors = {tensor.name: tensor for _, node in all_nodes(self.graph) for tensor in node.outputs}
        groups: dict[str, FakeQuantize] = {}
        self._activations: dict[str, FakeQuantize] = {}
        fixed = {activation.group for activation in self.plan.activations if activation.fixed_range is not None}
        clamped = {
            activation.group
            for activation in self.plan.activations
            if (maker := producer(tensors[activation.tensor]) if activation.tensor in tensors else None) is not None
            and maker.op == "Clip"
        }
        for activation in self.plan.activations:
            if activation.group not in groups:
                learns, grows = activation.group not in fixed, activation.group not in clamped
                quantizer = FakeQuantize(
                    activation.spec, encodings.activations[activation.tensor], learns=learns, grows=grows
                )
                # QuantizeLinear saturates at the limits of its type, also if the range was chosen for fewer bits.
                quantizer.format = FORMATS.get(quantizer.format.dtype.name, quantizer.format)
                groups[activation.group] = quantizer
            self._activations[activation.tensor] = groups[activation.group]
        self.activations = nn.ModuleList(groups.values())

    def _add_weights(self, encodings: Encodings) -> None:
        """Add the quantized weights and biases; equal encodings of one weight stay shared."""
        shared: dict[object, FakeQuantizedWeight] = {}
        self._weights: dict[tuple[str, int], FakeQuantizedWeight] = {}
        self._biases: dict[tuple[str, int], tuple[str, FakeQuantizedBias]] = {}
        for node, decision in self._planned():
            if decision.mode is Mode.DYNAMIC and node.op in ("MatMul", "Gemm"):
                self._dynamic.add(node.name)
            for weight in decision.weights:
                encoded = encodings.weights.get((node.name, weight.index))
                source = node.inputs[weight.index]
                if encoded is None:
                    continue
                # A weight that several nodes share has no channel scales.
                scales, around = (
                    encoded.parameters.scale.tobytes(),
                    self.channels.of_weight(node, decision, weight.index),
                )
                key = source, weight.of_rank(len(source.shape)), scales, encoded.values.tobytes(), around and node.name
                if key not in shared:
                    shared[key] = FakeQuantizedWeight(weight, source.values, encoded, around)
                self._weights[node.name, weight.index] = shared[key]
        for node, decision in self._planned():
            self._add_bias(node, decision, encodings.biases.get(node.name))
        self.weights = nn.ModuleList(shared.values())
        self.biases = nn.ModuleList(bias for _, bias in self._biases.values())

    def _add_bias(self, node: Node, decision: Decision, bias: EncodedBias | None) -> None:
        weight = self._weights.get((node.name, _WEIGHT))
        place = bias_of(node) if weight is not None else None
        source = optional_input(*place) if place is not None else None
        if weight is None or place is None or not is_constant(source) or (place[0].name, place[1]) in self._weights:
            return
        scales = self.channels.of_output(node)
        around = WeightRescaling() if scales is None else WeightRescaling(made=scales.now())
        values = source.values if bias is None or bias.values is None else around.own_bias(bias.values)
        quantized = (bias is not None and bias.quantized is not None) or self._is_fused(node, decision, source)
        data = self._activations[decision.data] if quantized else None
        self._biases[place[0].name, place[1]] = node.name, FakeQuantizedBias(values, weight, data, scales)

    def _is_fused(self, node: Node, decision: Decision, bias: Constant) -> bool:
        """Return True if the Add behind a quantized MatMul is written as the bias of a Gemm, which is quantized."""
        weight = node.inputs[_WEIGHT]
        return (
            node.op == "MatMul"
            and decision.mode is Mode.STATIC
            and sole_consumer(node.outputs[0]) is not None
            and len(weight.shape) == _MATRIX
            and weight.shape[1:] == bias.shape[-1:] == (bias.values.size,)
            and target_named(self.plan.target).is_onnxruntime
        )

    def _add_constants(self) -> None:
        """Add all other constants as buffers outside of the state, but those of shapes, which stay on the processor."""
        self._constants: dict[Constant, str] = {}
        self._small: dict[Constant, Tensor] = {}
        for place, tensor in enumerate(constants(self.graph)):
            values = np.array(tensor.values)
            if values.dtype == object or values.dtype.name in ("float16", "bfloat16"):
                raise ModelError(
                    f"tensor {tensor.name!r} is {values.dtype.name}, expected float32 to train in; convert the "
                    "model, or take a scheme of integers, which widens it"
                )
            if values.dtype.kind in "iub" and values.ndim <= 1 and values.size <= _SHAPE_SIZE:
                self._small[tensor] = torch.from_numpy(values)
                continue
            self._constants[tensor] = f"constant{place}"
            self.register_buffer(f"constant{place}", torch.from_numpy(values), persistent=False)

    def _planned(self) -> Iterator[tuple[Node, Decision]]:
        for _, node in all_nodes(self.graph):
            decision = self.plan.by_node.get(node.name)
            if decision is not None and decision.mode is not Mode.FLOAT:
                yield node, decision

    @property
    def is_dynamic(self) -> bool:
        """True if any activation is quantized dynamically, with one scale for all samples of a run."""
        return bool(self._dynamic)

    @property
    def nodes_without_gradient(self) -> tuple[str, ...]:
        """Names of the nodes that ran in onnxruntime because torch has no function for them."""
        return tuple(node.name for node in self._program.sessions)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the output, or the outputs in their order."""
        outputs = tuple(self.outputs({**dict(zip(self.names, inputs, strict=False)), **named}).values())
        return outputs[0] if len(outputs) == 1 else outputs

    def outputs(self, fed: Mapping[str, Tensor], subgraph: Subgraph | None = None) -> dict[str, Tensor]:
        """Run the module or a subgraph on tensors by input name; outputs of a subgraph are not yet quantized."""
        output_hook = self._quantized_output if subgraph is None else unchanged
        return self._program.run(fed, self._constant_tensors, self._quantized_input, output_hook, subgraph)

    def float_outputs(
        self, fed: Mapping[str, Tensor], subgraph: Subgraph, input_hook: InputHook = unchanged
    ) -> dict[str, Tensor]:
        """Run a subgraph of the float model on tensors by input name."""
        return self._program.run(fed, self._constant_tensors, input_hook, subgraph=subgraph)

    @property
    def _constant_tensors(self) -> dict[Constant, Tensor]:
        return {**self._small, **{tensor: getattr(self, name) for tensor, name in self._constants.items()}}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))

    def quantizers_of(self, node: Node) -> tuple[FakeQuantize | FakeQuantizedBias, ...]:
        """Return the quantizers of the inputs of a node of the main graph, and of the nodes in its bodies."""
        every = (node, *(inner for body in node.subgraphs() for _, inner in all_nodes(body)))
        quantizers = (self._quantizer(inner, index) for inner in every for index in range(len(inner.inputs)))
        return tuple(quantizer for quantizer in quantizers if quantizer is not None)

    @cached_property
    def subgraphs(self) -> tuple[Subgraph, ...]:
        """The graph cut into subgraphs that can be trained one after the other."""
        quantizers_by_node = {node: quantizers for node in self.graph.nodes if (quantizers := self.quantizers_of(node))}
        weights = {
            node: sum(isinstance(quantizer, FakeQuantizedWeight) for quantizer in some)
            for node, some in quantizers_by_node.items()
        }
        return cut_graph(self.graph, weights)

    def _quantized_input(self, node: Node, index: int, value: Tensor) -> Tensor:
        """Return what the quantized model computes with at an input of a node."""
        quantizer = self._quantizer(node, index)
        if isinstance(quantizer, FakeQuantizedWeight | FakeQuantizedBias):
            return quantizer().reshape(value.shape)
        if quantizer is not None:
            name = node.inputs[index].name
            return self.channels.fake_quantize(name, value, self._activations[name])
        if index == 0 and node.name in self._dynamic and self.fake_quant_enabled:
            return dynamic_fake_quantize(value)
        return value

    def _quantizer(self, node: Node, index: int) -> FakeQuantize | FakeQuantizedBias | None:
        """Return the quantizer of an input of a node, or None if it stays in float."""
        tensor, key = node.inputs[index], (node.name, index)
        if key in self._weights:
            return self._weights[key]
        if key in self._biases:
            return self._biases[key][1]
        own = isinstance(tensor, Variable) or tensor in data_inputs(node)
        if own and (node.name in self._static or (tensor.name in self._every and isinstance(tensor, Variable))):
            return self._activations.get(tensor.name)
        return None

    def _quantized_output(self, node: Node, index: int, value: Tensor) -> Tensor:
        name = node.outputs[index].name
        return self.channels.fake_quantize(name, value, self._activations[name]) if name in self._every else value

    @property
    def quantizers(self) -> Iterator[FakeQuantize]:
        """All fake quantizers."""
        return (module for module in self.modules() if isinstance(module, FakeQuantize))

    @property
    def embeddings(self) -> frozenset[FakeQuantizedWeight]:
        """The weights that are only used as embeddings."""
        operators = {node.name: operator_of(node) for node, _ in self._planned()}
        looks_up = {name: operator is not None and operator.looks_up for name, operator in operators.items()}
        looked_up, multiplied = (
            frozenset(weight for (node, _), weight in self._weights.items() if looks_up[node] is wanted)
            for wanted in (True, False)
        )
        return looked_up - multiplied

    def quantizer_of(self, tensor: str) -> FakeQuantize:
        """Return the quantizer of an activation."""
        return self._activations[tensor]

    @property
    def fake_quant_enabled(self) -> bool:
        """True if any quantizer is enabled."""
        return any(quantizer.fake_quant_enabled for quantizer in self.quantizers)

    def encodings(self) -> Encodings:
        """Return the encodings that the module computes with, to be written."""
        activations = {name: quantizer.parameters_now() for name, quantizer in self._activations.items()}
        weights = {key: weight.quantized() for key, weight in self._weights.items()}
        biases = {node: EncodedBias(bias.moved, bias.quantized()) for node, bias in self._biases.values()}
        stored: dict[str, QTensor] = {}
        for node, _ in self._planned():
            for tensor in data_inputs(node) if node.name in self._static else ():
                if isinstance(tensor, Constant) and tensor.name in activations:
                    format = format_named(self.plan.by_tensor[tensor.name].spec.format)
                    stored[tensor.name] = quantize(self.channels.divided(tensor), activations[tensor.name], format)
        encodings = replace(self._begun, activations=activations, constants=stored, weights=weights, biases=biases)
        return replace(encodings, factors=self.channels.factors())


def _with_biases(graph: Graph, encodings: Encodings) -> Graph:
    """Return a copy of the graph with zero biases where encodings add a bias."""
    graph = graph.copy()
    names = Names(graph)
    for _, node in all_nodes(graph):
        bias, place = encodings.biases.get(node.name), bias_of(node)
        if bias is not None and bias.values is not None and place is not None and optional_input(*place) is None:
            node.inputs = [*node.inputs[: place[1]], constant(names.unique(f"{node.name}.bias"), 0 * bias.values)]
    return graph


class Block(nn.Module):
    """A subgraph of a module that is trained by itself; only `quantizers` change."""

    def __init__(self, model: FakeQuantizedModel, subgraph: Subgraph, quantizers: Collection[nn.Module]) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(quantizers)
        self.subgraph = subgraph
        # In a tuple, the model's other parameters are not parameters of the block.
        self._model = (model,)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the input tensors."""
        return tuple(tensor.name for tensor in self.subgraph.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the output tensors."""
        return tuple(tensor.name for tensor in self.subgraph.outputs)

    def outputs(self, fed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the block on tensors by input name."""
        return self._model[0].outputs(fed, self.subgraph)


def blocks_of(module: FakeQuantizedModel) -> tuple[Block, ...]:
    """Cut a module into blocks; a quantizer that several blocks use belongs to the first of them."""
    taken, blocks = set[nn.Module](), []
    for subgraph in module.subgraphs:
        quantizers = dict.fromkeys(quantizer for node in subgraph.nodes for quantizer in module.quantizers_of(node))
        blocks.append(Block(module, subgraph, [quantizer for quantizer in quantizers if quantizer not in taken]))
        taken |= quantizers.keys()
    return tuple(blocks)


# Modules for a user's own training loop.


class QATModule(FakeQuantizedModel):
    """A module that can be converted to a quantized model; see `prepare` and `convert`."""

    def __init__(self, bench: PreparedModel, plan: Plan) -> None:
        graph = bench.graph_for(plan)
        for tensor in constants(graph):
            # The folder of the workbench is deleted, so values are copied.
            tensor.values = np.array(tensor.values)
        super().__init__(graph, plan, encode(plan, graph, config=config_from_plan(plan, 1)))
        self._placing, self._declared = bench.placing, bench.declared_types

    def quantized(self) -> Graph:
        """Return the quantized model."""
        return self._placing.quantized(self.graph, self.plan, self.encodings(), self._declared)


def prepare(model: str | Path | onnx.ModelProto | Any, plan: Plan) -> QATModule:
    """Make a torch module of a float model, with fake quantization where its plan quantizes.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph, as it was given to quantize() or plan().
        plan: a calibrated plan, such as that of the report of quantize().

    Returns:
        The module, with observers disabled. Its parameters are weights, biases, scales and zero points of all that
        is quantized.

    Raises:
        SchemeError: the plan is of another model, or cannot be applied again.
        DataError: the plan was not calibrated.
        ModelError: the model cannot be read, or has floats of another type than float32.
    """
    check_type(plan, Plan, "the plan", "a Plan, such as quantize(...).report.plan")
    wanted = QuantizationRequest.of(plan, plan.target, ())
    graph = as_graph(model)
    check_float_model(graph)
    with staging(None) as folder:
        emit = allowed_ops_named(wanted.scheme.emit)
        bench = open_prepared_model(graph, wanted.scheme, target_named(plan.target), folder, emit, plan)
        check_plan(plan, bench.graph)
        return QATModule(bench, plan)


def convert(module: QATModule) -> Graph:
    """Return the quantized model that a module computes; write it with onnxq.save.

    Raises:
        SchemeError: the module is not from prepare().
    """
    if not isinstance(module, QATModule):
        raise SchemeError(f"the module is {type(module).__name__}, expected one of onnxq.training.prepare()")
    return module.quantized()


def enable_fake_quant(module: nn.Module) -> None:
    """Enable a quantizer; use as ``module.apply(enable_fake_quant)``, as in torch.ao."""
    _switch(module, fake_quant_enabled=True)


def disable_fake_quant(module: nn.Module) -> None:
    """Disable a quantizer, so that floats pass unchanged."""
    _switch(module, fake_quant_enabled=False)


def enable_observer(module: nn.Module) -> None:
    """Let the values that pass a quantizer set its scale."""
    _switch(module, observer_enabled=True)


def disable_observer(module: nn.Module) -> None:
    """Leave the scale of a quantizer to the optimizer."""
    _switch(module, observer_enabled=False)


def _switch(module: nn.Module, **flags: bool) -> None:
    if isinstance(module, FakeQuantize):
        for name, value in flags.items():
            setattr(module, name, value)
