"""What people read: help, progress bars, tables and reports."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import MODELS
from reports import FULL, REPORT, changed
from rich import progress as rich_progress
from rich.console import Console

from cli.commands import CALIB, invoke
from cli.commands import COMMANDS as COMMANDS_OF_ONNXQ
from onnxq.calibration.data import Data
from onnxq.cli import progress_bars, terminal
from onnxq.cli import terminal as console
from onnxq.cli.tables import print_agreement, print_sensitivity, written
from onnxq.cli.terminal import open_console
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode, QuantSpec, Scheme
from onnxq.errors import OutputError
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import EvaluationSplit, Goal
from onnxq.ir import Graph
from onnxq.pipeline.optimization import Optimized, Size
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.delivery import Delivery
from onnxq.planning.plan import Decision
from onnxq.report import AccuracyError
from onnxq.report.page import to_html
from onnxq.runtime.sessions import runtime_version
from onnxq.search.results import MethodGain
from onnxq.search.sensitivity_report import NodeCost, OptionCost, Sensitivity, TensorCost

UNCORRECTED = replace(PRESETS["int8"], correct_biases=False)


def test_the_closing_table_holds_every_figure_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    report = quantize(
        MODELS / "vit.onnx", Data(MODELS / "data" / "calib.npz", limit=4), budget=Budget(latency_seconds=0.1)
    ).report
    capsys.readouterr()
    terminal.print_report(report)
    out, err = capsys.readouterr()
    assert out == ""
    for row in ("accuracy", "logits: SQNR", "evaluated on", "latency", "size", "integer ops", "Why not faster:"):
        assert row in err


@pytest.mark.parametrize(("measured", "reported"), [(0, "left out"), (4, "ended")])
def test_a_budget_that_ended_the_search_is_told(
    measured: int, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.print_report(changed(REPORT, search={"measured": measured, "limit": "--time-limit 1"}))
    assert f"{reported}, as the time of --time-limit 1 ran out" in " ".join(
        capsys.readouterr().err.replace("│", "").split()
    )


def test_a_speed_of_too_few_rounds_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    few = replace(REPORT.performance.latency, rounds=2)
    terminal.print_report(changed(REPORT, performance={"latency": few}))
    terminal.print_optimized(
        Optimized(Graph(), (), Size({"Relu": 2}, 20), Size({"Relu": 1}, 10), None, made_up=True, latency=few)
    )
    err = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert err.count("of unknown speed (2 rounds of timing are too few)") == 2
    assert "as fast" not in err


@pytest.mark.parametrize(("count", "reported"), [(1, "1 held-out sample"), (2, "2 held-out samples")])
def test_one_sample_is_told_of_as_one(count: int, reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_report(changed(REPORT, samples={"split": EvaluationSplit(count, 0)}))
    assert reported in " ".join(capsys.readouterr().err.split())


def test_all_that_was_measured_is_shown_where_that_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_report(FULL)
    short = capsys.readouterr().err
    terminal.print_report(FULL, every=True)
    whole = capsys.readouterr().err
    for title in (
        "Largest errors",
        "Accuracy methods, SQNR of the worst output",
        "Integer regions, profiled",
        "Plans compared",
        "Nodes with the lowest SQNR, each quantized alone",
    ):
        assert title not in short
        assert title in " ".join(whole.split())
    assert whole.count("(chosen)") == 1
    assert "percentile; x, y and 1 more" in " ".join(whole.replace("│", " ").split())
    for reported in (short, whole):
        assert " ".join(reported.split()).count("Verified: 2.00x as fast") == 1
    assert "--verbose shows all reasons and figures" in short


@pytest.mark.parametrize("columns", [60, 80])
def test_doubts_and_the_verdict_come_first_and_the_rest_fits_one_screen(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal.print_report(FULL)
    lines = capsys.readouterr().err.splitlines()
    first = "Warning: the samples are few. Verified: 2.00x as fast (1.90-2.10), 0.25 of the size, 31.2 dB on 3 held-out"
    assert " ".join(map(str.strip, lines)).startswith(first)
    assert max(map(len, lines)) <= columns
    assert len(lines) < 40


def test_reasons_are_told_with_the_operators_they_hold_for(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = {"Softmax is not worth an integer": ["Softmax"] * 2, "no integer kernel": ["Erf", "Tanh", "Sin"]}
    decisions = [
        Decision(f"{op}{index}", op, Mode.FLOAT, reason)
        for reason, names in reasons.items()
        for index, op in enumerate(names)
    ]
    terminal.print_report(replace(REPORT, plan=replace(REPORT.plan, decisions=tuple(decisions))), every=True)
    lines = [line.strip("│ ").split("│") for line in capsys.readouterr().err.splitlines()]
    reported = {row[0].strip(): row[1].strip() for row in lines if len(row) == 2}
    assert reported["2 Softmax"] == "Softmax is not worth an integer"
    assert reported["3 nodes"] == "no integer kernel"
    assert reported["nodes"] == "5 float"


def test_a_refusal_shows_warnings_and_what_to_try_and_leaves_its_sentence_to_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal.print_report(AccuracyError("output y has 31.2 dB, expected 60 dB", FULL).report)
    shown = capsys.readouterr().err
    assert shown.startswith("Warning: the samples are few.\n")
    assert "What to try:\n  --exclude a\n" in shown
    assert "model.int8.onnx" not in shown
    # The error itself is printed behind it.
    assert "31.2 dB, expected 60 dB" not in shown


@pytest.mark.parametrize(("scheme", "shown"), [(PRESETS["int8"], True), (UNCORRECTED, False)], ids=["with", "without"])
def test_corrected_biases_are_told(scheme: Scheme, shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    calib = MODELS / "data" / "calib.npz"
    report = quantize(
        MODELS / "resnet.onnx",
        Data(calib, limit=2),
        scheme=scheme,
        goal=Goal(force=True),
        budget=Budget(latency_seconds=0, search="off"),
    ).report
    terminal.print_report(report)
    assert (report.encoding.corrected_biases > 5) == shown
    assert ("bias correction (" in capsys.readouterr().err) == shown


@pytest.mark.parametrize(
    ("gain", "reported"),
    [
        (
            MethodGain("training", 20.0, 24.5, "epoch 3 of 8", 9.0),
            ["training (20.0 dB -> 24.5 dB)"],
        ),
        (
            MethodGain("training", 20.0, 20.0, "", 9.0, "no lower error"),
            ["training (20.0 dB -> 20.0 dB, not kept: no lower error)"],
        ),
    ],
    ids=["better", "no better"],
)
def test_what_training_bought_is_told(
    gain: MethodGain, reported: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.print_report(replace(REPORT, encoding=replace(REPORT.encoding, gains=(gain,))))
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert all(one in shown for one in reported)


@pytest.mark.parametrize(("bytes_", "shown"), [(0, False), (9, False), (10, True)])
def test_metadata_is_told_where_it_takes_a_hundredth_of_the_file(
    bytes_: int, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    report = quantize(
        MODELS / "gru.onnx",
        Data(MODELS / "data" / "calib.npz", limit=2),
        budget=Budget(search="off", latency_seconds=0),
    ).report
    capsys.readouterr()
    terminal.print_report(changed(report, files={"bytes": 1000, "metadata_bytes": bytes_}))
    assert ("--strip-metadata" in capsys.readouterr().err) == shown


def test_the_float_model_stands_among_the_plans_and_what_is_missing_comes_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    found = quantize(
        MODELS / "gru.onnx", Data(MODELS / "data" / "calib.npz", limit=4), budget=Budget(latency_seconds=0.02)
    )
    assert [point.speed for point in found.report.search.frontier if point.is_float] == [1.0]
    partly = changed(found.report, encoding={"delivered": (Delivery(2, 18, 3),)})
    terminal.print_report(partly, every=True)
    shown = capsys.readouterr().err
    assert "\n3 of 18 weights have at most 2 bits.\n" in shown
    assert shown.count("│ the float model ") == 1
    assert runtime_version() in shown


def test_a_plan_for_a_runtime_that_is_not_here_says_that_nothing_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    budget = Budget(search="off", accuracy="off", latency_seconds=0.02)
    done = quantize(MODELS / "gru.onnx", Data(MODELS / "data" / "calib.npz", limit=4), target="tensorrt", budget=budget)
    assert done.report.latency is None
    terminal.print_report(done.report)
    shown = capsys.readouterr().err
    assert "planned for tensorrt, not measured: no engine runs tensorrt on this machine; give --engine" in shown


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that lines of progress go by."""
    now = [0.0]
    monkeypatch.setattr(progress_bars.time, "monotonic", lambda: now[0])
    return now


