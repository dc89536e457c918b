"""quantize(), plan(), calibrate() and prepare(): results, passes of the user's own, and refusals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from conftest import MODELS, Build
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxq.calibration.accumulators import Range
from onnxq.calibration.data import Data
from onnxq.calibration.methods import MinMax
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.errors import DataError, ModelError, OutputError, PassError, SchemeError
from onnxq.evaluation.goal import MINIMUM_SQNR, Goal
from onnxq.ir import Constant, Graph
from onnxq.pipeline.quantization import Quantized, calibrate, plan, quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan import METADATA_KEY
from onnxq.report import AccuracyError
from onnxq.report.report import summary_rows
from onnxq.rewrite import Changes, Pass, RewriteRule
from onnxq.search.candidate import Candidate
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.search import Chooser

CALIB = MODELS / "data" / "calib.npz"
UNSEARCHED = Budget(search="off", latency_seconds=0)
NAMES = ("gru", "mobilenet", "resnet", "vit")


def accuracy(path: Path) -> float:
    """Share of the labelled test images that a model classifies rightly."""
    from onnxq.runtime.sessions import open_session, run

    images = np.load(MODELS / "data" / "test.npz")["image"]
    labels = np.load(MODELS / "data" / "test-labels.npy")
    (logits,) = run(open_session(path), {"image": images})
    return float((logits.argmax(axis=1) == labels).mean())


@pytest.mark.parametrize("name", NAMES)
def test_default_quantization_of_a_trained_model_is_small_faithful_and_accurate(name: str, tmp_path: Path) -> None:
    output = tmp_path / f"{name}.int8.onnx"
    report = quantize(MODELS / f"{name}.onnx", Data(CALIB, limit=64), output, budget=Budget(latency_seconds=0)).report
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert report.agreement.sound
    assert report.agreement.worst_sqnr >= MINIMUM_SQNR
    assert report.files.bytes == output.stat().st_size < 0.42 * report.files.float_bytes
    assert accuracy(output) >= accuracy(MODELS / f"{name}.onnx") - 0.005


def test_what_happens_is_logged_for_whoever_asks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "onnxq"):
        done = quantize(MODELS / "gru.onnx", Data(CALIB, limit=3), budget=Budget(latency_seconds=0, accuracy="ranges"))
    by_level: dict[str, list[str]] = {}
    for record in caplog.records:
        by_level.setdefault(record.levelname, []).append(record.getMessage())
    assert by_level["WARNING"] == list(done.report.samples.warnings) != []
    stages = [message.partition(":")[0] for message in by_level["INFO"]]
    assert stages == [*(stage.name for stage in done.report.run.stages), "Verified"]
    assert by_level["INFO"][-1] == done.report.verdict
    tried = [gain.method for gain in done.report.encoding.gains]
    assert [message.partition(":")[0] for message in by_level["DEBUG"]] == ["scheme", *tried]


@pytest.mark.parametrize("name", ["mobilenet", "resnet"])
def test_convolutional_networks_run_on_integer_kernels(name: str, tmp_path: Path) -> None:
    report = quantize(
        MODELS / f"{name}.onnx", Data(CALIB, limit=32), budget=Budget(latency_seconds=0, search="off")
    ).report
    convolutions = [one for one in report.plan.decisions if one.op_type in ("Conv", "Gemm")]
    assert all(one.mode is Mode.STATIC for one in convolutions)
    assert report.performance.kernels.integer >= len(convolutions)
    assert report.performance.kernels.heavy_float == 0


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "qnn"])
def test_activations_of_16_bits_have_a_much_lower_error_and_run_on_cpu_kernels(
    target: str, build: Callable[..., ModelProto], quantize_to: Callable[..., Quantized], tmp_path: Path
) -> None:
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y) { [a] a = Conv(x, w) [b] b = Tanh(a) [c] y = Conv(b, v) }"
    # Weights of these values are quantized without an error.
    exact = np.linspace(-127, 127, 16).round().astype(np.float32).reshape(4, 4, 1, 1) / 127
    exact[:, 0] = 1
    model = build(text, w=exact, v=exact)
    found = {}
    for preset in ("int8", "int8-int16-data"):
        done = quantize_to(model, tmp_path / f"{preset}.onnx", scheme=preset, target=target)
        found[preset] = done.report.agreement.worst_sqnr
    assert found["int8-int16-data"] > found["int8"] + 30
    written = onnx.load(tmp_path / "int8-int16-data.onnx")
    zero_points = {node.input[2] for node in written.graph.node if node.op_type == "QuantizeLinear"}
    types = {one.data_type for one in written.graph.initializer if one.name in zero_points}
    assert types == {TensorProto.UINT16}
    assert [(one.domain, one.version) for one in written.opset_import] == [("", 21)]


def test_every_node_has_a_decision_with_a_reason() -> None:
    decisions = plan(MODELS / "vit.onnx").decisions
    assert len({one.node for one in decisions}) == len(decisions) > 50
    assert all(one.reason for one in decisions)


def test_quantizing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        quantize(MODELS / "resnet.onnx", Data(CALIB, limit=16), tmp_path / name, budget=Budget(latency_seconds=0))
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_a_path_a_message_and_a_graphsurgeon_graph_give_the_same_model(tmp_path: Path) -> None:
    path = MODELS / "mobilenet.onnx"
    models = {"path": path, "message": onnx.load(path), "surgeon": gs.import_onnx(onnx.load(path))}  # noqa: TID251
    sqnr = {
        kind: quantize(
            model, Data(CALIB, limit=8), goal=Goal(force=True), budget=Budget(latency_seconds=0, search="off")
        ).report.agreement.worst_sqnr
        for kind, model in models.items()
    }
    assert len(set(sqnr.values())) == 1, sqnr


def test_samples_may_come_from_any_iterable_of_dictionaries() -> None:
    images = np.load(CALIB)["image"][:8]
    from_generator = quantize(
        MODELS / "gru.onnx", ({"image": image[None]} for image in images), budget=Budget(latency_seconds=0)
    )
    from_list = quantize(
        MODELS / "gru.onnx", [{"image": image[None]} for image in images], budget=Budget(latency_seconds=0)
    )
    assert from_generator.report.agreement == from_list.report.agreement
    # Every fourth judges.
    assert (from_generator.report.samples.calibrated, from_generator.report.agreement.samples) == (6, 2)


def test_a_stream_that_is_new_in_each_pass_is_read_once_for_all_steps(tmp_path: Path) -> None:
    images, generator, passes = np.load(CALIB)["image"][:12], np.random.default_rng(0), []

    class Augmented:
        def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
            passes.append(len(passes))
            return ({"image": image[None] + np.float32(generator.normal(0, 0.1))} for image in images)

    stream = Augmented()
    report = quantize(MODELS / "resnet.onnx", stream, tmp_path / "q.onnx", budget=Budget(latency_seconds=0)).report
    assert passes == [0]
    assert report.samples.split is not None
    # None of those that judge is one that set ranges, though each pass would have made others.
    assert (report.samples.split.samples, report.samples.split.seen) == (3, 0)
    assert report.agreement.worst_sqnr > 20


def test_the_range_method_is_the_users_when_given() -> None:
    scheme = replace(PRESETS["int8"], ranges=MinMax())
    report = quantize(
        MODELS / "resnet.onnx", Data(CALIB, limit=8), scheme=scheme, budget=Budget(latency_seconds=0)
    ).report
    assert report.encoding.ranges == "minmax"


def test_the_measured_range_method_is_better_than_min_max() -> None:
    with np.load(CALIB) as stack:
        data = [{name: array[place][None] for name, array in stack.items()} for place in range(200)]
    budgets = (Budget("off", accuracy, latency_seconds=0) for accuracy in ("ranges", "off"))
    reports = (quantize(MODELS / "resnet.onnx", data, budget=budget).report for budget in budgets)
    measured, fixed = (report.agreement.worst_sqnr for report in reports)
    assert measured > fixed + 0.5


def test_the_search_leaves_out_what_hurts_and_names_it() -> None:
    plain = quantize(
        MODELS / "mobilenet.onnx",
        Data(CALIB, limit=16),
        goal=Goal(force=True),
        budget=Budget(latency_seconds=0, search="off"),
    ).report
    goal = plain.agreement.worst_sqnr + 2
    searched = quantize(
        MODELS / "mobilenet.onnx", Data(CALIB, limit=16), goal=goal, budget=Budget(latency_seconds=0)
    ).report
    assert searched.agreement.worst_sqnr >= goal
    assert 0 < searched.plan.count(Mode.STATIC) < plain.plan.count(Mode.STATIC)
    demoted = [one for one in searched.plan.decisions if "would cost too much accuracy" in one.reason]
    assert demoted
    assert [one.sqnr for one in searched.search.sensitivities] == sorted(
        one.sqnr for one in searched.search.sensitivities
    )


def test_the_output_says_which_scheme_made_it_and_is_refused_as_input(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    quantize(MODELS / "gru.onnx", Data(CALIB, limit=4), output, scheme="int8-storage", budget=Budget(latency_seconds=0))
    properties = {entry.key: entry.value for entry in onnx.load(output).metadata_props}
    assert properties[METADATA_KEY] == "int8-storage"
    with pytest.raises(ModelError, match="quantized already, by onnxq as int8-storage"):
        quantize(output, CALIB, budget=Budget(latency_seconds=0))


@pytest.mark.parametrize(
    ("target", "largest", "written"),
    [
        ("onnxruntime-cpu", 1 << 30, ["out.onnx"]),
        ("onnxruntime-cpu", 0, ["out.onnx", "out.onnx.data"]),
        ("onnxruntime-web", 0, ["out.onnx"]),
    ],
)
def test_external_data_of_a_large_model_stays_external_but_for_browsers(
    target: str, largest: int, written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxq.pipeline.prepare._ONE_FILE", largest)
    source, output = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.load(MODELS / "resnet.onnx"), source, save_as_external_data=True, location="in.data")
    report = quantize(source, Data(CALIB, limit=4), output, target=target, budget=UNSEARCHED).report
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.data", "in.onnx", *written]
    assert report.files.data == (f"{output}.data" if len(written) == 2 else None)
    [size] = [row.text for row in summary_rows(report) if row.name == "size"]
    assert ("; keep out.onnx.data beside the model, which has its weights" in size) == (len(written) == 2)
    assert accuracy(output) > 0.9


def test_the_opset_is_left_alone_when_only_weights_are_stored(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 32]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    samples = [{"x": np.random.default_rng(i).standard_normal((2, 32)).astype(np.float32)} for i in range(4)]
    assert quantize(model, samples, scheme="int8-storage", budget=Budget(latency_seconds=0)).graph.opset == 11
    assert quantize(model, samples, budget=Budget(latency_seconds=0)).graph.opset == 13


def let_integers_be_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches find integers ten times as fast as floats, whatever the machine does."""

    def times(chooser: Chooser, candidate: Candidate | None) -> NodeTimes:
        decisions = candidate.plan.decisions if candidate is not None else chooser.scheme.plan.decisions
        static = {one.node for one in decisions if one.mode is Mode.STATIC and candidate is not None}
        nodes = {one.node: 1e3 if one.node in static else 1e4 for one in decisions}
        return NodeTimes(nodes, {}, dict.fromkeys(nodes, 1_000.0), 0.0)

    monkeypatch.setattr(Chooser, "times", times)


