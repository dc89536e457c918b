"""How runs of the command line end: refused by the gate, forced or written; in a process of its own too."""

from __future__ import annotations

import json

import onnx
import pytest
from onnx import ModelProto

from hostile.command_line import Place, Run, edit, quantize_arguments, quantized_pair, refused


def test_below_the_wanted_fidelity_nothing_is_written(place: Place, onnxq: Run) -> None:
    before = place.files()
    ended = onnxq(*quantize_arguments(place, "--min-sqnr", 200, "--search", "off"))
    assert (ended.code, ended.stdout) == (3, "")
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("onnxq: output y has ")
    assert "expected 200 dB or more; nothing was written" in last
    assert place.files() == before


def test_when_only_the_float_model_is_good_enough_stderr_says_what_hurts(place: Place, onnxq: Run) -> None:
    before = place.files()
    ended = onnxq(*quantize_arguments(place, "--min-sqnr", 200))
    assert (ended.code, ended.stdout) == (3, "")
    assert "the nodes that hurt most are" in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("onnxq: ")
    assert "nothing was written" in last
    assert "first" in last
    assert "second" in last
    assert place.files() == before


def test_an_existing_output_survives_a_refusal(place: Place, onnxq: Run) -> None:
    place.output.write_text("old")
    assert onnxq(*quantize_arguments(place, "--min-sqnr", 200, "--search", "off")).code == 3
    assert place.output.read_text() == "old"


def test_force_writes_below_the_wanted_fidelity(place: Place, onnxq: Run) -> None:
    ended = onnxq(*quantize_arguments(place, "--min-sqnr", 200, "--force", "--search", "off"))
    assert (ended.code, ended.stdout) == (0, f"{place.output}\n")
    assert place.output.is_file()


def test_a_success_writes_one_file_and_prints_its_path(place: Place, onnxq: Run) -> None:
    before = place.files()
    ended = onnxq(*quantize_arguments(place))
    assert (ended.code, ended.stdout) == (0, f"{place.output}\n")
    after = place.files()
    assert after.pop(str(place.output.relative_to(place.root)))
    assert after == before


def test_a_dry_run_writes_nothing_and_needs_no_samples(place: Place, onnxq: Run) -> None:
    before = place.files()
    ended = onnxq("quantize", place.model, "--dry-run")
    assert ended.code == 0
    assert [line.split("\t")[0] for line in ended.stdout.splitlines()] == ["static", "static", "static"]
    assert place.files() == before


def test_a_process_ends_with_the_same_sentence_and_code(place: Place, spawn: Run) -> None:
    before = place.files()
    sentence = refused(spawn(*quantize_arguments(place, "--preset", "int9")))
    assert "did you mean 'int8'" in sentence
    place.model.write_bytes(b"")
    assert "is empty" in refused(spawn("inspect", place.model))
    after = place.files()
    assert set(after) == set(before)


def test_a_process_prints_the_path_alone_on_stdout(place: Place, spawn: Run) -> None:
    ended = spawn(*quantize_arguments(place, "--report", place.root / "report.json"))
    assert (ended.code, ended.stdout) == (0, f"{place.output}\n")
    assert json.loads((place.root / "report.json").read_text())["files"]["output"] == str(place.output)


def test_debug_shows_the_traceback(place: Place, spawn: Run) -> None:
    ended = spawn("--debug", *quantize_arguments(place, "--preset", "int9"))
    assert ended.code == 1
    assert "SchemeError: preset 'int9'" in ended.stderr


@pytest.mark.parametrize("command", ["quantize", "inspect"])
def test_names_that_look_like_markup_are_printed_as_they_are(command: str, place: Place, onnxq: Run) -> None:
    def rename(model: ModelProto) -> None:
        model.graph.output[0].name = model.graph.node[-1].output[0] = "[/y]"

    edit(rename)(place)
    ended = onnxq(*quantize_arguments(place)) if command == "quantize" else onnxq("inspect", place.model)
    assert ended.code == 0
    assert "[/y]" in ended.stdout + ended.stderr


def test_a_report_that_cannot_be_written_leaves_no_model(place: Place, onnxq: Run) -> None:
    before = place.files()
    refused(onnxq(*quantize_arguments(place, "--report", place.root / "no" / "report.json")))
    assert place.files() == before


def test_a_report_never_replaces_the_model(place: Place, onnxq: Run) -> None:
    before = place.files()
    refused(onnxq(*quantize_arguments(place, "--report", place.model)))
    assert place.files() == before


def test_an_output_never_replaces_the_external_data_of_the_model(place: Place, onnxq: Run) -> None:
    model = onnx.load(place.model)
    onnx.save(model, place.model, save_as_external_data=True, location="quantized.onnx.data", size_threshold=0)
    before = place.files()
    arguments = quantize_arguments(place)
    arguments[arguments.index(str(place.output))] = str(place.model.parent / "quantized.onnx")
    refused(onnxq(*arguments))
    assert place.files() == before


def test_a_line_break_in_a_name_does_not_break_the_sentence(place: Place, onnxq: Run) -> None:
    edit(quantized_pair)(place)
    edit(lambda model: setattr(model.graph.node[0], "name", "two\nlines"))(place)
    refused(onnxq(*quantize_arguments(place)))
