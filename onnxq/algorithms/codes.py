"""Codes: everything that will be written in the place of floats, chosen before any graph is edited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.cache import CodesCache
from onnxq.algorithms.migration import Factors, divided_tensors, makers_of_divided, weighted_maker
from onnxq.algorithms.node_codes import Bias, Encoding
from onnxq.algorithms.parameters import activation_parameters, channel_means
from onnxq.algorithms.recipe import USUAL, Recipe
from onnxq.algorithms.scaling import divisible
from onnxq.calibration.statistics import Evidence
from onnxq.config.scheme import Mode
from onnxq.ir import Constant, Graph, Node, is_fixed, nodes, scopes
from onnxq.numerics.affine import Parameters, QTensor, quantize
from onnxq.numerics.formats import format_named
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Decision, Plan

NOTHING_SEEN = Evidence()


@dataclass(frozen=True, eq=False)
class Codes:
    """What is written for the activations, weights and biases of a plan.

    Attributes:
        activations: scale and zero point by tensor name.
        constants: codes of the constants among them, by tensor name.
        weights: codes by node and input, in the shape of the float weight; scales have its rank.
        biases: by node, of those that are coded or corrected.
        factors: what the channels of activations are divided by before they become codes, and those of float data that
            weights of codes multiply, by tensor name.
        divided: the activations among them that come divided, so that their quantizers need not divide.
        floats: constants that divide float data, by node and input.
    """

    activations: Mapping[str, Parameters] = field(default_factory=lambda: MappingProxyType({}))
    constants: Mapping[str, QTensor] = field(default_factory=lambda: MappingProxyType({}))
    weights: Mapping[tuple[str, int], QTensor] = field(default_factory=lambda: MappingProxyType({}))
    biases: Mapping[str, Bias] = field(default_factory=lambda: MappingProxyType({}))
    factors: Mapping[str, Factors] = field(default_factory=lambda: MappingProxyType({}))
    divided: frozenset[str] = frozenset()
    floats: Mapping[tuple[str, int], NDArray[np.floating]] = field(default_factory=lambda: MappingProxyType({}))

    def divided_as(self, graph: Graph, plan: Plan) -> Mapping[str, str]:
        """Return the tensors whose values come divided, or make such behind a clamp, with the one that has the factors.

        Args:
            graph: the prepared graph.
            plan: of it.
        """
        dividing = {name for name, _ in self.floats}
        found: dict[str, str] = {}
        for _, node in nodes(graph) if self.divided or dividing else ():
            for tensor in node.outputs:
                if tensor.name in self.divided:
                    maker = weighted_maker(tensor, plan)
                    before = maker.outputs if maker is not None else ()
                    found.update(dict.fromkeys((*(one.name for one in before), tensor.name), tensor.name))
            if node.name in dividing:
                found[node.outputs[0].name] = node.outputs[0].name
        return found


def encode(
    plan: Plan,
    graph: Graph,
    evidence: Evidence = NOTHING_SEEN,
    recipe: Recipe = USUAL,
    cache: CodesCache | None = None,
) -> Codes:
    """Choose the codes of all that a plan quantizes.

    Args:
        plan: names the nodes, their weights and the activations.
        graph: the prepared graph, which is read only.
        evidence: what calibration saw.
        recipe: how codes are chosen beyond what the plan says.
        cache: what was made for other plans; None starts with nothing.

    Raises:
        DataError: a tensor was not calibrated.
        ModelError: a weight holds NaN or infinity.
        SchemeError: the plan's blocks have more axes than the weight.
    """
    parameters = activation_parameters(plan, evidence, recipe.ranges, recipe.own_ranges)
    means = channel_means(plan, evidence)
    return encode_with(plan, graph, parameters, means, evidence, cache, recipe)


def encode_with(
    plan: Plan,
    graph: Graph,
    parameters: Mapping[str, Parameters],
    means: Mapping[str, NDArray[np.float64]],
    evidence: Evidence = NOTHING_SEEN,
    cache: CodesCache | None = None,
    recipe: Recipe = USUAL,
) -> Codes:
    """Choose the codes of weights and biases for activations whose parameters are given; see `encode`.

    Args:
        plan: names the nodes, their weights and the activations.
        graph: the prepared graph, which is read only.
        parameters: scale and zero point of each activation by tensor name.
        means: of each channel by tensor name; nodes whose data is not there keep their biases.
        evidence: what calibration saw, for encoders that look at data.
        cache: what was made for other plans; None starts with nothing.
        recipe: how weights and biases are chosen beyond what the plan says; its ranges are those of the parameters, and
            factors of tensors without codes are left out of account.
    """
    migration = recipe.migration.select(plan.by_tensor)
    scaled = divisible(graph, plan) if recipe.scaling.factors else {}
    scaling = recipe.scaling.select(scaled)
    factors = {**migration.factors, **scaling.factors}
    makers = makers_of_divided(graph, plan, migration)
    cache = CodesCache() if cache is None else cache
    encoding = Encoding(parameters, means, evidence, plan.target, cache, recipe, factors, makers)
    formats = {activation.tensor: activation.spec.format for activation in plan.activations}
    constants: dict[str, QTensor] = {}
    weights: dict[tuple[str, int], QTensor] = {}
    found_biases: dict[str, Bias] = {}
    for node, decision in _planned(graph, plan):
        for tensor in data_inputs(node) if decision.mode is Mode.STATIC else ():
            if isinstance(tensor, Constant) and tensor.name in formats and tensor.name not in constants:
                format, own = format_named(formats[tensor.name]), migration.factors.get(tensor.name)
                values = tensor.values if own is None else own.divide(tensor.values)
                constants[tensor.name] = quantize(values, parameters[tensor.name], format)
        for weight in decision.weights:
            if is_fixed(node.inputs[weight.index]):
                found, bias = encoding.of(node, decision, weight)
                weights[node.name, weight.index] = found
                if bias is not None:
                    found_biases[node.name] = bias
    divided = divided_tensors(graph, plan, migration)
    floats: dict[tuple[str, int], NDArray[np.floating]] = {}
    for name, one in scaling.factors.items():
        floats |= scaled[name].divided(one)
    return Codes(parameters, constants, weights, found_biases, factors, divided, floats)


def _planned(graph: Graph, plan: Plan) -> Iterator[tuple[Node, Decision]]:
    """Yield the nodes of a graph and its bodies that do not stay as they are."""
    for scope in scopes(graph):
        for node in scope.nodes:
            decision = plan.by_node.get(node.name)
            if decision is not None and decision.mode is not Mode.FLOAT:
                yield node, decision
