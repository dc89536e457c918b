"""onnxq quantize on the models that ship with the project."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from conftest import MODELS
from reports import FULL, REPORT, changed

import onnxq
from cli.commands import CALIB, invoke
from onnxq.cli import terminal
from onnxq.cli.options import Request, accuracy_option, budget_options, goal_options
from onnxq.cli.terminal import measured
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.errors import ModelError, OutputError, SchemeError
from onnxq.evaluation.goal import Goal
from onnxq.pipeline.request import Budget
from onnxq.planning.plan_file import load_plan
from onnxq.report import AccuracyError, load_report
from onnxq.report.page import to_html
from onnxq.search.results import NodeSensitivity

CALIBRATED = ("--calib", CALIB, "--limit", 8)
FILES = ("--report", "--html", "--plan-out", "--encodings-out")
MISUSE = [
    ((*CALIBRATED, "--calib", "more"), "--calib is given 2 times, expected once; put all samples into one folder"),
    (("--dry-run", "--preset", "int8", "--scheme", "s.toml"), "give --preset or --scheme, not both"),
    ((), "give --calib with representative samples"),
    (("-v", "-q"), "leave one of them out"),
    (("--plan", "plan.toml", "--dry-run"), "--dry-run shows the plan of a scheme"),
    *(((*CALIBRATED, "--plan", "plan.toml", *option),
       f"--plan decides for every node; leave out (--preset, .*)?{option[0]}")
      for option in (("--preset", "int8"), ("--exact",))),
    *(((*CALIBRATED, one, "file", other, "./file"), f"{one} and {other} are both")
      for one, other in itertools.combinations(FILES, 2)),
    *(((*CALIBRATED, "-o", "q.onnx", option, name), f"is {what} itself")
      for option in FILES for name, what in (("q.onnx", "the output"), ("q.onnx.data", "the data of the output"))),
    *(((*CALIBRATED, "--metric", "top1:labels.npy", option, number), f"Invalid value for '{option}'")
      for option in ("--max-drop", "--latency-seconds") for number in ("nan", "inf", "-1")),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "sentence"), MISUSE)
def test_misuse_is_told_before_anything_runs(
    arguments: tuple[object, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("quantize", MODELS / "gru.onnx", *arguments)
    assert result.exit_code == 2
    assert re.search(sentence, " ".join(result.stderr.split()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["quantize", "train", "sensitivity"])
def test_a_missing_model_is_reported_before_missing_samples(command: str) -> None:
    with pytest.raises(ModelError, match=r"missing\.onnx does not exist; give the path of an \.onnx file"):
        invoke(command, "missing.onnx")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--target", "openvino:threads=0"), "target 'openvino:threads=0' is not one of"),
        (
            ("--prefer", "size", "--preset", "int8"),
            "size chooses the bits of weights, and scheme int8 has other formats",
        ),
        (("--prefer", "size", "--preset", "int4-block32", "--search", "off"), "prefer = size needs a search"),
        (("--train", 1, "--search", "off"), "training for a faster plan needs a search"),
        (("--train", 1, "--latency-seconds", 0), "training for a faster plan needs a search"),
    ],
)
def test_requests_that_cannot_be_are_refused(arguments: tuple[object, ...], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match=sentence):
        invoke("quantize", MODELS / "gru.onnx", *CALIBRATED, "-o", tmp_path / "q.onnx", *arguments)


def test_quantize_prints_the_written_file_on_stdout_and_the_table_on_stderr(tmp_path: Path) -> None:
    output, report = tmp_path / "out.onnx", tmp_path / "report.json"
    result = invoke(
        "quantize",
        MODELS / "gru.onnx",
        "--calib",
        CALIB,
        "-o",
        output,
        "--limit",
        8,
        "--latency-seconds",
        0.1,
        "--report",
        report,
    )
    assert result.exit_code == 0
    assert result.stdout == f"{output}\n"
    for word in ("size", "SQNR", "latency", "integer ops", "storage"):
        assert word in result.stderr
    figures = json.loads(report.read_text())
    samples = figures["samples"]
    assert (samples["calibrated"], samples["split"]["samples"], samples["split"]["seen"]) == (6, 2, 0)
    reported = " ".join(result.stderr.replace("│", "").split())
    assert "2 held-out samples" in reported
    assert figures["files"]["bytes"] == output.stat().st_size
    assert {one["node"] for one in figures["plan"]["decisions"]}
    assert all(one["reason"] for one in figures["plan"]["decisions"])


def test_the_default_output_is_named_after_model_and_preset_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--calib", CALIB, "--limit", 4, "--latency-seconds", 0, "--preset", "int8-storage")
    result = invoke("quantize", MODELS / "gru.onnx", *options)
    assert result.stdout == "gru.int8-storage.onnx\n"
    assert [path.name for path in tmp_path.iterdir()] == ["gru.int8-storage.onnx"]


def test_dry_run_prints_one_line_a_node_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("quantize", MODELS / "resnet.onnx", "--dry-run")
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert {len(line) for line in lines} == {4}
    assert {line[0] for line in lines} <= {"static", "storage", "float"}
    assert sum(line[1] == "Conv" and line[0] == "static" for line in lines) > 5
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_the_same_as_json() -> None:
    lines = invoke("quantize", MODELS / "gru.onnx", "--dry-run").stdout.splitlines()
    found = json.loads(invoke("quantize", MODELS / "gru.onnx", "--dry-run", "--json").stdout)
    assert list(found[0]) == ["mode", "op_type", "node", "reason"]
    assert ["\t".join(one.values()) for one in found] == lines


def test_samples_named_twice_count_once(tmp_path: Path) -> None:
    link = tmp_path / "link.npz"
    link.symlink_to(CALIB)
    given = ("--calib", CALIB, "--calib", link, "--limit", 4)
    assert invoke("calibrate", MODELS / "gru.onnx", *given, "-o", tmp_path / "stats.npz").exit_code == 0
    assert len(onnxq.load_statistics(tmp_path / "stats.npz").samples) == 4


def test_excluded_nodes_stay_in_float() -> None:
    plain = invoke("quantize", MODELS / "resnet.onnx", "--dry-run").stdout.splitlines()
    node = next(line.split("\t")[2] for line in plain if line.startswith("static\tConv"))
    excluded = invoke("quantize", MODELS / "resnet.onnx", "--dry-run", "--exclude", node).stdout
    assert f"float\tConv\t{node}\t" in excluded


def test_a_scheme_file_decides(tmp_path: Path) -> None:
    scheme = tmp_path / "mine.toml"
    scheme.write_text('base = "int8"\n[[rule]]\nop_types = ["Gemm"]\nmode = "float"\n')
    lines = invoke("quantize", MODELS / "resnet.onnx", "--dry-run", "--scheme", scheme).stdout
    assert "float\tGemm" in lines
    assert "static\tConv" in lines


def test_images_are_samples_in_the_colours_of_the_input(tmp_path: Path) -> None:
    from PIL import Image

    for index, image in enumerate(np.load(CALIB)["image"][:4]):
        Image.fromarray((image[0] * 255).astype(np.uint8)).save(tmp_path / f"{index}.png")
    output = tmp_path / "out.onnx"
    options = ("--image-mean", "1/8", "--image-std", "0.5", "--latency-seconds", 0)
    done = invoke("quantize", MODELS / "gru.onnx", "--calib", tmp_path, "-o", output, *options)
    assert (done.exit_code, output.exists()) == (0, True)
    assert "4 images, GRAY, -0.25..1.75, 28x28 stretched" in done.stderr
    # Without the options, both models get other inputs, which only this line shows.
    for command, timing in (("compare", ()), ("bench", options[-2:])):
        images = invoke(command, MODELS / "gru.onnx", output, "--data", tmp_path, *timing)
        arrays = invoke(command, MODELS / "gru.onnx", output, "--data", CALIB, "--limit", 4, *timing)
        assert "samples: 4 images, GRAY, 0..1, 28x28 stretched\n" in images.stdout
        assert arrays.exit_code == 0
        assert "samples:" not in arrays.stdout
    certified = invoke("certify", MODELS / "gru.onnx", output, "--data", tmp_path)
    assert certified.stderr == "samples: 4 images, GRAY, 0..1, 28x28 stretched\n"


def test_the_output_of_a_plan_is_named_after_its_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--calib", CALIB, "--limit", 4, "--latency-seconds", 0)
    first = invoke("quantize", MODELS / "gru.onnx", *options, "--preset", "int8-storage", "--plan-out", "plan.toml")
    again = invoke("quantize", MODELS / "gru.onnx", *options, "--plan", "plan.toml")
    assert first.stdout == again.stdout == "gru.int8-storage.onnx\n"


def test_inputs_and_outputs_become_integers_where_it_is_asked_for(tmp_path: Path) -> None:
    options = ("--calib", CALIB, "--limit", 4, "--search", "off", "--accuracy", "off", "--latency-seconds", 0)
    result = invoke(
        "quantize",
        MODELS / "resnet.onnx",
        *options,
        "--target",
        "qnn",
        "--io",
        "quantized",
        "-o",
        tmp_path / "q.onnx",
        "--json",
    )
    assert result.exit_code == 0
    first, last = json.loads(result.stdout)["encoding"]["io"]
    assert (first["name"], first["kind"]) == ("image", "input")
    assert (last["name"], last["format"]) == ("logits", "uint8")


def test_encodings_are_written_and_read(tmp_path: Path) -> None:
    options = ("--calib", CALIB, "--limit", 4, "--search", "off", "--accuracy", "off", "--latency-seconds", 0)
    files = tmp_path / "one.encodings", tmp_path / "two.encodings"
    first = ("-o", tmp_path / "one.onnx", "--encodings-out", files[0])
    assert invoke("quantize", MODELS / "gru.onnx", *options, *first).exit_code == 0
    second = ("-o", tmp_path / "two.onnx", "--encodings", files[0], "--encodings-out", files[1])
    assert invoke("quantize", MODELS / "gru.onnx", *options, *second).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads(files[0].read_text())["activation_encodings"]
    with pytest.raises(OutputError, match=r"one\.encodings is read as well"):
        invoke("quantize", MODELS / "gru.onnx", *options, *second[:-1], files[0])
    folder = invoke("quantize", tmp_path, *options, "--encodings-out", files[1])
    assert "--encodings-out is about one model" in folder.stderr


def test_what_the_exporter_wrote_about_nodes_is_kept_unless_it_is_to_be_stripped(tmp_path: Path) -> None:
    model = onnx.load(MODELS / "gru.onnx")
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.exporter.namespace", value="model/layer" * 500)
    onnx.save(model, tmp_path / "float.onnx")
    options = (tmp_path / "float.onnx", "--calib", CALIB, "--limit", 2, "--search", "off", "--latency-seconds", 0)
    bytes_, reported = [], []
    for extra in ((), ("--strip-metadata",)):
        figures = ("--report", tmp_path / "report.json", "-o", tmp_path / "q.onnx")
        assert ("--strip-metadata" in invoke("quantize", *options, *figures, *extra).stderr) is not bool(extra)
        report = json.loads((tmp_path / "report.json").read_text())
        bytes_.append(report["files"]["bytes"])
        reported.append(report["files"]["metadata_bytes"])
    assert reported[1] == 0
    assert bytes_[0] - bytes_[1] == pytest.approx(reported[0], rel=0.01)


def test_recurrent_cells_become_integers_with_emit_ort_and_their_plan_says_so(build, tmp_path: Path) -> None:
    model = build(
        "(float[6,2,32] x) => (float[6,1,2,16] y) { [cell] y = LSTM <hidden_size = 16> (x, w, r) }",
        w=(1, 64, 32),
        r=(1, 64, 16),
    )
    source, samples, plan = tmp_path / "float.onnx", tmp_path / "calib.npz", tmp_path / "plan.toml"
    onnx.save(model, source)
    np.savez(samples, x=np.random.default_rng(0).standard_normal((4, 6, 2, 32), np.float32))
    options = (source, "--calib", samples, "--latency-seconds", 0, "--search", "off", "-o", tmp_path / "q.onnx")
    assert invoke("quantize", *options, "--emit", "ort", "--plan-out", plan).exit_code == 0
    assert [node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node] == ["DynamicQuantizeLSTM"]
    again = tmp_path / "again.onnx"
    assert (
        invoke("quantize", source, "--calib", samples, "--latency-seconds", 0, "--plan", plan, "-o", again).exit_code
        == 0
    )
    assert again.read_bytes() == (tmp_path / "q.onnx").read_bytes()


@pytest.mark.slow
def test_a_search_finds_that_a_recurrent_cell_is_faster_as_integers(build, tmp_path: Path) -> None:
    model = build(
        "(float[50,1,80] x) => (float[50,1,1,256] y) { [cell] y = LSTM <hidden_size = 256> (x, w, r) }",
        w=(1, 1024, 80),
        r=(1, 1024, 256),
    )
    onnx.save(model, tmp_path / "float.onnx")
    np.savez(tmp_path / "calib.npz", x=np.random.default_rng(0).standard_normal((16, 50, 1, 80), np.float32))
    options = (tmp_path / "float.onnx", "--calib", tmp_path / "calib.npz", "-o", tmp_path / "q.onnx")
    for extra, op in (((), "DynamicQuantizeLSTM"), (("--emit", "qdq"), "LSTM")):
        reported = invoke("quantize", *options, *extra).stderr
        assert op in [node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node]
        assert ("has no integers for 1 LSTM" in reported) is bool(extra)


def test_a_refused_result_leaves_its_report_and_plan(tmp_path: Path) -> None:
    options = ("--calib", CALIB, "--limit", 4, "--latency-seconds", 0, "--search", "off", "--min-sqnr", 90)
    kept = ("--report", tmp_path / "report.json", "--plan-out", tmp_path / "plan.toml")
    with pytest.raises(AccuracyError):
        invoke("quantize", MODELS / "gru.onnx", *options, *kept, "-o", tmp_path / "q.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.toml", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["worst_sqnr"] < 90
    assert load_plan(tmp_path / "plan.toml").decisions


def test_exactly_what_was_asked_for_or_nothing(tmp_path: Path) -> None:
    # At 35 dB no weight of 2 bits is left.
    options = ("--calib", CALIB, "--limit", 4, "--latency-seconds", 0, "--preset", "int2-block32", "--min-sqnr", 35)
    reported = invoke("quantize", MODELS / "gru.onnx", *options, "-o", tmp_path / "q.onnx").stderr
    assert re.search(r"\d of \d weights ha(s|ve) at most 2 bits; \d weights? ha(s|ve) more: ", reported)
    with pytest.raises(AccuracyError, match=r"\d of \d weights ha(s|ve) at most 2 bits; .*; expected all, exactly"):
        invoke("quantize", MODELS / "gru.onnx", *options, "--exact", "--force", "-o", tmp_path / "exact.onnx")
    assert not (tmp_path / "exact.onnx").exists()


def test_a_plan_is_searched_for_without_a_model_and_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--calib", CALIB, "--limit", 4, "--latency-seconds", 0)
    dry = ("--dry-run", "--plan-out", "gru.plan.toml")
    found = invoke("quantize", MODELS / "gru.onnx", *options, "--preset", "int8-storage", *dry)
    assert found.stdout == "gru.plan.toml\n"
    assert [path.name for path in tmp_path.iterdir()] == ["gru.plan.toml"]
    done = invoke("quantize", MODELS / "gru.onnx", *options, "--plan", "gru.plan.toml")
    assert done.stdout == "gru.int8-storage.onnx\n"


def test_the_report_is_the_answer_where_it_is_asked_for_and_quiet_says_nothing_else(tmp_path: Path) -> None:
    options = ("--calib", CALIB, "--limit", 4, "--latency-seconds", 0, "--search", "off", "-o", tmp_path / "q.onnx")
    result = invoke("quantize", MODELS / "gru.onnx", *options, "--json", "--quiet")
    assert json.loads(result.stdout)["files"]["output"] == str(tmp_path / "q.onnx")
    assert result.stderr == ""


def test_more_is_shown_on_wish_but_not_with_less(tmp_path: Path) -> None:
    options = (
        "--calib",
        CALIB,
        "--limit",
        2,
        "--latency-seconds",
        0,
        "--search",
        "off",
        "--force",
        "-o",
        tmp_path / "q.onnx",
    )
    few, every = (invoke("quantize", MODELS / "vit.onnx", *options, *extra).stderr for extra in ((), ("-v",)))
    assert "--verbose shows" in few
    assert "--verbose shows" not in every
    assert len(every) > len(few)


def test_a_faster_plan_is_looked_for_with_training(tmp_path: Path) -> None:
    options = ("--calib", CALIB, "--limit", 24, "--latency-seconds", 0.1, "--accuracy", "off", "--train", 0.02)
    result = invoke("quantize", MODELS / "mobilenet.onnx", *options, "-o", tmp_path / "q.onnx")
    assert result.stdout == f"{tmp_path / 'q.onnx'}\n"


def packed(*arguments: object) -> tuple[Goal, Budget]:
    """The goal and the budget that a command with these options is called with."""
    found: dict[str, Any] = {}

    @click.command()
    @goal_options
    @accuracy_option
    @budget_options
    def command(goal: Any, budget: Budget) -> None:
        found.update(goal=goal(), budget=budget)

    done = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found["goal"], found["budget"]


def test_nothing_given_is_what_python_takes_for_nothing_given() -> None:
    assert packed() == (Goal(), Budget())


@pytest.mark.parametrize(
    ("arguments", "goal"),
    [
        (("--min-sqnr", 30), Goal(30.0)),
        (("--force", "--exact"), Goal(force=True, exact=True)),
        (("--prefer", "size"), Goal(prefer="size")),
        (("--max-size", "300MB"), Goal(max_size="300MB")),
    ],
)
def test_goals(arguments: tuple[object, ...], goal: Goal) -> None:
    assert packed(*arguments)[0] == goal


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        (("--search", "full", "--accuracy", "gptq"), Budget(search="full", accuracy="gptq")),
        (("--latency-seconds", 0, "--time-limit", 60), Budget(latency_seconds=0.0, time_limit=60.0)),
        (("--engine", "openvino"), Budget(engine="openvino")),
        (("--threads", 2), Budget(threads=2)),
    ],
)
def test_budgets(arguments: tuple[object, ...], budget: Budget) -> None:
    assert packed(*arguments)[1] == budget


@pytest.mark.parametrize(
    ("arguments", "preset"),
    [
        (("--prefer", "size"), "int4-block32"),
        (("--max-size", "0.3"), "int4-block32"),
        (("--prefer", "speed"), "int8"),
        (("--max-size", "0.3", "--preset", "int8-block32"), "int8-block32"),
    ],
)
def test_a_size_needs_no_preset(arguments: tuple[str, ...], preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schemes: list[str] = []

    def run(model: Path, file: Path, data: object, request: Request, *others: object, quiet: bool) -> None:
        schemes.append(request.name)
        raise OutputError("enough is known")

    monkeypatch.setattr("onnxq.cli.quantize.run_quantize", run)
    with pytest.raises(OutputError):
        invoke("quantize", MODELS / "gru.onnx", "--calib", CALIB, *arguments)
    assert schemes == [preset]


def test_the_time_is_not_bounded_by_default() -> None:
    assert packed()[1].time_limit == math.inf


def test_accuracy_alone_can_be_taken_by_a_command() -> None:
    @click.command()
    @accuracy_option
    def command(accuracy: str) -> None:
        click.echo(accuracy)

    assert CliRunner().invoke(command, []).output == "fast\n"


LONG = "/model/encoder/layers.11/attention/self/query/MatMul"


@pytest.mark.parametrize("columns", [60, 80])
def test_all_figures_can_be_read_in_few_columns(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    plans = tuple(replace(point, static=123, dynamic=45) for point in FULL.search.frontier)
    nsr = tuple(NodeSensitivity(f"{LONG}{index}", Mode.STATIC, 20.0 + index) for index in range(30))
    terminal.print_report(changed(FULL, search={"frontier": plans, "sensitivities": nsr}), every=True)
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) <= columns
    # No heading is cut or broken inside a word.
    for word in ("without", "seconds", "first node", "profiled", "expected", "measured", "speed", "SQNR of the worst"):
        assert word in shown
    assert "…" not in shown
    assert shown.count("/MatMul") == 10


def test_what_was_not_measured_has_no_table() -> None:
    assert [table.title for table in measured(REPORT, 80)] == ["Nodes with the lowest SQNR, each quantized alone"]
    assert measured(changed(REPORT, search={"sensitivities": ()}), 80) == []


@pytest.mark.parametrize(("decibels", "word"), [(5, "Verified"), (200, "Refused")])
def test_pages_and_reports_are_kept(decibels: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    samples = ("--calib", MODELS / "data" / "calib.npz", "--limit", "8")
    effort = ("--search", "off", "--accuracy", "off", "--latency-seconds", "0", "--min-sqnr", decibels)
    files = ("--report", "r.json", "--html", "r.html", "-o", "q.onnx")
    with contextlib.suppress(AccuracyError):
        invoke("quantize", MODELS / "gru.onnx", *samples, *effort, *files)
    report = load_report("r.json")
    assert Path("r.html").read_text(encoding="utf-8") == to_html(report)
    assert f">{word}: " in to_html(report)
    assert report.run.command[0] == "onnxq"
    assert report.accuracy.layers is not None
    assert Path("q.onnx").exists() == (word == "Verified")


def test_every_preset_is_listed_with_a_description() -> None:
    lines = [line.split("\t") for line in invoke("quantize", "--preset", "list").stdout.splitlines()]
    assert [name for name, _ in lines] == list(PRESETS)
    assert all(description for _, description in lines)
