"""Results as tables on stdout, as an alternative to the same values in JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from onnxq.calibration.data import Data, samples_of, with_optional
from onnxq.cli import terminal
from onnxq.data.files import files_below
from onnxq.data.images import IMAGE_SUFFIXES, ImageOptions, describe_image_samples
from onnxq.data.inputs import inputs_of
from onnxq.data.stores import location
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.latency import LatencyComparison
from onnxq.evaluation.layers import Layers
from onnxq.ir import load
from onnxq.numerics.affine import decibels
from onnxq.pipeline.folders import Written
from onnxq.planning.plan import Activation
from onnxq.report.explanation import Explanation
from onnxq.report.formatting import counted, duration, milliseconds, plural
from onnxq.report.parts import TensorValues
from onnxq.report.report import describe_spec
from onnxq.search.sensitivity_report import NodeCost, Sensitivity, TensorCost


def print_images(reference: Path, data: Data, *, err: bool = False) -> None:
    """Print what the model receives of image files, which has to be the same as in `quantize`; nothing for others."""
    place = data.calibration
    files = files_below(location(place)) if isinstance(place, str | Path) else ()
    if any(file.suffix.lower() in IMAGE_SUFFIXES for file in files):
        samples, options = samples_of(reference, data), data.image_options or ImageOptions()
        inputs = with_optional(inputs_of(load(reference)), data.chained)
        if images := describe_image_samples(samples, inputs, options):
            click.echo(f"samples: {images}", err=err)


def print_agreement(agreement: Agreement) -> None:
    """Print how well two models agree."""
    named = [(_compared_tensor(output, agreement), output) for output in agreement.outputs]
    named += [(f"{output.name}, with its own choices", output) for output in agreement.own_choices]
    rows = (
        (
            name,
            _sqnr(output),
            "-" if output.agreement is None else f"{output.agreement:.2%}",
            f"{output.largest_error:.4g}",
        )
        for name, output in named
    )
    terminal.print_rows(
        counted(agreement.samples, agreement.files), ("output", "SQNR", "agreement", "largest error"), rows
    )


def _compared_tensor(output: OutputAgreement, agreement: Agreement) -> str:
    if output.stands_for:
        return f"{output.name}, stands for {', '.join(output.stands_for)}"
    return f"{output.name}, as each model chose" if output.name in agreement.free_choices else output.name


def print_bench(bench: LatencyComparison) -> None:
    """Print the speed of two models, with a conclusion in one sentence."""
    latency = bench.latency
    times = ((bench.reference, duration(latency.reference)), (bench.candidate, duration(latency.candidate)))
    click.echo(f"{bench.machine}, {bench.runtime}")
    terminal.print_rows("", ("model", "run"), times)
    click.echo(
        f"medians of {latency.runs} alternating runs of each model, loaded {latency.rounds} times, "
        f"on {bench.samples} samples with {plural(latency.threads, 'thread')}"
    )
    click.echo(bench.verdict)


def print_written(folder: str, results: Sequence[Written]) -> None:
    """Print the result of each dtype of a transformers.js folder."""
    header = ("dtype", "size", "SQNR", "files")
    terminal.print_rows(folder, header, map(_written_row, results))


def _written_row(result: Written) -> tuple[str, ...]:
    size = f"{result.bytes / 1e6:.2f} MB" if result.files else "-"
    files = ", ".join(file.name for file in result.files) or f"refused: {result.refused}"
    return result.dtype, size, "-" if result.sqnr is None else decibels(result.sqnr), files


# Above it nothing is lost: masks of -3e38 would say 700 dB.
_LOSSLESS = 200.0


def print_layers(comparison: Layers, top: int | None = None) -> None:
    """Print the error of layers by depth, and the tensors that were not compared; of `top` only the worst."""
    worst = sorted(comparison.layers, key=lambda layer: layer.isolated)[:top]
    shown = [layer for layer in comparison.layers if top is None or layer in worst]
    header = ("tensor", "operator", "as", "isolated", "accumulated", "worst samples")
    rows = (
        (
            layer.tensor,
            layer.op_type,
            layer.mode or "-",
            _plain(layer.isolated),
            _plain(layer.accumulated),
            ", ".join(f"{worst.sample} ({_plain(worst.sqnr)})" for worst in layer.worst),
        )
        for layer in shown
    )
    terminal.print_rows(f"Layers, on {comparison.samples} samples", header, rows)
    if omitted := len(comparison.layers) - len(shown):
        click.echo(f"{omitted} layers of less error are not shown; leave out --top to see all")
    for reason, count in Counter(comparison.left.values()).most_common():
        click.echo(f"{count} tensors left out: {reason}")


def _plain(value: float) -> str:
    return "-" if _LOSSLESS < value < math.inf else decibels(value)


def print_sensitivity(sensitivity: Sensitivity) -> None:
    """Print the cost of each tensor and node, and the SQNR of all quantizers together."""
    if sensitivity.tensors:
        header = ("tensor", "format", "SQNR alone", "worst output", "quantize", "dequantize")
        terminal.print_rows("Tensors", header, map(_tensor_row, sensitivity.tensors))
    header = ("node", "operator", "in float", "as", "time", "SQNR alone")
    terminal.print_rows("Nodes", header, (row for node in sensitivity.nodes for row in _node_rows(node)))
    shared = (
        " ~: its share of the error of its group." if any(_is_shared(tensor) for tensor in sensitivity.tensors) else ""
    )
    click.echo(
        f"{decibels(sensitivity.sqnr)} at the worst output with all quantized by {sensitivity.scheme} for "
        f"{sensitivity.target}, on {sensitivity.samples} samples.{shared}"
    )


def print_explanation(explanation: Explanation) -> None:
    """Print the facts known of a node, one per line."""
    terminal.print_rows("", (explanation.node, explanation.op_type), _facts(explanation))


def _facts(explanation: Explanation) -> Iterator[tuple[str, str]]:
    yield "mode", f"{explanation.mode}: {explanation.reason}"
    if explanation.figures:
        yield "figures", explanation.figures
    if explanation.time is not None:
        before, now = milliseconds(explanation.time.float_milliseconds), milliseconds(explanation.time.milliseconds)
        yield "time", f"{before} in float, {now} now"
    for sensitivity in explanation.sensitivities:
        yield "SQNR alone", f"{decibels(sensitivity.sqnr)} {sensitivity.mode}"
    channels = {spread.tensor: spread for spread in explanation.channels}
    for weight in explanation.weights:
        spread = channels.get(weight.tensor)
        apart = f", largest of its {spread.channels} channels {_ends(spread.maxima)}" if spread is not None else ""
        yield (
            f"weight {weight.tensor}",
            f"{describe_spec(weight.spec, granular=False)}, {weight.elements} values{apart}",
        )
    values = {value.tensor: value for value in explanation.values}
    for verb, tensors in (("input", explanation.read), ("output", explanation.given)):
        for tensor in tensors:
            yield f"{verb} {tensor.tensor}", _quantized(tensor, values.get(tensor.tensor))
    for verb, neighbours in (("from", explanation.producers), ("to", explanation.consumers)):
        for neighbour in neighbours:
            yield f"{verb} {neighbour.node}", f"{neighbour.op_type}, {neighbour.mode}, through {neighbour.tensor}"
    for kernel in explanation.kernels:
        yield "kernel", f"{kernel.op_type} {kernel.name}{', fused' if kernel.fused else ''}"
    if not explanation.is_there:
        yield "in the model", "no node has this name: it was fused into a neighbour, or another operator replaces it"


def _quantized(activation: Activation, seen: TensorValues | None) -> str:
    span = activation.known_range
    parts = [activation.spec.format, f"range {_ends(span)}" if span is not None else "range to be calibrated"]
    if seen is not None:
        parts.append(f"values {_ends((seen.low, seen.high))}, {seen.clipped:.2%} clipped")
    if activation.group != activation.tensor:
        parts.append(f"scale of {activation.group}")
    if activation.factors:
        parts.append(f"{len(activation.factors)} channels with scale factors")
    return ", ".join(parts)


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.4g} to {values[-1]:.4g}"


def _tensor_row(cost: TensorCost) -> tuple[str, ...]:
    sqnr = f"{'~' if _is_shared(cost) else ''}{decibels(cost.sqnr)}"
    times = milliseconds(cost.quantize), milliseconds(cost.dequantize)
    return cost.tensor, cost.format, sqnr, cost.output or "-", *times


def _is_shared(cost: TensorCost) -> bool:
    return cost.sqnr is not None and not cost.alone


def _node_rows(cost: NodeCost) -> Iterator[tuple[str, ...]]:
    """Yield a row per option of a node; only the first row has its name."""
    first = cost.node, cost.op_type, milliseconds(cost.milliseconds)
    options = [
        (
            f"{option.mode} {describe_spec(option.weight, granular=False)}" if option.weight else str(option.mode),
            milliseconds(option.milliseconds),
            decibels(option.sqnr),
        )
        for option in cost.options
    ]
    for number, option in enumerate(options or [("float", first[2], "-")]):
        yield (*(first if not number else ("", "", "")), *option)


def _sqnr(output: OutputAgreement) -> str:
    if not output.same_shapes:
        return "shapes differ"
    return decibels(output.sqnr) if output.finite else "not finite"
