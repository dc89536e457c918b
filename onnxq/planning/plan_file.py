"""Plans as TOML files, to be applied again on another machine or edited by hand."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from onnxq.config.documents import read_document
from onnxq.config.effort import check_not_dropped
from onnxq.config.scheme import Granularity, InputsOutputs, QuantSpec
from onnxq.errors import SchemeError, check_name, check_path, check_type, did_you_mean
from onnxq.planning.plan import NOTED_METHODS, Activation, Decision, Plan
from onnxq.runtime.targets import target_named
from onnxq.system.publish import write_text
from onnxq.system.records import Named, read_record

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
    check_path(path, "the plan file")
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
        **({"awq": [_table(scales, names, every=True) for scales in plan.awq]} if plan.awq else {}),
        **({"preparation": _table(plan.preparation, names, every=True)} if plan.preparation is not None else {}),
        "specs": {name: _table(spec, names, every=True) for spec, name in names.items()},
        "activations": {
            activation.tensor: _table(activation, names, besides="tensor") for activation in plan.activations
        },
        "nodes": {decision.node: _table(decision, names, besides="node") for decision in plan.decisions},
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
    return read_document(path, "plan", tomllib.loads, _parse_plan)


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
    keys = {field.name for field in fields(Plan)} - {"decisions", "activations"} | set(_SECTIONS)
    for key in document:
        if key not in keys:
            raise SchemeError(f"a plan has no key {key!r}{did_you_mean(key, keys)}")
    if "target" not in document:
        raise SchemeError("it has no target, expected a plan file; quantize --plan-out writes one")
    tables = {section: _section(document, section) for section in _SECTIONS}
    specs = {name: read_record(QuantSpec, f"spec {name!r}", table) for name, table in tables["specs"].items()}
    named: Named = {QuantSpec: specs}
    settings = {key: value for key, value in document.items() if key not in _SECTIONS}
    plan = read_record(Plan, "the plan", {"scheme": "", "decisions": [], "activations": [], **settings})
    _check_methods(plan.accuracy)
    return replace(
        plan,
        target=target_named(plan.target).name,
        decisions=tuple(
            read_record(Decision, f"node {name!r}", {**table, "node": name}, named)
            for name, table in tables["nodes"].items()
        ),
        activations=tuple(
            _checked_range(read_record(Activation, f"activation {name!r}", {**table, "tensor": name}, named))
            for name, table in tables["activations"].items()
        ),
    )


def _check_methods(names: tuple[str, ...]) -> None:
    for name in names:
        check_not_dropped(name)
        check_name("accuracy", name, NOTED_METHODS)


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
