"""How well two models agree, as a page: outputs, and noise along the depth where layers were compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from onnxq.evaluation.agreement import Agreement
from onnxq.evaluation.layers import Layers
from onnxq.report.charts import layer_chart
from onnxq.report.figures import counted, decibels
from onnxq.report.page import environment, resource
from onnxq.report.verdict import EQUAL, compared, told_equal
from onnxq.system.publish import write_text

# More rows take long to open, and nobody reads them.
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class Comparison:
    """Two models beside each other.

    Attributes:
        reference: file of the first.
        candidate: file of the second.
        agreement: of the outputs.
        layers: of the tensors that both have; None where these were not compared.
    """

    reference: Path
    candidate: Path
    agreement: Agreement
    layers: Layers | None = None

    @property
    def verdict(self) -> str:
        """How well they agree in one sentence."""
        samples = counted(self.agreement.samples, self.agreement.files)
        if not self.agreement.sound:
            return f"Outputs differ in shape or are not finite, on {samples}"
        worst = self.agreement.worst_sqnr
        if worst == math.inf:
            told = told_equal(self.agreement)
            return f"{'All outputs are equal' if told == EQUAL else told}, on {samples}{compared(self.agreement)}"
        return f"{decibels(worst)} at the worst output, on {samples}{compared(self.agreement)}"

    def to_html(self) -> str:
        """Return the comparison as a page of HTML that loads nothing else, and holds no script."""
        layers = self.layers.layers if self.layers is not None else ()
        shown = {
            "comparison": self,
            "layers": layers[:_MOST_LAYERS],
            "more": max(len(layers) - _MOST_LAYERS, 0),
            "chart": layer_chart(layers),
            "decibels": decibels,
            "style": Markup(resource("page.css")),
        }
        return environment().get_template("comparison.html.j2").render(shown)

    def save_html(self, path: str | Path) -> None:
        """Write the page.

        Raises:
            OutputError: the file cannot be written.
        """
        write_text(path, self.to_html(), "page")
