"""Exports: charts of a report as SVG files, its node data for Model Explorer, and encodings of a quantized model."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import onnx
from markupsafe import Markup

from onnxq.algorithms.activation_params import activation_parameters
from onnxq.calibration.methods import MinMax
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode
from onnxq.errors import OutputError
from onnxq.ir import Constant, Graph, all_graphs, as_graph, is_constant, producer
from onnxq.numerics.formats import format_named
from onnxq.planning.plan import Plan
from onnxq.report.charts import Chart, NodeView, frontier_chart, node_views, sqnr_along, sqnr_chart
from onnxq.report.page import environment
from onnxq.report.report import Report
from onnxq.system.publish import write_text

_STYLE = """
.paper{fill:#fff} text{font:12px "Helvetica Neue",Helvetica,Arial,sans-serif;fill:#444} .grid{stroke:#ddd;fill:none}
.axis{stroke:#444;fill:none} .mark{fill:#2b66c4} .mark.expected{fill:none;stroke:#777;stroke-width:1.5}
.mark.chosen{fill:#0b6b4f;stroke:#fff;stroke-width:2} .line{fill:none;stroke-width:2} .line.together{stroke:#a8321f}
.line.float{stroke:#a3a8ae;stroke-dasharray:4 4} .line.wanted{stroke:#0b6b4f;stroke-dasharray:2 3}
"""
_TITLES = {
    "frontier": ("Plans by time and accuracy", "profiled time", "SQNR of the worst output"),
    "sqnr": ("SQNR of nodes in graph order", "node", "SQNR of the worst output"),
}


def figures(report: Report) -> Mapping[str, str]:
    """Return the charts of a report as SVG: ``frontier`` and ``sqnr``, as far as they were measured."""
    nodes = node_views(report)
    charts: Mapping[str, Chart | None] = {
        "frontier": frontier_chart(report.search.frontier, report.accuracy.wanted),
        "sqnr": sqnr_chart(sqnr_along(nodes), len(nodes)),
    }
    # Macros have no type of their own.
    draw = environment().get_template("charts.svg.j2").module.chart  # type: ignore[attr-defined]
    style = Markup(_STYLE)
    return {name: str(draw(chart, name, *_TITLES[name], style)).strip() for name, chart in charts.items() if chart}


def save_figures(report: Report, folder: str | Path) -> tuple[Path, ...]:
    """Write the charts as files of a folder, and create the folder if needed.

    Returns:
        The files; none if nothing was measured that could be drawn.

    Raises:
        OutputError: A file cannot be written.
    """
    files = {Path(folder) / f"{name}.svg": drawing for name, drawing in figures(report).items()}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise OutputError(f"figures cannot be written to {folder}: {reason.strerror}; give another folder") from reason
    for file, drawing in files.items():
        write_text(file, drawing + "\n", "figure")
    return tuple(files)


# Node data for Model Explorer: mode, time and SQNR as colours on the quantized model's graph.

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
    """Return the node data by measure: ``mode``, and ``time`` and ``sqnr`` if they were measured.

    Times are milliseconds of the quantized model. ``sqnr`` is the SQNR in decibels of the worst output with a node
    alone quantized: the lowest has the highest error.
    """
    nodes = node_views(report)
    found: dict[str, dict[str, object]] = {"mode": {"name": "onnxq: mode", "results": _modes(nodes)}}
    if times := {node.name: {"value": node.milliseconds} for node in nodes if node.milliseconds is not None}:
        found["time"] = {"name": "onnxq: time in ms", "results": times, "gradient": _gradient(_LITTLE, _MUCH)}
    sqnrs = {node.name: node.sqnr for node in nodes if node.sqnr is not None and math.isfinite(node.sqnr)}
    if sqnrs:
        results = {name: {"value": sqnr} for name, sqnr in sqnrs.items()}
        found["sqnr"] = {"name": "onnxq: SQNR alone in dB", "results": results, "gradient": _gradient(_MUCH, _LITTLE)}
    return found


def save_overlays(report: Report, path: str | Path) -> tuple[Path, ...]:
    """Write one file for each measure, such as ``overlay.mode.json`` for ``overlay.json``.

    Returns:
        The files.

    Raises:
        OutputError: A file cannot be written.
    """
    files = tuple((Path(path).with_suffix(f".{measure}.json"), found) for measure, found in overlays(report).items())
    for file, found in files:
        write_text(file, json.dumps(found), "overlay")
    return tuple(file for file, _ in files)


def _modes(nodes: tuple[NodeView, ...]) -> dict[str, object]:
    return {node.name: {"value": str(node.mode), "bgColor": COLOURS[node.mode], "textColor": "white"} for node in nodes}


def _gradient(low: str, high: str) -> list[dict[str, object]]:
    return [{"stop": 0, "bgColor": low}, {"stop": 1, "bgColor": high}]


# Encodings, which converters for QNN read beside the float model.


def encodings(graph: Graph, plan: Plan, tensors: Collection[str]) -> dict[str, object]:
    """Return the scales and zero points of integer nodes as encodings of AIMET, version 1.0.0.

    Biases are left out, as converters compute theirs. So are tensors with divided channels, which have no scale of
    their own.

    Args:
        graph: the quantized model.
        plan: its plan, with all ranges.
        tensors: names of the tensors of the float model; the others are left out, as preparation made them.
    """
    stored = {tensor.name for scope in all_graphs(graph) for tensor in scope.initializers}
    found: dict[str, list[dict[str, object]]] = {"activation_encodings": [], "param_encodings": []}
    parameters = activation_parameters(plan, CalibrationStatistics(), MinMax())
    for one in plan.activations:
        if one.tensor in tensors and not one.factors:
            made, kind = parameters[one.tensor], "param" if one.tensor in stored else "activation"
            zero_point = 0 if made.zero_point is None else int(made.zero_point)
            entry = _encoding(
                one.tensor, one.spec.format, [float(made.scale)], zero_point, symmetric=one.spec.symmetric
            )
            found[f"{kind}_encodings"].append(entry)
    for name, format, scales in _weights(graph, plan):
        if name in tensors:
            found["param_encodings"].append(_encoding(name, format, scales, 0, symmetric=True))
    return {"version": "1.0.0", **found}


def _encoding(name: str, format: str, scales: list[float], zero_point: int, *, symmetric: bool) -> dict[str, object]:
    """Return an entry; its offset is that of unsigned integers."""
    kind = format_named(format)
    offset = -zero_point - (2 ** (kind.bits - 1) if kind.signed else 0)
    granularity = "PER_CHANNEL" if len(scales) > 1 else "PER_TENSOR"
    return {
        "name": name,
        "enc_type": granularity,
        "dtype": "INT",
        "bw": kind.bits,
        "is_sym": symmetric,
        "scale": scales,
        "offset": [offset] * len(scales),
    }


def _weights(graph: Graph, plan: Plan) -> Iterator[tuple[str, str, list[float]]]:
    """Yield name, format and scales of the weights that integer nodes of a written model multiply."""
    named = {node.name: node for scope in all_graphs(graph) for node in scope.nodes}
    seen = set[str]()
    for decision in plan.decisions:
        node = named.get(decision.node)
        if decision.mode is not Mode.STATIC or node is None:
            continue
        for weight in decision.weights:
            decoder = producer(node.inputs[weight.index])
            if decoder is not None and decoder.op == "Transpose":
                decoder = producer(decoder.inputs[0])
            if decoder is None or decoder.op != "DequantizeLinear" or weight.tensor in seen:
                continue
            scales = decoder.inputs[1]
            if is_constant(scales) and isinstance(decoder.inputs[0], Constant):
                seen.add(weight.tensor)
                yield weight.tensor, weight.spec.format, [float(one) for one in scales.values.reshape(-1)]


def save_encodings(graph: Graph, plan: Plan, model: str | Path | onnx.ModelProto | Graph, path: str | Path) -> None:
    """Write the scales and zero points of integer nodes as JSON: encodings of AIMET, version 1.0.0.

    Args:
        graph: the quantized model, such as ``quantize(...).graph``.
        plan: its plan, such as ``quantize(...).report.plan``.
        model: the float model, whose tensors are named.
        path: JSON file.

    Raises:
        OutputError: the file cannot be written.

    >>> save_encodings(done.graph, done.report.plan, "model.onnx", "model.encodings")  # doctest: +SKIP
    """
    floats = as_graph(model)
    names = {tensor.name for scope in all_graphs(floats) for tensor in (*scope.inputs, *scope.initializers)}
    for scope in all_graphs(floats):
        names |= {tensor.name for node in scope.nodes for tensor in (*node.inputs, *node.outputs)}
    write_text(path, json.dumps(encodings(graph, plan, names), indent=2) + "\n", "encodings")
