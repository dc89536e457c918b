"""Run the commands of the pages and write their output under them: ``python docs/outputs.py [--zoo DIR] [PAGE ...]``.

A block of the language ``console`` holds lines of ``$ onnxq ...`` and their output. The blocks of a page run in order
in one folder. There, ``models`` is the folder of the repository and ``zoo`` is DIR. Models are ``DIR/NAME.onnx``, as
``python models/zoo.py fetch DIR`` writes them, and samples are in ``DIR/data/NAME/calib`` and ``eval``. A line ``...``
stands for output that is left out. Such a block keeps the lines that it shows, with the new figures.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

DOCS = Path(__file__).parent
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = "..."
FIGURE = re.compile(r"\d+(?:\.\d+)?")
# Time differs from run to run.
TIMED = re.compile(r"\d[\d.,]* ?(?:ms|us|s|x)\b|\(\d[\d.]*-\d[\d.]*\)|\d+ runs|loaded \d+ times")
# Shown while something takes long.
PROGRESS = re.compile(r"^[A-Z]\w+ing( [a-z]+)?( \d.*)?$")
FRAME = re.compile(r"[\u2500-\u257f]+")
COLUMNS = "96"
# Rows of every closing table.
ALWAYS = {"accuracy", "evaluated on", "latency", "size", "nodes", "weights"}


@dataclass(frozen=True)
class Example:
    """A command of a page.

    Attributes:
        command: the line after ``$``, continued lines included.
        shown: the lines that the page shows as its output.
    """

    command: str
    shown: tuple[str, ...]

    @property
    def needs_zoo(self) -> bool:
        """Whether it reads a model that is fetched."""
        return " zoo/" in self.command


def examples_in(block: str) -> Iterator[Example]:
    """The commands of a block."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = re.sub(r"\\\n> ", "", part).partition("\n")
        yield Example(command, tuple(output.rstrip("\n").split("\n")) if output.strip() else ())


def is_measured(command: str) -> bool:
    """Whether what a command prints depends on how fast nodes are here."""
    _, name, *options = shlex.split(command)
    untimed = "--latency-seconds 0" in " ".join(options)
    return name in ("quantize", "bench") and not untimed


def page_examples(page: Path, *, zoo: bool) -> list[Example]:
    """The commands of a page in order, of blocks that read the zoo or of all others."""
    blocks = map(examples_in, BLOCK.findall(page.read_text(encoding="utf-8")))
    chosen = [block for block in map(list, blocks) if any(one.needs_zoo for one in block) == zoo]
    return [example for block in chosen for example in block]


def run(command: str, folder: Path) -> tuple[str, ...]:
    """Run a command of onnxq.

    Returns:
        Its lines on stdout and stderr.
    """
    program, *arguments = shlex.split(command)
    assert program == "onnxq", command
    done = subprocess.run(
        [sys.executable, "-m", "onnxq", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": COLUMNS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return lines_of(done.stdout)


def lines_of(text: str) -> tuple[str, ...]:
    """The lines that a command printed, without those of its progress."""
    lines = (line.rstrip() for line in text.rstrip("\n").split("\n"))
    return tuple(line for line in lines if not PROGRESS.match(line))


def words_of(text: str) -> str:
    """Text without frames, times and figures, as one line."""
    return " ".join(FIGURE.sub("#", TIMED.sub("#", FRAME.sub(" ", text))).split())


def figures_of(line: str) -> list[float]:
    """The figures of a line that do not depend on time."""
    return [float(figure) for figure in FIGURE.findall(TIMED.sub("", line))]


def names_of_rows(lines: Iterable[str]) -> set[str]:
    """The first cells of the rows of a table."""
    return {cell for line in lines if line.startswith("\u2502") and (cell := line.split("\u2502")[1].strip())}


def differences(shown: tuple[str, ...], printed: tuple[str, ...]) -> list[str]:
    """Lines that a page shows and a run does not print.

    Figures may differ by 2 or by a tenth, and times by anything.
    """
    all_words = words_of(" ".join(printed))
    wrong = []
    for line in shown:
        words = words_of(line)
        if words in ("", LEFT_OUT):
            continue
        if words not in all_words:
            wrong.append(line)
            continue
        near = [other for other in printed if words_of(other) == words]
        if near and not any(same_figures(line, other) for other in near):
            wrong.append(f"{line} (printed: {near[0]})")
    return wrong


def same_figures(one: str, other: str) -> bool:
    """Whether two lines of the same words hold about the same figures."""
    pairs = zip(figures_of(one), figures_of(other), strict=True)
    return all(abs(a - b) <= max(2, 0.1 * abs(a)) for a, b in pairs)


def refreshed(example: Example, printed: tuple[str, ...]) -> str:
    """The text of an example with the new output; lines that the page leaves out stay left out."""
    kept: list[str] = list(printed)
    if LEFT_OUT in example.shown:
        kept = []
        for line in example.shown:
            close = difflib.get_close_matches(line, printed, n=1, cutoff=0.5)
            kept += [LEFT_OUT] if line == LEFT_OUT else close or [f"NOT PRINTED: {line}"]
    command = example.command.replace(" \\ ", " ")
    return "\n".join((f"$ {command}", *kept)) + "\n"


def put_models(folder: Path, zoo: Path | None) -> None:
    """Link the models and data that commands of the pages name."""
    (folder / "models").symlink_to(DOCS.parent / "models")
    if zoo is not None:
        (folder / "zoo").symlink_to(zoo.resolve())


def main() -> None:
    """Refresh pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, help="folder of fetched models and data; without it their blocks stay")
    parser.add_argument("pages", type=Path, nargs="*", default=[*sorted(DOCS.rglob("*.md"))])
    options = parser.parse_args()
    for page in options.pages:
        text = page.read_text(encoding="utf-8")
        with TemporaryDirectory() as folder:
            put_models(Path(folder), options.zoo)

            def again(match: re.Match[str], folder: Path = Path(folder)) -> str:
                examples = list(examples_in(match[1]))
                if options.zoo is None and any(example.needs_zoo for example in examples):
                    return match[0]
                return "```console\n" + "".join(refreshed(one, run(one.command, folder)) for one in examples) + "```"

            page.write_text(BLOCK.sub(again, text), encoding="utf-8")
        sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    main()
