"""The command line as a whole: help, presets, and what is told of a misspelling."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands import CALIB, COMMANDS, MODELS, invoke

CALLED = [(), *((name,) for name in COMMANDS), ("stats", "merge"), ("stats", "show")]


@pytest.mark.parametrize("arguments", CALLED, ids=" ".join)
def test_every_command_has_help_that_ends_with_its_exit_codes(arguments: tuple[str, ...]) -> None:
    text = " ".join(invoke(*arguments, "--help").stdout.split())
    assert "0 done, 1 a fault in onnxq, 2 bad input" in text
    assert "INTEGER" not in text
    assert "..." not in text.replace("OPTIONS] FILES...", "").replace("COMMAND [ARGS]...", "")


@pytest.mark.parametrize("arguments", CALLED, ids=" ".join)
def test_a_misspelt_option_is_answered_with_the_nearest_one(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments, "--halp")
    assert result.exit_code == 2
    assert "--help" in result.stderr.splitlines()[-1]


def test_the_help_lists_every_command_once_by_what_people_want() -> None:
    lines = invoke("--help").stdout.splitlines()
    titles = [line.removesuffix(":") for line in lines if line and not line.startswith(" ")]
    assert titles[2:] == ["Quantize", "Compare", "Look inside", "Calibrate", "Rewrite"]
    listed = [line.split()[0] for line in lines[lines.index("Quantize:") :] if line.startswith("  ") and "." in line]
    assert sorted(name for name in listed if name in COMMANDS) == sorted(COMMANDS)


def test_a_command_loads_no_other_ones() -> None:
    code = "import sys\nfrom onnxq.cli.main import main\nsys.argv[1:] = ['presets']\ntry:\n    main()\nfinally:\n"
    code += "    print([name for name in sys.modules if name in ('onnxq.cli.compare', 'onnxq.cli.rewrite')])\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_a_quiet_run_without_a_search_loads_neither_searches_nor_engines_nor_pages(tmp_path: Path) -> None:
    needless = {"jinja2", "networkx", "numpy.ma", "rich", "torch", "onnxq.training.pipeline"}
    needless |= {"onnxq.planning.plan_file", "onnxq.report.page", "onnxq.search.frontier"}
    options = [
        "--calib",
        CALIB,
        "--limit",
        4,
        "--search",
        "off",
        "--latency-seconds",
        0,
        "--force",
        "-q",
        "-o",
        tmp_path / "q",
    ]
    code = "import sys\nfrom onnxq.cli.main import main\n"
    code += f"sys.argv[1:] = {['quantize', str(MODELS / 'gru.onnx'), *map(str, options)]}\n"
    code += f"try:\n    main()\nfinally:\n    print({needless} & set(sys.modules) or 'none')\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "none"


@pytest.mark.parametrize("arguments", [["--help"], ["quantize", "--help"], ["inspect", "--help"], ["--version"]])
def test_help_does_not_load_the_heavy_libraries(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom onnxq.cli.main import main\nsys.argv[1:] = " + repr(arguments) + "\n"
        "try:\n    main()\nfinally:\n"
        "    heavy = {'numpy', 'onnx', 'onnxruntime', 'rich', 'onnx_graphsurgeon'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout
