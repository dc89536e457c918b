"""Two plans, from their files or from reports, beside each other: which nodes they treat otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnxq.errors import DataError
from onnxq.planning.plan_file import load_plan

FIGURES = ("size_ratio", "worst_sqnr", "speed")
"""What reports sum up."""


@dataclass(frozen=True)
class Said:
    """What a plan or report says.

    Attributes:
        nodes: what becomes of each node, in words: its mode, and the formats of its weights.
        reasons: why, by node.
        figures: of a report, by their names in FIGURES; empty for a plan.
        details: how weights of each node are quantized besides, in words.
    """

    nodes: Mapping[str, str]
    reasons: Mapping[str, str]
    figures: Mapping[str, float | None]
    details: Mapping[str, str] = field(default_factory=dict)

    def of(self, node: str, *, closely: bool) -> str:
        """Return what is said of a node, with the details or without; empty where it is not known."""
        return " ".join(filter(None, (self.nodes.get(node, ""), self.details.get(node, "") if closely else "")))


@dataclass(frozen=True)
class Difference:
    """One that two plans, or two reports, have.

    Attributes:
        name: of the node or figure.
        before: what the first says; empty where it does not know the node.
        after: what the second says.
        reason: why, as the second says.
    """

    name: str
    before: str
    after: str
    reason: str = ""


def read_said(path: Path) -> Said:
    """Return what a plan in TOML or a report in JSON says.

    Raises:
        DataError: the report cannot be read, or is none.
        SchemeError: the plan cannot be read, or is none.
    """
    if path.suffix == ".json":
        return _of_report(path)
    decisions = [asdict(one) for one in load_plan(path).decisions]
    return Said(*_by_node(decisions), {}, _details(decisions))


def differences(first: Said, second: Said) -> tuple[Difference, ...]:
    """Return where two plans or reports differ: figures, then nodes in the order of the first.

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
        for before, after in [_told_apart(first, second, name)]
        if before != after
    )
    return (*figures, *nodes)


def _told_apart(first: Said, second: Said, node: str) -> tuple[str, str]:
    """Return what two say of a node, in as few words as tell them apart."""
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
    """Return a figure of a report, where infinities are words."""
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
    """Say how a weight is quantized, apart from its format."""
    told = {**{name: value for name, value in weight["spec"].items() if name != "format"}, "pairs": weight["pairs"]}
    return ", ".join(f"{name.replace('_', ' ')} {_listed(value)}" for name, value in told.items())


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else str(value)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
