"""Record the run that README shows: ``python docs/terminal.py`` writes docs/terminal.svg."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from outputs import COLUMNS, put_models, run
from rich.console import Console
from rich.terminal_theme import MONOKAI

COMMANDS = (
    "onnxq quantize models/resnet.onnx --calib models/data/calib.npz -o resnet.int8.onnx",
    "onnxq compare models/resnet.onnx resnet.int8.onnx --data models/data/test.npz",
)
PICTURE = Path(__file__).with_name("terminal.svg")


def main() -> None:
    """Run the commands and draw their output."""
    with TemporaryDirectory() as folder, Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=int(COLUMNS), file=nowhere)
        put_models(Path(folder), None)
        for command in COMMANDS:
            console.print(f"$ {command}", style="bold green", highlight=False)
            console.print("\n".join(run(command, Path(folder))), markup=False, highlight=False)
    picture = console.export_svg(title="onnxq", theme=MONOKAI, unique_id="onnxq")
    # The page loads nothing: viewers use a font of their own.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
