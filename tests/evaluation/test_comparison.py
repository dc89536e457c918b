"""By what models are compared: outputs, what stands for them, and the same random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from conftest import Build, QuantizeTo
from onnx import ModelProto, inliner

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.errors import CandidateError, ModelError
from onnxq.evaluation.agreement import compare_files, with_own_choices
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.warnings import warn_unmeasured_nodes
from onnxq.ir import as_graph
from onnxq.numerics.affine import decibels
from onnxq.onnx_api import inline_proto_functions, inlining
from onnxq.passes.preparing.preparation import reference_file
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.report import AccuracyError
from onnxq.report.report import compared
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.sessions import open_session, run
from onnxq.system.failures import is_fatal

GENERATOR = np.random.default_rng(0)
IMAGES = [{"image": GENERATOR.standard_normal((1, 3, 16, 16)).astype(np.float32)} for _ in range(16)]
CHOSEN = Budget(latency_seconds=0)


@pytest.fixture(scope="module")
def detector(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Boxes and scores of one class, kept by NonMaxSuppression, which keeps half of them."""
    model = build(
        """(float[1,3,16,16] image) => (float[N,4] boxes, float[N] scores) {
            f = Conv<pads = [1, 1, 1, 1]>(image, k) r = Relu(f) b = Conv(r, kb) s = Conv(r, ks)
            last = Transpose<perm = [0, 2, 3, 1]>(b) all = Reshape(last, boxed)
            p = Sigmoid(s) per = Reshape(p, scored)
            kept = NonMaxSuppression(all, per, most, overlap, least)
            third = Gather<axis = 1>(kept, two) which = Reshape(third, flat)
            rows = Squeeze(all, nought) boxes = Gather(rows, which)
            every = Reshape(per, flat) scores = Gather(every, which)
        }""",
        k=(16, 3, 3, 3),
        kb=(4, 16, 1, 1),
        ks=(1, 16, 1, 1),
        boxed=np.array([1, 256, 4]),
        scored=np.array([1, 1, 256]),
        most=np.array([256]),
        overlap=np.array([0.5], np.float32),
        least=np.array([0.5], np.float32),
        two=np.array(2),
        flat=np.array([-1]),
        nought=np.array([0]),
    )
    path = tmp_path_factory.mktemp("detector") / "detector.onnx"
    onnx.save(model, path)
    return path


def test_a_detector_is_compared_on_the_boxes_that_the_float_model_keeps(detector: Path, tmp_path: Path) -> None:
    output = tmp_path / "int8.onnx"
    report = quantize(detector, IMAGES, output, budget=CHOSEN).report
    assert report.plan.count(Mode.STATIC) >= 3
    evaluation_samples = {one.name: one.stands_for for one in report.agreement.outputs}
    assert evaluation_samples == {"boxes": (), "scores": (), "all": ("boxes", "scores"), "per": ("boxes", "scores")}
    assert report.agreement.sound
    assert 20 < report.agreement.worst_sqnr < 60
    # Compared as they are, one box more or less would decide.
    plain = ComparisonSpec(("boxes", "scores"))
    expected, found = (plain.open(path) for path in (detector, output))
    assert any(found.run(image)[0].shape != expected.run(image)[0].shape for image in IMAGES)
    # What was written has no outputs but the user's.
    assert [value.name for value in onnx.load(output).graph.output] == ["boxes", "scores"]


def test_labels_are_judged_by_the_scores_that_they_are_of(build: Build, tmp_path: Path) -> None:
    model = build(
        """(float[1,64] x) => (int64[1] label) {
            h = MatMul(x, w) r = Relu(h) scores = MatMul(r, u) label = ArgMax<axis = 1, keepdims = 0>(scores)
        }""",
        w=(64, 64),
        u=(64, 10),
    )
    samples = [{"x": GENERATOR.standard_normal((1, 64)).astype(np.float32)} for _ in range(16)]
    (scores,) = quantize(model, samples, tmp_path / "int8.onnx", budget=CHOSEN).report.agreement.outputs
    assert (scores.name, scores.stands_for, scores.compared) == ("scores", ("label",), 4)
    assert 20 < scores.decibels < 60
    # One sample of which the label happens to stay is not enough.
    with pytest.raises(AccuracyError, match="tensor scores, compared in place of label, has"):
        quantize(
            model, samples[:1], goal=60, scheme=PRESETS["int4-block32"], budget=Budget(search="off", latency_seconds=0)
        )


