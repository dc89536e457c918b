"""Commands that look inside: bench, compare, inspect and sensitivity."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import MODELS

from cli.commands import AS_IT_IS, CALIB, GRU, QUICK, RESNET, exit_code_of, invoke, refusal_of
from onnxq.errors import EngineError, OutputError
from onnxq.runtime.sessions import runtime_version


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Quantized models by name, with their reports beside them."""
    folder = tmp_path_factory.mktemp("quantized")
    files = {"gru": folder / "gru.onnx", "resnet": folder / "resnet.onnx"}
    for name, file in files.items():
        options = AS_IT_IS if name == "resnet" else (*QUICK, "--accuracy", "off")
        invoke("quantize", MODELS / f"{name}.onnx", *options, "-o", file, "--report", file.with_suffix(".json"))
    return files


def bench(*arguments: str) -> str:
    models = [MODELS / "mobilenet.onnx"] * 2
    options = ("--data", MODELS / "data" / "test.npz", "--latency-seconds", 0, "--threads", 1)
    done = invoke("bench", *models, *options, *arguments)
    assert done.exit_code == 0
    return done.output


def test_bench_prints_times_conditions_and_a_verdict() -> None:
    text = " ".join(bench("--limit", "3").split())
    assert "onnxruntime" in text
    assert "medians of 12 alternating runs of each model, loaded 12 times, on 3 samples with 1 thread" in text
    assert "mobilenet.onnx is " in text
    assert "with 95 % confidence" in text


def test_bench_prints_json() -> None:
    plain = json.loads(bench("--json"))
    assert plain["samples"] == 8
    assert plain["latency"]["rounds"] == 12
    assert plain["latency"]["interval"][0] <= plain["speed"] <= plain["latency"]["interval"][1]


def test_bench_runs_on_another_engine() -> None:
    plain = json.loads(bench("--limit", "1", "--json", "--engine", f"python:{sys.executable}"))
    assert plain["runtime"] == plain["latency"]["engine"] == runtime_version()


def test_bench_fails_below_a_speed_that_its_whole_interval_misses() -> None:
    assert "as fast as" in bench("--limit", "1", "--min-speed", "0.01")
    models = [MODELS / "mobilenet.onnx"] * 2
    options = ("--data", CALIB, "--limit", 1, "--latency-seconds", 0, "--min-speed", 1000)
    done = exit_code_of("bench", *models, *options)
    assert done.exit_code == 3
    assert "as fast, expected 1000x or more" in done.stderr


def test_an_engine_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(EngineError, match="engine 'openvina' is not one of"):
        bench("--engine", "openvina")


def test_compare_prints_agreement_and_json(quantized: dict[str, Path]) -> None:
    options = ("--data", CALIB, "--limit", 16)
    assert "logits" in invoke("compare", GRU, quantized["gru"], *options).stdout
    figures = json.loads(invoke("compare", GRU, quantized["gru"], *options, "--json").stdout)
    assert figures["samples"] == 16
    assert 20 < figures["outputs"][0]["sqnr"] < 100
    same = json.loads(invoke("compare", GRU, GRU, *options, "--json").stdout)
    assert same["outputs"][0] | {"sqnr": None, "agreement": 1.0, "largest_error": 0.0} == same["outputs"][0]


@pytest.mark.parametrize(("wanted", "code"), [(20, 0), (90, 3)])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_wanted_fidelity_makes_it_a_check(
    wanted: int, code: int, form: tuple[str, ...], quantized: dict[str, Path]
) -> None:
    done = exit_code_of("compare", GRU, quantized["gru"], "--data", CALIB, "--limit", 4, *form, "--min-sqnr", wanted)
    assert done.exit_code == code
    assert "logits" in done.stdout
    assert ("output logits has" in done.stderr and "expected 90 dB or more" in done.stderr) is bool(code)


@pytest.mark.parametrize(("drop", "code"), [(0.5, 0), (0, 3)])
def test_a_metric_makes_compare_a_check(drop: float, code: int) -> None:
    data = ("--data", MODELS / "data" / "test.npz", "--limit", 64)
    metric = ("--metric", f"top1:{MODELS / 'data' / 'test-labels.npy'}", "--max-drop", drop)
    better, worse = (GRU, RESNET) if code == 0 else (RESNET, GRU)
    done = exit_code_of("compare", better, worse, *data, *metric)
    assert done.exit_code == code
    assert "top1:" in done.stdout
    assert ("expected to lose at most 0" in done.stderr) is bool(code)


def test_compare_runs_the_candidate_on_another_engine() -> None:
    options = ("--data", CALIB, "--limit", 4, "--json", "--engine", "onnx-reference")
    figures = json.loads(invoke("compare", RESNET, RESNET, *options).stdout)
    assert 80 < figures["outputs"][0]["sqnr"] < 200


