"""Plans: the mode of every node, with its specs and the reason in words, and the activations that get a scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.calibration.accumulators import Request
from onnxq.calibration.kinds import default_request
from onnxq.config.scheme import InputsOutputs, Mode, QuantSpec
from onnxq.lowering import AllowedOps
from onnxq.numerics.pairs import Pairs
from onnxq.system.html_table import html_table

DECODING = frozenset({Mode.STATIC, Mode.DYNAMIC, Mode.WEIGHT_ONLY})
"""Modes that process quantized values in each run, unlike storage and float, which compute as the float model does."""

METADATA_KEY = "onnxq.scheme"
"""Key of the plan's scheme name in a quantized model's metadata_props."""

EXCLUDED = "it is excluded"
"""Reason of nodes that the user excludes."""

NOTED_METHODS = ("equalization", "awq", "gptq")
"""The accuracy methods that plans may name."""

DIVIDED_KEY = "onnxq.divided"
"""Metadata key of the tensors with divided channels: a JSON object from tensor name to the tensor of the factors."""


@dataclass(frozen=True)
class Weight:
    """A constant input of a node that is quantized.

    Attributes:
        index: input index of the node.
        tensor: name of the float initializer.
        axis: axis of the output channels; negative axes count from the end.
        elements: number of values.
        reduction_axis: axis that is summed over, or along which a looked-up row lies; 1-D blocks lie along it.
        pairs: which pairs of products the kernel may add in 16 bits; the quantized values must not overflow there.
        scales: given scales, one or one for each channel; empty lets the encoder choose them.
    """

    index: int
    tensor: str
    spec: QuantSpec
    axis: int
    elements: int = 0
    reduction_axis: int = 0
    pairs: Pairs = Pairs.NONE
    scales: tuple[float, ...] = ()

    def of_rank(self, rank: int) -> Weight:
        """Return the key of the quantized values of a weight of this rank; nodes with equal keys can share them."""
        return replace(self, index=0, axis=self.axis % rank, reduction_axis=self.reduction_axis % rank)


@dataclass(frozen=True)
class Activation:
    """A tensor of any graph that gets QuantizeLinear and DequantizeLinear, or a constant operand beside one.

    Attributes:
        group: name of the representative of all tensors that share the scale.
        fixed_range: range of the operator's output, or of the constant's values; it needs no calibration.
        every_consumer: whether float consumers read the dequantized tensor too. A kernel that can only output quantized
            values requires it. Otherwise only the integer nodes read it.
        ranges: its own calibration method, as parse_calibration_method takes it; empty for the plan's method.
        found_range: the calibrated range; None before calibration.
        factors: divisors of its channels before quantization; empty for none.
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
        """The range if it needs no calibration, else None."""
        return self.found_range if self.fixed_range is None else self.fixed_range


@dataclass(frozen=True)
class Mean:
    """The mean of each channel of a tensor of the main graph, along `axis`."""

    tensor: str
    axis: int


