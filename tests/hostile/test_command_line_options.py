"""Bad options and outputs on the command line: one sentence, the exit code, and nothing written anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hostile.command_line import Place, Run, quantize_arguments, refused

BAD_OUTPUTS = {
    "the model itself": (lambda place: place.model, r"is the model itself"),
    "the model by a detour": (
        lambda place: place.model.parent / ".." / "models" / "model.onnx",
        r"is the model itself",
    ),
    "the model by a link": (lambda place: place.root / "link.onnx", r"is the model itself"),
    "a folder": (lambda place: place.output.parent, r"is a folder; give a file such as"),
    "in no folder": (lambda place: place.root / "no" / "out.onnx", r"does not exist; create it first"),
    "below a file": (lambda place: place.model / "out.onnx", r"does not exist; create it first"),
    "a name too long": (lambda place: place.root / ("x" * 300), r"File name too long"),
}


@pytest.mark.parametrize("case", BAD_OUTPUTS)
def test_a_bad_output_is_one_sentence_and_no_file(case: str, place: Place, onnxq: Run) -> None:
    where, message = BAD_OUTPUTS[case]
    (place.root / "link.onnx").symlink_to(place.model)
    before = place.files()
    arguments = quantize_arguments(place)
    arguments[arguments.index(str(place.output))] = str(where(place))
    sentence = refused(onnxq(*arguments))
    assert re.search(message, sentence), sentence
    assert place.files() == before


def scheme(place: Place, text: str) -> Path:
    path = place.root / "scheme.toml"
    path.write_text(text)
    return path


BAD_OPTIONS = {
    "unknown preset": (["--preset", "int9"], r"preset 'int9' is not one of .*; did you mean 'int8'\?"),
    "unknown target": (["--target", "onnxruntime-cpux"], r"did you mean 'onnxruntime-cpu'"),
    "unknown range": (["--range", "minmx"], r"did you mean 'minmax'"),
    "range out of bounds": (["--range", "percentile:101"], r"expected above 0 and at most 100"),
    "range without number": (["--range", "percentile:high"], r"expected a number as in 'percentile:99.99'"),
    "pattern of nothing": (
        ["--exclude", "frist"],
        r"node pattern 'frist' matches nothing in the model; did you mean 'first'\?",
    ),
    "bad pattern": (["--exclude", "re:("], r"pattern 're:\(' is not a valid regular expression"),
    "missing scheme": (["--scheme", "missing.toml"], r"scheme missing\.toml cannot be read"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_bad_option_is_one_sentence_and_no_file(case: str, place: Place, onnxq: Run) -> None:
    options, message = BAD_OPTIONS[case]
    before = place.files()
    sentence = refused(onnxq(*quantize_arguments(place, *options)))
    assert re.search(message, sentence), sentence
    assert place.files() == before


METRICS = {
    "it raises": ("raise KeyError('box')", r"metric '.*metric\.py:quality' failed: KeyError: 'box'"),
    "it returns NaN": ("return float('nan')", r"returned nan, expected a finite number, higher for a better model"),
    "it returns nothing": ("pass", r"returned None, expected a finite number"),
    "it takes one list": ("", r"failed: TypeError"),
}


@pytest.mark.parametrize("case", METRICS)
def test_a_metric_that_tells_no_number_is_one_sentence_and_no_file(case: str, place: Place, onnxq: Run) -> None:
    body, message = METRICS[case]
    arguments = "outputs, samples" if body else "outputs"
    (place.root / "metric.py").write_text(f"def quality({arguments}):\n    {body or 'return 1'}\n")
    before = place.files()
    sentence = refused(onnxq(*quantize_arguments(place, "--metric", f"{place.root / 'metric.py'}:quality")))
    assert re.search(message, sentence), sentence
    assert {name: held for name, held in place.files().items() if "__pycache__" not in name} == before


@pytest.mark.parametrize(("count", "limit", "told"), [(11, (), "11"), (13, (), "13"), (3, ("--limit", 1), "3")])
def test_labels_that_are_not_as_many_as_the_samples_are_one_sentence(
    count: int, limit: tuple[object, ...], told: str, place: Place, onnxq: Run
) -> None:
    # Each of the three samples holds four rows.
    np.save(place.root / "labels.npy", np.zeros(count, np.int64))
    before = place.files()
    sentence = refused(onnxq(*quantize_arguments(place, "--metric", f"top1:{place.root / 'labels.npy'}", *limit)))
    assert f"and there are {told} labels, expected one for each" in sentence
    assert place.files() == before


@pytest.mark.parametrize("limit", [(), ("--limit", 2)])
def test_labels_of_all_samples_do_for_the_first_ones(limit: tuple[object, ...], place: Place, onnxq: Run) -> None:
    np.save(place.root / "labels.npy", np.zeros(12, np.int64))
    metric = ("--metric", f"top1:{place.root / 'labels.npy'}", "--max-drop", 1)
    assert onnxq(*quantize_arguments(place, *metric, *limit)).code == 0


def test_a_metric_that_depends_on_the_order_of_samples_is_told_in_the_table(place: Place, onnxq: Run) -> None:
    (place.root / "metric.py").write_text("def quality(outputs, samples):\n    return float(outputs[0]['y'].sum())\n")
    metric = ("--metric", f"{place.root / 'metric.py'}:quality", "--max-drop", 100)
    ended = onnxq(*quantize_arguments(place, *metric))
    assert ended.code == 0
    assert "depends on the order of the samples" in " ".join(ended.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]", "cannot be read"),
        ('[[rule]]\nmode = "statik"', "did you mean 'static'"),
        ('base = "int8"\n[[rule]]\nmode = "float"\nnodes = "secnod"', "did you mean 'second'"),
        (
            '[[rule]]\nmode = "static"\nactivation = { format = "int16" }',
            "activations as int16 per tensor have no integer kernel",
        ),
    ],
)
def test_a_bad_scheme_file_is_one_sentence_and_no_file(text: str, message: str, place: Place, onnxq: Run) -> None:
    path = scheme(place, text)
    before = place.files()
    assert message in refused(onnxq(*quantize_arguments(place, "--scheme", path)))
    assert place.files() == before


@pytest.mark.parametrize(
    "options",
    [
        ["--perset", "int8"],
        ["--limit", "0"],
        ["--limit", "many"],
        ["--min-sqnr", "high"],
        ["--latency-seconds", "-1"],
        ["--image-size", "224"],
        ["--image-mean", "a,b,c"],
        ["--image-channels", "CMYK"],
        ["--preset", "int8", "--scheme", "x.toml"],
        ["another.onnx"],
    ],
)
def test_misuse_shows_the_usage_and_writes_nothing(options: list[str], place: Place, onnxq: Run) -> None:
    before = place.files()
    ended = onnxq(*quantize_arguments(place, *options))
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Usage: onnxq quantize ")
    assert "Error: " in ended.stderr.splitlines()[-1]
    assert place.files() == before


def test_a_misspelt_option_is_told_with_the_nearest(place: Place, onnxq: Run) -> None:
    assert "--preset" in onnxq(*quantize_arguments(place, "--perset", "int8")).stderr
