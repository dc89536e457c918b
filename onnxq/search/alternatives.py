"""Ways to run a node whose neighbours see floats, beside computing in float: which there are, and what they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from onnxq.config.scheme import Mode, Spec
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.targets import Target
from onnxq.search.kernel_times import NodeTimes

_INTEGERS = frozenset({Mode.STATIC, Mode.DYNAMIC})


@dataclass(frozen=True)
class Alternative:
    """What happens to a node instead of what the scheme says.

    Attributes:
        mode: dynamic or weight-only; static is what the others are alternatives to.
        weight: how its weights are quantized; None takes what the scheme says.
    """

    mode: Mode
    weight: Spec | None = None

    def demotion(self, reason: str, figures: str = "") -> Demotion:
        """Return the wish that a node be run so."""
        return Demotion(self.mode, reason, figures, self.weight)

    @property
    def described(self) -> str:
        """How the figures of a decision call it.

        >>> Alternative(Mode.WEIGHT_ONLY, Spec("int4", (32,))).described
        'with float data and int4 codes'
        """
        return f"with float data and {self.weight.format} codes" if self.weight else "with dynamic scales"


STATIC = Alternative(Mode.STATIC)
"""What the alternatives stand beside: an integer kernel whose neighbours see codes."""

Way = tuple[str, Alternative]
"""A node and what it could be."""


@dataclass(frozen=True, eq=False)
class Offer:
    """An alternative that some nodes can take, measured where all of them take it.

    Attributes:
        alternative: what they take.
        plan: in which every node takes it that can.
        nodes: those.
        times: of the plan's model.
    """

    alternative: Alternative
    plan: Plan
    nodes: frozenset[str]
    times: NodeTimes


def alternatives(target: Target) -> Iterator[Alternative]:
    """Yield the alternatives that a runtime has fast kernels for."""
    if target.kernels.dynamic or target.kernels.own_dynamic:
        yield Alternative(Mode.DYNAMIC)
    yield from (Alternative(Mode.WEIGHT_ONLY, spec) for spec in target.kernels.multiplied)


def wishes(alternative: Alternative, full: Plan, target: Target) -> Mapping[str, Demotion]:
    """Return the demotions that put every node on an alternative that may be.

    Those may that the scheme wants as integers, and those whose weights it wants stored as the same codes. Other
    weights than the scheme's are no choice where it names weights of its own, finer or coarser than the target's.

    Args:
        alternative: what they are to take.
        full: what the scheme wants.
        target: the runtime.
    """
    usual = target.weight
    exchanged = {Mode.STATIC: usual, Mode.DYNAMIC: usual, Mode.STORAGE: alternative.weight}
    demotion = alternative.demotion("measured as an alternative to what the scheme says")
    return {
        one.node: demotion
        for one in full.decisions
        if (one.mode in _INTEGERS and alternative.weight is None)
        or (one.weights and all(weight.spec == exchanged.get(one.mode) for weight in one.weights))
    }


def takers(alternative: Alternative, plan: Plan, wished: Set[str]) -> frozenset[str]:
    """Return the nodes on which a plan fulfils the wish for an alternative; the others have fallen back."""
    return frozenset(one.node for one in plan.decisions if one.mode is alternative.mode and one.node in wished)