@pytest.mark.parametrize("engine", [None, OnnxRuntime()], ids=["here", "on an engine"])
def test_all_choices_can_be_given(engine: OnnxRuntime | None, build: Build, tmp_path: Path) -> None:
    """What each gives of scores that are wrong by a hundredth is compared where the float model chose."""
    text = """(float[6,32] x) => (top, kept, boxed, most, least, twice, bool[6] on, picked) {
        s = MatMul(x, w) v, i = TopK<axis = 0, largest = 0>(s, k) top = Sin(v)
        p = Sigmoid(s) m = Greater(s, nought) n = NonZero(m) t = Transpose(n) kept = GatherND(s, t)
        b = Slice(s, zero, four, one) boxes = Unsqueeze(b, zero) c = Slice(p, zero, one, one) d = Transpose(c)
        e = Unsqueeze(d, zero) f = NonMaxSuppression(boxes, e, k, half, nought) h = Slice(f, two, three, one)
        j = Squeeze(h, one) boxed = Gather(s, j)
        l = ArgMax<axis = 1>(s) most = Gather(w, l) o = ArgMin<axis = 0, keepdims = 0>(s) least = Gather(w, o)
        q = ReduceMax<axes = [1], keepdims = 0>(s) on = Greater(q, nought) r = Compress<axis = 0>(s, on)
        u = Compress<axis = 0>(x, on) z = MatMul(u, w) twice = Add(r, z) picked = Compress<axis = 0>(rows, on)
    }"""
    numbers = {
        name: np.array([value]) for name, value in (("zero", 0), ("one", 1), ("two", 2), ("three", 3), ("four", 4))
    }
    shapes = {"k": np.array([3]), "nought": np.zeros(1, np.float32), "half": np.float32([0.5]), "rows": np.arange(6)}
    weight = GENERATOR.standard_normal((32, 32)).astype(np.float32)
    for name, factor in (("one", 1.0), ("other", 1.01)):
        onnx.save(build(text, w=np.float32(factor) * weight, **numbers, **shapes), tmp_path / f"{name}.onnx")
    samples = [{"x": GENERATOR.standard_normal((6, 32)).astype(np.float32)} for _ in range(4)]
    found = compare_files(tmp_path / "one.onnx", tmp_path / "other.onnx", samples, engine=engine)
    assert found.sound
    assert found.decided == ("picked",)
    assert set(found.chosen) == {"top", "kept", "boxed", "twice"}
    decibels = {one.name: one.sqnr for one in found.outputs if one.name in ("kept", "boxed", "most", "least")}
    assert decibels == {name: pytest.approx(40, abs=0.1) for name in decibels}
    assert [one.sqnr for one in found.outputs if one.name == "on"] == [None]


TOPK = "(float[4,64] x) => (y) { h = MatMul(x, w) v, i = TopK(h, k) c = Sin(v) [late] y = MatMul(c, u) }"
# The two experts of a row, each a matrix of its own.
EXPERTS = """(float[4,64] x) => (float[4,64] y) {
    g = MatMul(x, gate) p = Softmax(g) v, i = TopK(p, two) picked = Gather(experts, i)
    rows = Unsqueeze(x, last) turned = Transpose<perm = [0, 2, 1]>(rows) each = Unsqueeze(turned, second)
    m = MatMul(each, picked) r = Squeeze(m, axes) a = Relu(r)
    share = Unsqueeze(v, last) scaled = Mul(a, share) y = ReduceSum<keepdims = 0>(scaled, second)
}"""
# The features of the three nearest of 64 points.
NEIGHBOURS = """(float[64,32] x) => (float[64,16] y) {
    f = MatMul(x, w) t = Transpose(f) d = MatMul(f, t) v, i = TopK(d, three) near = Gather(f, i)
    h = MatMul(near, u) r = Relu(h) y = ReduceMax<axes = [1], keepdims = 0>(r)
}"""
CONSTANTS = {"last": np.array([2]), "second": np.array([1]), "axes": np.array([2]), "two": np.array([2])}


