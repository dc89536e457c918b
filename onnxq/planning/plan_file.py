"""Plans as TOML files, to be applied again on another machine or edited by hand, and differences between plans."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from onnxq.config.effort import check_not_dropped
from onnxq.config.scheme import Granularity, InputsOutputs, QuantSpec
from onnxq.errors import DataError, SchemeError, check_name, check_path, check_type, did_you_mean
from onnxq.lowering import AllowedOps
from onnxq.planning.plan import NOTED_METHODS, Activation, AwqScales, Damping, Decision, Plan, Preparation
from onnxq.runtime.targets import target_named
from onnxq.system.publish import write_text
from onnxq.system.records import Named, RecordError, read_record, read_value

_COMMENT = """\
# A plan of onnxq: what happens to every node of a model, and which tensors get a scale.
#
# Replay it with: onnxq quantize MODEL --calib SAMPLES --plan THIS_FILE
#
# You may edit the mode and the weights of a node. Every node of the model needs an entry.
#   static       activations and weights are quantized with fixed scales; activations need an entry of their own
#   dynamic      weights are quantized, and activations with scales that are computed in each run
#   weight-only  weights are quantized, and the runtime multiplies or looks them up; activations stay float
#   storage      weights are compressed on disk and dequantized at load
#   float        nothing changes; the node has no weights here
#
# An activation without found_range is calibrated anew. All others get their scales from this file.
# A key that is left out has its default. Specs are written once, and referred to by name.

