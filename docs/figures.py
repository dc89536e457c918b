"""Draw the pictures of docs/explanation: ``python docs/figures.py``. A test checks that the files are what it draws."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "explanation" / "figures"
FLOAT, INTEGER, STORED, LINE = "#dfe6ee", "#bfe3c6", "#f6e3b4", "#445"
RED = "#b3261e"
# SQNR in dB of models/resnet.onnx as int8, on every 32nd image of models/data/calib.npz.
SAMPLES = (43.6, 36.8, 36.9, 42.4, 44.6, 42.0, 38.5, 38.1, 37.8, 39.3, 38.0, 47.1, 37.7, 45.8, 40.7, 46.7)


@dataclass
class Drawing:
    """Shapes on a white sheet.

    Attributes:
        title: for screen readers.
        width: in pixels.
        height: in pixels.
        shapes: elements of SVG, in order.
    """

    title: str
    width: int = 720
    height: int = 180
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, text: str, fill: str = FLOAT, width: float = 96, height: float = 34) -> None:
        """A rounded box with a word in it."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{LINE}"/>'
        )
        self.text(x + width / 2, y + height / 2 + 5, text)

    def text(self, x: float, y: float, text: str, anchor: str = "middle", color: str = "#112", size: int = 14) -> None:
        """A line of text."""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{escape(text)}</text>'
        )

    def line(
        self, points: Iterable[tuple[float, float]], color: str = LINE, dash: str = "", arrow: bool = False
    ) -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        end = ' marker-end="url(#tip)"' if arrow else ""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"{dashes}{end}/>')

    def bar(self, x: float, y: float, width: float, height: float, fill: str = FLOAT) -> None:
        """A bar that stands on y."""
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y - height:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'
        )

    def chain(self, y: float, nodes: list[tuple[str, str]], x: float = 20, gap: float = 24, width: float = 96) -> None:
        """Boxes from left to right with arrows between them."""
        for index, (name, fill) in enumerate(nodes):
            left = x + index * (width + gap)
            self.box(left, y, name, fill, width)
            if index:
                self.line([(left - gap, y + 17), (left - 4, y + 17)], arrow=True)

    def svg(self) -> str:
        """The file."""
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'role="img" font-family="sans-serif"><title>{escape(self.title)}</title>'
        )
        sheet = f'<rect width="{self.width}" height="{self.height}" fill="#fff"/>'
        return "\n".join((head, tip, sheet, *self.shapes, "</svg>")) + "\n"


def prepare() -> Drawing:
    """Many nodes become few."""
    drawing = Drawing(
        "A convolution, a batch normalization and a hard swish of four nodes become two nodes", height=170
    )
    names = ("Conv", "BatchNorm", "Add 3", "Clip 0..6", "Div 6", "Mul")
    drawing.text(20, 24, "as exported", "start")
    drawing.chain(36, [(name, FLOAT) for name in names], gap=20)
    drawing.text(20, 108, "canonical form", "start")
    drawing.chain(120, [("Conv", FLOAT), ("HardSwish", FLOAT)], gap=20)
    drawing.text(300, 142, "ppocr-cls: 258 nodes become 143", "start")
    return drawing


def calibrate() -> Drawing:
    """A histogram with two ranges."""
    drawing = Drawing("A histogram of activations: the range by minimum and maximum, and a narrower one", height=210)
    floor, left, step = 160.0, 60.0, 10.0
    for index in range(60):
        place = (index - 22) / 8
        share = math.exp(-place * place / 2) + (0.03 if 48 < index < 56 else 0)
        inside = 4 <= index <= 41
        drawing.bar(left + index * step, floor, step - 1, 120 * share, INTEGER if inside else STORED)
    drawing.line([(left, floor), (left + 600, floor)])
    drawing.line([(left + 40, 30), (left + 40, floor)], RED, "5 4")
    drawing.line([(left + 420, 30), (left + 420, floor)], RED, "5 4")
    drawing.text(left + 426, 44, "range with the least squared error", "start", RED)
    drawing.line([(left, floor + 12), (left + 560, floor + 12)])
    drawing.text(left + 280, floor + 32, "range from minimum to maximum: rare values make every step larger")
    return drawing


