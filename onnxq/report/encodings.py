"""Encodings of a quantized model, which converters for QNN read beside the float model."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path

import onnx

from onnxq.algorithms.activation_params import activation_parameters
from onnxq.calibration.methods import MinMax
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode
from onnxq.ir import Constant, Graph, all_graphs, as_graph, is_constant, producer
from onnxq.numerics.formats import format_named
from onnxq.planning.plan import Plan
from onnxq.system.publish import write_text


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
    document: dict[str, list[dict[str, object]]] = {"activation_encodings": [], "param_encodings": []}
    parameters = activation_parameters(plan, CalibrationStatistics(), MinMax())
    for activation in plan.activations:
        if activation.tensor in tensors and not activation.factors:
            scale, zero_point = parameters[activation.tensor].scale, parameters[activation.tensor].zero_point
            offset = 0 if zero_point is None else int(zero_point)
            spec, kind = activation.spec, "param" if activation.tensor in stored else "activation"
            entry = _encoding(activation.tensor, spec.format, [float(scale)], offset, symmetric=spec.symmetric)
            document[f"{kind}_encodings"].append(entry)
    for name, format, scales in _weights(graph, plan):
        if name in tensors:
            document["param_encodings"].append(_encoding(name, format, scales, 0, symmetric=True))
    return {"version": "1.0.0", **document}


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
                yield weight.tensor, weight.spec.format, [float(scale) for scale in scales.values.reshape(-1)]


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
