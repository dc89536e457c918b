"""Colored output: a console that prints the texts of a model literally."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from onnxq.config.scheme import Mode
from onnxq.evaluation.agreement import OutputAgreement
from onnxq.evaluation.goal import EvaluationSplit
from onnxq.passes.constants import FixInitializers
from onnxq.planning.delivery import missing
from onnxq.planning.plan import Decision
from onnxq.preparing.rewriting import Rewritten
from onnxq.report import Report
from onnxq.report.formatting import counted, decibels, duration, milliseconds, shortened, size, threads, visible
from onnxq.report.refusal import suggestions
from onnxq.report.report import speed, which
from onnxq.rewrite import PassResult
from onnxq.search.refinement import TRAINING

if TYPE_CHECKING:
    from onnxq.commands.inspection import Inspection
    from onnxq.commands.optimization import Optimized


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that prints the names of a model literally and ignores markup in them."""
    return _Console(stderr=stderr, markup=False, emoji=False, highlight=False)


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


# The measurements of a run, as tables

_SHOWN_NODES = 10
# Number of tensors or nodes shown per method; a report file has all of them.
_NAMED = 2
# Columns of the figures beside names, and the fewest columns of a name.
_FIGURES, _NAME = 42, 18


def measured(report: Report, columns: int) -> list[Table]:
    """Return the tables that a report has figures for; names are shortened to fit `columns` of the terminal."""
    width = max(columns - _FIGURES, _NAME)
    found, plans = (_worst(report, width), _gains(report, width), _regions(report, width)), _plans(report)
    return [table for table in (*found, plans, _noises(report, width)) if table.rows]


def _table(title: str, *header: str) -> Table:
    return Table(Column(header[0], overflow="fold"), *header[1:], title=title, title_justify="left")


