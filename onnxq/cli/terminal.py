"""What people see: tables, on stderr unless they are the answer itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.table import Column, Table

from onnxq.cli.progress_bars import open_console
from onnxq.inspection import Inspection
from onnxq.judging.agreement import OutputAgreement
from onnxq.judging.gate import Judged
from onnxq.optimization import Optimized
from onnxq.planning.delivery import missing
from onnxq.report import Report
from onnxq.report.figures import decibels, duration, milliseconds, shortened, size, threads
from onnxq.report.suggestions import suggestions
from onnxq.rewriting import Rewritten
from onnxq.scheme import Mode

_SHOWN_REASONS = 5
_LONGEST_NAME = 40
# Columns of a terminal that no table fills.
_WIDE = 10_000
# Of the bytes of a model.
_WORTH_STRIPPING = 0.01


def print_report(report: Report, *, every: bool = False) -> None:
    """Print on stderr doubts, what came of a run in one line, then the closing table; all figures where wanted."""
    console = open_console(stderr=True)
    # Whatever is said of unlike samples holds for them alone.
    for sentence in report.samples.doubts:
        console.print(f"Doubt: {sentence}.")
    console.print(report.verdict)
    if tries := suggestions(report):
        console.print("Try the same with")
    for one in tries:
        console.print(f"  {one.options}\n    {one.why}")
    if told := missing(report.encoding.delivered):
        console.print(f"{told[0].upper()}{told[1:]}.")
    console.print(_summary(report))
    if reasons := report.plan.left_in_float():
        console.print(_left(reasons, None if every else _SHOWN_REASONS))
    evidence = [table for table in (_gains(report), _regions(report), _plans(report), _noises(report)) if table.rows]
    for table in evidence if every else ():
        console.print(table)
    if evidence and not every:
        console.print("--verbose shows what was measured, --html all of it on a page.")


def _summary(report: Report) -> Table:
    """Return the figures of a model that people ask for first."""
    files, kernels, plan = report.files, report.performance.kernels, report.plan
    table = Table(show_header=False)
    table.add_row("size", f"{size(files.float_bytes)} -> {size(files.bytes)} ({report.size_ratio:.2f}x)")
    for output in report.agreement.outputs:
        table.add_row(*_output(output))
    if report.samples.judged is not None:
        table.add_row("judged on", _judged(report.samples.judged))
    if (latency := report.latency) is not None:
        table.add_row(
            "latency",
            f"{duration(latency.reference)} -> {duration(latency.candidate)} ({latency.speed:.2f}x as fast, "
            f"{threads(latency.threads)}, {latency.engine})",
        )
    elif report.performance.unmeasured:
        table.add_row(plan.target, f"planned, not measured: {report.performance.unmeasured}")
    if (elsewhere := report.fidelity.elsewhere) is not None:
        for output in elsewhere.agreement.outputs:
            name, told = _output(output)
            table.add_row(name, f"{told} on {elsewhere.engine}")
    if not files.loads:
        table.add_row(
            "written", "in types that onnxruntime cannot load; all figures are of the same codes in ones it can"
        )
    if (scores := report.fidelity.scores) is not None:
        bound = scores.doubt or f"with 95 % confidence it loses at most {scores.most_lost:.2g} on others"
        table.add_row("metric", f"{scores.reference:.4g} -> {scores.candidate:.4g} ({scores.name}); {bound}")
    table.add_row(
        "kernels",
        f"{kernels.integer} integer, {kernels.heavy_float} float convolutions and products, "
        f"{kernels.quantize} QuantizeLinear and DequantizeLinear left",
    )
    table.add_row("nodes", ", ".join(f"{plan.count(mode)} {mode}" for mode in Mode if plan.count(mode)))
    if cells := report.encoding.left_by_standard:
        table.add_row("standard ONNX", f"has no integers for {cells} LSTM; --emit fastest measures onnxruntime's own")
    if report.encoding.corrected_biases:
        table.add_row("biases", f"{report.encoding.corrected_biases} corrected for the mean error of rounded weights")
    if files.metadata_bytes >= _WORTH_STRIPPING * files.bytes:
        share = f"{files.metadata_bytes / files.bytes:.1%}"
        table.add_row(
            "metadata", f"{size(files.metadata_bytes)} of the exporter ({share}); --strip-metadata leaves it out"
        )
    return table


def _output(output: OutputAgreement) -> tuple[str, str]:
    """Return what an output is called, and how close it is to the float model's."""
    parts = [] if output.sqnr is None else [f"SQNR {decibels(output.sqnr)}"]
    if output.bound is not None and math.isfinite(output.bound):
        parts.append(f"{output.bound:.1f} dB or more with 95 % confidence")
    if output.agreement is not None:
        parts.append(f"{output.agreement:.1%} {'equal' if output.sqnr is None else 'same arg max'}")
    judges = f", judges {', '.join(output.stands_for)}" if output.stands_for else ""
    kind = "tensor" if output.stands_for else "output"
    return f"{kind} {shortened(output.name, _LONGEST_NAME)}{judges}", ", ".join(parts) or "not compared"


def _left(reasons: Sequence[tuple[str, int]], most: int | None) -> Table:
    """Return why nodes are not static, each reason with how many nodes it holds for."""
    table = Table(title="Not static, and why", title_justify="left", show_header=False)
    shown = reasons[:most]
    for reason, count in shown:
        table.add_row(_counted(count), reason)
    if others := sum(count for _, count in reasons[len(shown) :]):
        table.add_row(_counted(others), "other reasons; see --report")
    return table