def test_a_model_that_integers_slow_down_computes_in_float_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxq.evaluation import latency

    let_integers_be_fast(monkeypatch)
    # Whatever was measured in the end counts as slower, also after the search has left some nodes out.
    monkeypatch.setattr(latency.Latency, "speed", 0.5)
    report = quantize(MODELS / "resnet.onnx", Data(CALIB, limit=16), budget=Budget(latency_seconds=0.05)).report
    assert report.plan.count(Mode.STATIC) == 0
    assert report.plan.count(Mode.STORAGE) > 10
    assert report.performance.kernels.integer == 0
    assert any("as integers the model" in one.reason for one in report.plan.decisions)


def test_a_stack_of_depthwise_convolutions_ends_in_storage(build: Callable[..., ModelProto], tmp_path: Path) -> None:
    # Integer depthwise kernels take half as long again as float ones on maps of this size.
    nodes = " ".join(f"[d{i}] t{i + 1} = Conv <group = 192, pads = [1,1,1,1]> (t{i}, w{i})" for i in range(6))
    weights = {f"w{i}": (192, 1, 3, 3) for i in range(6)}
    model = build(f"(float[1,192,56,56] t0) => (float[1,192,56,56] t6) {{ {nodes} }}", **weights)
    generator = np.random.default_rng(0)
    samples = [{"t0": generator.standard_normal((1, 192, 56, 56)).astype(np.float32)} for _ in range(4)]
    budget = Budget(latency_seconds=0.5, certificate=False)
    report = quantize(model, samples, tmp_path / "out.onnx", budget=budget).report
    assert report.plan.count(Mode.STATIC) == 0
    assert report.plan.count(Mode.STORAGE) == 6
    # Nine weights a channel weigh little more than a scale and the bias that makes up for their rounding.
    assert report.size_ratio < 0.52
    assert all(one.reason for one in report.plan.decisions)


