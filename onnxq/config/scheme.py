"""Schemes: what the user wants, as rules from operators and names to specs. Frozen."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from types import MappingProxyType

from onnxq.calibration.methods import CalibrationMethod, parse_calibration_method
from onnxq.config.encodings_file import TensorEncoding
from onnxq.errors import SchemeError, did_you_mean, parse_choice
from onnxq.lowering import AllowedOps
from onnxq.numerics.spec import Granularity, Method, QuantSpec, Rounding, Storage
from onnxq.system.plugins import load_registered, registered_names

__all__ = [
    "Granularity",
    "InputsOutputs",
    "Method",
    "Mode",
    "QuantSpec",
    "Rounding",
    "Rule",
    "Scheme",
    "Storage",
    "check_method",
    "matches",
    "packaged_encoder",
]

ENTRY_POINTS = "onnxq.encoders"
"""Group of entry points; each names an `onnxq.algorithms.encoders.Encoder`, which the method of a Spec asks for."""

# A pattern that starts so is a regular expression that must match the whole name; anything else is a glob.
_REGEX = "re:"


class Mode(StrEnum):
    """How a node is quantized.

    >>> Rule(Mode.FLOAT, op_types=("LSTM",)).mode
    <Mode.FLOAT: 'float'>
    """

    STATIC = "static"
    """Activations and weights are quantized with fixed scales; the node runs as an integer kernel."""
    DYNAMIC = "dynamic"
    """Weights and activations are quantized, and scales of activations are computed in each run."""
    WEIGHT_ONLY = "weight-only"
    """Weights are quantized, and the runtime multiplies or looks them up as they are; activations stay float."""
    STORAGE = "storage"
    """Weights are compressed on disk and dequantized at load; the node computes in float."""
    FLOAT = "float"
    """Nothing changes."""


class InputsOutputs(StrEnum):
    """The types of a model's inputs and outputs."""

    FLOAT = "float"
    """Those of the float model."""
    QUANTIZED = "quantized"
    """Integers where the plan quantizes them; the application quantizes and dequantizes."""


def check_method(method: str) -> None:
    """Refuse the method of a Spec that is neither ours nor an encoder of an installed package.

    Raises:
        SchemeError: it is none; the message suggests the nearest one.
    """
    if not isinstance(method, Method):
        packaged_encoder(method)


# What is installed is looked up once: that takes milliseconds, and a model has thousands of weights.
@cache
def packaged_encoder(method: str) -> object:
    """Return what an installed package registers as the encoder of that name.

    Raises:
        SchemeError: no package has one, or it cannot be loaded.
    """
    encoder = load_registered(ENTRY_POINTS, method, "Encoder")
    if encoder is None:
        names = [*map(str, Method), *registered_names(ENTRY_POINTS)]
        expected = f"expected one of {', '.join(names)}{did_you_mean(method, names)}"
        raise SchemeError(f"method {method!r} is unknown, {expected}, or an encoder of an installed package")
    return encoder


@dataclass(frozen=True)
class Rule:
    """A selection of nodes and what to do with them. A rule without selection takes every node.

    Attributes:
        mode: how the nodes are quantized.
        op_types: patterns of op types, written like those of names; empty takes all.
        nodes: glob patterns, or ``re:`` and a regular expression, of node names; empty takes all.
        tensors: patterns of the names of the node's inputs and outputs; empty takes all.
        weight: spec of weights; None takes the target's format, symmetric per channel.
        activation: spec of activations; None takes the target's format, affine per tensor.

    >>> Rule(Mode.FLOAT, nodes=("/head/*",)).nodes
    ('/head/*',)
    """

    mode: Mode
    op_types: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    weight: QuantSpec | None = None
    activation: QuantSpec | None = None

    def __post_init__(self) -> None:
        """Check that the mode is one, that somebody has the methods, and that regular expressions are valid."""
        object.__setattr__(self, "mode", parse_choice(Mode, "mode", self.mode))
        for pattern in (*self.op_types, *self.nodes, *self.tensors):
            if pattern.startswith(_REGEX):
                _compiled(pattern)
        for spec in filter(None, (self.weight, self.activation)):
            check_method(spec.method)

    def selects(self, op_type: str, node: str, tensors: Iterable[str], origins: Sequence[tuple[str, str]] = ()) -> bool:
        """Whether the rule takes a node of this op type and name that touches these tensors.

        Args:
            op_type: its operator.
            node: its name.
            tensors: names of its inputs and outputs.
            origins: names and op types of the model's own nodes that it stands for, first the one whose work it does.
        """
        # A product that adds its bias by itself is no Add, unless the Add is named.
        names = origins if self.nodes else origins[:1]
        return any(self._takes(name, kind) for name, kind in ((node, op_type), *names)) and (
            not self.tensors or any(matches(pattern, name) for pattern in self.tensors for name in tensors)
        )

    def _takes(self, node: str, op_type: str) -> bool:
        return (not self.op_types or any(matches(pattern, op_type) for pattern in self.op_types)) and (
            not self.nodes or any(matches(pattern, node) for pattern in self.nodes)
        )


