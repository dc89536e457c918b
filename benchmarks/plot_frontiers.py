"""Draw the frontiers that benchmarks/zoo.py --json has kept: SQNR over speed, one panel a model.

    python benchmarks/plot_frontiers.py benchmarks/results/zoo.json docs/frontiers.svg

Needs matplotlib, which nothing else here does.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

COLUMNS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    rows = [row for row in json.loads(options.results.read_text()) if row["frontier"]]
    # Equal results are equal bytes.
    matplotlib.rcParams["svg.hashsalt"] = "onnxq"
    height = math.ceil(len(rows) / COLUMNS)
    figure, panels = plt.subplots(height, COLUMNS, figsize=(3.2 * COLUMNS, 2.6 * height), squeeze=False)
    for panel in panels.flat[len(rows) :]:
        panel.axis("off")
    for panel, row in zip(panels.flat, rows, strict=False):
        draw(panel, row)
    figure.supxlabel("expected milliseconds of a run")
    figure.supylabel("SQNR of the worst output, dB (calibration samples)")
    figure.tight_layout()
    figure.savefig(options.output, metadata={"Date": None})


def draw(panel: Any, row: dict[str, Any]) -> None:
    """Draw the plans that were weighed, the one taken filled, and a line where the float model is."""
    for point in row["frontier"]:
        # JSON has no numbers for infinities, which are words.
        sqnr = math.nan if point["sqnr"] is None else float(point["sqnr"])
        if point["is_float"]:
            panel.axvline(point["milliseconds"], linewidth=0.8, linestyle="--", color="grey")
        elif math.isfinite(sqnr):
            fill = "full" if point["chosen"] else "none"
            panel.plot(point["milliseconds"], sqnr, "o", fillstyle=fill, color="tab:blue")
    panel.set_xlim(0, 1.08 * max(point["milliseconds"] for point in row["frontier"]))
    panel.axhline(20, linewidth=0.8, color="grey")
    panel.set_title(f"{row['model']}: {row['speed'][0]:.2f}x", fontsize=9)
    panel.tick_params(labelsize=7)


if __name__ == "__main__":
    main()
