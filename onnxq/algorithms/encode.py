"""Encode a plan: choose the quantized values of its weights, biases and constants, each once for all plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.activation_params import activation_parameters, channel_means
from onnxq.algorithms.awq import scalable_tensors
from onnxq.algorithms.bias_correction import mean_error
from onnxq.algorithms.encoders import encode_weight, encoder_named, given_parameters, weight_gemm_view
from onnxq.algorithms.encoding_config import DEFAULT_CONFIG, EncodingConfig
from onnxq.algorithms.encodings import EncodedBias, EncodingCache, Encodings
from onnxq.algorithms.equalization import (
    ChannelScales,
    WeightRescaling,
    divided_tensors,
    makers_of_divided,
    read_factors,
)
from onnxq.algorithms.gptq import GemmView, HessianInfo, hessian_info
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode
from onnxq.ir import Constant, Graph, Node, all_nodes, is_constant, optional_input
from onnxq.numerics.affine import QTensor, QuantParams, quantize, quantize_bias, raise_scale_for_bias
from onnxq.numerics.formats import format_named
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.planning.planner import bias_of
from onnxq.runtime.targets import target_named
from onnxq.system.resources import Progress, silent

Array = NDArray[Any]
# Weights of shape [directions, gates, size]; each gate of a direction is a channel.
_RECURRENT: Final = frozenset({"LSTM"})
_WEIGHT: Final = 1
# Attributes that determine how the error of a weight reaches the output.
_FORM: Final = ("transB", "group", "strides")


@dataclass(frozen=True, eq=False)
class WeightHessian:
    """The Gram matrices of a weight.

    Attributes:
        key: cache key.
        terms: computes the input of encoders lazily, because it is as large as the Gram matrix.
    """

    key: Hashable
    terms: Callable[[], HessianInfo]


@dataclass(frozen=True, eq=False)
class NodeEncoder:
    """Encodes the weights and biases of one plan."""

    parameters: Mapping[str, QuantParams]
    means: Mapping[str, NDArray[np.float64]]
    statistics: CalibrationStatistics
    target: str
    cache: EncodingCache
    config: EncodingConfig
    factors: Mapping[str, ChannelScales]
    makers: Mapping[str, ChannelScales]

    def of(self, node: Node, decision: Decision, weight: Weight) -> tuple[QTensor, EncodedBias | None]:
        """Return the quantized weight and the bias behind it."""
        source = node.inputs[weight.index]
        recurrent = decision.mode is Mode.DYNAMIC and node.op in _RECURRENT
        key: tuple[Hashable, ...] = (self.cache.digest(source), _decisive(weight, len(source.shape)), recurrent)
        if recurrent:
            return self.cache.tensor(key, lambda: _rows(source.values, weight)), None
        around = self._around(node, decision)
        if around:
            key = (*key, node.op, repr(node.attrs), around.key)
        behind = self._behind(node, decision) if weight.index == _WEIGHT else None
        shown = self._digest(node, weight)
        return self.cache.chosen((key, behind, shown), lambda: self._chosen(node, decision, weight, key))

    def _behind(self, node: Node, decision: Decision) -> Hashable:
        """Return a key of everything that determines the bias, and through it the smallest scales of the weight."""
        means = self.means.get(decision.mean.tensor) if decision.mean is not None else None
        data = self.parameters.get(decision.data) if decision.mode is Mode.STATIC else None
        place = bias_of(node)
        index = decision.bias
        bias = optional_input(*place) if place is not None else node.inputs[index] if index is not None else None
        return (
            *(node.op, *(repr(node.attrs.get(name)) for name in _FORM)),
            *(decision.mode is Mode.STATIC, decision.bias, self.target, place is not None),
            None if data is None else float(data.scale),
            None if means is None else means.tobytes(),
            None if bias is None else self.cache.digest(bias),
        )

    def _chosen(
        self, node: Node, decision: Decision, weight: Weight, key: tuple[Hashable, ...]
    ) -> tuple[QTensor, EncodedBias | None]:
        source, around = node.inputs[weight.index], self._around(node, decision)
        known = self._known(node, decision, weight)
        # An encoder with Hessians uses them for scales too. Otherwise GPTQ only changes rounding, after the scales.
        at_once, later = (known, None) if encoder_named(weight.spec.method).sums is not None else (None, known)

        def encoded(key: Hashable, parameters: QuantParams | None, seen: WeightHessian | None) -> QTensor:
            def made() -> QTensor:
                values = around.weight(node, weight.index, source.values)
                return encode_weight(values, weight, parameters, None if seen is None else seen.terms())

            return self.cache.tensor(key, made)

        key = key if at_once is None else (*key, at_once.key)
        found, bias = encoded(key, given_parameters(weight, tuple(source.shape)), at_once), None
        if decision.mode is Mode.STATIC and decision.bias is not None and weight.index == _WEIGHT:
            bias, scale = around.bias(node.inputs[decision.bias].values), float(self.parameters[decision.data].scale)
            raised = raise_scale_for_bias(found.parameters.scale, bias, scale)
            if not np.array_equal(raised, found.parameters.scale):
                key = (*key, raised.tobytes())
                found = encoded(key, replace(found.parameters, scale=raised), at_once)
        if later is not None:
            key = (*key, later.key)
            found = encoded(key, found.parameters, later)
        corrected = self._corrected(node, decision, weight, found, key)
        if bias is None:
            return found, None if corrected is None else self._added(node, decision, found, corrected)
        # The corrected bias could require other weight scales, but the weight stays: its errors are corrected.
        return found, EncodedBias(corrected, quantize_bias(bias if corrected is None else corrected, found, scale))

    def _around(self, node: Node, decision: Decision) -> WeightRescaling:
        return WeightRescaling(read_factors(node, decision, self.factors, self.parameters), self.makers.get(node.name))

    def _known(self, node: Node, decision: Decision, weight: Weight) -> WeightHessian | None:
        """Return the Gram matrices of a weight, if its encoder or GPTQ uses them."""
        shown, gptq = self._shown(node, weight), self.config.gptq
        if shown is None or gptq is None:
            return None
        around = self._around(node, decision)
        corrected = self._means(node, decision, weight) is not None

        def terms() -> HessianInfo:
            # The Gram matrix is of undivided activations, while the weight's columns are multiplied by the factors.
            ones = np.ones(node.inputs[weight.index].shape)
            divided = WeightRescaling(around.read).weight(node, weight.index, ones) if around.read else None
            return hessian_info(*shown, divided, gptq.damping, corrected=corrected)

        return WeightHessian((self._digest(node, weight), corrected), terms)

    def _shown(self, node: Node, weight: Weight) -> tuple[HessianAccumulator, GemmView] | None:
        gptq = self.config.gptq
        sums = weight_gemm_view(node, weight, gptq) if gptq is not None else None
        gram = self.statistics.statistics.get(sums.request) if sums is not None else None
        return (gram, sums) if sums is not None and isinstance(gram, HessianAccumulator) and gram.count else None

    def _digest(self, node: Node, weight: Weight) -> Hashable:
        """Return a key of the Gram matrices and GPTQ settings of a weight."""
        shown = self._shown(node, weight)
        return None if shown is None else (self.config.gptq, shown[1], shown[0].digest)

    def _means(self, node: Node, decision: Decision, weight: Weight) -> Array | None:
        """Return the channel means of a weight's activations, if a bias can correct its mean error."""
        if decision.mean is None or weight.index != _WEIGHT or bias_of(node) is None:
            return None
        return self.means.get(decision.mean.tensor)

    def _corrected(
        self, node: Node, decision: Decision, weight: Weight, quantized: QTensor, key: Hashable
    ) -> Array | None:
        """Return the bias corrected for factors and the mean rounding error; None if it does not change."""
        means = self._means(node, decision, weight)
        place = bias_of(node) if weight.index == _WEIGHT else None
        around = self._around(node, decision)
        if place is None or (means is None and around.made is None):
            return None
        source, bias = node.inputs[weight.index], optional_input(*place)
        values = None if bias is None else around.bias(bias.values)
        if means is None:
            return values
        shown = around.means(means)
        form = node.op, *(repr(node.attrs.get(name)) for name in _FORM)
        lost = self.cache.array(
            ("lacking", key, form, shown.tobytes()),
            lambda: mean_error(node, around.weight(node, weight.index, source.values), quantized, shown),
        )
        if values is None:
            return np.asarray(lost.astype(source.dtype)) if lost.any() else None
        return np.asarray((values.astype(np.float64) + lost.reshape(values.shape)).astype(values.dtype))

    def _added(self, node: Node, decision: Decision, weight: QTensor, corrected: Array) -> EncodedBias:
        """Return a corrected bias, quantized too if an integer kernel without a bias adds it to its sums."""
        place = bias_of(node)
        bare = place is not None and place[0] is node and optional_input(*place) is None
        if decision.mode is not Mode.STATIC or not bare or not target_named(self.target).reads.integer_bias:
            return EncodedBias(corrected)
        return EncodedBias(corrected, quantize_bias(corrected, weight, float(self.parameters[decision.data].scale)))


