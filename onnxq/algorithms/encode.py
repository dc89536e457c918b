"""Encode a plan: choose the quantized values of its weights, biases and constants, each once for all plans."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.activation_params import activation_parameters, channel_means
from onnxq.algorithms.awq import scalable_tensors
from onnxq.algorithms.bias_correction import mean_error
from onnxq.algorithms.encoders import encode_weight, encoder_named, given_parameters, quantized_nodes, weight_gemm_view
from onnxq.algorithms.encoding_config import DEFAULT_CONFIG, EncodingConfig
from onnxq.algorithms.encodings import EncodedBias, EncodingCache, Encodings
from onnxq.algorithms.equalization import (
    ChannelScales,
    WeightRescaling,
    divided_tensors,
    makers_of_divided,
    read_factors,
)
from onnxq.algorithms.gptq import GemmView, Gptq, HessianInfo, hessian_info
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode
from onnxq.ir import Constant, Graph, Node, Tensor, is_constant, optional_input
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
Key = tuple[Hashable, ...]
# Attributes that determine how the error of a weight reaches the output.
_FORM: Final = ("transB", "group", "strides")


@dataclass(frozen=True, eq=False)
class WeightHessian:
    """The Gram matrices that round a weight.

    Attributes:
        gram: the statistic of its activations.
        view: the weight as matrices.
        gptq: settings of GPTQ.
        corrected: whether a bias corrects the mean error, so that only the variance counts.
    """

    gram: HessianAccumulator
    view: GemmView
    gptq: Gptq
    corrected: bool

    @property
    def key(self) -> Hashable:
        """A key that differs between different matrices and settings."""
        return self.gptq, self.view, self.gram.digest, self.corrected

    def info(self, divided: Array | None) -> HessianInfo:
        """Return the input of encoders, which is as large as the Gram matrix; see `hessian_info`."""
        return hessian_info(self.gram, self.view, divided, self.gptq.damping, corrected=self.corrected)


@dataclass(frozen=True, eq=False)
class WeightEncoder:
    """Encodes one weight, and corrects the bias behind it.

    Attributes:
        around: factors of the channels on both sides.
        hessian: Gram matrices of the activations; None if neither the encoder nor GPTQ uses them.
        cache: quantized values by all that determines them.
    """

    node: Node
    weight: Weight
    around: WeightRescaling
    hessian: WeightHessian | None
    cache: EncodingCache

    @property
    def source(self) -> Constant:
        """The float weight."""
        return self.node.inputs[self.weight.index]  # type: ignore[no-any-return]

    @property
    def key(self) -> Key:
        """A key of the quantized values, whatever the node and initializer."""
        rank = len(self.source.shape)
        decisive = replace(self.weight.of_rank(rank), tensor="", elements=0)
        around = (self.node.op, repr(self.node.attrs), self.around.key) if self.around else ()
        return self.cache.digest(self.source), decisive, *around

    def rows(self) -> QTensor:
        """Return the quantized weight of a recurrent cell, whose channels are the rows of all directions."""
        return self.cache.tensor((*self.key, "rows"), self._rows)

    def _rows(self) -> QTensor:
        values = self.source.values
        found = encode_weight(values.reshape(-1, values.shape[-1]), replace(self.weight, axis=0, reduction_axis=1))
        scale = found.parameters.scale
        grid = (*values.shape[:-1], 1) if scale.size > 1 else (1,) * values.ndim
        return QTensor(found.values.reshape(values.shape), QuantParams(scale.reshape(grid), None), found.format)

    def quantized(self, bias: Array | None, scale: float) -> tuple[QTensor, Key]:
        """Return the quantized weight and its key.

        Args:
            bias: the bias of an integer kernel, for which the scales of the weight must be large enough; None if there
                is none.
            scale: scale of the kernel's activations.
        """
        # An encoder with Hessians uses them for scales too. Otherwise GPTQ only changes rounding, after the scales.
        at_once = self.hessian if encoder_named(self.weight.spec.method).sums is not None else None
        key = self.key if at_once is None else (*self.key, at_once.key)
        quantized = self._encoded(key, given_parameters(self.weight, tuple(self.source.shape)), at_once)
        if bias is not None:
            raised = raise_scale_for_bias(quantized.parameters.scale, bias, scale)
            if not np.array_equal(raised, quantized.parameters.scale):
                key = (*key, raised.tobytes())
                quantized = self._encoded(key, replace(quantized.parameters, scale=raised), at_once)
        if self.hessian is not None and at_once is None:
            key = (*key, self.hessian.key)
            quantized = self._encoded(key, quantized.parameters, self.hessian)
        return quantized, key

    def _encoded(self, key: Key, parameters: QuantParams | None, hessian: WeightHessian | None) -> QTensor:
        def made() -> QTensor:
            info = None if hessian is None else hessian.info(self._divided())
            return encode_weight(self._rescaled(), self.weight, parameters, info)

        return self.cache.tensor(key, made)

    def _rescaled(self) -> Array:
        return self.around.weight(self.node, self.weight.index, self.source.values)

    def _divided(self) -> Array | None:
        # The Gram matrix is of undivided activations, while the weight's columns are multiplied by the factors.
        read, ones = WeightRescaling(self.around.read), np.ones(self.source.shape)
        return read.weight(self.node, self.weight.index, ones) if read else None

    def corrected(self, bias: Tensor | None, means: Array | None, quantized: QTensor, key: Key) -> Array | None:
        """Return the bias corrected for factors and the mean rounding error; None if it does not change."""
        values = None if bias is None else self.around.bias(bias.values)
        if means is None:
            return values
        shown = self.around.means(means)
        form = self.node.op, *(repr(self.node.attrs.get(name)) for name in _FORM)
        lost = self.cache.array(
            (key, form, shown.tobytes()), lambda: mean_error(self.node, self._rescaled(), quantized, shown)
        )
        if values is None:
            return np.asarray(lost.astype(self.source.dtype)) if lost.any() else None
        return np.asarray((values.astype(np.float64) + lost.reshape(values.shape)).astype(values.dtype))


@dataclass(frozen=True, eq=False)
class PlanEncoder:
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
        around = WeightRescaling(
            read_factors(node, decision, self.factors, self.parameters), self.makers.get(node.name)
        )
        place = bias_of(node) if weight.index == _WEIGHT else None
        means = self.means.get(decision.mean.tensor) if decision.mean is not None and place is not None else None
        encoder = WeightEncoder(
            node, weight, around, self._hessian(node, weight, corrected=means is not None), self.cache
        )
        if decision.mode is Mode.DYNAMIC and node.op in _RECURRENT:
            return encoder.rows(), None
        bias, scale = None, 0.0
        if decision.mode is Mode.STATIC and weight.index == _WEIGHT:
            bias = around.bias(node.inputs[decision.bias].values) if decision.bias is not None else None
            scale = float(self.parameters[decision.data].scale)
        quantized, key = encoder.quantized(bias, scale)
        corrected = None
        if place is not None and (means is not None or around.made is not None):
            corrected = encoder.corrected(optional_input(*place), means, quantized, key)
        if bias is not None:
            # The corrected bias could require other weight scales, but the weight stays: its errors are corrected.
            bias = bias if corrected is None else corrected
        elif corrected is None:
            return quantized, None
        elif decision.mode is Mode.STATIC and self._adds_new_bias(node, place):
            bias = corrected
        return quantized, EncodedBias(corrected, None if bias is None else quantize_bias(bias, quantized, scale))

    def _hessian(self, node: Node, weight: Weight, *, corrected: bool) -> WeightHessian | None:
        """Return the Gram matrices of a weight, if its encoder or GPTQ uses them."""
        gptq = self.config.gptq
        view = weight_gemm_view(node, weight, gptq) if gptq is not None else None
        gram = self.statistics.statistics.get(view.request) if view is not None else None
        if gptq is None or view is None or not isinstance(gram, HessianAccumulator) or not gram.count:
            return None
        return WeightHessian(gram, view, gptq, corrected)

    def _adds_new_bias(self, node: Node, place: tuple[Node, int] | None) -> bool:
        """Whether an integer kernel that has no bias can add a quantized one to its sums."""
        bare = place is not None and place[0] is node and optional_input(*place) is None
        return bare and target_named(self.target).reads.integer_bias


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
        plan: as in `encode`.
        graph: as in `encode`.
        parameters: scale and zero point of each activation by tensor name.
        means: channel means by tensor name. Nodes whose activations are missing keep their biases.
        statistics: as in `encode`, with the Hessians.
        cache: as in `encode`.
        config: its calibration methods must be those of `parameters`. Factors of float tensors are ignored.
        progress: as in `encode`.
    """
    equalization = config.equalization.select(plan.by_tensor)
    scaled = scalable_tensors(graph, plan) if config.awq.factors else {}
    awq = config.awq.select(scaled)
    factors = {**equalization.factors, **awq.factors}
    makers = makers_of_divided(graph, plan, equalization)
    cache = EncodingCache() if cache is None else cache
    encoding = PlanEncoder(parameters, means, statistics, plan.target, cache, config, factors, makers)
    formats = {activation.tensor: activation.spec.format for activation in plan.activations}
    constants: dict[str, QTensor] = {}
    weights: dict[tuple[str, int], QTensor] = {}
    found_biases: dict[str, EncodedBias] = {}
    planned, done = list(quantized_nodes(graph, plan)), 0
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
