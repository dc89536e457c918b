"""onnxq quantize on the models that ship with the project, each in an empty current folder."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import MODELS, Build

import onnxq
from cli.commands import AS_IT_IS, CALIB, GRU, QUICK, RESNET, invoke, refusal_of, words_of
from onnxq.errors import ModelError, OutputError, SchemeError
from onnxq.planning.plan_file import load_plan
from onnxq.report import AccuracyError, load_report
from onnxq.report.page import to_html

FILES = ("--report", "--html", "--plan-out", "--encodings-out")
MISUSE = [
    ((*QUICK, "--calib", "more"), "--calib is given 2 times, expected once; put all samples into one folder"),
    (("--dry-run", "--preset", "int8", "--scheme", "s.toml"), "give --preset or --scheme, not both"),
    ((), "give --calib with representative samples"),
    (("-v", "-q"), "leave one of them out"),
    (("--plan", "plan.toml", "--dry-run"), "--dry-run shows the plan of a scheme"),
    ((*QUICK, "--dtypes", "q8", "--preset", "int8"), "--dtypes goes without --preset; leave one of them out"),
    *(((*QUICK, "--plan", "plan.toml", *option),
       f"--plan decides for every node; leave out (--preset, .*)?{option[0]}")
      for option in (("--preset", "int8"), ("--exact",))),
    *(((*QUICK, first, "file", second, "./file"), f"{first} and {second} are both")
      for first, second in itertools.combinations(FILES, 2)),
    *(((*QUICK, "-o", "q.onnx", option, name), f"is {what} itself")
      for option in FILES for name, what in (("q.onnx", "the output"), ("q.onnx.data", "the data of the output"))),
    *(((*QUICK, "--metric", "top1:labels.npy", option, number), f"Invalid value for '{option}'")
      for option in ("--max-drop", "--latency-seconds") for number in ("nan", "inf", "-1")),
]  # fmt: skip


@pytest.fixture(autouse=True)
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Start in an empty folder, and return a function that lists it."""
    monkeypatch.chdir(tmp_path)
    return lambda: sorted(path.name for path in tmp_path.iterdir())


def quantized(*options: object, model: Path = GRU) -> Any:
    """Quantize a model to q.onnx, and return what was printed."""
    result = invoke("quantize", model, *options, "-o", "q.onnx")
    assert (result.exit_code, Path("q.onnx").exists()) == (0, True), result.output
    return result


@pytest.mark.parametrize(("arguments", "sentence"), MISUSE)
def test_misuse_is_refused_before_anything_runs(
    arguments: tuple[object, ...], sentence: str, written: Callable[[], list[str]]
) -> None:
    assert re.search(sentence, refusal_of("quantize", GRU, *arguments))
    assert written() == []