def test_a_scheme_that_names_a_range_method_has_it_unless_the_user_names_one(tmp_path: Path) -> None:
    named = PRESETS["torch-fbgemm"]
    found = [
        quantize(MODELS / "gru.onnx", Data(CALIB, limit=4), scheme=scheme, budget=UNSEARCHED).report.encoding.ranges
        for scheme in (named, replace(named, ranges="minmax"))
    ]
    assert found == ["histogram", "minmax"]


@dataclass(frozen=True)
class Scale(Pass):
    """Multiply the weight of the first Conv, which changes all that follows."""

    factor: float = 1.0

    def apply(self, graph: Graph) -> Changes:
        node = next(node for node in graph.nodes if node.op == "Conv")
        node.inputs[1].values = node.inputs[1].values * np.float32(self.factor)
        node.name = "scaled"
        return Changes((node.name,), (("other", "not wanted"),))


def test_passes_of_the_users_come_first_and_the_report_tells_of_them(residual: ModelProto, samples_for) -> None:
    report = quantize(residual, samples_for(residual), prepare=[Scale(), "NameNodes"], budget=UNSEARCHED).report
    assert [one.name for one in report.run.passes[:3]] == ["Scale", "NameNodes", "FixInitializers"]
    assert report.plan.decisions[0].node == "scaled"
    reported = json.loads(report.to_json())["run"]["passes"]
    assert (reported[0]["name"], reported[0]["options"], reported[0]["skipped_names"]) == (
        "Scale",
        {"factor": "1.0"},
        [["other", "not wanted"]],
    )
    assert len(reported) == len(report.run.passes)


