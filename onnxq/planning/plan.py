"""Plans: for every node what happens to it, with which specs, and the reason in words. Decides; edits nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.calibration.accumulators import Request
from onnxq.calibration.kinds import default_request
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.lowering import AllowedOps
from onnxq.numerics.pairs import Pairs
from onnxq.system.records import html_table

DECODING = frozenset({Mode.STATIC, Mode.DYNAMIC, Mode.WEIGHT_ONLY})
"""Modes in which codes are worked on in each run, unlike those that compute as the float model does."""

METADATA_KEY = "onnxq.scheme"
"""Entry of a quantized model's metadata_props that names the scheme of its plan."""

EXCLUDED = "it is excluded"
"""Why nodes stay in float that the user names for that."""

NOTED_METHODS = ("equalization", "awq", "gptq", "bias-correction")
"""The accuracy methods that plans name."""

DIVIDED_KEY = "onnxq.divided"
"""Entry that names the tensors whose channels come divided by factors: a JSON object with the tensor that has these."""


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
        pairs: which products with data may be added in 16 bits, which codes then fit.
    """

    index: int
    tensor: str
    spec: QuantSpec
    axis: int
    elements: int = 0
    reduction_axis: int = 0
    pairs: Pairs = Pairs.NONE

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
        ranges: its own calibration method, as parse_calibration_method takes it; empty where it has that of the plan.
        found_range: what calibration has found by that method; None where that is still to be done.
        factors: what its channels are divided by before they become codes; empty where they stay.
        channels: axis of these channels.
    """

    tensor: str
    spec: QuantSpec
    group: str
    fixed_range: tuple[float, float] | None = None
    every_consumer: bool = False
    ranges: str = ""
    found_range: tuple[float, float] | None = None
    factors: tuple[float, ...] = ()
    channels: int = 0

    @property
    def known_range(self) -> tuple[float, float] | None:
        """The range that needs no calibration."""
        return self.found_range if self.fixed_range is None else self.fixed_range


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
        finer: why its weights have finer codes than the scheme asks for, in words; empty where they have not.
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
    finer: str = ""


@dataclass(frozen=True)
class Demotion:
    """A measured wish that something else happen to a node than the scheme says.

    Attributes:
        mode: what happens to it.
        reason: why, in words.
        figures: what was measured.
        weight: how its weights are quantized, where not as the scheme says.
        finer: why they have finer codes than the scheme asks for, in words; empty where they have not.
    """

    mode: Mode
    reason: str
    figures: str = ""
    weight: QuantSpec | None = None
    finer: str = ""


@dataclass(frozen=True)
class Damping:
    """How weights are rounded so that their errors cancel.

    Attributes:
        share: of the mean of a Gram matrix's diagonal that is added to it.
        bits: weights of more bits are rounded to their nearest codes.
        observed: the tensors whose Gram matrices were seen together.
    """

    share: float
    bits: int
    observed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scaling:
    """What the channels of float data are divided by, which weights of codes make up for.

    Attributes:
        tensor: the data.
        factors: one for each channel, above 0.
    """

    tensor: str
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Preparation:
    """What a plan was made for and by, without which it cannot be carried out again.

    Attributes:
        model: digest of the prepared model.
        version: of onnxq.
        opset: of the prepared model.
        steps: names of the passes that follow the canonical form.
        widened: whether 16-bit floats became float32.
        without: names of the passes and rules of the canonical form that were left out.
    """

    model: str
    version: str
    opset: int
    steps: tuple[str, ...] = ()
    widened: bool = False
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Decisions for all nodes and the activations that get a scale.

    Attributes:
        decisions: one for each node, in graph order, bodies of control flow behind their graph.
        activations: the tensors that get QuantizeLinear and DequantizeLinear, in graph order.
        scheme: name of the scheme.
        target: name of the target.
        ranges: the calibration method for the activations, as parse_calibration_method takes it; empty when it is not
            known yet.
        accuracy: names of the accuracy methods by which codes are chosen, where they pay.
        emit: what the written model may hold.
        damping: how errors of rounding cancel; None where all weights are rounded to their nearest codes.
        scaling: what channels of float data are divided by.
        thorough: whether it was chosen with all effort for accuracy.
        preparation: what it was made for and by; None while that is not known.
        observed: the tensors that were observed together, which runtimes fuse otherwise alone.
        refitted: whether its ranges are also those of the samples that judged it.
    """

    decisions: tuple[Decision, ...]
    activations: tuple[Activation, ...]
    scheme: str
    target: str
    ranges: str = ""
    accuracy: tuple[str, ...] = ()
    emit: AllowedOps = AllowedOps.QDQ
    damping: Damping | None = None
    thorough: bool = False
    preparation: Preparation | None = None
    observed: tuple[str, ...] = ()
    scaling: tuple[Scaling, ...] = ()
    refitted: bool = False

    def __repr__(self) -> str:
        return f"Plan({self.scheme} for {self.target}; {self})"

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {mode}" for mode in Mode if (count := self.count(mode)))
        return f"{len(self.decisions)} nodes: {counts}" if counts else "no nodes"

    def _repr_html_(self) -> str:
        """Return what notebooks show: how many nodes have each mode, and the first of them with their reasons."""
        rows = [(one.node, one.op_type, one.mode, one.reason) for one in self.decisions]
        return html_table(str(self), ("node", "operator", "mode", "reason"), rows)

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
        return tuple(activation.tensor for activation in self.activations if activation.known_range is None)

    @property
    def calibrated(self) -> Mapping[str, QuantSpec]:
        """The specs of the tensors whose range must be calibrated, by name."""
        return {one.tensor: one.spec for one in self.activations if one.known_range is None}

    @property
    def requests(self) -> tuple[Request, ...]:
        """What must be observed whatever the calibration method: ranges, and means that biases are corrected by."""
        means = (decision.mean for decision in self.decisions if decision.mean is not None)
        wanted = [
            *(default_request(tensor, "range") for tensor in self.taps),
            *(default_request(mean.tensor, "channel-means", mean.axis) for mean in means),
        ]
        return tuple(dict.fromkeys(wanted))

    def left_in_float(self) -> tuple[tuple[str, int], ...]:
        """The reasons why nodes do not run as integer kernels, with how many nodes each holds, most first."""
        reasons = Counter(decision.reason for decision in self.decisions if decision.mode is not Mode.STATIC)
        return tuple(reasons.most_common())
