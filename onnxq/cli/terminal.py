"""Colored output: a console that prints the texts of a model literally."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from onnxq.config.scheme import Mode
from onnxq.numerics.affine import decibels
from onnxq.passes.preparing.rewriting import Rewritten
from onnxq.planning.delivery import missing
from onnxq.planning.plan import Decision
from onnxq.report import Report
from onnxq.report.formatting import duration, milliseconds, shortened, size, visible
from onnxq.report.refusal import name_operators, suggestions, why_not_faster
from onnxq.report.report import speed, summary_rows
from onnxq.rewrite import PassResult

if TYPE_CHECKING:
    from onnxq.pipeline.inspection import Inspection
    from onnxq.pipeline.optimization import Optimized


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that prints the names of a model literally and ignores markup in them."""
    return _Console(stderr=stderr, markup=False, emoji=False, highlight=False)


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


# The measurements of a run, as tables

_SHOWN_NODES = 10
_PLANS = "Plans compared"
# Number of tensors or nodes shown per method; a report file has all of them.
_NAMED = 2
# Columns of the figures beside names, and the fewest columns of a name.
_FIGURES, _NAME = 46, 18
# Columns of the figures beside the places of largest errors.
_ERRORS = 58


Cells = Iterator[tuple[str, ...]]


def measured(report: Report, columns: int) -> list[Table]:
    """Return the tables that a report has figures for; names are shortened to fit `columns` of the terminal."""
    width = max(columns - _FIGURES, _NAME)
    alone = "Nodes with the lowest SQNR, each quantized alone"
    methods = ("method", "without", "with", "seconds", "result")
    tables = (
        ("Largest errors", ("output", "sample", "SQNR", "float -> quantized"), _worst(report, width)),
        ("Accuracy methods, SQNR of the worst output", methods, _gains(report, width)),
        ("Integer regions, profiled", ("first node", "mode", "nodes", "float", "integer"), _regions(report, width)),
        (_PLANS, ("nodes", "profiled", "expected", "measured", "speed"), _plans(report)),
        (alone, ("node", "mode", "SQNR of the worst output"), _sensitive_nodes(report, width)),
        ("Time and memory by stage", ("stage", "seconds", "peak memory so far"), _stages(report)),
    )
    return [table for title, header, rows in tables if (table := _table(title, header, rows)).rows]


