"""Plans: for every node what happens to it, with which specs, and the reason in words. Decides; edits nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from onnxq.scheme import Mode, Spec

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
    """

    index: int
    tensor: str
    spec: Spec
    axis: int
    elements: int = 0


@dataclass(frozen=True)
class Activation:
    """A tensor of the main graph that passes through QuantizeLinear and DequantizeLinear.

    Attributes:
        tensor: its name.
        spec: how it is quantized.
        group: name of the tensor that stands for all tensors sharing one scale.
        fixed_range: range given by the operator that makes it, so that calibration is not asked.
        every_consumer: whether float consumers read the dequantized tensor too, which an integer kernel that can
            only give codes demands; otherwise only the integer nodes do.
    """

    tensor: str
    spec: Spec
    group: str
    fixed_range: tuple[float, float] | None = None
    every_consumer: bool = False


@dataclass(frozen=True)
class Decision:
    """What happens to one node and why.

    Attributes:
        node: name, unique over all graphs of the model.
        op_type: its operator.
        mode: static, storage or float.
        reason: one sentence for the user.
        weights: the constant inputs that become codes.
        bias: input index of a bias that becomes int32 codes.
        data: name of the activation that a static node's weight multiplies.
    """

    node: str
    op_type: str
    mode: Mode
    reason: str
    weights: tuple[Weight, ...] = ()
    bias: int | None = None
    data: str = ""


@dataclass(frozen=True)
class Demotion:
    """A measured wish that a node be taken out of integer arithmetic, whatever the scheme says."""

    mode: Mode
    reason: str


@dataclass(frozen=True)
class Plan:
    """Decisions for all nodes and the activations that get a scale.

    Attributes:
        decisions: one for each node, in graph order, bodies of control flow behind their graph.
        activations: the tensors that get QuantizeLinear and DequantizeLinear, in graph order.
        scheme: name of the scheme.
        target: name of the target.
    """

    decisions: tuple[Decision, ...]
    activations: tuple[Activation, ...]
    scheme: str
    target: str

    @cached_property
    def by_node(self) -> Mapping[str, Decision]:
        """The decisions by node name."""
        return {decision.node: decision for decision in self.decisions}

    def count(self, mode: Mode) -> int:
        """How many nodes have ``mode``."""
        return sum(decision.mode is mode for decision in self.decisions)

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of the tensors whose range must be calibrated."""
        return tuple(activation.tensor for activation in self.activations if activation.fixed_range is None)

    def left_in_float(self) -> tuple[tuple[str, int], ...]:
        """The reasons why nodes do not run as integer kernels, with how many nodes each holds, most first."""
        reasons = Counter(decision.reason for decision in self.decisions if decision.mode is not Mode.STATIC)
        return tuple(reasons.most_common())
