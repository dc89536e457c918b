"""A report, or a comparison of two models, as one HTML page that needs no network and no library."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any

import jinja2
from markupsafe import Markup

from onnxq.config.scheme import Mode
from onnxq.evaluation.agreement import Agreement
from onnxq.evaluation.layers import Layers
from onnxq.numerics.affine import decibels
from onnxq.planning.delivery import missing
from onnxq.report.charts import (
    NodeView,
    causes,
    chain,
    frontier_chart,
    layer_chart,
    node_rows,
    node_views,
    shared_words,
    sqnr_along,
    sqnr_chart,
)
from onnxq.report.formatting import counted, duration, milliseconds, plural, size, visible
from onnxq.report.refusal import suggestions, why_not_faster
from onnxq.report.report import EQUAL, Report, compared, describe_equality, speed, summary_rows, which
from onnxq.search.results import MethodGain
from onnxq.system.publish import write_text

# Characters that end a script element or a line of JavaScript, even inside a string.
_UNSAFE = str.maketrans({letter: f"\\u{ord(letter):04x}" for letter in "<>&'\u2028\u2029"})
_WORST_LAYERS = 20
# By identity, the title of a section, and what a report must hold to have it.
_SECTIONS: Mapping[str, tuple[str, Callable[[Report], Any]]] = {
    "outputs": ("Accurate?", lambda report: True),
    "plans": ("Faster?", lambda report: report.search.frontier),
    "left": ("Float", lambda report: any(decision.mode is not Mode.STATIC for decision in report.plan.decisions)),
    "network": ("Network", lambda report: True),
    "nodes": ("Nodes", lambda report: True),
    "sqnr": ("Error", lambda report: report.accuracy.layers or sqnr_along(node_views(report))),
    "accuracy": ("Methods", lambda report: report.encoding.gains or report.encoding.skipped_at_sqnr is not None),
    "values": ("Ranges", lambda report: report.encoding.tensors),
    "weights": ("Weights", lambda report: report.encoding.weights),
    "certificate": ("Elsewhere?", lambda report: report.certificate),
    "again": ("Reproduce", lambda report: True),
}


def to_html(report: Report) -> str:
    """Return a report as an HTML page that loads nothing else.

    All names are escaped, so a hostile model can run nothing.
    """
    nodes, layers = node_views(report), report.accuracy.layers.layers if report.accuracy.layers else ()
    script = resource("page.js")
    shown = {
        "report": report,
        "sections": [(name, title) for name, (title, holds) in _SECTIONS.items() if holds(report)],
        "command": shlex.join(report.run.command),
        "summary": summary_rows(report),
        "why_not_faster": "" if report.accuracy.refusal else why_not_faster(report),
        "suggestions": suggestions(report),
        "missing": missing(report.encoding.delivered),
        "model_name": PurePath(report.files.model).name or "model",
        "output_name": PurePath(report.output or "").name,
        "tiles": _tiles(report),
        "frontier": frontier_chart(report.search.frontier, report.accuracy.wanted),
        "sqnr": sqnr_chart(sqnr_along(nodes), len(nodes)),
        "layers": report.accuracy.layers,
        "layer_sqnr": layer_chart(layers),
        "worst_layers": sorted(layers, key=lambda layer: layer.isolated)[:_WORST_LAYERS],
        "links": chain(nodes),
        "timed": any(node.milliseconds is not None for node in nodes),
        "has_sqnr": any(node.sqnr is not None for node in nodes),
        "modes": [(mode, count) for mode in Mode if (count := report.plan.count(mode))],
        "causes": causes(nodes, report),
        "facts": _facts(report),
        "version": report.run.machine.versions.get("onnxq", "") if report.run.machine else "",
        "data": script_json(_data(report, nodes)),
        "style": Markup(resource("page.css")),
        "script": Markup(script),
        "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "gained": _gained,
    }
    return environment().get_template("report.html.j2").render(shown)


def save_html(report: Report, path: str | Path) -> None:
    """Write a report as an HTML page.

    Raises:
        OutputError: The file cannot be written.
    """
    write_text(path, to_html(report), "page")


@cache
def environment() -> jinja2.Environment:
    """Return the templates' environment: all text is escaped and visible, and a missing name is an error."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("onnxq.report"),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals.update(decibels=decibels, milliseconds=milliseconds, size=size)
    return templates


def script_json(value: object) -> Markup:
    """Return plain values as JSON that is safe in a script element.

    >>> str(script_json(["</script>"])).isascii(), "<" in script_json(["</script>"])
    (True, False)
    """
    return Markup(json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_UNSAFE))


