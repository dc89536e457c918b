"""What a quantization did, as values and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxq.errors import DataError, check_path
from onnxq.evaluation.agreement import Agreement
from onnxq.evaluation.latency import Latency
from onnxq.planning.plan import Plan
from onnxq.report.figures import decibels, share
from onnxq.report.parts import Encoding, Fidelity, ModelFiles, Performance, Run, Samples, Search
from onnxq.report.verdict import judges, verdict
from onnxq.system.publish import write_text
from onnxq.system.records import RecordError, html_table, read_record, to_plain

VERSION = 1
"""Of the JSON; a report of another version is refused."""

# Figures that pipelines look at first; they follow from the others.
_SUMMARY = ("size_ratio", "worst_sqnr", "speed")


@dataclass(frozen=True, repr=False)
class Report:
    """Everything that was decided and measured.

    Attributes:
        files: what was read and written.
        plan: every node's decision with its reason.
        samples: what was calibrated and judged by.
        fidelity: how close the quantized model is to the float model.
        performance: how it runs.
        search: what was weighed.
        encoding: how codes were chosen.
        run: how it was done.
    """

    files: ModelFiles
    plan: Plan
    samples: Samples
    fidelity: Fidelity
    performance: Performance
    search: Search
    encoding: Encoding
    run: Run

    def __repr__(self) -> str:
        return f"Report({self.verdict}; {self.plan})"

    def _repr_html_(self) -> str:
        """Return what notebooks show: the verdict, and the figures of each output."""
        rows = [(one.name, decibels(one.sqnr), share(one.agreement)) for one in self.agreement.outputs]
        return html_table(self.verdict, ("output", "SQNR", "agreement"), rows) + self.plan._repr_html_()

    @property
    def output(self) -> str | None:
        """The file that was written, or None."""
        return self.files.output

    @property
    def verdict(self) -> str:
        """What came of it in one sentence."""
        return verdict(self.files, self.samples, self.fidelity, self.performance)

    @property
    def judges(self) -> str:
        """By how many samples it was judged, and how many of these it had seen, in words."""
        return judges(self.samples, self.fidelity)

    @property
    def size_ratio(self) -> float:
        """Size of the quantized model as a share of the float model's."""
        return self.files.size_ratio

    @property
    def agreement(self) -> Agreement:
        """How far the outputs are from the float model's."""
        return self.fidelity.agreement

    @property
    def latency(self) -> Latency | None:
        """Times of a run beside the float model; None when they were not asked for."""
        return self.performance.latency

    def to_json(self) -> str:
        """Return the report as JSON, figures of the closing table first; load_report reads it again.

        Infinities and NaN, for which JSON has no numbers, are the words Infinity, -Infinity and NaN.
        """
        summary = {
            "version": VERSION,
            "size_ratio": self.size_ratio,
            "worst_sqnr": self.agreement.worst_sqnr,
            "speed": self.latency.speed if self.latency is not None else None,
        }
        return json.dumps({**to_plain(summary), **to_plain(self)}, indent=2)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON.

        Raises:
            OutputError: the file cannot be written.
        """
        write_text(path, self.to_json() + "\n", "report")


def load_report(path: str | Path) -> Report:
    """Read what Report.save wrote.

    Returns:
        The report, equal to the one that was saved.

    Raises:
        DataError: the file cannot be read, is no report, or is one of another version.
    """
    check_path(path, "the file of a report")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise DataError(f"report {path} cannot be read: {reason}") from reason
    if not isinstance(found, dict) or "plan" not in found:
        raise DataError(f"{path} is no report of onnxq; expected what quantize --report writes")
    if (version := found.get("version")) != VERSION:
        newer = isinstance(version, int) and version > VERSION
        told = "a newer onnxq" if newer else "an older onnxq"
        raise DataError(f"report {path} is of {told} (version {version}, expected {VERSION}); quantize again")
    return _parsed(path, found)


def _parsed(path: str | Path, found: Mapping[str, Any]) -> Report:
    fields = {key: value for key, value in found.items() if key not in ("version", *_SUMMARY)}
    try:
        return read_record(Report, "the report", fields)
    except RecordError as reason:
        raise DataError(f"report {path}: {reason}") from reason