@dataclass(frozen=True)
class Retype(Pass):
    """Give the first Conv a weight of another type, so that the model does not load."""

    def apply(self, graph: Graph) -> Changes:
        node = next(node for node in graph.nodes if node.op == "Conv")
        node.inputs[1].values = node.inputs[1].values.astype(np.float64)
        return Changes((node.name,))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("step", "goal", "fault"),
    [
        (Scale(10.0), Goal(), r"output y has -?[\d.]+ dB, expected 20 dB or more"),
        (Retype(), Goal(), r"it does not run \(.*tensor\(double\).*\)"),
        (Retype(), Goal(force=True), r"it does not run \(.*tensor\(double\).*\)"),
    ],
)
def test_a_pass_of_the_users_that_breaks_the_float_model_is_refused_by_its_name(
    residual: ModelProto, samples_for, tmp_path: Path, place: int, step: Pass, goal: Goal, fault: str
) -> None:
    output = tmp_path / "out.onnx"
    expected = rf"^pass {type(step).__name__} changes the float model: {fault}; correct the pass, or leave it out$"
    passes: list[object] = ["NameNodes"]
    passes.insert(place, step)
    with pytest.raises(PassError, match=expected):
        quantize(residual, samples_for(residual), output, goal=goal, prepare=passes, budget=UNSEARCHED)
    assert not output.exists()


class ClampWrongly(Pass):
    """Make each Relu a Clip with a limit of another type."""

    def apply(self, graph: Graph) -> Changes:
        nodes = [node for node in graph.nodes if node.op == "Relu"]
        for node in nodes:
            node.op = "Clip"
            node.inputs.append(Constant(f"{node.name}.low", np.zeros(())))
        return Changes(tuple(node.name for node in nodes))


def test_a_pass_of_the_users_whose_model_does_not_load_is_refused_by_its_name(
    residual: ModelProto, samples_for
) -> None:
    with pytest.raises(PassError, match=r"pass ClampWrongly changes the float model: it does not run \(Type Error: .*"):
        quantize(residual, samples_for(residual), prepare=[ClampWrongly()], budget=UNSEARCHED)


class Misspelt(RewriteRule):
    def pattern(self, op):
        return op.Subb(op.any("x"), op.any("y"))

    def rewrite(self, new, match):
        return match.x


class Buggy(RewriteRule):
    def pattern(self, op):
        return op.Relu(op.any("x"))

    def rewrite(self, new, match):
        raise ValueError("a mistake")


