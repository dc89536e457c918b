"""The command line refuses bad models, samples, options and passes: one sentence, the exit code, nothing written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from hostile.command_line import Place, Run, edit, quantize_arguments, quantized_pair, refused, stored
from onnxq.evaluation.goal import Goal
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget


def assert_refused(place: Place, onnxq: Run, arguments: Iterable[object], message: str) -> None:
    """Check that a command ends with one sentence, which a pattern is found in, and changes no file."""
    before = place.files()
    sentence = refused(onnxq(*arguments))
    assert re.search(message, sentence), sentence
    assert place.files() == before


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("sensitivity", "MODEL", "--calib", "none"), "none"),
        (("sensitivity", "none.onnx", "--calib", "CALIB"), "none.onnx"),
        (("sensitivity", "BROKEN", "--calib", "CALIB"), "broken.onnx"),
        (("sensitivity", "MODEL", "--calib", "CALIB", "--preset", "int9"), "did you mean 'int8'"),
        (("sensitivity", "MODEL", "--calib", "CALIB", "-o", "MODEL"), "model.onnx"),
        (("sensitivity", "MODEL", "--calib", "CALIB", "--search", "off"), "measures nothing"),
        (("inspect", "none.onnx"), "none.onnx"),
        (("inspect", "MODEL", "first", "--report", "none.json"), "none.json"),
        (("inspect", "MODEL", "first", "--report", "BROKEN"), "broken.onnx"),
        (("compare", "MODEL", "none.onnx", "--data", "CALIB", "--layers"), "none.onnx"),
        (("compare", "MODEL", "BROKEN", "--data", "CALIB", "--layers"), "broken.onnx"),
        (("compare", "MODEL", "MODEL", "--data", "none", "--layers"), "none"),
        (("compare", "MODEL", "MODEL", "--data", "CALIB", "--layers", "--report", "BROKEN"), "broken.onnx"),
    ],
)
def test_what_looks_inside_a_model_tells_bad_input_in_one_sentence(
    arguments: tuple[str, ...], reported: str, place: Place, onnxq: Run
) -> None:
    broken = place.root / "broken.onnx"
    broken.write_bytes(b"\xff\x00 no model")
    names = {"MODEL": place.model, "CALIB": place.calib, "BROKEN": broken}
    assert_refused(place, onnxq, [names.get(name, name) for name in arguments], re.escape(reported))


def external(place: Place, location: str) -> None:
    """Make the model refer to a data file by this location."""
    model = onnx.load(place.model)
    tensor = model.graph.initializer[0]
    content = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    onnx.save(model, place.model)
    (place.root / "secret.data").write_bytes(content)


def truncated(place: Place) -> None:
    place.model.write_bytes(place.model.read_bytes()[:-1000])


def folder(place: Place) -> None:
    place.model.unlink()
    place.model.mkdir()


def only(*nodes: onnx.NodeProto) -> Callable[[Place], None]:
    """Return an edit that leaves a float[4,32] input and these nodes, the last of which gives ``y``."""

    def replaced(model: ModelProto) -> None:
        del model.graph.node[:]
        del model.graph.initializer[:]
        model.graph.node.extend(nodes)
        model.graph.output[0].type.tensor_type.ClearField("shape")

    return edit(replaced)


def integer_product() -> Callable[[Place], None]:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "dynamic"),
        helper.make_node("Transpose", ["q"], ["t"]),
        helper.make_node("MatMulInteger", ["q", "t"], ["i"]),
        helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
    ]
    return only(*nodes)


def divided_by_zero(model: ModelProto) -> None:
    model.graph.node[-1].output[0] = "made"
    model.graph.node.append(helper.make_node("Sub", ["made", "made"], ["zero"]))
    model.graph.node.append(helper.make_node("Div", ["zero", "zero"], ["y"]))


def our_own(place: Place) -> None:
    quantize(
        place.model, place.calib, place.root / "done.onnx", goal=Goal(force=True), budget=Budget(latency_seconds=0)
    )
    (place.root / "done.onnx").replace(place.model)


def imported(domain: str, version: int) -> Callable[[Place], None]:
    def change(model: ModelProto) -> None:
        del model.opset_import[:]
        model.opset_import.add(domain=domain, version=version)

    return edit(change)


BAD_MODELS = {
    "not ONNX": (
        lambda place: place.model.write_text("weights and biases"),
        r"model\.onnx is not an ONNX model, is cut short",
    ),
    "truncated": (truncated, r"model\.onnx"),
    "empty": (lambda place: place.model.write_bytes(b""), r"model\.onnx is empty; expected an ONNX model"),
    "a folder": (
        folder,
        r"model\.onnx holds no float model, expected genai_config\.json of onnxruntime-genai",
    ),
    "missing": (lambda place: place.model.unlink(), r"model\.onnx does not exist; give the path of an \.onnx file"),
    "Git LFS pointer": (
        lambda place: place.model.write_text("version https://git-lfs.github.com/spec/v1\n"),
        r"is a Git LFS pointer",
    ),
    "missing external data": (lambda place: external(place, "weights.data"), r"weights\.data"),
    "external data above": (lambda place: external(place, "../secret.data"), r"\.\./secret\.data"),
    "opset of the future": (imported("", 999), r"999"),
    "opset 0": (imported("", 0), r"opset|version|Opset"),
    "no opset": (edit(lambda model: model.ClearField("opset_import")), r"opset|version|domain"),
    "no nodes": (edit(lambda model: model.graph.ClearField("node")), r"y"),
    "no outputs": (edit(lambda model: model.graph.ClearField("output")), r"the model has no outputs"),
    "a cycle": (
        edit(lambda model: model.graph.node[0].input.__setitem__(0, model.graph.node[-1].output[0])),
        r"has a cycle through the nodes",
    ),
    "a name that makes a tensor twice": (
        edit(lambda model: model.graph.initializer.append(model.graph.initializer[0])),
        r"declares the tensor 'w0' twice",
    ),
    "a missing input": (edit(lambda model: model.graph.ClearField("initializer")), r"w0"),
    "quantized nodes": (
        edit(quantized_pair),
        r"the model is quantized already: node pair is QuantizeLinear; quantize the float model",
    ),
    "integer products": (integer_product(), r"the model is quantized already: node dynamic is DynamicQuantizeLinear"),
    "our own output": (our_own, r"the model is quantized already, by onnxq as int8; quantize the float model"),
    "nothing to quantize": (
        only(helper.make_node("Tanh", ["x"], ["y"])),
        r"there is nothing to quantize in the model: onnxruntime-cpu has no integer kernel for Tanh",
    ),
    "NaN in a weight": (edit(lambda model: stored(model, np.nan)), r"weight w0 of node first holds NaN or infinity"),
    "infinity in a weight": (
        edit(lambda model: stored(model, np.inf)),
        r"weight w0 of node first holds NaN or infinity",
    ),
    "NaN alone in its outputs": (
        edit(divided_by_zero),
        r"every value of output y of the float model is NaN or infinite on all \d+ samples; find the first",
    ),
    "unknown operator": (edit(lambda model: setattr(model.graph.node[1], "op_type", "Rleu")), r"Rleu"),
}


@pytest.mark.parametrize(
    "case", ["not ONNX", "truncated", "empty", "a folder", "missing", "missing external data", "external data above"]
)
@pytest.mark.parametrize("command", ["inspect", "compare", "plan"])
def test_every_command_refuses_a_bad_model(case: str, command: str, place: Place, onnxq: Run) -> None:
    BAD_MODELS[case][0](place)
    arguments = {
        "inspect": ["inspect", place.model],
        "compare": ["compare", place.model, place.model, "--data", place.calib],
        "plan": ["quantize", place.model, "--dry-run"],
    }
    assert_refused(place, onnxq, arguments[command], "")


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
    arguments = quantize_arguments(place)
    arguments[arguments.index(str(place.output))] = str(where(place))
    assert_refused(place, onnxq, arguments, message)


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
    "report in no folder": (["--report", "no/report.json"], r"no"),
    "report over the model": (["--report", "../models/model.onnx"], r"model\.onnx"),
}


def put(name: str, text: str) -> Callable[[Place], object]:
    return lambda place: (place.root / name).write_text(text)


def labels(count: int) -> Callable[[Place], object]:
    return lambda place: np.save(place.root / "labels.npy", np.zeros(count, np.int64))


def metric(body: str, arguments: str = "outputs, samples") -> Callable[[Place], object]:
    return put("metric.py", f"def quality({arguments}):\n    {body}\n")


QUALITY, TOP1 = ["--metric", "../metric.py:quality"], ["--metric", "top1:../labels.npy"]
SCHEME = ["--scheme", "../scheme.toml"]
BAD_FILES = {
    "metric raises": (
        metric("raise KeyError('box')"),
        QUALITY,
        r"metric '.*metric\.py:quality' failed: KeyError: 'box'",
    ),
    "metric is NaN": (metric("return float('nan')"), QUALITY, r"returned nan, expected a finite number, higher for"),
    "metric is nothing": (metric("pass"), QUALITY, r"returned None, expected a finite number"),
    "metric takes one list": (metric("return 1", "outputs"), QUALITY, r"failed: TypeError"),
    # Each of the three samples holds four rows.
    "few labels": (labels(11), TOP1, r"and there are 11 labels, expected one for each"),
    "many labels": (labels(13), TOP1, r"and there are 13 labels, expected one for each"),
    "labels of less than a sample": (labels(3), [*TOP1, "--limit", 1], r"there are 3 labels, expected one for each"),
    "no TOML": (put("scheme.toml", "[[rule]"), SCHEME, r"cannot be read"),
    "no mode": (put("scheme.toml", '[[rule]]\nmode = "statik"'), SCHEME, r"did you mean 'static'"),
    "no node": (
        put("scheme.toml", 'base = "int8"\n[[rule]]\nmode = "float"\nnodes = "secnod"'),
        SCHEME,
        r"did you mean 'second'",
    ),
    "no kernel": (
        put("scheme.toml", '[[rule]]\nmode = "static"\nactivation = { format = "int4" }'),
        SCHEME,
        r"activations as int4 per tensor have no integer kernel",
    ),
}


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


PASSES = """
from dataclasses import dataclass
from onnxq import Changes, Pass
import onnx_graphsurgeon as gs

