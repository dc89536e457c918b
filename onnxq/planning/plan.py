"""Plans: for every node what happens to it, with which specs, and the reason in words. Decides; edits nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.evidence.kinds import request_for
from onnxq.evidence.requests import Request
from onnxq.lowering import Emit
from onnxq.scheme import Mode, Spec

DECODING = frozenset({Mode.STATIC, Mode.DYNAMIC, Mode.WEIGHT_ONLY})
"""Modes in which codes are worked on in each run, unlike those that compute as the float model does."""

METADATA_KEY = "onnxq.scheme"
"""Entry of a quantized model's metadata_props that names the scheme of its plan."""


@dataclass(frozen=True)
class Weight:
    """A constant input of a node that becomes codes.

    Attributes:
        index: which input of the node.
        tensor: name of the float initializer.
        spec: how it is quantized.
        axis: axis of its output channels, negative axes counted from the end.
        elements: how many values it has.
        reduction_axis: axis that is summed over, or that a looked-up row lies along; blocks of one extent lie along it.
    """

    index: int
    tensor: str
    spec: Spec
    axis: int
    elements: int = 0
    reduction_axis: int = 0

    def of_rank(self, rank: int) -> Weight:
        """Return what decides the codes of a weight of this rank: nodes for which it is equal can share them."""
        return replace(self, index=0, axis=self.axis % rank, reduction_axis=self.reduction_axis % rank)


@dataclass(frozen=True)
class Activation:
    """A tensor of any graph that passes through QuantizeLinear and DequantizeLinear, or a constant among such data.

    Attributes:
        tensor: its name.
        spec: how it is quantized.
        group: name of the tensor that stands for all tensors sharing one scale.
        fixed_range: range given by the operator that makes it, or by a constant's values, so that calibration is not
            asked.
        every_consumer: whether float consumers read the dequantized tensor too, which an integer kernel that can
            only give codes demands; otherwise only the integer nodes do.
        ranges: its own range method, as parse_range takes it; empty where it has that of the plan.
    """

    tensor: str
    spec: Spec
    group: str
    fixed_range: tuple[float, float] | None = None
    every_consumer: bool = False
    ranges: str = ""


@dataclass(frozen=True)
class Mean:
    """The mean of each channel of a tensor of the main graph.

    Attributes:
        tensor: its name.
        axis: of the channels.
    """

    tensor: str
    axis: int


@dataclass(frozen=True)
class Decision:
    """What happens to one node and why.

    Attributes:
        node: name, unique over all graphs of the model.
        op_type: its operator.
        mode: what happens to it.
        reason: one sentence for the user.
        figures: what was measured that the reason rests on.
        weights: the constant inputs that become codes.
        bias: input index of a bias that becomes int32 codes.
        data: name of the activation that the weight of a static or dynamic node multiplies.
        mean: of the data whose mean and the weight's rounding say how the bias is to be corrected, where it is.
    """

    node: str
    op_type: str
    mode: Mode
    reason: str
    weights: tuple[Weight, ...] = ()
    bias: int | None = None
    data: str = ""
    figures: str = ""
    mean: Mean | None = None


@dataclass(frozen=True)
class Demotion:
    """A measured wish that something else happen to a node than the scheme says.

    Attributes:
        mode: what happens to it.
        reason: why, in words.
        figures: what was measured.
        weight: how its weights are quantized, where not as the scheme says.
    """

    mode: Mode
    reason: str
    figures: str = ""
    weight: Spec | None = None


@dataclass(frozen=True)
class Plan:
    """Decisions for all nodes and the activations that get a scale.

    Attributes:
        decisions: one for each node, in graph order, bodies of control flow behind their graph.
        activations: the tensors that get QuantizeLinear and DequantizeLinear, in graph order.
        scheme: name of the scheme.
        target: name of the target.
        ranges: the range method for the activations, as parse_range takes it; empty when it is not known yet.
        accuracy: names of the accuracy methods by which codes are chosen, where they pay.
        emit: what the written model may hold.
    """

    decisions: tuple[Decision, ...]
    activations: tuple[Activation, ...]
    scheme: str
    target: str
    ranges: str = ""
    accuracy: tuple[str, ...] = ()
    emit: Emit = Emit.QDQ

    @cached_property
    def by_node(self) -> Mapping[str, Decision]:
        """The decisions by node name."""
        return {decision.node: decision for decision in self.decisions}

    @cached_property
    def by_tensor(self) -> Mapping[str, Activation]:
        """The activations by the name of the tensor."""
        return {activation.tensor: activation for activation in self.activations}

    @cached_property
    def effect(self) -> tuple[object, ...]:
        """What the plan does, without the reasons: plans of the same effect make the same model."""
        nodes = tuple((decision.mode, decision.weights, decision.bias) for decision in self.decisions)
        return nodes, self.activations

    def count(self, mode: Mode) -> int:
        """How many nodes have ``mode``."""
        return sum(decision.mode is mode for decision in self.decisions)

    @property
    def decodes(self) -> bool:
        """Whether any node works on codes in each run, so that the model may be slower than float."""
        return any(decision.mode in DECODING for decision in self.decisions)

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of the tensors whose range must be calibrated."""
        return tuple(activation.tensor for activation in self.activations if activation.fixed_range is None)

    @property
    def calibrated(self) -> Mapping[str, Spec]:
        """The specs of the tensors whose range must be calibrated, by name."""
        return {one.tensor: one.spec for one in self.activations if one.fixed_range is None}

    @property
    def requests(self) -> tuple[Request, ...]:
        """What must be observed whatever the range method: ranges, and means that biases are corrected by."""
        means = (decision.mean for decision in self.decisions if decision.mean is not None)
        wanted = [
            *(request_for(tensor, "range") for tensor in self.taps),
            *(request_for(mean.tensor, "channel-means", mean.axis) for mean in means),
        ]
        return tuple(dict.fromkeys(wanted))

    def left_in_float(self) -> tuple[tuple[str, int], ...]:
        """The reasons why nodes do not run as integer kernels, with how many nodes each holds, most first."""
        reasons = Counter(decision.reason for decision in self.decisions if decision.mode is not Mode.STATIC)
        return tuple(reasons.most_common())
