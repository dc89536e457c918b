"""Charts of a report as files of SVG, for papers and slides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from onnxq.errors import OutputError
from onnxq.report.charts import Chart, frontier_chart, noise_chart
from onnxq.report.page import environment
from onnxq.report.report import Report
from onnxq.report.views import node_views, noise_along
from onnxq.system.publish import write_text

_STYLE = """
.paper{fill:#fff} text{font:12px "Helvetica Neue",Helvetica,Arial,sans-serif;fill:#444} .grid{stroke:#ddd;fill:none}
.axis{stroke:#444;fill:none} .mark{fill:#2b66c4} .mark.expected{fill:none;stroke:#777;stroke-width:1.5}
.mark.chosen{fill:#0b6b4f;stroke:#fff;stroke-width:2} .line{fill:none;stroke-width:2} .line.together{stroke:#a8321f}
.line.float{stroke:#a3a8ae;stroke-dasharray:4 4} .line.wanted{stroke:#0b6b4f;stroke-dasharray:2 3}
"""
_TITLES = {
    "frontier": ("Plans by time and fidelity", "profiled time", "SQNR of the worst output"),
    "noise": ("Noise of nodes in graph order", "node", "SQNR of the worst output"),
}


def figures(report: Report) -> Mapping[str, str]:
    """Return the charts that the report has figures for, as SVG by name: ``frontier`` and ``noise``."""
    nodes = node_views(report)
    charts: Mapping[str, Chart | None] = {
        "frontier": frontier_chart(report.search.frontier, report.fidelity.wanted),
        "noise": noise_chart(noise_along(nodes), len(nodes)),
    }
    # Macros are typed as any name of a template is.
    draw = environment().get_template("charts.svg.j2").module.chart  # type: ignore[attr-defined]
    style = Markup(_STYLE)
    return {name: str(draw(chart, name, *_TITLES[name], style)).strip() for name, chart in charts.items() if chart}


def save_figures(report: Report, folder: str | Path) -> tuple[Path, ...]:
    """Write the charts as files of a folder, which is made where there is none.

    Returns:
        The files; none where nothing was measured that could be drawn.

    Raises:
        OutputError: one cannot be written.
    """
    files = {Path(folder) / f"{name}.svg": drawing for name, drawing in figures(report).items()}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise OutputError(f"figures cannot be written to {folder}: {reason.strerror}; give another folder") from reason
    for file, drawing in files.items():
        write_text(file, drawing + "\n", "figure")
    return tuple(files)