def test_rules_of_the_users_that_fail_are_warned_of(residual: ModelProto, samples_for, caplog) -> None:
    report = quantize(residual, samples_for(residual), prepare=[Misspelt(), Buggy()], budget=UNSEARCHED).report
    misspelt, buggy = report.warnings[-2:]
    assert misspelt.startswith("skipped, as rule Misspelt has no pattern")
    assert "did you mean 'Sub'?" in misspelt
    assert buggy.startswith("skipped, as rule Buggy failed at Relu node")
    assert re.search(r"ValueError: a mistake \(.*test_quantization.py, line \d+\)$", buggy)
    assert {misspelt, buggy} <= set(caplog.messages)
    [row] = [row for row in summary_rows(report) if row.name == "own passes"]
    assert row.text == "Misspelt failed; Buggy failed"


def test_plan_and_statistics_are_those_of_the_rewritten_model(residual: ModelProto, samples_for) -> None:
    assert plan(residual, prepare=[Scale()]).decisions[0].node == "scaled"
    samples = samples_for(residual)
    usual, scaled = (calibrate(residual, samples, prepare=passes) for passes in ((), [Scale(10.0)]))
    highest = [{name: one.of(name).need(Range).maximum for name in usual.by_tensor} for one in (usual, scaled)]
    assert any(highest[1][name] > maximum * 2 for name, maximum in highest[0].items())
    done = quantize(
        residual,
        Data(samples, statistics=scaled),
        prepare=[Scale(10.0)],
        goal=Goal(force=True),
        budget=Budget(latency_seconds=0, search="off"),
    )
    assert done.report.run.passes[0].options == {"factor": "10.0"}


def test_below_the_wanted_fidelity_nothing_is_written_unless_forced(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    output.write_bytes(b"old")
    with pytest.raises(AccuracyError, match=r"output logits has .* dB, expected 200 dB or more; nothing was written"):
        quantize(
            MODELS / "gru.onnx", Data(CALIB, limit=4), output, goal=200, budget=Budget(latency_seconds=0, search="off")
        )
    assert output.read_bytes() == b"old"
    quantize(
        MODELS / "gru.onnx",
        Data(CALIB, limit=4),
        output,
        goal=Goal(min_sqnr=200, force=True),
        budget=Budget(latency_seconds=0, search="off"),
    )
    assert len(output.read_bytes()) > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]


def test_the_fidelity_error_names_the_nodes_that_hurt_most() -> None:
    with pytest.raises(AccuracyError, match="the nodes with the lowest SQNR are ") as caught:
        quantize(
            MODELS / "resnet.onnx", Data(CALIB, limit=2), scheme=conv_only(), goal=500, budget=Budget(latency_seconds=0)
        )
    assert caught.value.report.search.sensitivities


@pytest.mark.parametrize("apart", [False, True])
def test_silent_samples_are_refused_before_anything_is_calibrated_also_where_it_is_forced(
    apart: bool, residual: ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreparedModel, "calibrate", lambda *arguments: pytest.fail("it was calibrated"))
    (entry,) = residual.graph.input
    shape = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
    silent = [{entry.name: np.zeros(shape, np.float32)} for _ in range(3)]
    real = [{entry.name: np.random.default_rng(0).standard_normal(shape).astype(np.float32)} for _ in range(3)]
    data = Data(real, silent) if apart else Data(silent)
    with pytest.raises(DataError, match="hold a single value in each input, such as zeros"):
        quantize(residual, data, goal=Goal(force=True), budget=Budget(latency_seconds=0, search="off"))


def conv_only() -> Scheme:
    """Static convolutions that the search may not store: what it demotes stays in integer storage, below 500 dB."""
    return Scheme((Rule(Mode.STATIC, op_types=("Gemm",)),))


@pytest.mark.parametrize(
    ("preset", "nodes", "reported"),
    [
        ("int8", "y = Relu(x)", "Relu: a clamp is fused only into the output of an integer kernel"),
        ("int8", "w = MatMul(x, z) y = Relu(w)", "MatMul: both operands are activations; Relu: a clamp is fused only"),
        ("int8-dynamic", "w = MatMul(x, z) y = Relu(w)", "MatMul: both operands are activations; .* for Relu"),
        ("int4-block32", "w = MatMul(x, z) y = Relu(w)", "MatMul: both operands are activations; Relu has no"),
        ("int8-storage", "w = MatMul(x, z) y = Relu(w)", "MatMul: both operands are activations; Relu has no"),
        ("int4-block32", "y = Relu(x)", "Relu has no weight$"),
        (
            "int4-block32",
            "y = MatMul(x, small)",
            "MatMul: its constants are too small to quantize, or not learned weights$",
        ),
    ],
)
def test_a_model_without_weights_is_refused_with_the_obstacle(
    preset: str, nodes: str, reported: str, build: Build
) -> None:
    model = build(f"(float[8,8] x, float[8,8] z) => (y) {{ {nodes} }}", small=(8, 8))
    with pytest.raises(ModelError, match=f"^there is nothing to quantize in the model: {reported}"):
        plan(model, scheme=PRESETS[preset])