def test_layers_are_told_in_a_table_and_as_json(quantized: dict[str, Path]) -> None:
    requested = ("compare", GRU, quantized["gru"], "--data", CALIB, "--limit", 4, "--layers")
    table = invoke(*requested, "--report", quantized["gru"].with_suffix(".json")).stdout
    for word in ("isolated", "accumulated", "/gru/GRU_output_0", "storage", "Layers, on 4 samples"):
        assert word in table
    short = invoke(*requested, "--top", 1).stdout
    assert "layers of less error are not shown; leave out --top to see all" in short
    assert len(short) < len(table)
    figures = json.loads(invoke(*requested, "--json").stdout)
    assert [output["name"] for output in figures["outputs"]] == ["logits"]
    last = figures["layers"][-1]
    assert (last["tensor"], len(last["worst"])) == ("logits", 3)
    assert abs(last["accumulated"] - figures["outputs"][0]["sqnr"]) < 0.1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("compare", GRU, GRU, "--data", CALIB, "--report", "report.json"), "--report is for --layers"),
        (("compare", GRU, GRU, "--data", CALIB, "--top", 1), "--top is for --layers"),
        (("compare", GRU, GRU, "--data", CALIB, "--max-drop", 1), "--max-drop is about a --metric"),
        (("inspect", GRU, "/gru/GRU"), "go together"),
        (("inspect", GRU, "--report", "report.json"), "go together"),
        (("inspect", GRU, "/gru/GRU", "--report", "r.json", "--beside", RESNET), "leave out one of them"),
        (("sensitivity", GRU), "give --calib with representative samples"),
        (("sensitivity", GRU, "--calib", CALIB, "--top", 0), "'--top'"),
        (("sensitivity", GRU, "--calib", CALIB, "--sort", "noisy"), "'--sort'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: tuple[object, ...], sentence: str) -> None:
    assert sentence in refusal_of(*words)


def test_a_comparison_is_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    invoke("compare", GRU, GRU, "--data", CALIB, "--limit", 4, "--html", page)
    assert "All outputs are equal, on 4 samples" in page.read_text(encoding="utf-8")
    with pytest.raises(OutputError, match="gru"):
        invoke("compare", GRU, GRU, "--data", CALIB, "--html", GRU)


def test_a_node_of_a_quantized_model_is_told_with_its_report(quantized: dict[str, Path]) -> None:
    node = ("inspect", quantized["resnet"], "/3/Add", "--report", quantized["resnet"].with_suffix(".json"))
    reported = invoke(*node).stdout
    for word in ("static: ", "QLinearAdd", "from /2/Relu", "uint8, range", "to /3/Relu_1"):
        assert word in reported
    plain = json.loads(invoke(*node, "--json").stdout)
    assert (plain["mode"], [kernel["op_type"] for kernel in plain["kernels"]]) == ("static", ["QLinearAdd"])


def test_operators_of_two_models_are_shown_beside_each_other() -> None:
    models = RESNET, "--beside", MODELS / "vit.onnx"
    reported = invoke("inspect", *models).stdout
    rows = {cells[0]: cells[1:] for line in reported.splitlines() if (cells := line.strip("│").split("│"))[1:]}
    counts = {name.strip(): tuple(cell.strip() for cell in cells) for name, cells in rows.items()}
    first, second = json.loads(invoke("inspect", *models, "--json").stdout)
    for operator in ("Conv", "MatMul"):
        before, after = (one["operators"].get(operator, 0) for one in (first, second))
        assert counts[operator] == (str(before), str(after), f"{after - before:+}" if after != before else "")
    nodes = [sum(one["operators"].values()) - one["operators"].get("Constant", 0) for one in (first, second)]
    assert counts["all nodes"][:2] == tuple(map(str, nodes))


def test_inspect_tells_what_is_quantized_and_how(quantized: dict[str, Path]) -> None:
    before, after = (json.loads(invoke("inspect", file, "--json").stdout) for file in (RESNET, quantized["resnet"]))
    assert (before["quantized"], after["quantized"]) == (False, True)
    assert {weight["weight"] for weight in before["weights"]} == {"float"}
    assert {weight["weight"] for weight in after["weights"]} == {"int8"}
    assert all(weight["scales"] == weight["shape"][0] for weight in after["weights"] if weight["op_type"] == "Conv")
    assert after["scheme"] == "int8"
    assert "Weights" in invoke("inspect", quantized["resnet"]).stdout


OPTIONS = ("--calib", CALIB, "--limit", 4, "--accuracy", "off", "--latency-seconds", 0.1)


def test_tables_and_json_hold_every_tensor_and_node(tmp_path: Path) -> None:
    reported = invoke("sensitivity", GRU, *OPTIONS, "-o", tmp_path / "costs.json")
    for word in ("/gru/GRU", "storage int8-narrow", "dB at the worst output", "4 samples"):
        assert word in reported.stdout
    figures = json.loads((tmp_path / "costs.json").read_text())
    assert (figures["scheme"], figures["target"], figures["samples"]) == ("int8", "onnxruntime-cpu", 4)
    assert {one["node"] for one in figures["nodes"]} >= {"/gru/GRU", "/Gather"}


def test_rows_are_sorted_and_cut() -> None:
    shown = invoke("sensitivity", GRU, *OPTIONS, "--sort", "time", "--top", 1, "--json").stdout
    (slowest,) = json.loads(shown)["nodes"]
    assert slowest["op_type"] == "GRU"
