"""What a run has measured, as tables for people who ask for all of it."""

from __future__ import annotations

from pathlib import PurePath

from rich.table import Table

from onnxq.config.scheme import Mode
from onnxq.report import Report
from onnxq.report.formatting import decibels, milliseconds, shortened

_SHOWN_NODES = 10
# Names of places at which a method found something; a report file has them all.
_NAMED = 2
# Columns that figures take beside names, and those that names have at least.
_FIGURES, _NAME = 42, 18


def measured(report: Report, columns: int) -> list[Table]:
    """Return the tables that a report has figures for.

    Args:
        report: what was found out.
        columns: of the terminal, which names are shortened for.
    """
    width = max(columns - _FIGURES, _NAME)
    found, plans = (_worst(report, width), _gains(report, width), _regions(report, width)), _plans(report)
    return [table for table in (*found, plans, _noises(report, width)) if table.rows]


def _table(title: str, *header: str) -> Table:
    return Table(*header, title=title, title_justify="left")


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
