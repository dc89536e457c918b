"""Node data for Model Explorer: mode, time and noise as colours on the quantized model's graph.

A file holds one measure of one graph, as `model_explorer.node_data_builder` writes it; nodes are known by their names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from onnxq.config.scheme import Mode
from onnxq.report.report import Report
from onnxq.report.views import NodeView, node_views
from onnxq.system.publish import write_text

COLOURS: Mapping[Mode, str] = {
    Mode.STATIC: "#2b66c4",
    Mode.DYNAMIC: "#0f8573",
    Mode.WEIGHT_ONLY: "#7a4bb8",
    Mode.STORAGE: "#b57a10",
    Mode.FLOAT: "#a3a8ae",
}
"""Of modes, as on the page."""

_MUCH, _LITTLE = "#a8321f", "#f1efe8"


def overlays(report: Report) -> Mapping[str, dict[str, object]]:
    """Return the node data by measure: ``mode``, and ``time`` and ``noise`` where they were measured.

    Times are milliseconds of the quantized model; noise is the SQNR in decibels of the worst output with a node alone
    as codes, so that the lowest is the noisiest.
    """
    nodes = node_views(report)
    found: dict[str, dict[str, object]] = {"mode": {"name": "onnxq: mode", "results": _modes(nodes)}}
    if times := {node.name: {"value": node.milliseconds} for node in nodes if node.milliseconds is not None}:
        found["time"] = {"name": "onnxq: time in ms", "results": times, "gradient": _gradient(_LITTLE, _MUCH)}
    noises = {node.name: node.noise for node in nodes if node.noise is not None and math.isfinite(node.noise)}
    if noises:
        results = {name: {"value": noise} for name, noise in noises.items()}
        found["noise"] = {"name": "onnxq: SQNR alone in dB", "results": results, "gradient": _gradient(_MUCH, _LITTLE)}
    return found


def save_overlays(report: Report, path: str | Path) -> tuple[Path, ...]:
    """Write one file for each measure, such as ``overlay.mode.json`` for ``overlay.json``.

    Returns:
        The files.

    Raises:
        OutputError: one cannot be written.
    """
    files = tuple((Path(path).with_suffix(f".{measure}.json"), found) for measure, found in overlays(report).items())
    for file, found in files:
        write_text(file, json.dumps(found), "overlay")
    return tuple(file for file, _ in files)


def _modes(nodes: tuple[NodeView, ...]) -> dict[str, object]:
    return {node.name: {"value": str(node.mode), "bgColor": COLOURS[node.mode], "textColor": "white"} for node in nodes}


def _gradient(low: str, high: str) -> list[dict[str, object]]:
    return [{"stop": 0, "bgColor": low}, {"stop": 1, "bgColor": high}]