def _table(title: str, header: Sequence[str], rows: Cells) -> Table:
    """Return a table. Names in its first column are shortened already and do not wrap; other texts there may."""
    table = Table(Column(header[0], no_wrap=title != _PLANS), *header[1:], title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _worst(report: Report, width: int) -> Cells:
    for output in report.agreement.outputs:
        for sample in output.worst:
            index = f"[{', '.join(map(str, sample.place.index))}]"
            name = shortened(output.name, max(width + _FIGURES - _ERRORS - len(index), _NAME // 2))
            values = f"{sample.place.reference:.4g} -> {sample.place.candidate:.4g}"
            file = f", {shortened(PurePath(sample.file).name, _NAME)}" if sample.file else ""
            yield f"{name}{index}", f"{sample.sample}{file}", decibels(sample.sqnr), values


def _gains(report: Report, width: int) -> Cells:
    for gain in report.encoding.gains:
        text = (gain.kept, f"{'others ' if gain.kept else ''}left out: {gain.left}" if gain.left else "")
        named = ", ".join(shortened(name, width) for name in gain.where[:_NAMED])
        more = f" and {len(gain.where) - _NAMED} more" if len(gain.where) > _NAMED else ""
        result = "; ".join(filter(None, (*text, f"{named}{more}")))
        yield gain.method, decibels(gain.before), decibels(gain.after), f"{gain.seconds:.1f}", result


def _regions(report: Report, width: int) -> Cells:
    for region in report.performance.regions:
        times = (milliseconds(time) for time in (region.float_milliseconds, region.milliseconds))
        yield shortened(region.first, width), str(region.mode), str(region.nodes), *times


def _plans(report: Report) -> Cells:
    for point in report.search.frontier:
        modes = {Mode.STATIC: point.static, Mode.DYNAMIC: point.dynamic, Mode.WEIGHT_ONLY: point.weight_only}
        text = [f"{count} {mode}" for mode, count in modes.items() if count] or ["no integers"]
        yield (
            "the float model" if point.is_float else f"{', '.join(text)}{' (chosen)' if point.chosen else ''}",
            f"{point.milliseconds:.2f} ms",
            decibels(point.predicted),
            decibels(point.sqnr),
            "-" if point.speed is None else f"{point.speed:.2f}x",
        )


def _sensitive_nodes(report: Report, width: int) -> Cells:
    for sensitivity in report.search.sensitivities[:_SHOWN_NODES]:
        yield shortened(sensitivity.node, width), str(sensitivity.mode), decibels(sensitivity.sqnr)


def _stages(report: Report) -> Cells:
    return ((stage.name, f"{stage.seconds:.1f}", size(stage.peak_bytes)) for stage in report.run.stages)


# Tables on stderr, or on stdout if they are the result itself

# More columns than any table fills.
_WIDE = 10_000


def print_report(report: Report, *, every: bool = False) -> None:
    """Print a report on stderr: warnings, the verdict unless it is a refusal, a table, and what to try.

    `every` shows all reasons and figures.
    """
    console = open_console(stderr=True)
    # The figures below do not hold for samples unlike these, so warnings come first.
    for sentence in report.warnings:
        console.print(f"Warning: {sentence}.")
    for name, reason in report.run.left_out:
        console.print(f"Left out of the preparation: {name}, as {reason}.")
    for failure in report.run.failures:
        console.print(f"{failure[0].upper()}{failure[1:]}. Please report it, with what --debug shows.")
    # The command ends with the sentence of a refusal.
    if not report.accuracy.refusal:
        console.print(report.verdict)
    if text := missing(report.encoding.delivered):
        console.print(f"{text[0].upper()}{text[1:]}.")
    table = Table(show_header=False)
    for row in summary_rows(report):
        table.add_row(row.name, row.text)
    console.print(table)
    if every:
        for figures in (_left(report.plan.decisions), *measured(report, console.width)):
            if figures.rows:
                console.print(figures)
    elif not report.accuracy.refusal and (why := why_not_faster(report)):
        console.print(f"Why not faster: {why}.")
    if tries := suggestions(report):
        console.print("What to try:")
    for suggestion in tries:
        for text, indent in ((suggestion.options, " " * 2), (suggestion.why, " " * 4)):
            console.print(_indented(text, console.width, indent))
    if not every:
        console.print("--verbose shows all reasons and figures, --html a page of them.")


def _indented(text: str, width: int, indent: str) -> str:
    """Wrap a text without breaking words, so that options can be copied."""
    return fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _left(decisions: Sequence[Decision]) -> Table:
    table = Table(title="Nodes that do not run as integers", title_justify="left", show_header=False)
    reasons = defaultdict[str, Counter[str]](Counter)
    for decision in decisions:
        if decision.mode is not Mode.STATIC:
            reasons[decision.reason][decision.op_type] += 1
    for reason, operators in sorted(reasons.items(), key=lambda item: -item[1].total()):
        table.add_row(name_operators(operators), reason)
    return table


def print_applied(done: Rewritten) -> None:
    """Print on stderr what every pass did."""
    table = Table(Column("pass", no_wrap=True), "changed", "skipped", "time", title="Passes")
    if done.differences:
        table.add_column("largest difference")
        table.caption = "compared on generated inputs" if done.made_up else "compared on the samples given"
    for index, result in enumerate(done.applied):
        changed, skipped = len(result.changes.changed), len(result.changes.skipped)
        compared = [f"{done.differences[index]:.2g}"] if done.differences else []
        table.add_row(type(result.step).__name__, str(changed), str(skipped), duration(result.seconds), *compared)
    console = open_console(stderr=True)
    console.print(table)
    _print_failed(console, done.applied)


def print_optimized(done: Optimized) -> None:
    """Print on stderr what an optimization changed, the operators before and after it, and the result."""
    table = Table(Column("pass or rule", no_wrap=True), "changes", title="Optimized")
    for name, count in done.counts.items():
        table.add_row(name, str(count))
    console = open_console(stderr=True)
    if done.counts:
        console.print(table)
        console.print(_operators("before", done.before.operators, "after", done.after.operators))
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


def _operators(name: str, operators: Mapping[str, int], other_name: str, others: Mapping[str, int]) -> Table:
    """Return the number of nodes of each operator of two models, the most frequent first, and all of them."""
    table = Table(
        Column("operator", no_wrap=True), *(Column(head, justify="right") for head in (name, other_name, "change"))
    )
    counts = Counter(operators) | Counter(others)
    rows = [(operator, operators.get(operator, 0), others.get(operator, 0)) for operator, _ in counts.most_common()]
    for operator, count, after in (*rows, ("all nodes", sum(operators.values()), sum(others.values()))):
        table.add_row(operator, str(count), str(after), f"{after - count:+}" if after != count else "")
    return table


def _print_failed(console: Console, applied: Iterable[PassResult]) -> None:
    for what in dict.fromkeys(what for result in applied for _, what in result.changes.failed):
        console.print(f"Skipped: {what}.", markup=False)


def _difference(done: Optimized) -> str:
    if done.difference is None:
        return "nothing was compared, since onnxruntime does not run the model"
    where = "generated inputs" if done.made_up else "the samples given"
    return f"the worst output differs by {done.difference.share:.1g} of its largest value on {where}"


def print_rows(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on stdout, with a row on one line.

    If a table is too wide for the terminal, each row begins with a line for its name, the first column.
    """
    console = open_console()
    if not console.is_terminal:
        console.width = _WIDE
    rows = [tuple(visible(text) for text in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    if sum(widths) + 3 * len(widths) + 1 <= console.width:
        table = Table(*header, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    lines = [title] if title else []
    for name, *texts in (header, *rows):
        figures = "  ".join(text.ljust(width) for text, width in zip(texts, widths[1:], strict=True)).rstrip()
        lines += [name] if name else []
        lines += [f"  {figures}"] if figures else []
    console.print("\n".join(lines), soft_wrap=True)


def print_beside(first: Inspection, second: Inspection) -> None:
    """Print on stdout the operators of two models, and their sizes."""
    console = open_console()
    names = [PurePath(inspection.path).name for inspection in (first, second)]
    # Initializers may be written as Constant nodes, which compute nothing.
    counts = [
        {op: count for op, count in inspection.operators.items() if op != "Constant"} for inspection in (first, second)
    ]
    console.print(_operators(names[0], counts[0], names[1], counts[1]))
    sizes = [inspection.bytes + inspection.external_bytes for inspection in (first, second)]
    console.print(f"{size(sizes[0])} -> {size(sizes[1])}, {sizes[1] / sizes[0]:.2f} of the size")


def print_inspection(inspection: Inspection) -> None:
    """Print the contents of a model on stdout."""
    console = open_console()
    table = Table(title=inspection.path, show_header=False)
    external = f" and {size(inspection.external_bytes)} external" if inspection.external_bytes else ""
    table.add_row("size", size(inspection.bytes) + external)
    table.add_row(
        "opset", ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in inspection.opsets.items())
    )
    table.add_row("IR", str(inspection.ir_version))
    table.add_row("producer", inspection.producer or "-")
    table.add_row("quantized", (inspection.scheme or "yes") if inspection.quantized else "no")
    for kind, ports in (("input", inspection.inputs), ("output", inspection.outputs)):
        for port in ports:
            shape = (
                "?" if port.shape is None else " x ".join("?" if d is None else str(d) for d in port.shape) or "scalar"
            )
            table.add_row(kind, f"{port.name} {port.type} {shape}")
    table.add_row("graphs", str(inspection.graphs))
    table.add_row("operators", ", ".join(f"{count} {op}" for op, count in inspection.operators.items()))
    for name, (count, held) in inspection.constants.items():
        table.add_row(f"{name} constants", f"{count}, {size(held)}")
    console.print(table)
    if inspection.quantized:
        rows = (
            (weight.node, weight.op_type, weight.weight, str(weight.scales or "-"), weight.data)
            for weight in inspection.weights
        )
        print_rows("Weights", ("node", "op", "weight", "scales", "data"), rows)
