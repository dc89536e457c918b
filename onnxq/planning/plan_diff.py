"""Two plans, from their files or from reports, beside each other: which nodes they treat otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
    """

    nodes: Mapping[str, str]
    reasons: Mapping[str, str]
    figures: Mapping[str, float | None]


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
    return Said(*_by_node(decisions), {})


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
        Difference(name, first.nodes.get(name, ""), second.nodes.get(name, ""), second.reasons.get(name, ""))
        for name in dict.fromkeys((*first.nodes, *second.nodes))
        if first.nodes.get(name) != second.nodes.get(name)
    )
    return (*figures, *nodes)


def _of_report(path: Path) -> Said:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Said(*_by_node(found["plan"]["decisions"]), {name: _read_figure(found[name]) for name in FIGURES})
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


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
