"""What people read: help, progress bars, tables and reports."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import MODELS
from reports import FULL, REPORT, changed
from rich import progress as rich_progress
from rich.console import Console

from cli.commands import AS_IT_IS, CALIB, COMMANDS, GRU, QUICK, invoke, refusal_of, words_of
from onnxq.calibration.data import Data
from onnxq.cli import progress_bars, terminal
from onnxq.cli.tables import print_agreement, print_sensitivity
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.errors import OutputError
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import EvaluationSplit, Goal
from onnxq.ir import Graph
from onnxq.pipeline.optimization import Optimized, Size
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.delivery import Delivery
from onnxq.planning.plan import Decision
from onnxq.report import AccuracyError, Report
from onnxq.report.page import to_html
from onnxq.runtime.sessions import runtime_version
from onnxq.search.results import MethodGain, NodeSensitivity
from onnxq.search.sensitivity_report import NodeCost, OptionCost, Sensitivity, TensorCost

FEW_ROUNDS = replace(REPORT.performance.latency, rounds=2)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Print a report, and return the text on stderr."""

    def printed(report: Report, **options: bool) -> str:
        capsys.readouterr()
        terminal.print_report(report, **options)
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return printed


def test_the_closing_table_holds_every_figure_and_the_reasons(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    data, budget = Data(CALIB, limit=4), Budget(latency_seconds=0.1)
    report = quantize(MODELS / "vit.onnx", data, goal=Goal(force=True), budget=budget).report
    shown = printed(report)
    for row in ("accuracy", "logits: SQNR", "evaluated on", "latency", "size", "integer ops", "Why not faster:"):
        assert row in shown
    assert runtime_version() in shown
    assert [point.speed for point in report.search.frontier if point.is_float] == [1.0]
    assert printed(report, every=True).count("\u2502 the float model ") == 1


@pytest.mark.parametrize(
    ("report", "shown"),
    [
        (changed(REPORT, search={"measured": 0, "limit": "--x 1"}), "left out, as the time of --x 1 ran out"),
        (changed(REPORT, search={"measured": 4, "limit": "--x 1"}), "ended, as the time of --x 1 ran out"),
        (changed(REPORT, performance={"latency": FEW_ROUNDS}), "of unknown speed (2 rounds of timing are too few)"),
        (changed(REPORT, samples={"split": EvaluationSplit(1, 0)}), "on 1 held-out sample"),
        (changed(REPORT, samples={"split": EvaluationSplit(2, 0)}), "on 2 held-out samples"),
        (changed(REPORT, encoding={"corrected_biases": 6}), "bias correction (6 nodes)"),
        (changed(REPORT, encoding={"delivered": (Delivery(2, 18, 3),)}), "3 of 18 weights have at most 2 bits."),
        (
            changed(REPORT, encoding={"gains": (MethodGain("training", 20.0, 24.5, "epoch 3 of 8", 9.0),)}),
            "training (20.0 dB -> 24.5 dB)",
        ),
        (
            changed(REPORT, encoding={"gains": (MethodGain("training", 20.0, 20.0, "", 9.0, "no lower error"),)}),
            "training (20.0 dB -> 20.0 dB, not kept: no lower error)",
        ),
        (changed(REPORT, files={"bytes": 1000, "metadata_bytes": 10}), "--strip-metadata"),
    ],
)
def test_the_closing_table_tells(report: Report, shown: str, printed: Callable[..., str]) -> None:
    assert shown in words_of(printed(report))


@pytest.mark.parametrize(
    ("report", "hidden"),
    [
        (changed(REPORT, performance={"latency": FEW_ROUNDS}), "as fast"),
        (REPORT, "bias correction"),
        (REPORT, "weights have at most"),
        (changed(REPORT, files={"bytes": 1000, "metadata_bytes": 9}), "--strip-metadata"),
        (changed(REPORT, files={"bytes": 1000}), "--strip-metadata"),
    ],
)
def test_the_closing_table_leaves_out(report: Report, hidden: str, printed: Callable[..., str]) -> None:
    assert hidden not in words_of(printed(report))


def test_an_optimization_of_too_few_rounds_tells_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = Size({"Relu": 2}, 20), Size({"Relu": 1}, 10)
    terminal.print_optimized(Optimized(Graph(), (), before, after, None, made_up=True, latency=FEW_ROUNDS))
    shown = words_of(capsys.readouterr().err)
    assert ("of unknown speed (2 rounds of timing are too few)" in shown, "as fast" in shown) == (True, False)


def test_all_that_was_measured_is_shown_where_that_is_wanted(printed: Callable[..., str]) -> None:
    short, whole = printed(FULL), printed(FULL, every=True)
    for title in (
        "Largest errors",
        "Accuracy methods, SQNR of the worst output",
        "Integer regions, profiled",
        "Plans compared",
        "Nodes with the lowest SQNR, each quantized alone",
    ):
        assert title not in short
        assert title in words_of(whole)
    assert whole.count("(chosen)") == 1
    assert "percentile; x, y and 1 more" in words_of(whole)
    for text in (short, whole):
        assert words_of(text).count("Verified: 2.00x as fast") == 1
    assert "--verbose shows all reasons and figures" in short


@pytest.mark.parametrize("columns", [60, 80])
def test_doubts_and_the_verdict_come_first_and_the_rest_fits_one_screen(
    columns: int, printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(FULL).splitlines()
    first = "Warning: the samples are few. Verified: 2.00x as fast (1.90-2.10), 0.25 of the size, 31.2 dB on 3 held-out"
    assert " ".join(map(str.strip, lines)).startswith(first)
    assert max(map(len, lines)) <= columns
    assert len(lines) < 40


LONG = "/model/encoder/layers.11/attention/self/query/MatMul"


@pytest.mark.parametrize("columns", [60, 80])
def test_all_figures_can_be_read_in_few_columns(
    columns: int, printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    plans = tuple(replace(point, static=123, dynamic=45) for point in FULL.search.frontier)
    nodes = tuple(NodeSensitivity(f"{LONG}{index}", Mode.STATIC, 20.0 + index) for index in range(30))
    shown = printed(changed(FULL, search={"frontier": plans, "sensitivities": nodes}), every=True)
    assert max(map(len, shown.splitlines())) <= columns
    # No heading is cut or broken inside a word.
    for word in ("without", "seconds", "first node", "profiled", "expected", "measured", "speed", "SQNR of the worst"):
        assert word in shown
    assert "…" not in shown
    assert shown.count("/MatMul") == 10


def test_figures_that_were_not_measured_have_no_table() -> None:
    titles = [table.title for table in terminal.measured(REPORT, 80)]
    assert titles == ["Nodes with the lowest SQNR, each quantized alone"]
    assert terminal.measured(changed(REPORT, search={"sensitivities": ()}), 80) == []


def test_reasons_are_told_with_the_operators_they_hold_for(printed: Callable[..., str]) -> None:
    reasons = {"Softmax is not worth an integer": ["Softmax"] * 2, "no integer kernel": ["Erf", "Tanh", "Sin"]}
    decisions = tuple(
        Decision(f"{op}{index}", op, Mode.FLOAT, reason)
        for reason, names in reasons.items()
        for index, op in enumerate(names)
    )
    shown = printed(replace(REPORT, plan=replace(REPORT.plan, decisions=decisions)), every=True)
    rows = [line.strip("│ ").split("│") for line in shown.splitlines()]
    told = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
    assert told["2 Softmax"] == "Softmax is not worth an integer"
    assert told["3 nodes"] == "no integer kernel"
    assert told["nodes"] == "5 float"


def test_a_refusal_shows_warnings_and_what_to_try_and_leaves_its_sentence_to_the_end(
    printed: Callable[..., str],
) -> None:
    shown = printed(AccuracyError("output y has 31.2 dB, expected 60 dB", FULL).report)
    assert shown.startswith("Warning: the samples are few.\n")
    assert "What to try:\n  --exclude a\n" in shown
    assert "model.int8.onnx" not in shown
    # The error itself is printed behind it.
    assert "31.2 dB, expected 60 dB" not in shown


def test_a_plan_for_a_runtime_that_is_not_here_says_that_nothing_was_measured(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    budget = Budget(search="off", accuracy="off", latency_seconds=0.02)
    report = quantize(GRU, Data(CALIB, limit=4), target="tensorrt", budget=budget).report
    assert report.latency is None
    reason = "not measured: no engine runs tensorrt on this machine; give --engine"
    assert f"planned for tensorrt, {reason}" in printed(report)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that lines of progress go by."""
    now = [0.0]
    monkeypatch.setattr(progress_bars.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("settings", "steps", "lines"),
    [
        (
            {"seconds": 60.0},
            [*((1.0, "calibrate", done, 30) for done in range(1, 22)), (60.0, "search", 7, 0)],
            ["Calibrating 10 of 30, 50 s left", "Calibrating 20 of 30, 40 s left", "Measuring candidates 7, 0 s left"],
        ),
        # A phase whose end is known says how long it still takes.
        (
            {},
            [(0, "calibrate", 0, 10), (12, "calibrate", 4, 10), (12, "calibrate", 10, 10), (12, "search", 3, 0)],
            ["Calibrating 4 of 10, about 18 s to go", "Calibrating 10 of 10", "Measuring candidates 3"],
        ),
        (
            {},
            [(0.0, "encode", 0, 32_000_000), (12.0, "encode", 8_000_000, 32_000_000)],
            ["Encoding weights 8.00 MB of 32.00 MB, about 36 s to go"],
        ),
        (
            {"notes": {"train": "loss 0.01, 20.0 dB"}},
            [(10.0, "train", 3, 8), (10.0, "verify", 0, 0)],
            ["Training 3 of 8 (loss 0.01, 20.0 dB)", "Verifying"],
        ),
        ({"quiet": True}, [(60.0, "train", 3, 8)], []),
    ],
    ids=["limit", "rest", "bytes", "notes", "quiet"],
)
def test_where_no_terminal_is_a_line_is_printed_every_ten_seconds(
    settings: dict[str, Any],
    steps: Sequence[tuple[float, str, int, int]],
    lines: list[str],
    now: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bars.progress_bars(**settings) as progress:
        for seconds, *step in steps:
            now[0] += seconds
            progress(*step)
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in lines))


def test_progress_bars_are_drawn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bars.progress_bars() as progress:
        for done in (1, 2):
            progress("calibrate", done, 2)
            progress("encode", done * 1_000_000, 2_000_000)
        progress("verify", 0, 0)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Calibrating" in err
    assert "2.00 MB/2.00 MB" in err


@pytest.mark.parametrize("widgets", [True, False])
def test_bars_are_drawn_in_a_notebook_that_has_widgets(widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Bars(rich_progress.Progress):
        def __init__(self, *columns: rich_progress.ProgressColumn, **options: Any) -> None:
            super().__init__(*columns, disable=True, **options)
            made.append(self)

    monkeypatch.setattr(rich_progress, "Progress", Bars)
    monkeypatch.setattr(terminal, "open_console", lambda stderr: Console(force_jupyter=True))
    monkeypatch.setattr(progress_bars, "find_spec", lambda name: object() if widgets else None)
    with progress_bars.progress_bars() as progress:
        progress("calibrate", 1, 2)
    assert [task.completed for bars in made for task in bars.tasks] == [1] * widgets


def test_long_names_have_lines_of_their_own_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "open_console", lambda: Console(width=80, force_terminal=True, color_system=None))
    name = "/model/layers.11/self_attn/q_proj/MatMul_quantized"
    terminal.print_rows("Nodes", ("node", "as", "time"), [(name, "static int8", "1 ms"), ("", "float", "2 ms")])
    terminal.print_rows(
        "Nodes", ("node", "as", "SQNR alone"), [(name, "weight-only int4", "31 dB"), ("", "float", "-")]
    )
    fits, long = capsys.readouterr().out.split("Nodes")[1:]
    assert name in fits
    assert "│" in fits
    assert long.splitlines()[1:4] == ["node", "  as                SQNR alone", name]
    assert long.splitlines()[4:6] == ["  weight-only int4  31 dB", "  float             -"]


def test_names_are_not_cut_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ways = (
        OptionCost(Mode.STATIC, QuantSpec("int8-narrow"), 0.5, 30.0),
        OptionCost(Mode.STORAGE, None, None, math.inf),
    )
    tensors = (TensorCost(LONG, "uint8", 31.0, False, "y", None, None),)
    print_sensitivity(Sensitivity("int8", "t", 4, 20.0, tensors, (NodeCost(LONG, "Conv", Mode.STATIC, 1.0, ways),)))
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line for line in out.splitlines() if LONG in line]
    assert len(rows) == 2
    assert "~31.0 dB" in rows[0]
    assert "static int8-narrow" in rows[1]
    assert "its share of the error of its group" in out


def test_names_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    print_agreement(Agreement(3, (OutputAgreement("a\x1b[2J\u202e[/b]", 1.0, None, 0.0, True, True, 0),)))
    out = capsys.readouterr().out
    assert r"a\x1b[2J\u202e[/b]" in out
    assert not {"\x1b", "\u202e"} & set(out)


def test_outputs_that_cannot_be_compared_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [
        OutputAgreement("a", 1.0, None, 0.0, same_shapes=False, finite=True, compared=0),
        OutputAgreement("b", 1.0, 0.5, 0.0, same_shapes=True, finite=False, compared=0),
    ]
    print_agreement(Agreement(3, tuple(outputs)))
    out = capsys.readouterr().out
    assert "shapes differ" in out
    assert "not finite" in out
    assert "50.00%" in out


@pytest.mark.parametrize(("command", "more"), [("quantize", ("--search", "off")), ("train", ("--epochs", 1))])
def test_a_report_is_printed_where_json_is_asked_for(command: str, more: tuple[object, ...], tmp_path: Path) -> None:
    options = (*QUICK, *more, "--force", "--json", "-q", "-o", tmp_path / "q.onnx")
    result = invoke(command, GRU, *options)
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["files"]["output"] == str(tmp_path / "q.onnx")
    assert found["run"]["command"][0] == "onnxq"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_report_that_has_no_room_says_where_the_model_is(tmp_path: Path) -> None:
    (tmp_path / f".r.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    options = (*AS_IT_IS, "--force", "-q", "-o", tmp_path / "q.onnx", "--report", tmp_path / "r.json")
    with pytest.raises(OutputError, match=r"report .*r\.json cannot .*: No space .* is there .* in .*q\.onnx$"):
        invoke("quantize", GRU, *options)
    assert [path.name for path in tmp_path.iterdir()] == ["q.onnx"]


@pytest.mark.parametrize("command", ["quantize", "train"])
def test_the_model_is_never_the_output(command: str, tmp_path: Path) -> None:
    shutil.copy(GRU, tmp_path / "m.onnx")
    with pytest.raises(OutputError, match="is the model itself"):
        invoke(command, tmp_path / "m.onnx", *QUICK, "-o", tmp_path / "m.onnx")
    with pytest.raises(OutputError, match="of the output does not exist"):
        invoke(command, tmp_path / "m.onnx", *QUICK, "-o", tmp_path / "missing" / "o")


@pytest.mark.parametrize(
    ("flags", "reported"),
    [((), [False]), (("-q",), []), (("-v",), [True]), (("--json", "-q"), ["json"]), (("--json",), [False, "json"])],
)
def test_a_refusal_is_told_as_the_flags_say(
    flags: tuple[str, ...], reported: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    monkeypatch.setattr("onnxq.cli.terminal.print_report", lambda report, *, every: found.append(every))
    monkeypatch.setattr(
        "click.echo",
        lambda text, *, err=False: err or found.append(json.loads(text)["accuracy"]["refusal"] and "json"),
    )
    options = (*AS_IT_IS, "--min-sqnr", 200, *flags, "-o", tmp_path / "q.onnx")
    with pytest.raises(AccuracyError):
        invoke("quantize", GRU, *options)
    assert found == reported


@pytest.mark.parametrize("command", ["quantize", "train"])
@pytest.mark.parametrize("option", ["-o", "--report"])
def test_samples_are_never_overwritten(command: str, option: str, tmp_path: Path) -> None:
    shutil.copy(CALIB, tmp_path / "c.npz")
    rest = () if option == "-o" else ("-o", tmp_path / "o")
    with pytest.raises(OutputError, match=r"c\.npz is read as well; give another name"):
        invoke(command, GRU, "--calib", tmp_path / "c.npz", option, tmp_path / "c.npz", *rest)
    assert (tmp_path / "c.npz").read_bytes() == CALIB.read_bytes()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    FULL.save(tmp_path / "report.json")
    return tmp_path / "report.json"


def test_a_report_becomes_a_page(saved: Path) -> None:
    page = saved.with_suffix(".html")
    assert invoke("report", saved).stdout == f"{page}\n"
    assert page.read_text(encoding="utf-8") == to_html(FULL)


def test_the_report_itself_is_not_written_over(saved: Path) -> None:
    before = saved.read_bytes()
    assert "is the report itself" in refusal_of("report", saved, "-o", saved)
    assert saved.read_bytes() == before


CALLED = [(), *((name,) for name in COMMANDS)]


@pytest.mark.parametrize("arguments", CALLED, ids=" ".join)
def test_every_command_has_help_that_ends_with_its_exit_codes(arguments: tuple[str, ...]) -> None:
    text = " ".join(invoke(*arguments, "--help").stdout.split())
    assert "0 done, 1 a fault in onnxq, 2 bad input" in text
    assert "INTEGER" not in text
    assert "..." not in text.replace("MODEL | FILES...", "").replace("COMMAND [ARGS]...", "")


@pytest.mark.parametrize("arguments", CALLED, ids=" ".join)
def test_a_misspelt_option_is_answered_with_the_nearest_one(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments, "--halp")
    assert result.exit_code == 2
    assert "--help" in result.stderr.splitlines()[-1]


def test_the_help_lists_every_command_once_by_what_people_want() -> None:
    lines = invoke("--help").stdout.splitlines()
    titles = [line.removesuffix(":") for line in lines if line and not line.startswith(" ")]
    assert titles[2:] == ["Quantize", "Compare", "Verify", "Look inside", "Calibrate", "Rewrite"]
    listed = [line.split()[0] for line in lines[lines.index("Quantize:") :] if line.startswith("  ") and "." in line]
    assert sorted(name for name in listed if name in COMMANDS) == sorted(COMMANDS)


def test_a_command_loads_no_other_ones() -> None:
    code = "import sys\nfrom onnxq.cli.main import main\nsys.argv[1:] = ['quantize', '--preset', 'list']\n"
    code += "try:\n    main()\nfinally:\n"
    code += "    print([name for name in sys.modules if name in ('onnxq.cli.compare', 'onnxq.cli.rewrite')])\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_a_quiet_run_without_a_search_loads_neither_searches_nor_engines_nor_pages(tmp_path: Path) -> None:
    needless = {"jinja2", "networkx", "numpy.ma", "rich", "torch", "onnxq.training.pipeline"}
    needless |= {"onnxq.planning.plan_file", "onnxq.report.page", "onnxq.search.frontier"}
    options = [*AS_IT_IS, "--force", "-q", "-o", tmp_path / "q"]
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


def test_names_are_shown_as_they_are_and_obeyed_in_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.open_console(stderr=True).print("[red]a[/red] :smile: b\x1b[31mc")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("[red]a[/red] :smile: b")
    assert "\x1b" not in err
