"""Bias correction: biases that cancel the mean rounding error of each output channel.

Analytic correction only needs the means of the activations (Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction", 2019, section 4.2). Sequential correction runs the model layer by layer (Nagel et
al., "A White Paper on Neural Network Quantization", 2021, section 3.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.encodings import Encodings
from onnxq.algorithms.equalization import ChannelScales, Equalization, WeightRescaling, makers_of_divided, read_factors
from onnxq.calibration.activations import Activations
from onnxq.calibration.segments import Stage, stages
from onnxq.ir import Graph, Node, optional_input
from onnxq.numerics.affine import QTensor, QuantParams, quantize
from onnxq.numerics.formats import format_named
from onnxq.planning.plan import Plan
from onnxq.planning.planner import bias_of
from onnxq.runtime.sessions import Array

_CONVOLUTIONS: Final = frozenset({"Conv", "ConvTranspose"})


def mean_error(node: Node, values: NDArray[Any], weight: QTensor, means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean error of each output channel due to the rounding of a weight.

    The error grows with the mean of the activations, which is far from zero behind most activation functions (Nagel et
    al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019, section 4.2, with measured
    means).

    Args:
        node: the compute node.
        values: its float weight.
        weight: its quantized weight.
        means: mean of each channel of its activations.

    Returns:
        Float output minus quantized output for each output channel, to be added to the bias.
    """
    error = values.astype(np.float32) - weight.dequantize()
    if node.op not in _CONVOLUTIONS:
        return np.asarray(means @ (error.T if node.attrs.get("transB", 0) else error))
    groups = int(node.attrs.get("group", 1))
    # Padding is ignored, as if every kernel lay inside the input.
    kernels = error.sum(tuple(range(2, error.ndim))).reshape(groups, -1, error.shape[1])
    if node.op == "Conv":
        return np.asarray(np.einsum("goi,gi->go", kernels, means.reshape(groups, -1)).reshape(-1))
    # Each input position gives one product for each tap, and the output has `spread` times as many positions.
    spread = math.prod(node.attrs.get("strides", ()))
    return np.asarray(np.einsum("gio,gi->go", kernels, means.reshape(groups, -1)).reshape(-1) / spread)


# --- sequential correction ------------------------------------------------------------------------------------------

_MATRIX_PRODUCTS: Final = frozenset({"Gemm", "MatMul"})

Floats = NDArray[np.float64]
Rounding = Callable[[Array], Array]
"""Quantizes and dequantizes values."""


@dataclass(frozen=True)
class Layer:
    """A compute node with a bias.

    Attributes:
        output: the tensor behind the bias.
        axis: channel axis of the output.
        bias: name of the initializer, which no other node reads.
    """

    output: str
    axis: int
    bias: str


@dataclass(frozen=True)
class Rounded:
    """The float values of a quantized model.

    Attributes:
        weights: by initializer: quantized weights, and the biases to start from.
        activations: quantize-dequantize functions by tensor.
    """

    weights: Mapping[str, QTensor | Array]
    activations: Mapping[str, Rounding]

    def of(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of tensors as their readers see them."""
        return {
            name: self.activations[name](array) if name in self.activations else array for name, array in values.items()
        }

    def weights_of(self, part: Stage) -> dict[str, Array]:
        """Return the dequantized values of the free weights of a stage."""
        found = ((name, self.weights[name]) for name in part.weights if name in self.weights)
        return {name: values.dequantize() if isinstance(values, QTensor) else values for name, values in found}


def with_sequential_biases(
    recipe: EncodingConfig,
    plan: Plan,
    graph: Graph,
    codes: Encodings,
    model: Path,
    samples: Iterable[Mapping[str, Array]],
) -> EncodingConfig:
    """Return a config with sequentially corrected biases; see `sequential_biases`.

    `codes` are the encodings of the plan by `recipe`, and `model` is the file of the prepared graph. The correction
    assumes that float nodes beside static ones also read rounded activations. Bodies of control flow run in float and
    are not corrected.

    Raises:
        DataError: a sample does not run.
        OutputError: the disk has no room for the activations.
    """
    layers = layers_of(graph, plan)
    if not layers:
        return recipe
    rounded = rounded_by(codes, plan, graph)
    outputs = [layer.output for layer in layers.values()]
    parts = stages(model, rounded.activations.keys(), observed=outputs, free=rounded.weights.keys())
    found = sequential_biases(parts, samples, tuple(layers.values()), rounded)
    biases = {node: found[layer.bias] for node, layer in layers.items() if layer.bias in found}
    return replace(recipe, biases={**recipe.biases, **biases})


def rounded_by(codes: Encodings, plan: Plan, graph: Graph) -> Rounded:
    """Return the dequantized values of the tensors and initializers of the main graph, and the biases of its layers.

    All values are in the scale of the float model: equalization factors of channels and weights are undone.
    """
    weights: dict[str, QTensor | Array] = dict(codes.constants)
    layers, makers = layers_of(graph, plan), makers_of_divided(graph, plan, Equalization(codes.factors))
    added: dict[str, Array] = {}
    made = {tensor.name for tensor in graph.inputs}
    for node in graph.nodes:
        made.update(tensor.name for tensor in node.outputs)
        decision = plan.by_node.get(node.name)
        read = read_factors(node, decision, codes.factors, codes.activations) if decision is not None else None
        around = WeightRescaling(read, makers.get(node.name))
        for index, tensor in enumerate(node.inputs):
            # Weights of other types are left out.
            if (node.name, index) in codes.weights and tensor.dtype == np.float32:
                stored = codes.weights[node.name, index]
                weights.setdefault(
                    tensor.name, around.own_weight(node, index, stored.dequantize()) if around else stored
                )
        bias = codes.biases.get(node.name)
        place = bias_of(node) if node.name in layers or bias is not None else None
        own = optional_input(*place) if place is not None else None
        values = around.own_bias(bias.values) if bias is not None and bias.values is not None else None
        if own is not None and node.name in layers:
            weights[own.name] = own.values if values is None else values
        elif own is None and values is not None:
            added[node.outputs[0].name] = values.reshape(-1, *(1,) * (len(node.inputs[1].shape) - 2))
    roundings: dict[str, Rounding] = {tensor: partial(np.add, bias) for tensor, bias in added.items()}
    for one in plan.activations:
        if one.tensor in made:
            rounding = _Rounding(codes.activations[one.tensor], one.spec.format, codes.factors.get(one.tensor))
            roundings[one.tensor] = partial(rounding.of, added.get(one.tensor))
    return Rounded(weights, roundings)


@dataclass(frozen=True, eq=False)
class _Rounding:
    parameters: QuantParams
    format: str
    factors: ChannelScales | None

    def of(self, bias: Array | None, values: Array) -> Array:
        """Quantize and dequantize values, after adding the bias that a convolution only has in the built model."""
        whole = values if bias is None else values + bias
        divided = whole if self.factors is None else self.factors.divide(whole)
        found = quantize(divided, self.parameters, format_named(self.format)).dequantize()
        return (found if self.factors is None else self.factors.multiply(found)).astype(values.dtype, copy=False)


def layers_of(graph: Graph, plan: Plan) -> dict[str, Layer]:
    """Return the layers of a plan whose biases can be corrected, by node in the order of the main graph.

    Left out are biases that several nodes share, biases in bodies of control flow, missing biases, and nodes without a
    mean request in the plan.
    """
    found, main = {}, set(graph.nodes)
    for node in graph.nodes:
        decision = plan.by_node.get(node.name)
        place = bias_of(node) if decision is not None and decision.mean is not None else None
        if place is not None:
            owner, index = place
            bias = optional_input(owner, index)
            if bias is not None and len(bias.outputs) == 1 and owner in main:
                axis = -1 if node.op in _MATRIX_PRODUCTS else 1
                found[node.name] = Layer(owner.outputs[0].name, axis, bias.name)
    return found


def sequential_biases(
    parts: Sequence[Stage], samples: Iterable[Mapping[str, Array]], layers: Sequence[Layer], rounded: Rounded
) -> dict[str, Array]:
    """Return biases with which each channel keeps the mean of the float model.

    Layers are corrected one at a time in the order of the model. Each layer reads the quantized outputs of the
    corrected layers in front, so its bias corrects its own error and the rest of theirs (after Nagel et al., "A White
    Paper on Neural Network Quantization", 2021, section 3.5). `shrink_means` reduces the correction if few samples
    support it; a single sample gives none.

    Each stage runs twice on each sample, and once more for each layer in it.

    Args:
        parts: the float model, cut at the quantized tensors, with free weights and biases.
        samples: inputs by name; all are kept on disk or in memory.
        layers: in the order of the model. Layers whose output no stage returns keep their biases.
        rounded: the values of the quantized model.

    Returns:
        Corrected biases by initializer, in the original type and shape.

    Raises:
        DataError: a sample does not run.
        OutputError: the disk has no room for the activations.
    """
    found: dict[str, Array] = {}
    with Activations() as exact, Activations() as coded:
        order = []
        for number, sample in enumerate(samples):
            exact.put(number, sample)
            coded.put(number, rounded.of(sample))
            order.append(number)
        for part in parts[: _corrected(parts, layers)] if order else ():
            own = [layer for layer in layers if layer.output in part.outputs]
            kept = [name for name in part.outputs if name in part.kept]
            given = rounded.weights_of(part)
            with part:
                expected: dict[Layer, list[_Sums]] = {layer: [] for layer in own}
                for number in order:
                    values = part.run(exact.of(number, part.inputs))
                    exact.put(number, {name: values[name] for name in kept})
                    for layer in own:
                        expected[layer].append(_Sums.of(values[layer.output], layer.axis))
                for layer in own:
                    runs = (part.run(coded.of(number, part.inputs), given, [layer.output]) for number in order)
                    seen = [_Sums.of(values[layer.output], layer.axis) for values in runs]
                    shift = shrink_means(
                        np.array([one.sums - other.sums for one, other in zip(expected[layer], seen, strict=True)]),
                        np.array([one.elements for one in seen]),
                    )
                    bias = given[layer.bias]
                    given[layer.bias] = found[layer.bias] = (bias + shift.reshape(bias.shape)).astype(bias.dtype)
                for number in order:
                    coded.put(number, rounded.of(part.run(coded.of(number, part.inputs), given, kept)))
            exact.keep(part.kept)
            coded.keep(part.kept)
    return found


def _corrected(parts: Sequence[Stage], layers: Sequence[Layer]) -> int:
    """Return the number of stages up to the last one with a layer."""
    outputs = {layer.output for layer in layers}
    return max((place for place, part in enumerate(parts, 1) if outputs.intersection(part.outputs)), default=0)


def shrink_means(sums: Floats, elements: NDArray[np.int64]) -> Floats:
    """Return the mean of each channel, reduced by how much its samples disagree.

    A mean with standard error e over the samples is multiplied by `t / (t + e**2)`. t is the variance of the true means
    over the channels: the mean excess of their squares over the squared standard errors, at least 0 (empirical Bayes
    after Efron and Morris, "Stein's Estimation Rule and Its Competitors", 1973). So a few samples suffice if their
    errors agree.

    Args:
        sums: sum over the elements of each channel, shape (samples, channels).
        elements: elements of a channel in each sample, shape (samples,).

    Returns:
        Means of shape (channels,); zeros if fewer than two samples have elements.

    >>> shrink_means(np.array([[4.0, 4.0], [4.0, -4.0]]), np.array([2, 2])).tolist()
    [2.0, 0.0]
    """
    seen = elements > 0
    count, total = int(seen.sum()), int(elements.sum())
    if count < 2:
        return np.zeros(sums.shape[-1])
    means = sums.sum(0) / total
    # Standard error of a ratio of sums, so samples with many elements count more.
    deviations = sums[seen] - elements[seen, None] * means
    errors = np.square(deviations).sum(0) * (count / (count - 1)) / total**2
    true = max(float((np.square(means) - errors).mean()), 0.0)
    return np.asarray(means * np.divide(true, true + errors, out=np.ones_like(means), where=errors > 0))


class _Sums(NamedTuple):
    sums: Floats
    elements: int

    @classmethod
    def of(cls, values: Array, axis: int) -> _Sums:
        others = tuple(index for index in range(values.ndim) if index != axis % values.ndim)
        return cls(np.asarray(values.sum(others, dtype=np.float64)), values.size // max(values.shape[axis], 1))