class Raises(Pass):
    def apply(self, graph):
        raise KeyError("no\\nsuch node")

class ReturnsNothing(Pass):
    def apply(self, graph):
        graph.nodes[0].name = "changed"

class ReturnsText(Pass):
    def apply(self, graph):
        return Changes("changed")

class AppendsText(Pass):
    def apply(self, graph):
        graph.nodes.append("Relu")
        return Changes(("Relu",))

class AppendsPlainGraph(Pass):
    def apply(self, graph):
        graph.nodes[0].attrs["body"] = gs.Graph()
        return Changes(("body",))

class MixesTypes(Pass):
    def apply(self, graph):
        graph.nodes[0].op = "And"
        return Changes(("And",))

class TakesOutput(Pass):
    def apply(self, graph):
        graph.outputs.clear()
        return Changes(("outputs",))

class Recurses(Pass):
    def apply(self, graph):
        return self.apply(graph)

class Abstract(Pass):
    pass

class Unrelated:
    def apply(self, graph):
        return Changes()

def function(graph):
    return Changes()
"""


WRONG_PASSES = {
    "Raises": "pass Raises raised KeyError",
    "ReturnsNothing": "pass ReturnsNothing returned NoneType",
    "ReturnsText": "pass ReturnsText raised TypeError: Changes takes",
    "AppendsText": "pass AppendsText: graph 'main' lists 'Relu' of type str",
    "AppendsPlainGraph": "pass AppendsPlainGraph: attribute 'body' of node 'first' is a plain GraphSurgeon graph",
    "MixesTypes": "",
    "TakesOutput": "",
    "Recurses": "pass Recurses raised RecursionError",
    "Abstract": "cannot be made: TypeError",
    "Unrelated": "expected a subclass of onnxq.Pass",
    "function": "is of type function",
    "Gone": "holds no 'Gone'",
}


# A dry run loads nothing in onnxruntime, and who verifies nothing may take an output away.
UNSEEN = {("dry", "MixesTypes"), ("run", "TakesOutput")}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, name)
        for command in ("run", "verified", "quantize", "dry")
        for name in WRONG_PASSES
        if (command, name) not in UNSEEN
    ],
)
def test_passes_that_are_wrong(place: Place, onnxq: Run, command: str, name: str) -> None:
    (place.root / "passes.py").write_text(PASSES)
    chosen = ["--pass", f"{place.root / 'passes.py'}:{name}"]
    arguments = {
        "run": ["run", place.model, "-o", place.output],
        "verified": ["run", place.model, "-o", place.output, "--verify-each", "--data", place.calib],
        "quantize": quantize_arguments(place, "--search", "off"),
        "dry": ["quantize", place.model, "--dry-run"],
    }[command]
    assert_refused(place, onnxq, [*arguments, *chosen], re.escape(WRONG_PASSES[name]))


def replace_samples(**arrays: object) -> Callable[[Place], None]:
    def replaced(place: Place) -> None:
        for path in place.calib.iterdir():
            path.unlink()
        if arrays:
            np.savez(place.calib / "sample.npz", **arrays)

    return replaced


def floats(*shape: int, value: float = 0.5) -> np.ndarray:
    return np.full(shape, value, np.float32)


def spoiled(value: float) -> np.ndarray:
    values = floats(4, 32)
    values[1, 2] = value
    return values


BAD_SAMPLES = {
    "empty folder": (replace_samples(), r"expected \.npz, \.npy, images, input_N\.pb"),
    "missing folder": (
        lambda place: place.calib.rename(place.root / "gone"),
        r"calib does not exist; give a file or folder",
    ),
    "wrong name": (replace_samples(input=floats(4, 32)), r"'input' is not an input of the model, expected 'x'"),
    "integers": (replace_samples(x=floats(4, 32).astype(np.int64)), r"'x' is int64, expected float32"),
    "NaN": (replace_samples(x=spoiled(np.nan)), r"'x' holds 1 NaN or infinite values of 128"),
    "infinity": (replace_samples(x=spoiled(-np.inf)), r"'x' holds 1 NaN or infinite values of 128"),
    "zero samples": (replace_samples(x=floats(0, 4, 32)), r"no samples"),
}


def too_large(place: Place) -> None:
    large = floats(4, 32, value=3e38)
    large[0, 0] = 2e38
    replace_samples(x=large)(place)
    edit(lambda model: stored(model, 3e38))(place)


REFUSED = {
    **{f"model: {name}": (damage, [], message) for name, (damage, message) in BAD_MODELS.items()},
    **{f"samples: {name}": (damage, [], message) for name, (damage, message) in BAD_SAMPLES.items()},
    "values too large for the model": (too_large, [], "NaN or infinite"),
    **{f"option: {name}": (lambda place: None, options, message) for name, (options, message) in BAD_OPTIONS.items()},
    **BAD_FILES,
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_sentence_and_no_file(case: str, place: Place, onnxq: Run) -> None:
    damage, options, message = REFUSED[case]
    damage(place)
    assert_refused(place, onnxq, quantize_arguments(place, *options), message)


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
    assert "the nodes with the lowest SQNR are" in ended.stderr
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


def test_an_output_never_replaces_the_external_data_of_the_model(place: Place, onnxq: Run) -> None:
    model = onnx.load(place.model)
    onnx.save(model, place.model, save_as_external_data=True, location="quantized.onnx.data", size_threshold=0)
    arguments = quantize_arguments(place)
    arguments[arguments.index(str(place.output))] = str(place.model.parent / "quantized.onnx")
    assert_refused(place, onnxq, arguments, "")


def test_a_line_break_in_a_name_does_not_break_the_sentence(place: Place, onnxq: Run) -> None:
    edit(quantized_pair)(place)
    edit(lambda model: setattr(model.graph.node[0], "name", "two\nlines"))(place)
    refused(onnxq(*quantize_arguments(place)))