@pytest.mark.parametrize(
    ("text", "shapes", "sample", "scores"),
    [
        (TOPK, {"w": (64, 64), "u": (8, 8), "k": np.array([8])}, (4, 64), "h"),
        (EXPERTS, {"gate": (64, 8), "experts": (8, 64, 64), **CONSTANTS}, (4, 64), "p"),
        (NEIGHBOURS, {"w": (32, 32), "u": (32, 16), "three": np.array([3])}, (64, 32), "d"),
    ],
    ids=["top", "experts", "neighbours"],
)
def test_what_lies_behind_a_choice_is_compared_with_the_choice_of_the_float_model(
    text: str, shapes: dict, sample: tuple[int, ...], scores: str, build: Build, tmp_path: Path
) -> None:
    model, path = build(text, **shapes), tmp_path / "model.onnx"
    onnx.save(model, path)
    samples = [{"x": GENERATOR.standard_normal(sample).astype(np.float32)} for _ in range(8)]
    # The last weights alone are wrong by a tenth, behind the choice.
    last = onnx.numpy_helper.to_array(model.graph.initializer[1])
    model.graph.initializer[1].CopyFrom(
        onnx.numpy_helper.from_array(np.float32(1.1) * last, model.graph.initializer[1].name)
    )
    onnx.save(model, tmp_path / "other.onnx")
    agreement = compare_files(path, tmp_path / "other.onnx", samples)
    found = {one.name: one for one in agreement.outputs}
    assert found["y"].sqnr == pytest.approx(20, abs=0.1)
    # Its own choices are the same.
    assert agreement.own_choices == ()
    assert (found[scores].sqnr, found[scores].stands_for) == (math.inf, ("y",))
    coarse = PRESETS["int2-block32"]
    with pytest.raises(AccuracyError, match=r"(output y|compared in place of y,) has"):
        quantize(path, samples, scheme=coarse, budget=Budget(search="off", accuracy="off", latency_seconds=0))


def test_places_that_are_chosen_otherwise_change_nothing_but_the_scores(build: Build, tmp_path: Path) -> None:
    """Of scores that are nearly equal any change chooses other places, whose rows differ altogether."""
    text = """(float[1,8] x, float[8,16] rows) => (y, int64[1,2] i) {
        s = MatMul(x, w) v, i = TopK(s, k) y = Gather(rows, i)
    }"""
    shapes = {"w": np.eye(8, dtype=np.float32), "k": np.array([2])}
    onnx.save(build(text, **shapes), tmp_path / "one.onnx")
    turned = {**shapes, "w": np.diag(np.linspace(1.01, 0.99, 8)).astype(np.float32)}
    onnx.save(build(text, **turned), tmp_path / "other.onnx")
    samples = [
        {
            "x": np.linspace(1, 1.001, 8, dtype=np.float32)[None],
            "rows": GENERATOR.standard_normal((8, 16)).astype(np.float32),
        }
        for _ in range(4)
    ]
    first, second = (run(open_session(tmp_path / name), samples[0])[1] for name in ("one.onnx", "other.onnx"))
    assert set(first.flat).isdisjoint(second.flat)
    agreement = compare_files(tmp_path / "one.onnx", tmp_path / "other.onnx", samples)
    found = {one.name: one for one in agreement.outputs}
    own = {one.name: one for one in agreement.own_choices}
    assert found["y"].sqnr == math.inf
    assert own["y"].sqnr < 3
    assert own["i"].agreement == 0.0
    opened = partial(ComparisonSpec.open, model=tmp_path / "other.onnx")
    surer = with_own_choices(agreement, tmp_path / "one.onnx", opened, samples, risk=1e-3)
    assert surer.own_choices[0].bound < own["y"].bound
    assert agreement.worst_sqnr == found["s"].sqnr
    assert compared(agreement).endswith(
        f"with the choices of this model y has {decibels(own['y'].sqnr)}, i is equal in 0.0%"
    )
    assert found["s"].stands_for == ("y", "i")
    assert 40 < found["s"].sqnr < 50
    assert "i" not in found