def _decisive(weight: Weight, rank: int) -> Weight:
    """Return the part of `weight` that determines quantized values, whatever the node and initializer."""
    return replace(weight.of_rank(rank), tensor="", elements=0)


def _rows(values: Array, weight: Weight) -> QTensor:
    """Return the quantized weight of a recurrent cell, whose channels are the rows of all directions."""
    rows = values.reshape(-1, values.shape[-1])
    found = encode_weight(rows, replace(weight, axis=0, reduction_axis=1))
    scale = found.parameters.scale
    grid = (*values.shape[:-1], 1) if scale.size > 1 else (1,) * values.ndim
    return QTensor(found.values.reshape(values.shape), QuantParams(scale.reshape(grid), None), found.format)


# --- a whole plan ---------------------------------------------------------------------------------------------------

NOTHING_SEEN = CalibrationStatistics()


def encode(
    plan: Plan,
    graph: Graph,
    statistics: CalibrationStatistics = NOTHING_SEEN,
    config: EncodingConfig = DEFAULT_CONFIG,
    cache: EncodingCache | None = None,
    progress: Progress = silent,
) -> Encodings:
    """Choose the quantized values of everything that a plan quantizes.

    Args:
        plan: names the nodes, their weights and the activations.
        graph: the prepared graph, which is not changed.
        statistics: the calibration statistics.
        config: results of the accuracy methods.
        cache: results of other plans; None starts with an empty cache.
        progress: called for the stage ``encode`` with bytes of float weights.

    Raises:
        DataError: a tensor was not calibrated.
        ModelError: a weight holds NaN or infinity.
        SchemeError: the plan's blocks have more axes than the weight.
    """
    parameters = activation_parameters(plan, statistics, config.ranges, config.own_ranges)
    means = channel_means(plan, statistics)
    return encode_with(plan, graph, parameters, means, statistics, cache, config, progress)