_NO_RULE = Rule(Mode.FLOAT)


@dataclass(frozen=True)
class Scheme:
    """An ordered list of rules; the first that selects a node decides.

    Attributes:
        rules: the rules, most specific first.
        name: how reports call the scheme.
        ranges: the calibration method for activations, or its name as parse_calibration_method takes it; empty tries
            several on the whole model and keeps the best, or takes min-max without that accuracy method.
        correct_biases: whether biases make up for the mean error of rounded weights.
        emit: what the written model may hold, see AllowedOps.
        excluded: the rules among them that exclude nodes; reasons of decisions mention these.
        encodings: formats and scales of tensors, which take precedence over those of rules and calibration.
        io: the types of the model's inputs and outputs.

    >>> Scheme((Rule(Mode.FLOAT, nodes=("/head/*",)), Rule(Mode.STORAGE)), "small").name
    'small'
    """

    rules: tuple[Rule, ...]
    name: str = "custom"
    ranges: str | CalibrationMethod = ""
    correct_biases: bool = True
    emit: str = AllowedOps.FASTEST
    excluded: tuple[Rule, ...] = ()
    encodings: tuple[TensorEncoding, ...] = ()
    io: InputsOutputs = InputsOutputs.FLOAT

    def __post_init__(self) -> None:
        """Check that the types of inputs and outputs are a choice."""
        object.__setattr__(self, "io", parse_choice(InputsOutputs, "io", self.io))

    def excluding(self, *patterns: str) -> Scheme:
        """Return this scheme with the nodes that match ``patterns`` left in float."""
        if not patterns:
            return self
        rule = Rule(Mode.FLOAT, nodes=patterns)
        return replace(self, rules=(rule, *self.rules), excluded=(rule, *self.excluded))

    @property
    def range_method(self) -> CalibrationMethod | None:
        """The calibration method for activations; None leaves the choice to measuring."""
        return (
            (parse_calibration_method(self.ranges) if self.ranges else None)
            if isinstance(self.ranges, str)
            else self.ranges
        )

    @property
    def multiplies_integers(self) -> bool:
        """Whether any rule asks for integer arithmetic."""
        return any(rule.mode in (Mode.STATIC, Mode.DYNAMIC) for rule in self.rules)

    def rule_for(
        self, op_type: str, node: str, tensors: Iterable[str], origins: Sequence[tuple[str, str]] = ()
    ) -> Rule:
        """Return the first rule that selects the node; a node that no rule selects stays in float."""
        names = tuple(tensors)
        return next((rule for rule in self.rules if rule.selects(op_type, node, names, origins)), _NO_RULE)

    def check_used(
        self,
        op_types: set[str],
        nodes: set[str],
        tensors: set[str],
        readers: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Check that every pattern of every rule matches something in a model.

        Args:
            op_types: of the model.
            nodes: names of its nodes.
            tensors: names of its tensors.
            readers: names of the nodes that read a tensor, for the message.

        Raises:
            SchemeError: a pattern matches nothing; the message suggests the nearest name.
        """
        for rule in self.rules:
            for kind, patterns, names in (
                ("op type", rule.op_types, op_types),
                ("node", rule.nodes, nodes),
                ("tensor", rule.tensors, tensors),
            ):
                for pattern in patterns:
                    if not any(matches(pattern, name) for name in names):
                        if kind == "node" and (reading := readers.get(pattern)):
                            raise SchemeError(
                                f"node pattern {pattern!r} is the name of a tensor, expected nodes; give those that "
                                f"read it: {', '.join(reading)}"
                            )
                        raise SchemeError(
                            f"{kind} pattern {pattern!r} matches nothing in the model{did_you_mean(pattern, names)}"
                        )


def matches(pattern: str, name: str) -> bool:
    """Whether a glob, or ``re:`` and a regular expression, matches the whole name.

    >>> matches("/head/*", "/head/Conv_1"), matches("re:.*_[0-9]+", "/head/Conv_1")
    (True, True)
    """
    if pattern.startswith(_REGEX):
        return _compiled(pattern).fullmatch(name) is not None
    # Names may hold brackets, which a glob reads as a character set, so equality counts first.
    return pattern == name or fnmatch.fnmatchcase(name, pattern)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(_REGEX))
    except re.error as reason:
        raise SchemeError(f"pattern {pattern!r} is not a valid regular expression: {reason}") from reason