@pytest.mark.parametrize("returned", ["y, int64[1,2] i", "y"])
def test_a_model_that_fails_with_its_own_choices_is_at_fault(returned: str, build: Build, tmp_path: Path) -> None:
    """Of scores that are nearly equal, the candidate chooses the last, which has no row."""
    text = f"""(float[1,8] x, float[4,16] rows) => ({returned}) {{
        s = MatMul(x, w) v, i = TopK(s, k) y = Gather(rows, i)
    }}"""
    for name, last in (("one.onnx", 0.99), ("other.onnx", 1.01)):
        weight = np.diag(np.linspace(1, last, 8)).astype(np.float32)
        onnx.save(build(text, w=weight, k=np.array([2])), tmp_path / name)
    sample = {"x": np.ones((1, 8), np.float32), "rows": GENERATOR.standard_normal((4, 16)).astype(np.float32)}
    with pytest.raises(CandidateError) as caught:
        compare_files(tmp_path / "one.onnx", tmp_path / "other.onnx", [sample])
    message = str(caught.value)
    assert "does not run a sample with its own choices for " in message
    assert message.endswith("; exclude the nodes that compute s")
    assert "idx=7" in message
    assert str(tmp_path) not in message


def test_weights_behind_what_nothing_compares_are_doubted(build: Build, tmp_path: Path) -> None:
    text = """(float[4,64] x) => (float[N] y, float[4,64] h) {
        h = MatMul(x, w) c = Unique<axis = 0>(h) [late] e = MatMul(c, u) y = Reshape(e, flat)
    }"""
    onnx.save(build(text, w=(64, 64), u=(64, 8), flat=np.array([-1])), tmp_path / "model.onnx")
    [warning] = warn_unmeasured_nodes(ComparisonSpec.of(tmp_path / "model.onnx", tmp_path / "model.onnx"))
    assert warning.startswith("the quantization error of late is not measured")


