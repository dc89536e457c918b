"""Compare a plan with its scheme: weights with the requested number of bits, and nodes left in float."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from onnxq.config.scheme import Method, Mode, Scheme
from onnxq.ir import Graph, Node, all_nodes
from onnxq.lowering import AllowedOps
from onnxq.numerics.formats import format_named
from onnxq.planning.obstacles import dynamic_obstacle
from onnxq.planning.plan import Plan
from onnxq.planning.planner import rule_of
from onnxq.planning.weights import every_weight, large_weights, weight_spec
from onnxq.runtime.targets import Target

_SHOWN = 2


@dataclass(frozen=True)
class Delivery:
    """How many weights have at most the requested number of bits.

    Attributes:
        bits: requested bits of a quantized value.
        requested: weights for which a rule requests these bits; weights that would save no bytes do not count.
        got: how many of them have at most `bits` bits.
        reasons: why the others do not, with the number of weights, most frequent first.
    """

    bits: int
    requested: int
    got: int
    reasons: tuple[tuple[str, int], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether all requested weights have the bits."""
        return self.got == self.requested

    def __str__(self) -> str:
        said = f"{self.got} of {self.requested} weights {'has' if self.got == 1 else 'have'} at most {self.bits} bits"
        parts = [f"{_have(count)} more: {reason}" for reason, count in self.reasons[:_SHOWN]]
        rest = sum(count for _, count in self.reasons[_SHOWN:])
        return "; ".join([said, *parts, *([f"{_have(rest)} more for other reasons"] if rest else [])])


def _have(count: int) -> str:
    return f"{count} weight has" if count == 1 else f"{count} weights have"


def deliveries(plan: Plan, graph: Graph, scheme: Scheme, target: Target) -> tuple[Delivery, ...]:
    """Return what a plan delivers for each number of bits that a scheme requests, fewest bits first.

    Args:
        plan: for the nodes of `graph`.
        graph: the prepared graph.
        scheme: the user's rules.
        target: the runtime.
    """
    requested, got = Counter[int](), Counter[int]()
    reasons: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for _, node in all_nodes(graph):
        rule = rule_of(scheme, node)
        if rule.mode is Mode.FLOAT:
            continue
        spec, decision = weight_spec(rule, target), plan.by_node[node.name]
        bits = format_named(spec.format).bits
        delivered = {weight.index: format_named(weight.spec.format).bits for weight in decision.weights}
        wanted = (every_weight if spec.method is Method.BURN else large_weights)(node, spec)
        for index in {weight.index for weight in wanted} | delivered.keys():
            requested[bits] += 1
            if delivered.get(index, bits + 1) <= bits:
                got[bits] += 1
            else:
                reasons[bits][decision.finer or decision.reason] += 1
    return tuple(
        Delivery(bits, requested[bits], got[bits], tuple(reasons[bits].most_common())) for bits in sorted(requested)
    )


def missing(promises: Sequence[Delivery]) -> str:
    """Return what was requested and not delivered in words, or an empty string.

    >>> missing([Delivery(2, 18, 3), Delivery(8, 5, 5)])
    '3 of 18 weights have at most 2 bits'
    """
    return "; ".join(str(delivery) for delivery in promises if not delivery.is_whole)


def left_by_standard(plan: Plan, graph: Graph, scheme: Scheme, target: Target) -> int:
    """Count the float nodes that the scheme requests as integers, but for which standard ONNX has no operator.

    Args:
        plan: for the nodes of `graph`.
        graph: the prepared graph.
        scheme: the user's rules.
        target: the runtime, which may have these operators.
    """

    def is_left(node: Node) -> bool:
        wanted = rule_of(scheme, node).mode in (Mode.STATIC, Mode.DYNAMIC)
        return wanted and not dynamic_obstacle(node, target, AllowedOps.ORT)

    own = (node for _, node in all_nodes(graph) if node.op in target.kernels.own_dynamic and not node.domain)
    return sum(is_left(node) for node in own if plan.by_node[node.name].mode is not Mode.DYNAMIC)