def test_where_no_terminal_is_a_line_is_printed_every_ten_seconds(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bars.progress_bars(seconds=60.0) as progress:
        for done in range(1, 22):
            now[0] += 1.0
            progress("calibrate", done, 30)
        now[0] += 60.0
        progress("search", 7, 0)
    lines = ["Calibrating 10 of 30, 50 s left", "Calibrating 20 of 30, 40 s left", "Measuring candidates 7, 0 s left"]
    assert capsys.readouterr() == ("", "\n".join([*lines, ""]))


def test_lines_tell_how_long_a_phase_still_takes_where_its_end_is_known(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bars.progress_bars() as progress:
        progress("calibrate", 0, 10)
        for done, total in ((4, 10), (10, 10)):
            now[0] += 12.0
            progress("calibrate", done, total)
        now[0] += 12.0
        progress("search", 3, 0)
    lines = ["Calibrating 4 of 10, about 18 s to go", "Calibrating 10 of 10", "Measuring candidates 3"]
    assert capsys.readouterr().err.splitlines() == lines


def test_lines_of_weights_count_bytes(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars.progress_bars() as progress:
        progress("encode", 0, 32_000_000)
        now[0] += 12.0
        progress("encode", 8_000_000, 32_000_000)
    assert capsys.readouterr().err == "Encoding weights 8.00 MB of 32.00 MB, about 36 s to go\n"


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


def test_what_is_noted_of_a_stage_stands_beside_it(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    notes = {"train": "loss 0.01, 20.0 dB"}
    with progress_bars.progress_bars(notes=notes) as progress:
        now[0] += 10.0
        progress("train", 3, 8)
        now[0] += 10.0
        progress("verify", 0, 0)
    assert capsys.readouterr().err == "Training 3 of 8 (loss 0.01, 20.0 dB)\nVerifying\n"


@pytest.mark.parametrize("widgets", [True, False])
def test_bars_are_drawn_in_a_notebook_that_has_widgets(widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Bars(rich_progress.Progress):
        def __init__(self, *columns: rich_progress.ProgressColumn, **options: Any) -> None:
            super().__init__(*columns, disable=True, **options)
            made.append(self)

    monkeypatch.setattr(rich_progress, "Progress", Bars)
    monkeypatch.setattr(console, "open_console", lambda stderr: Console(force_jupyter=True))
    monkeypatch.setattr(progress_bars, "find_spec", lambda name: object() if widgets else None)
    with progress_bars.progress_bars() as progress:
        progress("calibrate", 1, 2)
    assert [task.completed for bars in made for task in bars.tasks] == [1] * widgets


LONG = "/a/very/long/name" * 10


def test_long_names_have_lines_of_their_own_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "open_console", lambda: Console(width=80, force_terminal=True, color_system=None))
    name = "/model/layers.11/self_attn/q_proj/MatMul_quantized"
    console.print_rows("Nodes", ("node", "as", "time"), [(name, "static int8", "1 ms"), ("", "float", "2 ms")])
    console.print_rows("Nodes", ("node", "as", "SQNR alone"), [(name, "weight-only int4", "31 dB"), ("", "float", "-")])
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


def test_blocks_are_written_with_their_extent() -> None:
    assert written(QuantSpec("int4", (2, 16))) == "int4 in blocks of 2x16"


COMMANDS = ("quantize", "train")
SAMPLES = ("--calib", CALIB, "--limit", 8, "--latency-seconds", 0, "--accuracy", "off")


@pytest.mark.parametrize(("command", "more"), [("quantize", ("--search", "off")), ("train", ("--epochs", 1))])
def test_a_report_is_printed_where_json_is_asked_for(command: str, more: tuple[object, ...], tmp_path: Path) -> None:
    options = (*SAMPLES, *more, "--force", "--json", "-q", "-o", tmp_path / "q.onnx")
    result = invoke(command, MODELS / "gru.onnx", *options)
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["files"]["output"] == str(tmp_path / "q.onnx")
    assert found["run"]["command"][0] == "onnxq"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_report_that_has_no_room_says_where_the_model_is(tmp_path: Path) -> None:
    (tmp_path / f".r.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    options = (*SAMPLES, "--search", "off", "--force", "-q", "-o", tmp_path / "q.onnx", "--report", tmp_path / "r.json")
    with pytest.raises(OutputError, match=r"report .*r\.json cannot .*: No space .* is there .* in .*q\.onnx$"):
        invoke("quantize", MODELS / "gru.onnx", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["q.onnx"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_is_never_the_output(command: str, tmp_path: Path) -> None:
    shutil.copy(MODELS / "gru.onnx", tmp_path / "m.onnx")
    with pytest.raises(OutputError, match="is the model itself"):
        invoke(command, tmp_path / "m.onnx", *SAMPLES, "-o", tmp_path / "m.onnx")
    with pytest.raises(OutputError, match="of the output does not exist"):
        invoke(command, tmp_path / "m.onnx", *SAMPLES, "-o", tmp_path / "missing" / "o")


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
    options = (*SAMPLES, "--search", "off", "--min-sqnr", 200, *flags, "-o", tmp_path / "q.onnx")
    with pytest.raises(AccuracyError):
        invoke("quantize", MODELS / "gru.onnx", *options)
    assert found == reported


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["-o", "--report"])
def test_samples_are_never_overwritten(command: str, option: str, tmp_path: Path) -> None:
    shutil.copy(CALIB, tmp_path / "c.npz")
    rest = () if option == "-o" else ("-o", tmp_path / "o")
    with pytest.raises(OutputError, match=r"c\.npz is read as well; give another name"):
        invoke(command, MODELS / "gru.onnx", "--calib", tmp_path / "c.npz", option, tmp_path / "c.npz", *rest)
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
    result = invoke("report", saved, "-o", saved)
    assert result.exit_code == 2
    assert "is the report itself" in result.stderr
    assert saved.read_bytes() == before


CALLED = [(), *((name,) for name in COMMANDS_OF_ONNXQ)]


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
    assert sorted(name for name in listed if name in COMMANDS_OF_ONNXQ) == sorted(COMMANDS_OF_ONNXQ)


def test_a_command_loads_no_other_ones() -> None:
    code = "import sys\nfrom onnxq.cli.main import main\nsys.argv[1:] = ['quantize', '--preset', 'list']\n"
    code += "try:\n    main()\nfinally:\n"
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


def test_names_are_shown_as_they_are_and_obeyed_in_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    open_console(stderr=True).print("[red]a[/red] :smile: b\x1b[31mc")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("[red]a[/red] :smile: b")
    assert "\x1b" not in err