def test_models_without_such_operators_are_compared_as_they_are(perceptron: ModelProto, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    assert ComparisonSpec.of(tmp_path / "model.onnx", tmp_path / "model.onnx") == ComparisonSpec(("y",))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("count", [0, 7])
def test_samples_that_run_at_once_come_in_order(
    at_once: bool, count: int, perceptron: ModelProto, samples_for: Callable[..., list], tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(perceptron, path)
    samples = samples_for(perceptron, 7)[:count]
    view = ComparisonSpec.whole(path).open(path, at_once=at_once)
    found, expected = list(view.run_each(iter(samples))), [view.run(sample) for sample in samples]
    assert len(found) == count
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_model_that_was_made_and_cannot_be_read_is_at_fault_alone(detector: Path, tmp_path: Path) -> None:
    (broken := tmp_path / "broken.onnx").write_bytes(b"no model")
    views = ComparisonSpec.of(detector, detector)
    for opening in (
        lambda: ComparisonSpec.of(detector, broken),
        lambda: views.open(broken),
    ):
        with pytest.raises(CandidateError) as caught:
            opening()
        assert not is_fatal(caught.value)
    with pytest.raises(ModelError) as given:
        ComparisonSpec.of(broken, detector)
    assert is_fatal(given.value)


def test_a_model_that_lacks_the_tensors_is_refused(detector: Path, build: Build, tmp_path: Path) -> None:
    onnx.save(build("(float[2] x) => (float[2] boxes, float[2] scores) { boxes, scores = Split(x) }"), tmp_path / "o")
    with pytest.raises(CandidateError, match=r"lacks the tensors that decide 'kept', expected all, per"):
        ComparisonSpec.of(detector, detector).open(tmp_path / "o")
    plain = ComparisonSpec(("boxes", "scores"), free_choices=("boxes", "scores"))
    assert ComparisonSpec.of(detector, tmp_path / "o") == plain


NOISY = """(float[8,32] x) => (float[8,16] y) {{
    h = MatMul(x, w) {} z = MatMul(n, u) y = Tanh(z)
}}"""


@pytest.mark.parametrize(
    "nodes",
    [
        "e = RandomNormalLike(h) n = Add(h, e)",
        "e = RandomUniform<shape = [8, 32], high = 4.0>() n = Mul(h, e)",
        "p = Sigmoid(x) e = Bernoulli(p) n = Mul(h, e)",
        "n = Dropout(h, half, yes)",
    ],
)
def test_models_that_draw_random_numbers_draw_the_same(
    nodes: str, build: Build, quantize_to: QuantizeTo, tmp_path: Path
) -> None:
    model = build(NOISY.format(nodes), w=(32, 32), u=(32, 16), half=np.array(0.5, np.float32), yes=np.array(True))
    samples = [{"x": GENERATOR.standard_normal((8, 32)).astype(np.float32)} for _ in range(8)]
    report = quantize_to(model, tmp_path / "int8.onnx", samples=samples, goal=Goal(20)).report
    assert 20 < report.agreement.worst_sqnr < math.inf
    # The user's model goes on to draw anew.
    written = onnx.load(tmp_path / "int8.onnx").graph.node
    assert not [attribute for node in written for attribute in node.attribute if attribute.name == "seed"]


# Outputs that are no plain floats of one shape: models are judged all the same, and the verdict says how.

ROWS = [{"x": GENERATOR.standard_normal((4, 64)).astype(np.float32)} for _ in range(16)]
LAYERS = "h = MatMul(x, w) r = Relu(h) a = MatMul(r, u)"
WEIGHTS = {"w": (64, 64), "u": (64, 10)}
ZERO, HALF = np.zeros(1, np.float32), np.float32([0.5])
NAMES = np.array([f"class {number}" for number in range(10)], object)


def divided(*zeros: Any) -> list[dict[str, np.ndarray]]:
    """Return samples with a divisor that is zero in these places."""
    samples = []
    for number, sample in enumerate(ROWS):
        divisor = np.ones((4, 10), np.float32)
        if number % 2:
            divisor[zeros] = 0
        samples.append({**sample, "d": divisor})
    return samples


def verdict(build: Build, text: str, samples: list[dict[str, np.ndarray]], folder: Path, **constants: Any) -> str:
    model = build(text.replace("LAYERS", LAYERS), **{**WEIGHTS, **constants})
    budget = Budget(search="off", accuracy="off", latency_seconds=0, certificate=False)
    return quantize(model, samples, folder / "int8.onnx", goal=5, budget=budget).report.verdict


DIVIDED = "(float[4,64] x, float[4,10] d) => (float[4,10] y) {{ LAYERS {} }}"


@pytest.mark.parametrize(
    ("nodes", "places"),
    [
        ("t = Mul(a, d) y = Div(t, d)", (slice(None),)),
        ("t = Mul(a, d) y = Div(t, d)", (0, slice(3))),
        ("y = Div(a, d)", (0, slice(3))),
        ("t = Div(a, d) y = Softmax(t)", (0,)),
    ],
    ids=["NaN in whole samples", "NaN in places", "infinite in places", "NaN in rows of probabilities"],
)
def test_places_of_no_number_are_left_out(nodes: str, places: Any, build: Build, tmp_path: Path) -> None:
    found = verdict(build, DIVIDED.format(nodes), divided(*places), tmp_path)
    assert "dB on 4 held-out samples" in found
    assert found.endswith("; y is compared where the float model is finite")


@pytest.mark.parametrize(
    ("outputs", "nodes", "constants", "reported"),
    [
        ("float[4,10] a, float[4,10] z", "n = Mul(a, zero) z = Div(n, zero)", {"zero": ZERO}, "; z is not compared"),
        (
            "string[4] s",
            "l = ArgMax<axis = 1, keepdims = 0>(a) s = Gather(names, l)",
            {"names": NAMES},
            "; s is evaluated",
        ),
        ("bool[4,10] b", "b = Greater(a, half)", {"half": HALF}, "equal outputs on 4 held-out samples"),
        ("int32[4,10] i", "t = Div(a, half) i = Cast<to = 6>(t)", {"half": HALF}, "equal labels on 4 held-out samples"),
        ("seq(float[1,10]) s", "s = SplitToSequence(a, one)", {"one": np.array(1)}, "dB on 4 held-out samples"),
        ("optional(float[4,10]) o", "o = Optional(a)", {}, "dB on 4 held-out samples"),
        ("float[4,10] a, float[1] c", "c = Identity(half)", {"half": HALF}, "dB on 4 held-out samples"),
        (
            "float[4,10] c",
            "z = Mul(a, zero) c = Add(z, half)",
            {"zero": ZERO, "half": HALF},
            "dB on 4 held-out samples",
        ),
        (
            "float[M,10] y",
            "m = ReduceMax<axes = [1], keepdims = 0>(a) c = Greater(m, most) y = Compress<axis = 0>(a, c)",
            {"most": np.float32([1e9])},
            "; y is not compared, because the float model's values are not finite",
        ),
    ],
    ids=["one of NaN", "strings", "bools", "integers", "sequence", "optional", "constant", "all constant", "empty"],
)
def test_outputs_of_all_kinds_are_judged(
    outputs: str, nodes: str, constants: dict[str, Any], reported: str, build: Build, tmp_path: Path
) -> None:
    text = f"(float[4,64] x) => ({outputs}) {{ LAYERS {nodes} }}"
    assert reported in verdict(build, text, ROWS, tmp_path, **constants)


@pytest.mark.parametrize("lengths", [range(12, 52, 7), (2, 3)])
def test_the_number_of_classes_may_differ_from_sample_to_sample(lengths: range, build: Build, tmp_path: Path) -> None:
    text = """(float[1,N,64] x) => (float[1,N,N] p) {
        h = MatMul(x, w) t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(h, t) p = Softmax<axis = -1>(s)
    }"""
    shapes = [(1, lengths[number % len(lengths)], 64) for number in range(16)]
    samples = [{"x": GENERATOR.standard_normal(shape).astype(np.float32) / 4} for shape in shapes]
    assert "dB on 4 held-out samples" in verdict(build, text, samples, tmp_path)


def test_a_model_without_any_finite_answer_is_refused(build: Build, tmp_path: Path) -> None:
    text = "(float[4,64] x) => (float[4,10] y) { LAYERS e = Exp(a) y = Div(e, zero) }"
    with pytest.raises(ModelError, match="every value of output y of the float model is NaN or infinite"):
        verdict(build, text, ROWS, tmp_path, zero=ZERO)


# Functions: the given file runs as it is.

LOCAL = '<domain: "local", opset_import: ["" : 17, "local" : 1]>'
SCORES = "h = MatMul(x, w) s = local.F(h)"
LEAKY = LOCAL + " F <slope: float = 0.9> (a) => (r) { r = LeakyRelu<alpha: float = @slope>(a) }"
TOP = LOCAL + " T (a, k) => (v, i) { v, i = TopK(a, k) }"
TOP_OF_SHARES = LOCAL + " T (a, k) => (v, i) { p = Softmax(a) v, i = TopK<largest = 0>(p, k) }"
POSITIVE = (
    LOCAL + " P <least: float = 0.5> (a) => (m) { t = Constant<value_float: float = @least>() m = Greater(a, t) }"
)


def with_functions(outputs: str, nodes: str, functions: str, w: np.ndarray) -> ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17, "local" : 1]> g (float[4,64] x) => ({outputs}) '
        f"{{ {SCORES} {nodes} }} {LEAKY} {functions}"
    )
    for name, values in (("w", w), ("k", np.array([2]))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model


@pytest.mark.parametrize(
    ("outputs", "nodes", "functions", "compared", "free_choices"),
    [
        ("float[4,16] s", "", "", {"s": ()}, ()),
        ("v, i", "v, i = local.T(s, k)", TOP, {"v": (), "s": ("v", "i")}, ()),
        ("v, i", "v, i = local.T(s, k)", TOP_OF_SHARES, {"v": (), "i": ()}, ("v", "i")),
        ("n", "m = local.P(s) n = NonZero(m)", POSITIVE, {"s": ("n",)}, ()),
        (
            "y",
            "y = Scan<num_scan_inputs = 1, body = b (float[16] a) => (float[2] v) {v, i = TopK<largest = 0>(a, k)}>(s)",
            "",
            {"y": ()},
            ("y",),
        ),
    ],
    ids=["values", "choice in a function", "scores in a function", "mask by a function", "choice in a body"],
)
def test_the_given_file_runs_as_it_is(
    outputs: str,
    nodes: str,
    functions: str,
    compared: dict[str, tuple[str, ...]],
    free_choices: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)
    model, path = with_functions(outputs, nodes, functions, weight), tmp_path / "model.onnx"
    onnx.save(model, path)
    onnx.save(inliner.inline_local_functions(with_defaults(model)), tmp_path / "flat.onnx")
    onnx.save(with_functions(outputs, nodes, functions, np.float32(1.1) * weight), tmp_path / "other.onnx")

    found = compare_files(path, tmp_path / "flat.onnx", ROWS)
    assert {one.name: one.stands_for for one in found.outputs} == compared
    assert found.free_choices == free_choices
    assert found.worst_sqnr == math.inf
    assert compare_files(path, tmp_path / "other.onnx", ROWS).worst_sqnr < 40

    # What is made by a wrong inliner differs from the file, however it is inlined to find choices.
    def without_slope(model: ModelProto, **options: Any) -> ModelProto:
        inlined = inline(model, **options)
        for node in inlined.graph.node:
            if node.op_type == "LeakyRelu":
                del node.attribute[:]
        return inlined

    inline = inliner.inline_local_functions
    monkeypatch.setattr(inlining.inliner, "inline_local_functions", without_slope)
    onnx.save(inline_proto_functions(model), tmp_path / "wrong.onnx")
    assert compare_files(path, tmp_path / "flat.onnx", ROWS).worst_sqnr == math.inf
    assert compare_files(path, tmp_path / "wrong.onnx", ROWS).worst_sqnr < 10


def with_defaults(model: ModelProto) -> ModelProto:
    """Return the model with the defaults of its functions at their calls, which onnx's inliner leaves out."""
    defaults = {function.name: function.attribute_proto for function in model.functions}
    for node in model.graph.node:
        node.attribute.extend(defaults.get(node.op_type, ()))
    return model


@pytest.mark.parametrize(
    ("outputs", "nodes", "wrong"),
    [
        ("v, i", "v, i = TopK(s, k)", "v, i = TopK<largest = 0>(s, k)"),
        ("n", "m = Greater(s, t) n = NonZero(m)", "m = Less(s, t) n = NonZero(m)"),
        ("int64[4] l", "l = ArgMax<axis = 1, keepdims = 0>(s)", "l = ArgMin<axis = 1, keepdims = 0>(s)"),
        ("c", "m = Greater(s, t) l = ArgMax<axis = 1, keepdims = 0>(s) n = NonZero(m) c = Gather(l, o)", ""),
    ],
)
def test_a_model_that_chooses_otherwise_by_the_same_scores_is_seen(
    outputs: str, nodes: str, wrong: str, build: Build, tmp_path: Path
) -> None:
    constants = {"w": (64, 16), "k": np.array([2]), "t": np.float32([0.5]), "o": np.array([1, 0])}
    for name, decided in (("right", nodes), ("wrong", wrong or nodes.replace("ArgMax", "ArgMin"))):
        text = f"(float[4,64] x) => ({outputs}) {{ s = MatMul(x, w) {decided} }}"
        onnx.save(build(text, **constants), tmp_path / f"{name}.onnx")
    right = tmp_path / "right.onnx"
    assert compare_files(right, right, ROWS).worst_sqnr == math.inf
    found = compare_files(right, tmp_path / "wrong.onnx", ROWS)
    assert not found.sound or found.worst_sqnr < 10


def test_functions_that_draw_random_numbers_draw_the_same(tmp_path: Path) -> None:
    noisy = LOCAL + " N (a) => (r) { n = RandomNormalLike(a) r = Add(a, n) }"
    weight = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)
    model = with_functions("float[4,16] y", "z = local.N(s) y = local.N(z)", noisy, weight)
    assert quantize(model, ROWS, tmp_path / "int8.onnx", budget=CHOSEN).report.agreement.worst_sqnr > 20


def test_a_model_in_memory_is_its_own_reference(tmp_path: Path, perceptron: ModelProto) -> None:
    perceptron.graph.doc_string = "as it is"
    path = reference_file(as_graph(perceptron), perceptron, tmp_path)
    assert path.read_bytes() == perceptron.SerializeToString()
    plain = gs.import_onnx(perceptron)  # noqa: TID251 - what users hand over
    (tmp_path / "plain").mkdir()
    assert onnx.load(reference_file(as_graph(plain), plain, tmp_path / "plain")).graph.node == perceptron.graph.node