@pytest.mark.parametrize(
    ("patterns", "reported"),
    [(("*",), "every node is excluded$"), (("stem", "left", "right", "last"), "some nodes are excluded; .* integer")],
)
def test_a_model_whose_nodes_are_excluded_is_refused_for_that(
    patterns: tuple[str, ...], reported: str, residual: ModelProto
) -> None:
    with pytest.raises(ModelError, match=f"there is nothing to quantize in the model: {reported}"):
        plan(residual, scheme=PRESETS["int8"].excluding(*patterns))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"goal": math.nan}, "the required SQNR is NaN, expected decibels such as 20"),
        ({"goal": "20"}, "the required SQNR is '20' of type str, expected decibels such as 20"),
        ({"budget": "fest"}, "search 'fest' is not one of off, fast, full; did you mean 'fast'"),
        ({"budget": 3}, r"the budget is 3 of type int, expected one of off, fast, full, or Budget\(...\)"),
        ({"scheme": 8}, "the scheme is 8 of type int, expected the name of a preset or TOML file, a Scheme or a Plan"),
        ({"target": None}, "the target is None of type NoneType, expected the name of a runtime"),
        ({"output": 1}, "the output is 1 of type int, expected a path, or None to write nothing"),
        ({"prepare": "NameNodes"}, "the passes are 'NameNodes', expected a list of passes or of their names"),
    ],
)
def test_arguments_that_say_nothing_are_refused_in_a_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        quantize(MODELS / "gru.onnx", CALIB, **given)


@pytest.mark.parametrize("name", ["q.onnx", "q.onnx.data"])
def test_times_are_not_kept_in_the_output(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"times cannot be kept in the output .*q\.onnx; give another name"):
        quantize(MODELS / "gru.onnx", CALIB, tmp_path / "q.onnx", budget=Budget(cache=tmp_path / name))
    assert list(tmp_path.iterdir()) == []


def test_what_keeps_a_large_model_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreparedModel, "is_large", True)
    with pytest.raises(AccuracyError) as caught:
        quantize(MODELS / "gru.onnx", Data(CALIB, limit=2), goal=140, budget=Budget(latency_seconds=0))
    assert {one.node for one in caught.value.report.search.sensitivities} == {"/gru/GRU", "/gru/GRU_1", "/head/Gemm"}
    assert str(caught.value).startswith(
        "output logits has 96.7 dB, expected 140 dB or more; nothing was written; the nodes with the lowest SQNR are "
        "/head/Gemm ("
    )


def test_a_search_that_gains_nothing_writes_nothing_unless_forced(build: Build, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    # Nearly all of the model are whole numbers, and the scales of its small weight take more than its quantized values
    # save.
    model = build(
        """(float[16,8] x, int64[16] i) => (float[16,8] y, int64[16] z) {
            h = MatMul(x, w) y = Relu(h) z = Gather(t, i)
        }""",
        w=(8, 8),
        t=generator.integers(0, 9, 9000),
    )
    samples = [
        {"x": generator.standard_normal((16, 8)).astype(np.float32), "i": generator.integers(0, 9000, 16)}
        for _ in range(16)
    ]
    output, untimed = tmp_path / "out.onnx", Budget(latency_seconds=0)
    with pytest.raises(AccuracyError, match=r"the quantized model is 1\.0\d of the size and of unmeasured speed"):
        quantize(model, samples, output, budget=untimed)
    assert list(tmp_path.iterdir()) == []
    found = quantize(model, samples, output, goal=Goal(force=True), budget=untimed).report
    assert found.output
    assert found.size_ratio >= 1
    # As it is, or by a plan that is given, it is wanted whatever it gains.
    assert quantize(model, samples, output, budget=Budget(latency_seconds=0, search="off")).report.output
    assert quantize(model, samples, output, scheme=found.plan, budget=untimed).report.output