def encode() -> Drawing:
    """Real values on a grid."""
    drawing = Drawing("Real values are rounded to the nearest of 256 levels", height=170)
    for index in range(17):
        x = 40 + index * 40
        drawing.line([(x, 92), (x, 108)])
        if index % 4 == 0:
            drawing.text(x, 128, str(index - 4))
    drawing.line([(40, 100), (680, 100)])
    for real, level in ((112, 120), (331, 320), (478, 480), (594, 600)):
        drawing.shapes.append(f'<circle cx="{real}" cy="52" r="5" fill="{RED}"/>')
        drawing.line([(real, 58), (level, 88)], RED, arrow=True)
    drawing.text(40, 30, "float x", "start", RED)
    drawing.text(40, 156, "quantized q = clamp(round(x / scale) + zero point); the arrows are the error", "start")
    return drawing


def search() -> Drawing:
    """A chain that is cut where it costs least."""
    drawing = Drawing("A chain of nodes: integers, a float region and two boundaries", height=190)
    names = [
        ("Conv", INTEGER),
        ("Conv", INTEGER),
        ("Sigmoid", FLOAT),
        ("Mul", FLOAT),
        ("Conv", INTEGER),
        ("Gemm", INTEGER),
    ]
    drawing.chain(60, names, gap=20)
    for x in (242, 474):
        drawing.line([(x, 30), (x, 124)], RED, "5 4")
    drawing.text(242, 24, "dequantize", color=RED)
    drawing.text(474, 24, "quantize", color=RED)
    drawing.text(360, 150, "cost of a plan = time of nodes + time of boundaries + weight x error of integers")
    drawing.text(360, 174, "a minimum cut finds the cheapest of all 64 plans of these six nodes")
    return drawing


def place(decibels: float) -> float:
    """Where an SQNR lies from left to right."""
    return 40 + (decibels - 15) * 19


def bound() -> Drawing:
    """SQNR of samples, their estimate and its lower bound."""
    drawing = Drawing("SQNR of single samples, the SQNR of all, its lower bound and the goal", height=200)
    drawing.line([(40, 150), (690, 150)])
    for decibels in range(15, 48, 5):
        drawing.text(place(decibels), 172, f"{decibels} dB")
    for index, decibels in enumerate(SAMPLES):
        drawing.shapes.append(f'<circle cx="{place(decibels):.1f}" cy="{126 - 14 * (index % 3)}" r="4" fill="{LINE}"/>')
    for decibels, name, color in ((20, "goal", LINE), (35.8, "bound", RED), (38.1, "all samples", "#1b6e2f")):
        drawing.line([(place(decibels), 40), (place(decibels), 150)], color, "5 4")
        drawing.text(place(decibels), 30, f"{name} {decibels:g}", color=color)
    drawing.text(40, 192, "a plan passes if the bound lies at or above the goal", "start")
    return drawing


def publish() -> Drawing:
    """Steps down until one holds."""
    drawing = Drawing("The chosen plan, stored weights, stored weights of the given graph, or a refusal", height=150)
    names = [("chosen plan", INTEGER), ("stored weights", STORED), ("stored, as given", STORED), ("refusal", "#f2c4c0")]
    drawing.chain(44, names, gap=48, width=134)
    drawing.text(360, 26, "each is loaded, run on the holdout set and timed beside the given model")
    for x in (160, 342, 524):
        drawing.text(x + 18, 96, "slower,", color=RED, size=12)
        drawing.text(x + 18, 111, "or too inaccurate", color=RED, size=12)
    drawing.text(87, 134, "written if it holds")
    return drawing


FIGURES = {
    "prepare": prepare,
    "calibrate": calibrate,
    "encode": encode,
    "search": search,
    "bound": bound,
    "publish": publish,
}


def main() -> None:
    """Write all."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