@pytest.mark.parametrize("command", ["quantize", "train", "sensitivity"])
def test_a_missing_model_is_reported_before_missing_samples(command: str) -> None:
    with pytest.raises(ModelError, match=r"missing\.onnx does not exist; give the path of an \.onnx file"):
        invoke(command, "missing.onnx")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--target openvino:threads=0", "target 'openvino:threads=0' is not one of"),
        ("--prefer size --preset int8", "size chooses the bits of weights, and scheme int8 has other formats"),
        ("--prefer size --preset int4-block32 --search off", "prefer = size needs a search"),
        ("--train 1 --search off", "training for a faster plan needs a search"),
        ("--train 1 --latency-seconds 0", "training for a faster plan needs a search"),
    ],
)
def test_requests_that_cannot_be_are_refused(arguments: str, sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        invoke("quantize", GRU, *QUICK[:4], *arguments.split())


def test_quantize_prints_the_written_file_on_stdout_and_the_table_on_stderr() -> None:
    result = quantized(*QUICK[:3], 8, "--latency-seconds", 0.1, "--report", "report.json")
    assert result.stdout == "q.onnx\n"
    for word in ("size", "SQNR", "latency", "integer ops", "storage", "2 held-out samples"):
        assert word in words_of(result.stderr)
    figures = json.loads(Path("report.json").read_text())
    samples = figures["samples"]
    assert (samples["calibrated"], samples["split"]["samples"], samples["split"]["seen"]) == (6, 2, 0)
    assert figures["files"]["bytes"] == Path("q.onnx").stat().st_size
    assert all(decision["node"] and decision["reason"] for decision in figures["plan"]["decisions"])


def test_outputs_are_named_after_model_and_preset_also_those_of_a_plan(written: Callable[[], list[str]]) -> None:
    first = invoke("quantize", GRU, *QUICK, "--preset", "int8-storage", "--plan-out", "plan.toml")
    assert written() == [name := "gru.int8-storage.onnx", "plan.toml"]
    again = invoke("quantize", GRU, *QUICK, "--plan", "plan.toml")
    assert first.stdout == again.stdout == f"{name}\n"


def test_a_dry_run_prints_one_line_a_node_and_writes_nothing(written: Callable[[], list[str]]) -> None:
    lines = [line.split("\t") for line in invoke("quantize", RESNET, "--dry-run").stdout.splitlines()]
    assert {line[0] for line in lines} <= {"static", "storage", "float"}
    assert sum(line[1] == "Conv" and line[0] == "static" for line in lines) > 5
    plain = json.loads(invoke("quantize", RESNET, "--dry-run", "--json").stdout)
    assert list(plain[0]) == ["mode", "op_type", "node", "reason"]
    assert [list(decision.values()) for decision in plain] == lines
    node = next(line[2] for line in lines if line[:2] == ["static", "Conv"])
    assert f"float\tConv\t{node}\t" in invoke("quantize", RESNET, "--dry-run", "--exclude", node).stdout
    assert written() == []


def test_samples_named_twice_count_once() -> None:
    Path("link.npz").symlink_to(CALIB)
    given = ("--calib", CALIB, "--calib", "link.npz", "--limit", 4)
    assert invoke("calibrate", GRU, *given, "-o", "stats.npz").exit_code == 0
    assert len(onnxq.load_statistics("stats.npz").samples) == 4


def test_a_scheme_file_decides() -> None:
    Path("mine.toml").write_text('base = "int8"\n[[rule]]\nop_types = ["Gemm"]\nmode = "float"\n')
    lines = invoke("quantize", RESNET, "--dry-run", "--scheme", "mine.toml").stdout
    assert "float\tGemm" in lines
    assert "static\tConv" in lines


def test_images_are_samples_in_the_colours_of_the_input(tmp_path: Path) -> None:
    from PIL import Image

    for index, image in enumerate(np.load(CALIB)["image"][:4]):
        Image.fromarray((image[0] * 255).astype(np.uint8)).save(tmp_path / f"{index}.png")
    options = ("--image-mean", "1/8", "--image-std", "0.5", "--latency-seconds", 0)
    assert "4 images, GRAY, -0.25..1.75, 28x28 stretched" in quantized("--calib", tmp_path, *options).stderr
    # Without the options, both models get other inputs, which only this line shows.
    shown = "samples: 4 images, GRAY, 0..1, 28x28 stretched\n"
    for command, timing in (("compare", ()), ("bench", options[-2:])):
        images = invoke(command, GRU, "q.onnx", "--data", tmp_path, *timing)
        arrays = invoke(command, GRU, "q.onnx", "--data", CALIB, "--limit", 4, *timing)
        assert (shown in images.stdout, arrays.exit_code, "samples:" in arrays.stdout) == (True, 0, False)
    assert invoke("certify", GRU, "q.onnx", "--data", tmp_path).stderr == shown


def test_inputs_and_outputs_become_integers_where_it_is_asked_for() -> None:
    result = quantized(*AS_IT_IS, "--target", "qnn", "--io", "quantized", "--json", model=RESNET)
    first, last = json.loads(result.stdout)["encoding"]["io"]
    assert (first["name"], first["kind"]) == ("image", "input")
    assert (last["name"], last["format"]) == ("logits", "uint8")


def test_encodings_are_written_and_read(tmp_path: Path) -> None:
    first, second = Path("one.encodings"), Path("two.encodings")
    quantized(*AS_IT_IS, "--encodings-out", first)
    quantized(*AS_IT_IS, "--encodings", first, "--encodings-out", second)
    assert first.read_bytes() == second.read_bytes()
    assert json.loads(first.read_text())["activation_encodings"]
    with pytest.raises(OutputError, match=r"one\.encodings is read as well"):
        invoke("quantize", GRU, *AS_IT_IS, "--encodings", first, "--encodings-out", first)
    assert "--encodings-out is about one model" in refusal_of(
        "quantize", tmp_path, *AS_IT_IS, "--encodings-out", second
    )


def test_metadata_of_the_exporter_is_kept_unless_it_is_to_be_stripped() -> None:
    model = onnx.load(GRU)
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.exporter.namespace", value="model/layer" * 500)
    onnx.save(model, "float.onnx")
    kept, stripped = (
        (quantized(*AS_IT_IS, "--report", "report.json", *extra, model=Path("float.onnx")), load_report("report.json"))
        for extra in ((), ("--strip-metadata",))
    )
    assert ("--strip-metadata" in kept[0].stderr, "--strip-metadata" in stripped[0].stderr) == (True, False)
    assert stripped[1].files.metadata_bytes == 0
    assert kept[1].files.bytes - stripped[1].files.bytes == pytest.approx(kept[1].files.metadata_bytes, rel=0.01)


def put_lstm(build: Build, steps: int, batch: int, inputs: int, hidden: int, samples: int) -> None:
    """Write an LSTM as float.onnx with samples."""
    shapes = f"(float[{steps},{batch},{inputs}] x) => (float[{steps},1,{batch},{hidden}] y)"
    text = f"{shapes} {{ [cell] y = LSTM <hidden_size = {hidden}> (x, w, r) }}"
    onnx.save(build(text, w=(1, 4 * hidden, inputs), r=(1, 4 * hidden, hidden)), "float.onnx")
    x = np.random.default_rng(0).standard_normal((samples, steps, batch, inputs), np.float32)
    np.savez("calib.npz", x=x)


def operators() -> list[str]:
    return [node.op_type for node in onnx.load("q.onnx").graph.node]


def test_recurrent_cells_become_integers_with_emit_ort_and_their_plan_says_so(build: Build) -> None:
    put_lstm(build, 6, 2, 32, 16, samples=4)
    options = ("--calib", "calib.npz", "--latency-seconds", 0)
    quantized(*options, "--search", "off", "--emit", "ort", "--plan-out", "plan.toml", model=Path("float.onnx"))
    assert operators() == ["DynamicQuantizeLSTM"]
    before = Path("q.onnx").read_bytes()
    quantized(*options, "--plan", "plan.toml", model=Path("float.onnx"))
    assert Path("q.onnx").read_bytes() == before


@pytest.mark.slow
def test_a_search_finds_that_a_recurrent_cell_is_faster_as_integers(build: Build) -> None:
    put_lstm(build, 50, 1, 80, 256, samples=16)
    for extra, op in (((), "DynamicQuantizeLSTM"), (("--emit", "qdq"), "LSTM")):
        reported = quantized("--calib", "calib.npz", *extra, model=Path("float.onnx")).stderr
        assert op in operators()
        assert ("has no integer operator for 1 LSTM" in words_of(reported)) is bool(extra)


def test_a_refused_result_leaves_its_report_and_plan(written: Callable[[], list[str]]) -> None:
    kept = ("--report", "report.json", "--plan-out", "plan.toml", "-o", "q.onnx")
    with pytest.raises(AccuracyError):
        invoke("quantize", GRU, *AS_IT_IS, "--min-sqnr", 90, *kept)
    assert written() == ["plan.toml", "report.json"]
    assert json.loads(Path("report.json").read_text())["worst_sqnr"] < 90
    assert load_plan("plan.toml").decisions


def test_exact_bits_are_written_or_nothing() -> None:
    # At 35 dB no weight of 2 bits is left.
    options = (*QUICK, "--preset", "int2-block32", "--min-sqnr", 35)
    count = r"\d of \d weights ha(s|ve) at most 2 bits; "
    assert re.search(rf"{count}\d weights? ha(s|ve) more: ", quantized(*options).stderr)
    with pytest.raises(AccuracyError, match=rf"{count}.*; expected all, exactly"):
        invoke("quantize", GRU, *options, "--exact", "--force", "-o", "exact.onnx")
    assert not Path("exact.onnx").exists()


def test_a_plan_is_searched_for_without_a_model_and_carried_out(written: Callable[[], list[str]]) -> None:
    found = invoke("quantize", GRU, *QUICK, "--preset", "int8-storage", "--dry-run", "--plan-out", "gru.plan.toml")
    assert found.stdout == "gru.plan.toml\n"
    assert written() == ["gru.plan.toml"]
    assert invoke("quantize", GRU, *QUICK, "--plan", "gru.plan.toml").stdout == "gru.int8-storage.onnx\n"


def test_more_is_shown_on_wish() -> None:
    options = (*AS_IT_IS, "--force")
    few, every = (quantized(*options, *extra, model=MODELS / "vit.onnx").stderr for extra in ((), ("-v",)))
    assert ("--verbose shows" in few, "--verbose shows" in every) == (True, False)
    assert len(every) > len(few)


@pytest.mark.parametrize("of_folder", [False, True])
def test_a_faster_plan_is_looked_for_with_training(*, of_folder: bool) -> None:
    Path("models").mkdir()
    model = Path(shutil.copy(MODELS / "mobilenet.onnx", "models"))
    options = ("--calib", CALIB, "--limit", 24, "--latency-seconds", 0.1, "--accuracy", "off", "--train", 0.02)
    done = invoke("quantize", model.parent if of_folder else model, *options, "-o", "trained")
    assert done.stdout == "trained\n"
    # Trained or not, the closing words tell of it; which of both depends on measured times.
    assert "training" in done.stderr


@pytest.mark.parametrize(("decibels", "word"), [(5, "Verified"), (200, "Refused")])
def test_pages_and_reports_are_kept(decibels: int, word: str) -> None:
    files = ("--report", "r.json", "--html", "r.html", "-o", "q.onnx")
    with contextlib.suppress(AccuracyError):
        invoke("quantize", GRU, *AS_IT_IS, "--min-sqnr", decibels, *files)
    report = load_report("r.json")
    assert Path("r.html").read_text(encoding="utf-8") == to_html(report)
    assert f">{word}: " in to_html(report)
    assert report.run.command[0] == "onnxq"
    assert report.accuracy.layers is not None
    assert Path("q.onnx").exists() == (word == "Verified")