def _gains(report: Report) -> Table:
    gains = Table("method", "without", "with", "seconds", Column("kept", overflow="fold"))
    gains.title = "Accuracy, worst output on the samples that candidates are judged by"
    for gain in report.encoding.gains:
        told = (gain.kept, f"not{' the others' if gain.kept else ''}: {gain.left}" if gain.left else "")
        kept = "; ".join(filter(None, told))
        gains.add_row(gain.method, decibels(gain.before), decibels(gain.after), f"{gain.seconds:.1f}", kept)
    return gains


def _regions(report: Report) -> Table:
    regions = Table(Column("from node", overflow="fold"), "mode", "nodes", "float", "integer")
    regions.title = "Integer regions, profiled"
    for region in report.performance.regions:
        times = (milliseconds(time) for time in (region.float_milliseconds, region.milliseconds))
        regions.add_row(region.first, str(region.mode), str(region.nodes), *times)
    return regions


def _plans(report: Report) -> Table:
    modes = ("static", "dynamic", "weight-only")
    plans = Table(*modes, "profiled", "expected", "worst output", "speed", "", title="Plans that were weighed")
    for point in report.search.frontier:
        plans.add_row(
            str(point.static),
            str(point.dynamic),
            str(point.weight_only),
            f"{point.milliseconds:.2f} ms",
            decibels(point.predicted),
            decibels(point.sqnr),
            "-" if point.speed is None else f"{point.speed:.2f}x",
            "float" if point.is_float else "taken" if point.chosen else "",
        )
    return plans


def _noises(report: Report) -> Table:
    hurt = Table(Column("node", overflow="fold"), "as", "alone at the worst output", title="What hurts most")
    for one in report.search.sensitivities:
        hurt.add_row(one.node, str(one.mode), decibels(one.sqnr))
    return hurt


def _counted(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def print_applied(done: Rewritten) -> None:
    """Print what every pass did on stderr."""
    table = Table(Column("pass", overflow="fold"), "changed", "left", "time", title="Passes")
    if done.differences:
        table.add_column("largest difference")
        table.caption = "compared on made-up inputs" if done.made_up else "compared on the samples given"
    for index, one in enumerate(done.applied):
        changed, left = len(one.changes.changed), len(one.changes.left)
        compared = [f"{done.differences[index]:.2g}"] if done.differences else []
        table.add_row(type(one.step).__name__, str(changed), str(left), duration(one.seconds), *compared)
    open_console(stderr=True).print(table)


def print_optimized(done: Optimized) -> None:
    """Print on stderr what an optimization changed, and what the result is."""
    table = Table(Column("pass or rule", overflow="fold"), "changes", title="Optimized")
    for name, count in done.counts.items():
        table.add_row(name, str(count))
    console = open_console(stderr=True)
    if done.counts:
        console.print(table)
    for name, reason in done.left_out:
        console.print(f"Left out {'everything' if name == '*' else name}: {reason}.")
    speed = ""
    if done.latency is not None:
        low, high = done.latency.interval
        speed = f", {done.latency.speed:.2f} times as fast ({low:.2f} to {high:.2f})"
    console.print(
        f"{done.before.nodes} nodes before, {done.after.nodes} after; {done.after.bytes / done.before.bytes:.3f} of "
        f"the size{speed}; {_difference(done)}."
    )


def _difference(done: Optimized) -> str:
    if done.difference is None:
        return "nothing was compared, since onnxruntime does not run the model"
    where = "made-up inputs" if done.made_up else "the samples given"
    return f"the worst output differs by {done.difference.share:.1g} of its largest value on {where}"


def print_rows(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> None:
    """Print a table on stdout, whose first column may be long; off a terminal each row is one line."""
    console = open_console()
    if not console.is_terminal:
        console.width = _WIDE
    table = Table(Column(header[0], overflow="fold"), *header[1:], title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if caption:
        console.print(caption)


def print_inspection(found: Inspection) -> None:
    """Print what is in a model on stdout."""
    console = open_console()
    table = Table(title=found.path, show_header=False)
    external = f" and {size(found.external_bytes)} external" if found.external_bytes else ""
    table.add_row("size", size(found.bytes) + external)
    table.add_row("opset", ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in found.opsets.items()))
    table.add_row("IR", str(found.ir_version))
    table.add_row("producer", found.producer or "-")
    table.add_row("quantized", (found.scheme or "yes") if found.quantized else "no")
    for kind, ports in (("input", found.inputs), ("output", found.outputs)):
        for port in ports:
            shape = (
                "?" if port.shape is None else "x".join("?" if d is None else str(d) for d in port.shape) or "scalar"
            )
            table.add_row(kind, f"{port.name} {port.type} {shape}")
    table.add_row("graphs", str(found.graphs))
    table.add_row("operators", ", ".join(f"{count} {op}" for op, count in found.operators.items()))
    for name, (count, held) in found.constants.items():
        table.add_row(f"{name} constants", f"{count}, {size(held)}")
    console.print(table)
    if found.quantized:
        weights = Table("node", "op", "weight", "scales", "data", title="Weights")
        for weight in found.weights:
            weights.add_row(weight.node, weight.op_type, weight.weight, str(weight.scales or "-"), weight.data)
        console.print(weights)


def _judged(judged: Judged) -> str:
    """Say by which samples a model was judged."""
    known = {0: "which the plan had not seen", judged.samples: "which the plan had seen"}
    seen = known.get(judged.seen, f"of which the plan had seen {judged.seen}")
    tried = f"; candidates were tried on {judged.tried}" if judged.tried else ""
    rounds = f", searched {judged.rounds} times" if judged.rounds > 1 else ""
    return f"{judged.samples} samples, {seen}{tried}{rounds}"
