"""What is to become of a model, as the arguments of quantize() say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode, Scheme
from onnxq.config.scheme_file import scheme_named
from onnxq.errors import SchemeError, check_type
from onnxq.lowering import AllowedOps, allowed_ops_named
from onnxq.planning.plan import DECODING, Plan
from onnxq.preparing.named_passes import Step
from onnxq.preparing.preparation import canonical_steps
from onnxq.runtime.targets import target_named


@dataclass(frozen=True)
class Wanted:
    """What is to become of a model.

    Attributes:
        scheme: the rules; where a plan is carried out they only name what it was made by.
        target: name of the runtime.
        prepare: passes of the user's.
        replay: a plan to carry out as it is, instead of the scheme.
        least: opset below which the model is not prepared, for codes that the scheme does not ask for.
        keeps_forms: whether operators keep the form they have, see `Target.keeping_forms`.
        without: names of `canonical_steps` that preparing leaves out.
        stored_because: why weights are only stored, and everything is computed in float; empty where they are not.
    """

    scheme: Scheme
    target: str
    prepare: Sequence[Step] = ()
    replay: Plan | None = None
    least: int = 0
    keeps_forms: bool = False
    without: frozenset[str] = frozenset()
    stored_because: str = ""

    def stored(self, reason: str) -> Wanted:
        """Return the same with weights that are only stored: the model computes in float what the float model does."""
        return replace(self, keeps_forms=True, stored_because=reason)

    @property
    def prepared_for(self) -> Scheme:
        """The scheme that the model is prepared for: without integers, where weights are only stored."""
        if not self.stored_because:
            return self.scheme
        rules = tuple(replace(rule, mode=Mode.STORAGE) if rule.mode in DECODING else rule for rule in self.scheme.rules)
        return replace(self.scheme, rules=rules)

    @property
    def as_given(self) -> Wanted:
        """The same of the float model as it was given, which is brought into no other form."""
        return replace(self, without=frozenset(canonical_steps()))

    @classmethod
    def of(cls, scheme: str | Scheme | Plan, target: str, prepare: Sequence[Step]) -> Wanted:
        """Return what the arguments of quantize() mean; a plan says its target itself.

        Raises:
            SchemeError: a name is not known, or an argument is of another type.
        """
        check_type(scheme, (str, Scheme, Plan), "the scheme", "the name of a preset or TOML file, a Scheme or a Plan")
        check_type(target, str, "the target", "the name of a runtime such as onnxruntime-cpu")
        if isinstance(scheme, Plan):
            return cls(replace(preset_named("int8"), emit=scheme.emit), scheme.target, prepare, scheme)
        return cls(scheme_named(scheme) if isinstance(scheme, str) else scheme, target_named(target).name, prepare)

    def emit(self, *, measured: bool) -> AllowedOps:
        """Return what may be written for the target: where time is not measured nothing is known to be faster.

        Args:
            measured: whether a search measures time on this machine.

        Raises:
            SchemeError: operators of onnxruntime's own are asked for, and the target has none.
        """
        wished, target = allowed_ops_named(self.scheme.emit), target_named(self.target)
        if wished is AllowedOps.ORT and not target.has_contrib:
            raise SchemeError(
                f"emit 'ort' is about operators only onnxruntime has, and the target is {target.name}; leave it out"
            )
        known = target.has_contrib and (measured or self.replay is not None)
        return AllowedOps.QDQ if wished is AllowedOps.FASTEST and not known else wished
