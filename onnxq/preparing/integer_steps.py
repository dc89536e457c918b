"""What follows the canonical form for the integer kernels of a runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnxq.config.scheme import Mode, Scheme
from onnxq.errors import SchemeError, did_you_mean
from onnxq.passes.activations import JoinHardSwishes, SplitHardSwishes, SplitPRelus
from onnxq.passes.control_flow import ScanCells
from onnxq.passes.convolutions import ConvolvePooled, ConvolveTransposed
from onnxq.passes.linear import UnfuseProducts
from onnxq.planning.plan import DECODING
from onnxq.rewrite import Applied, Pass
from onnxq.runtime.targets import Target

_STEPS = (
    UnfuseProducts(),
    SplitHardSwishes(),
    JoinHardSwishes(),
    SplitPRelus(),
    ConvolvePooled(),
    ConvolveTransposed(),
    ScanCells(),
)

_FORMS = (ConvolvePooled, ConvolveTransposed, ScanCells)


def gives_forms(applied: Iterable[Applied]) -> bool:
    """Whether passes gave operators a form that a target's integer kernels are faster with as a rule."""
    return any(one.changes and isinstance(one.step, _FORMS) for one in applied)


def gives_scans(applied: Iterable[Applied]) -> bool:
    """Whether passes made recurrent cells a Scan."""
    return any(one.changes and isinstance(one.step, ScanCells) for one in applied)


def integer_steps(scheme: Scheme, target: Target) -> tuple[Pass, ...]:
    """Return the passes that follow the canonical form for the integer kernels of a target."""
    kernels, static = target.kernels, any(rule.mode is Mode.STATIC for rule in scheme.rules)
    decoding = any(rule.mode in DECODING for rule in scheme.rules)
    wanted = {
        UnfuseProducts(): decoding and target.workarounds,
        SplitHardSwishes(): static and "HardSigmoid" in kernels.fused.ops,
        JoinHardSwishes(): "HardSwish" in kernels.fused.whole,
        SplitPRelus(): target.workarounds,
        ConvolvePooled(): static and kernels.forms.convolves_pooled,
        ConvolveTransposed(): static and kernels.forms.pads_channels,
        ScanCells(): static and kernels.forms.scans,
    }
    return tuple(step for step, is_wanted in wanted.items() if is_wanted)


def steps_named(names: Iterable[str]) -> tuple[Pass, ...]:
    """Return the passes that `integer_steps` has found for an earlier plan.

    Raises:
        SchemeError: a name is none of these.
    """
    known: Mapping[str, Pass] = {type(step).__name__: step for step in _STEPS}
    for name in names:
        if name not in known:
            raise SchemeError(
                f"the plan has step {name!r}, expected any of {', '.join(known)}{did_you_mean(name, known)}"
            )
    return tuple(known[name] for name in names)