@dataclass(frozen=True)
class Decision:
    """The mode of one node, and why.

    Attributes:
        node: name, unique over all graphs of the model.
        reason: one sentence for the user.
        figures: the measurements that the reason depends on.
        weights: the constant inputs that are quantized.
        bias: input index of a bias that is quantized to int32.
        data: name of the activation that the weight of a static or dynamic node multiplies.
        mean: with it and the rounding of the weight, the bias is corrected; None for no correction.
        finer: why its weights are quantized more finely than the scheme requests, or stay float by choice, in words;
            empty if they are not.
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
    """A measured exception for one node from what the scheme says.

    Attributes:
        mode: the mode instead.
        reason: why, in words.
        figures: what was measured.
        weight: spec of its weights; None takes that of the scheme.
        finer: why its weights are quantized more finely than the scheme requests, or stay float by choice, in words;
            empty if they are not.
    """

    mode: Mode
    reason: str
    figures: str = ""
    weight: QuantSpec | None = None
    finer: str = ""


@dataclass(frozen=True)
class Damping:
    """Settings of GPTQ, which rounds weights so that their errors cancel (Frantar et al. 2022, arXiv:2210.17323).

    Attributes:
        share: this share of the mean of the Gram matrix's diagonal is added to the diagonal.
        bits: weights with more bits are rounded to nearest.
        observed: the tensors whose Gram matrices were observed together.
    """

    share: float
    bits: int
    observed: tuple[str, ...] = ()


@dataclass(frozen=True)
class AwqScales:
    """Divisors of the channels of a float activation, by which quantized weights are multiplied in turn.

    Attributes:
        tensor: the activation.
        factors: one for each channel, above 0.
    """

    tensor: str
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Preparation:
    """The model and settings that a plan was made for; both are needed to apply it again.

    Attributes:
        model: digest of the prepared model.
        version: version of onnxq.
        opset: of the prepared model.
        steps: names of the passes after canonicalization.
        widened: whether 16-bit floats were converted to float32.
        without: names of the canonicalization passes and rules that were left out.
    """

    model: str
    version: str
    opset: int
    steps: tuple[str, ...] = ()
    widened: bool = False
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Decisions for all nodes, and the activations that get a scale.

    Attributes:
        decisions: one for each node, in graph order; nodes of subgraphs follow their graph.
        activations: the tensors that get QuantizeLinear and DequantizeLinear, in graph order.
        scheme: name of the scheme.
        target: name of the target.
        ranges: calibration method of the activations, as parse_calibration_method takes it; empty if not yet known.
        accuracy: names of the accuracy methods, applied where they improve accuracy.
        emit: operators that the written model may contain.
        damping: settings of GPTQ; None rounds all weights to nearest.
        awq: divisors of the channels of float activations.
        io: the types of the model's inputs and outputs.
        thorough: whether the plan was searched with full effort for accuracy.
        preparation: None while it is not known.
        observed: the tensors that were observed together; runtimes fuse differently if fewer are observed.

    >>> import onnxq
    >>> onnxq.plan("models/gru.onnx")
    Plan(int8 for onnxruntime-cpu; 11 nodes: 1 static, 2 storage, 8 float)
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
    awq: tuple[AwqScales, ...] = ()
    io: InputsOutputs = InputsOutputs.FLOAT

    def __repr__(self) -> str:
        return f"Plan({self.scheme} for {self.target}; {self})"

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {mode}" for mode in Mode if (count := self.count(mode)))
        return f"{len(self.decisions)} nodes: {counts}" if counts else "no nodes"

    def _repr_html_(self) -> str:
        rows = [(decision.node, decision.op_type, decision.mode, decision.reason) for decision in self.decisions]
        return html_table(str(self), ("node", "operator", "mode", "reason"), rows)

    @cached_property
    def by_node(self) -> Mapping[str, Decision]:
        """The decisions by node name."""
        return {decision.node: decision for decision in self.decisions}

    @cached_property
    def by_tensor(self) -> Mapping[str, Activation]:
        """The activations by tensor name."""
        return {activation.tensor: activation for activation in self.activations}

    @cached_property
    def effect(self) -> tuple[object, ...]:
        """The decisions without their reasons: plans of equal effect make the same model."""
        nodes = tuple((decision.mode, decision.weights, decision.bias) for decision in self.decisions)
        return nodes, self.activations

    def count(self, mode: Mode) -> int:
        """Return the number of nodes with ``mode``."""
        return sum(decision.mode is mode for decision in self.decisions)

    @property
    def decodes(self) -> bool:
        """Whether any node processes quantized values in each run, so that the model may be slower than in float."""
        return any(decision.mode in DECODING for decision in self.decisions)

    @property
    def observed_tensors(self) -> tuple[str, ...]:
        """Names of the tensors whose ranges must be calibrated."""
        return tuple(activation.tensor for activation in self.activations if activation.known_range is None)

    @property
    def calibrated(self) -> Mapping[str, QuantSpec]:
        """The specs of the tensors whose ranges must be calibrated, by name."""
        return {activation.tensor: activation.spec for activation in self.activations if activation.known_range is None}

    @property
    def requests(self) -> tuple[Request, ...]:
        """The statistics that every calibration method needs: ranges, and channel means for bias correction."""
        means = (decision.mean for decision in self.decisions if decision.mean is not None)
        wanted = [
            *(default_request(tensor, "range") for tensor in self.observed_tensors),
            *(default_request(mean.tensor, "channel-means", mean.axis) for mean in means),
        ]
        return tuple(dict.fromkeys(wanted))

    def left_in_float(self) -> tuple[tuple[str, int], ...]:
        """Return the reasons why nodes do not run as integer kernels with the number of nodes, most frequent first."""
        reasons = Counter(decision.reason for decision in self.decisions if decision.mode is not Mode.STATIC)
        return tuple(reasons.most_common())


def stored_instead(plan: Plan, why: str) -> dict[str, Demotion]:
    """Return the demotions by which weights are only stored where nodes process quantized values in each run."""
    return {
        decision.node: Demotion(Mode.STORAGE, why)
        for decision in plan.decisions
        if decision.mode in DECODING and decision.weights
    }