def _worst(report: Report, width: int) -> Table:
    worst = _table("Where outputs are worst", "largest error at", "sample", "SQNR", "float -> codes")
    for output in report.agreement.outputs:
        for one in output.worst:
            index = f"[{', '.join(map(str, one.place.index))}]"
            name = shortened(output.name, max(width - len(index), _NAME // 2))
            values = f"{one.place.reference:.4g} -> {one.place.candidate:.4g}"
            file = f", {shortened(PurePath(one.file).name, _NAME)}" if one.file else ""
            worst.add_row(f"{name}{index}", f"{one.sample}{file}", decibels(one.sqnr), values)
    return worst


def _gains(report: Report, width: int) -> Table:
    gains = _table("Accuracy, at the worst output", "method", "without", "with", "seconds", "kept")
    for gain in report.encoding.gains:
        told = (gain.kept, f"not{' the others' if gain.kept else ''}: {gain.left}" if gain.left else "")
        named = ", ".join(shortened(name, width) for name in gain.where[:_NAMED])
        more = f" and {len(gain.where) - _NAMED} more" if len(gain.where) > _NAMED else ""
        kept = "; ".join(filter(None, (*told, f"{named}{more}")))
        gains.add_row(gain.method, decibels(gain.before), decibels(gain.after), f"{gain.seconds:.1f}", kept)
    return gains


def _regions(report: Report, width: int) -> Table:
    regions = _table("Integer regions, profiled", "from node", "mode", "nodes", "float", "integer")
    for region in report.performance.regions:
        times = (milliseconds(time) for time in (region.float_milliseconds, region.milliseconds))
        name = shortened(region.first, width)
        regions.add_row(name, str(region.mode), str(region.nodes), *times)
    return regions


def _plans(report: Report) -> Table:
    plans = _table("Plans that were weighed", "nodes", "profiled", "expected", "worst", "speed")
    for point in report.search.frontier:
        modes = {Mode.STATIC: point.static, Mode.DYNAMIC: point.dynamic, Mode.WEIGHT_ONLY: point.weight_only}
        told = [f"{count} {mode}" for mode, count in modes.items() if count] or ["no integers"]
        plans.add_row(
            "the float model" if point.is_float else f"{', '.join(told)}{' (taken)' if point.chosen else ''}",
            f"{point.milliseconds:.2f} ms",
            decibels(point.predicted),
            decibels(point.sqnr),
            "-" if point.speed is None else f"{point.speed:.2f}x",
        )
    return plans


def _noises(report: Report, width: int) -> Table:
    hurt = _table("What hurts most", "node", "as", "alone, at the worst output")
    for one in report.search.sensitivities[:_SHOWN_NODES]:
        hurt.add_row(shortened(one.node, width), str(one.mode), decibels(one.sqnr))
    return hurt


# Tables on stderr, or on stdout if they are the result itself

_SHOWN_REASONS = 5
# Share of the terminal for the names of outputs, with limits in columns.
_NAME_SHARE, _SHORTEST_NAME, _LONGEST_NAME = 1 / 4, 14, 40
# More columns than any table fills.
_WIDE = 10_000
# Share of the bytes of a model.
_WORTH_STRIPPING = 0.01
_IN_WORDS = {
    Mode.STATIC: "static (integers)",
    Mode.DYNAMIC: "dynamic (integers, scaled anew in each run)",
    Mode.WEIGHT_ONLY: "weight-only (float times codes, or rows looked up)",
    Mode.STORAGE: "storage (float, from weights kept as codes)",
    Mode.FLOAT: "float",
}


def print_report(report: Report, *, every: bool = False) -> None:
    """Print a report on stderr: warnings, the verdict in one line, tables, and the verdict again.

    `every` shows all reasons and figures.
    """
    console = open_console(stderr=True)
    # The figures below do not hold for samples unlike these, so warnings come first.
    for sentence in report.samples.warnings:
        console.print(f"Warning: {sentence}.")
    for name, reason in report.run.left_out:
        console.print(f"Left out of the preparation: {name}, as {reason}.")
    for failure in report.run.failures:
        console.print(f"{failure[0].upper()}{failure[1:]}. Please report it, with what --debug shows.")
    console.print(report.verdict)
    if tries := suggestions(report):
        console.print("Try the same with")
    for one in tries:
        for told, indent in ((one.options, " " * 2), (one.why, " " * 4)):
            console.print(_indented(told, console.width, indent))
    if told := missing(report.encoding.delivered):
        console.print(f"{told[0].upper()}{told[1:]}.")
    console.print(_summary(report, console.width))
    if (left := _left(report.plan.decisions, None if every else _SHOWN_REASONS)).rows:
        console.print(left)
    evidence = measured(report, console.width)
    for table in evidence if every else ():
        console.print(table)
    if evidence and not every:
        console.print("--verbose shows what was measured, --html all of it on a page.")
    if not report.fidelity.refusal:
        # The first line may be out of sight by now. A refusal ends with the error itself instead.
        console.print(report.verdict)


def _indented(text: str, width: int, indent: str) -> str:
    """Wrap a text without breaking words, so that options can be copied."""
    return fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(report: Report, columns: int) -> Table:
    width = min(max(int(columns * _NAME_SHARE), _SHORTEST_NAME), _LONGEST_NAME)
    files, kernels, plan = report.files, report.performance.kernels, report.plan
    table = Table(show_header=False)
    table.add_row("size", f"{size(files.float_bytes)} -> {size(files.bytes)} ({report.size_ratio:.2f}x)")
    for output in report.agreement.outputs:
        table.add_row(*_output(output, width))
    if report.samples.split is not None:
        table.add_row("judged on", _judged(report.samples.split))
    if limit := report.search.limit:
        done = "ended" if report.search.measured else "left out"
        table.add_row("search", f"{done} for want of more than {limit}")
    if (latency := report.latency) is not None:
        table.add_row(
            "latency",
            f"{duration(latency.reference)} -> {duration(latency.candidate)}, {speed(latency)}, "
            f"{threads(latency.threads)}, {latency.engine}",
        )
    elif report.performance.unmeasured:
        table.add_row(plan.target, f"planned, not measured: {report.performance.unmeasured}")
    if (elsewhere := report.fidelity.on_engine) is not None:
        for output in elsewhere.agreement.outputs:
            name, told = _output(output, width)
            table.add_row(name, f"{told} on {elsewhere.engine}")
        if elsewhere.floats is not None:
            table.add_row("the float model", f"SQNR {elsewhere.floats:.1f} dB there at its worst output")
    if not files.loads:
        table.add_row(
            "written", "in types that onnxruntime cannot load; all figures are of the same codes in ones it can"
        )
    if (scores := report.fidelity.scores) is not None:
        bound = scores.doubt or f"with 95 % confidence it loses at most {scores.most_lost:.2g} on others"
        table.add_row("metric", f"{scores.reference:.4g} -> {scores.candidate:.4g} ({scores.name}); {bound}")
    between = f"; {_counted(kernels.quantize, 'conversion')} to or from codes" if kernels.quantize else ""
    heavy = kernels.integer + kernels.heavy_float
    table.add_row("in integers", f"{kernels.integer} of {heavy} convolutions and products{between}")
    table.add_row("nodes", ", ".join(f"{plan.count(mode)} {_IN_WORDS[mode]}" for mode in Mode if plan.count(mode)))
    if cells := report.encoding.left_by_standard:
        table.add_row(
            "standard ONNX",
            f"has no integers for {cells} LSTM; a search with --emit fastest measures onnxruntime's own",
        )
    if (spared := report.encoding.skipped_at_sqnr) is not None:
        table.add_row("accuracy", f"{spared:.1f} dB without any method are plenty; --accuracy full tries all the same")
    if report.encoding.corrected_biases:
        table.add_row("biases", f"{report.encoding.corrected_biases} corrected for the mean error of rounded weights")
    for gain in report.encoding.gains:
        if gain.method == TRAINING:
            change = f"{decibels(gain.before)} -> {decibels(gain.after)} on samples that nothing was learned from"
            table.add_row(gain.method, f"{change}; {gain.kept or f'not kept: {gain.left}'}")
    if fixed := report.run.changed_by(FixInitializers):
        table.add_row("inputs", f"{_counted(fixed, 'initializer')} that the exporter lists as inputs are constants")
    if files.metadata_bytes >= _WORTH_STRIPPING * files.bytes:
        share = f"{files.metadata_bytes / files.bytes:.1%}"
        table.add_row(
            "metadata", f"{size(files.metadata_bytes)} of the exporter ({share}); --strip-metadata leaves it out"
        )
    return table


def _output(output: OutputAgreement, width: int) -> tuple[str, str]:
    parts = [] if output.sqnr is None else [f"SQNR {decibels(output.sqnr)}"]
    if output.bound is not None and math.isfinite(output.bound):
        parts.append(f"{output.bound:.1f} dB or more with 95 % confidence")
    if output.agreement is not None:
        parts.append(f"{output.agreement:.1%} {'equal' if output.sqnr is None else 'same arg max'}")
    judges = f", judges {', '.join(output.stands_for)}" if output.stands_for else ""
    kind = "tensor" if output.stands_for else "output"
    return f"{kind} {shortened(output.name, width)}{judges}", ", ".join(parts) or "not compared"


def _left(decisions: Sequence[Decision], most: int | None) -> Table:
    table = Table(title="Not in integers throughout, and why", title_justify="left", show_header=False)
    reasons = defaultdict[str, Counter[str]](Counter)
    for decision in decisions:
        if decision.mode is not Mode.STATIC:
            reasons[decision.reason][decision.op_type] += 1
    found = sorted(reasons.items(), key=lambda item: -item[1].total())
    for reason, operators in found[:most]:
        table.add_row(_operators(operators), reason)
    if others := sum(operators.total() for _, operators in found[len(found[:most]) :]):
        table.add_row(_counted(others, "node"), "other reasons; see --report")
    return table


def _operators(counts: Counter[str]) -> str:
    """Return the number of nodes per operator, or only the total for more than two operators.

    >>> _operators(Counter(Erf=12)), _operators(Counter(Mul=2, Add=3)), _operators(Counter("abc"))
    ('12 Erf', '3 Add, 2 Mul', '3 nodes')
    """
    if len(counts) > 2:
        return _counted(counts.total(), "node")
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _counted(count: int, what: str) -> str:
    return f"{count} {what if count == 1 else what + 's'}"


def print_applied(done: Rewritten) -> None:
    """Print on stderr what every pass did."""
    table = Table(Column("pass", overflow="fold"), "changed", "left", "time", title="Passes")
    if done.differences:
        table.add_column("largest difference")
        table.caption = "compared on made-up inputs" if done.made_up else "compared on the samples given"
    for index, one in enumerate(done.applied):
        changed, left = len(one.changes.changed), len(one.changes.skipped)
        compared = [f"{done.differences[index]:.2g}"] if done.differences else []
        table.add_row(type(one.step).__name__, str(changed), str(left), duration(one.seconds), *compared)
    console = open_console(stderr=True)
    console.print(table)
    _print_failed(console, done.applied)


def print_optimized(done: Optimized) -> None:
    """Print on stderr what an optimization changed, and the result."""
    table = Table(Column("pass or rule", overflow="fold"), "changes", title="Optimized")
    for name, count in done.counts.items():
        table.add_row(name, str(count))
    console = open_console(stderr=True)
    if done.counts:
        console.print(table)
    for name, reason in done.left_out:
        console.print(f"Left out {'everything' if name == '*' else name}: {reason}.")
    _print_failed(console, done.applied)
    timed = ""
    if done.latency is not None:
        timed = f", {speed(done.latency)}"
    console.print(
        f"{done.before.nodes} nodes before, {done.after.nodes} after; {done.after.bytes / done.before.bytes:.3f} of "
        f"the size{timed}; {_difference(done)}."
    )


def _print_failed(console: Console, applied: Iterable[PassResult]) -> None:
    for what in dict.fromkeys(what for one in applied for _, what in one.changes.failed):
        console.print(f"Skipped: {what}.", markup=False)


def _difference(done: Optimized) -> str:
    if done.difference is None:
        return "nothing was compared, since onnxruntime does not run the model"
    where = "made-up inputs" if done.made_up else "the samples given"
    return f"the worst output differs by {done.difference.share:.1g} of its largest value on {where}"


def print_rows(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> None:
    """Print a table on stdout; off a terminal, each row is one line, however long its first column is."""
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
    """Print the contents of a model on stdout."""
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
                "?" if port.shape is None else " x ".join("?" if d is None else str(d) for d in port.shape) or "scalar"
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


def _judged(judged: EvaluationSplit) -> str:
    known = {0: "which the plan had not seen", judged.samples: "which the plan had seen"}
    seen = known.get(judged.seen, f"of which the plan had seen {judged.seen}")
    tried = f"; candidates were tried on {judged.tried}" if judged.tried else ""
    rounds = f", searched {judged.rounds} times" if judged.rounds > 1 else ""
    numbers = f" ({told})" if (told := which(judged)) else ""
    return f"{counted(judged.samples, judged.files)}{numbers}, {seen}{tried}{rounds}"