"""
_SECTIONS = ("specs", "activations", "nodes")


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as TOML; equal plans give equal bytes. An existing file is replaced.

    Args:
        plan: such as ``quantize(...).report.plan``.
        path: TOML file.

    Raises:
        OutputError: the file cannot be written.

    >>> save_plan(report.plan, "plan.toml")  # doctest: +SKIP
    """
    check_type(plan, Plan, "the plan", "a Plan, such as quantize(...).report.plan")
    check_path(path, "the file of a plan")
    # Imported here because only writing needs it; the standard library reads TOML.
    import tomli_w

    names = _spec_names(plan)
    document = {
        "scheme": plan.scheme,
        "target": plan.target,
        "ranges": plan.ranges,
        "emit": plan.emit,
        **({"io": plan.io} if plan.io is not InputsOutputs.FLOAT else {}),
        **({"accuracy": list(plan.accuracy)} if plan.accuracy else {}),
        **({"observed": list(plan.observed)} if plan.observed else {}),
        **({"thorough": True} if plan.thorough else {}),
        **({"damping": _table(plan.damping, names, every=True)} if plan.damping is not None else {}),
        **({"awq": [_table(one, names, every=True) for one in plan.awq]} if plan.awq else {}),
        **({"preparation": _table(plan.preparation, names, every=True)} if plan.preparation is not None else {}),
        "specs": {name: _table(spec, names, every=True) for spec, name in names.items()},
        "activations": {one.tensor: _table(one, names, besides="tensor") for one in plan.activations},
        "nodes": {one.node: _table(one, names, besides="node") for one in plan.decisions},
    }
    write_text(path, _COMMENT + tomli_w.dumps(document), "plan")


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `save_plan` wrote, possibly edited by hand.

    Args:
        path: TOML file.

    Raises:
        SchemeError: the file cannot be read, is not TOML, or has a key, value or name that does not exist.

    >>> load_plan("plan.toml").scheme  # doctest: +SKIP
    'int8'
    """
    check_path(path, "the file of a plan")
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as reason:
        raise SchemeError(f"plan {path} cannot be read: {reason}") from reason
    try:
        return _parse_plan(document)
    except (SchemeError, RecordError) as reason:
        raise SchemeError(f"plan {path}: {reason}") from reason


# Values to tables.


def _spec_names(plan: Plan) -> dict[QuantSpec, str]:
    weights = (weight.spec for decision in plan.decisions for weight in decision.weights)
    specs = dict.fromkeys((*weights, *(activation.spec for activation in plan.activations)))
    names: dict[QuantSpec, str] = {}
    for spec in specs:
        granularity = (
            str(spec.granularity)
            if isinstance(spec.granularity, Granularity)
            else "block-" + "x".join(map(str, spec.granularity))
        )
        stem, number = f"{spec.format}-{granularity}", 2
        name = stem
        while name in names.values():
            name, number = f"{stem}-{number}", number + 1
        names[spec] = name
    return names


def _table(record: Any, names: Mapping[QuantSpec, str], *, besides: str = "", every: bool = False) -> dict[str, object]:
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.name != besides}
    usual = {field.name: field.default for field in fields(record)}
    return {name: _plain(value, names) for name, value in values.items() if every or value != usual[name]}


def _plain(value: object, names: Mapping[QuantSpec, str]) -> object:
    if isinstance(value, QuantSpec):
        return names[value]
    if is_dataclass(value):
        return _table(value, names)
    if isinstance(value, tuple):
        return [_plain(item, names) for item in value]
    return value


# Tables to values.


def _parse_plan(document: Mapping[str, Any]) -> Plan:
    known = tuple(field.name for field in fields(Plan) if field.name not in ("decisions", "activations"))
    known += _SECTIONS
    for key in document:
        if key not in known:
            raise SchemeError(f"a plan has no key {key!r}{did_you_mean(key, known)}")
    if "target" not in document:
        raise SchemeError("it has no target, expected the file of a plan; onnxq plan and --plan-out write one")
    tables = {section: _section(document, section) for section in _SECTIONS}
    specs = {name: read_record(QuantSpec, f"spec {name!r}", table) for name, table in tables["specs"].items()}
    named: Named = {QuantSpec: specs}
    return Plan(
        tuple(
            read_record(Decision, f"node {name!r}", {**table, "node": name}, named)
            for name, table in tables["nodes"].items()
        ),
        tuple(
            _checked_range(read_record(Activation, f"activation {name!r}", {**table, "tensor": name}, named))
            for name, table in tables["activations"].items()
        ),
        read_value(str, "scheme", document.get("scheme", "")),
        target_named(read_value(str, "target", document["target"])).name,
        read_value(str, "ranges", document.get("ranges", "")),
        _methods(read_value(tuple[str, ...], "accuracy", document.get("accuracy", []))),
        read_value(AllowedOps, "emit", document.get("emit", AllowedOps.QDQ)),
        read_value(Damping, "damping", document["damping"]) if "damping" in document else None,
        read_value(bool, "thorough", document.get("thorough", False)),
        read_value(Preparation, "preparation", document["preparation"]) if "preparation" in document else None,
        read_value(tuple[str, ...], "observed", document.get("observed", [])),
        read_value(tuple[AwqScales, ...], "awq", document.get("awq", [])),
        read_value(InputsOutputs, "io", document.get("io", InputsOutputs.FLOAT)),
    )


def _methods(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        check_not_dropped(name)
        check_name("accuracy", name, NOTED_METHODS)
    return names


def _section(document: Mapping[str, Any], section: str) -> dict[str, dict[str, Any]]:
    tables = document.get(section, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise SchemeError(f"{section} are written as tables such as [{section}.NAME]")
    return tables


def _checked_range(activation: Activation) -> Activation:
    for key in ("fixed_range", "found_range"):
        low, high = getattr(activation, key) or (0.0, 0.0)
        if not -math.inf < low <= high < math.inf:
            raise SchemeError(
                f"activation {activation.tensor!r}: {key} is the smallest and largest value, found [{low}, {high}]"
            )
    if not all(0 < factor <= 1 for factor in activation.factors):
        raise SchemeError(f"activation {activation.tensor!r}: factors are above 0 and at most 1")
    return activation


# Differences between two plans or reports.

FIGURES = ("size_ratio", "worst_sqnr", "speed")
"""The summary figures of a report."""


@dataclass(frozen=True)
class Said:
    """What a plan or report says about nodes.

    Attributes:
        nodes: the mode and the weight formats of each node, in words.
        reasons: the reasons, by node.
        figures: of a report, by the names in FIGURES; empty for a plan.
        details: other settings of the weights of each node, in words.
    """

    nodes: Mapping[str, str]
    reasons: Mapping[str, str]
    figures: Mapping[str, float | None]
    details: Mapping[str, str] = field(default_factory=dict)

    def of(self, node: str, *, closely: bool) -> str:
        """Return what is said about a node, with the details if `closely`; empty for an unknown node."""
        return " ".join(filter(None, (self.nodes.get(node, ""), self.details.get(node, "") if closely else "")))


@dataclass(frozen=True)
class Difference:
    """A difference between two plans or reports.

    Attributes:
        name: the node or figure.
        before: what the first says; empty if it lacks the node.
        after: what the second says.
        reason: the reason in the second.
    """

    name: str
    before: str
    after: str
    reason: str = ""


def read_said(path: Path) -> Said:
    """Read a plan in TOML or a report in JSON.

    Raises:
        DataError: the report cannot be read or is not a report.
        SchemeError: the plan cannot be read or is not a plan.
    """
    if path.suffix == ".json":
        return _of_report(path)
    decisions = [asdict(one) for one in load_plan(path).decisions]
    return Said(*_by_node(decisions), {}, _details(decisions))


def differences(first: Said, second: Said) -> tuple[Difference, ...]:
    """Return the differences of two plans or reports: figures, then nodes in the order of the first.

    >>> differences(Said({"a": "static int8"}, {}, {}), Said({"a": "float"}, {"a": "it hurts"}, {}))
    (Difference(name='a', before='static int8', after='float', reason='it hurts'),)
    """
    figures = (
        Difference(name, _figure(first.figures[name]), _figure(second.figures[name]))
        for name in FIGURES
        if name in first.figures and name in second.figures and first.figures[name] != second.figures[name]
    )
    nodes = (
        Difference(name, before, after, second.reasons.get(name, ""))
        for name in dict.fromkeys((*first.nodes, *second.nodes))
        for before, after in [_difference(first, second, name)]
        if before != after
    )
    return (*figures, *nodes)


def _difference(first: Said, second: Said, node: str) -> tuple[str, str]:
    briefly = (first.of(node, closely=False), second.of(node, closely=False))
    return briefly if briefly[0] != briefly[1] else (first.of(node, closely=True), second.of(node, closely=True))


def _of_report(path: Path) -> Said:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        decisions = found["plan"]["decisions"]
        figures = {name: _read_figure(found[name]) for name in FIGURES}
        return Said(*_by_node(decisions), figures, _details(decisions))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is no report of onnxq ({error}), expected what quantize --report writes") from error


def _read_figure(value: float | str | None) -> float | None:
    """Infinities are words in JSON."""
    return None if value is None else float(value)


def _by_node(decisions: list[dict[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    said = {
        one["node"]: " ".join((one["mode"], *(weight["spec"]["format"] for weight in one["weights"])))
        for one in decisions
    }
    return said, {one["node"]: one["reason"] for one in decisions}


def _details(decisions: list[dict[str, Any]]) -> dict[str, str]:
    return {one["node"]: "; ".join(map(_in_words, one["weights"])) for one in decisions}


def _in_words(weight: Mapping[str, Any]) -> str:
    shown = {**{name: value for name, value in weight["spec"].items() if name != "format"}, "pairs": weight["pairs"]}
    return ", ".join(f"{name.replace('_', ' ')} {_listed(value)}" for name, value in shown.items())


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else str(value)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