def _visible(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _all_visible(value: Any) -> Any:
    return [_all_visible(item) for item in value] if isinstance(value, list | tuple) else _visible(value)


def resource(name: str) -> str:
    """Return the text of a file beside the templates."""
    return files("onnxq.report").joinpath("templates", name).read_text(encoding="utf-8")


def _tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield the figures at the top of the page, each with a title before it and a note after it."""
    written, scores, latency = report.files, report.accuracy.scores, report.latency
    yield "Size", f"{report.size_ratio:.2f}x", f"{size(written.float_bytes)} → {size(written.bytes)}"
    if latency is not None:
        low, high = latency.interval
        doubt = "" if latency.significant else ", which shows no difference"
        interval = f"{low:.2f} to {high:.2f} with 95 % confidence{doubt}" if latency.is_bounded else speed(latency)
        times = f"{duration(latency.reference)} → {duration(latency.candidate)}, {plural(latency.threads, 'thread')}"
        figure = f"{latency.speed:.2f}x" if latency.is_bounded else "not known"
        yield "Speed", figure, f"{interval}; {times}, {latency.engine}"
    worst = min(report.agreement.outputs, key=lambda output: output.decibels, default=None)
    if worst is not None:
        yield "Worst output", decibels(worst.decibels), f"{worst.name}, on {report.evaluated_on}"
    if scores is not None:
        yield scores.name, f"{scores.candidate:.4g}", f"{scores.reference:.4g} in float"
    counts = ", ".join(f"{count} {mode}" for mode in Mode if (count := report.plan.count(mode)))
    yield "Integer kernels", str(report.performance.kernels.integer), counts


def _gained(gain: MethodGain) -> str:
    change = gain.after - gain.before
    return f"{change:+.1f} dB" if gain.kept and math.isfinite(change) else "-"


def _facts(report: Report) -> tuple[tuple[str, str], ...]:
    machine, plan, kept = report.run.machine, report.plan, report.files
    facts = [
        ("Float model", kept.model),
        ("SHA-256 of it", kept.model_digest),
        ("Quantized model", kept.output or "none was written"),
        ("SHA-256 of it", kept.output_digest if kept.output else ""),
        ("Scheme and target", f"{plan.scheme} for {plan.target}"),
        ("Ranges", report.encoding.ranges),
        ("Samples", f"{report.samples.calibrated} calibrated; evaluated on {report.evaluated_on}"),
        ("Evaluated on", which(report.samples.split) if report.samples.split is not None else ""),
        ("Time", f"{report.run.seconds:.1f} s"),
    ]
    if machine is not None:
        facts.append(("Machine", f"{machine.processor}, {machine.cores} cores, {machine.system}"))
        facts.append(("Versions", ", ".join(f"{name} {number}" for name, number in machine.versions.items())))
    return tuple((name, fact) for name, fact in facts if fact)


def _data(report: Report, nodes: Sequence[NodeView]) -> dict[str, object]:
    """Return what the script draws; long lists take as few bytes as possible."""
    tensors = [
        [
            tensor.tensor,
            *(_short(value) for value in (tensor.low, tensor.high, *tensor.range, tensor.clipped)),
            list(tensor.counts),
        ]
        for tensor in report.encoding.tensors
    ]
    weights = [
        [weight.tensor, weight.node, weight.channels, [_short(value) for value in weight.maxima]]
        for weight in report.encoding.weights
    ]
    data = {"words": shared_words(nodes), "nodes": list(node_rows(nodes)), "tensors": tensors, "weights": weights}
    return {name: _all_visible(values) for name, values in data.items()}


def _short(value: float) -> float:
    """Return a number with four digits; 0 if it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


# A comparison of two models as a page.

# More rows take long to open, and nobody reads them.
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class Comparison:
    """Two models beside each other.

    Attributes:
        reference: file of the first.
        candidate: file of the second.
        layers: the tensors of both models; None if they were not compared.
    """

    reference: Path
    candidate: Path
    agreement: Agreement
    layers: Layers | None = None

    @property
    def verdict(self) -> str:
        """How well they agree, in one sentence."""
        samples = counted(self.agreement.samples, self.agreement.files)
        if not self.agreement.sound:
            return f"Outputs differ in shape or are not finite, on {samples}"
        worst = self.agreement.worst_sqnr
        if worst == math.inf:
            tooltip = describe_equality(self.agreement)
            return f"{'All outputs are equal' if tooltip == EQUAL else tooltip}, on {samples}{compared(self.agreement)}"
        return f"{decibels(worst)} at the worst output, on {samples}{compared(self.agreement)}"

    def to_html(self) -> str:
        """Return the comparison as an HTML page that loads nothing else and has no script."""
        layers = self.layers.layers if self.layers is not None else ()
        shown = {
            "comparison": self,
            "layers": layers[:_MOST_LAYERS],
            "more": max(len(layers) - _MOST_LAYERS, 0),
            "chart": layer_chart(layers),
            "style": Markup(resource("page.css")),
        }
        return environment().get_template("comparison.html.j2").render(shown)

    def save_html(self, path: str | Path) -> None:
        """Write the page.

        Raises:
            OutputError: The file cannot be written.
        """
        write_text(path, self.to_html(), "page")