def encode_with(
    plan: Plan,
    graph: Graph,
    parameters: Mapping[str, QuantParams],
    means: Mapping[str, NDArray[np.float64]],
    statistics: CalibrationStatistics = NOTHING_SEEN,
    cache: EncodingCache | None = None,
    config: EncodingConfig = DEFAULT_CONFIG,
    progress: Progress = silent,
) -> Encodings:
    """Choose the quantized weights and biases for given activation parameters; see `encode`.

    Args:
        plan: names the nodes, their weights and the activations.
        graph: the prepared graph, which is not changed.
        parameters: scale and zero point of each activation by tensor name.
        means: channel means by tensor name. Nodes whose activations are missing keep their biases.
        statistics: the calibration statistics with the Hessians.
        cache: results of other plans; None starts with an empty cache.
        config: results of the accuracy methods. Its calibration methods must be those of `parameters`. Factors of
            tensors that stay in float are ignored.
        progress: called for the stage ``encode`` with bytes of float weights.
    """
    equalization = config.equalization.select(plan.by_tensor)
    scaled = scalable_tensors(graph, plan) if config.awq.factors else {}
    awq = config.awq.select(scaled)
    factors = {**equalization.factors, **awq.factors}
    makers = makers_of_divided(graph, plan, equalization)
    cache = EncodingCache() if cache is None else cache
    encoding = NodeEncoder(parameters, means, statistics, plan.target, cache, config, factors, makers)
    formats = {activation.tensor: activation.spec.format for activation in plan.activations}
    constants: dict[str, QTensor] = {}
    weights: dict[tuple[str, int], QTensor] = {}
    found_biases: dict[str, EncodedBias] = {}
    planned, done = list(_planned(graph, plan)), 0
    total = sum(_float_bytes(node, decision) for node, decision in planned)
    for node, decision in planned:
        progress("encode", done, total)
        for tensor in data_inputs(node) if decision.mode is Mode.STATIC else ():
            if isinstance(tensor, Constant) and tensor.name in formats and tensor.name not in constants:
                format, own = format_named(formats[tensor.name]), equalization.factors.get(tensor.name)
                values = tensor.values if own is None else own.divide(tensor.values)
                constants[tensor.name] = quantize(values, parameters[tensor.name], format)
        for weight in decision.weights:
            if is_constant(node.inputs[weight.index]):
                found, bias = encoding.of(node, decision, weight)
                weights[node.name, weight.index] = found
                if bias is not None:
                    found_biases[node.name] = bias
        done += _float_bytes(node, decision)
    progress("encode", total, total)
    divided = divided_tensors(graph, plan, equalization)
    floats: dict[tuple[str, int], NDArray[np.floating]] = {}
    for name, one in awq.factors.items():
        floats |= scaled[name].divided(one)
    return Encodings(parameters, constants, weights, found_biases, factors, divided, floats)


def _float_bytes(node: Node, decision: Decision) -> int:
    weights = (node.inputs[weight.index] for weight in decision.weights)
    return sum(weight.nbytes for weight in weights if isinstance(weight, Constant))


def _planned(graph: Graph, plan: Plan) -> Iterator[tuple[Node, Decision]]:
    for _, node in all_nodes(graph):
        decision = plan.by_node.get(node.name)
        if decision is not None and decision.mode is not Mode.FLOAT:
            yield node, decision
