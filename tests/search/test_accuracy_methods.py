"""More accurate encodings: each method is kept where it helps on unseen samples, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MODELS, Build, Samples

from onnxq import Budget, Data, Goal, load_plan, plan, quantize, save_plan
from onnxq.algorithms.range_search import pooled
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.config.effort import FULL, AccuracyEffort
from onnxq.config.presets import PRESETS, preset_named
from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.errors import SchemeError
from onnxq.ir import as_graph
from onnxq.numerics.spec import Method, QuantSpec
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.targets import target_named
from onnxq.search import accuracy_methods
from onnxq.search.accuracy_methods import improved
from onnxq.search.candidate import Candidate, Workshop
from onnxq.search.prepared_model import open_prepared_model
from onnxq.search.results import MethodGain
from onnxq.system.failures import collect_failures
from onnxq.system.resources import NEVER, Deadline, silent
from search.laboratory import minmax

Draw = Callable[[np.random.Generator], np.ndarray]


def normal(*shape: int) -> Draw:
    return lambda generator: generator.standard_normal(shape)


def uniform(generator: np.random.Generator) -> np.ndarray:
    return generator.uniform(0, 1, (1, 6, 8, 8))


def alike(generator: np.random.Generator) -> np.ndarray:
    """Draw channels that all have the same largest value."""
    image = uniform(generator)
    image[..., 0, 0] = 1.0
    return image


@dataclass(frozen=True)
class Case:
    """A model and its samples.

    Attributes:
        text: the graph.
        draw: draws the input of a sample.
        weights: arrays, or shapes of random ones.
    """

    text: str
    draw: Draw
    weights: dict[str, Any]
    scheme: str = "int8"

    def samples(self, count: int, seed: int = 0) -> Samples:
        generator = np.random.default_rng(seed)
        return [{"x": self.draw(generator).astype(np.float32)} for _ in range(count)]

    def workshop(self, build: Build, folder: Path, count: int = 32) -> Workshop:
        folder = folder / f"run{len(list(folder.iterdir()))}"
        folder.mkdir()
        graph = as_graph(build(self.text, **self.weights))
        model = open_prepared_model(graph, preset_named(self.scheme), target_named("onnxruntime-cpu"), folder)
        samples = self.samples(count)
        statistics = model.calibrate(model.plan({}), samples, silent)
        return Workshop.of(model, model.prepared, samples, statistics, "model.onnx", count=16)

    def error(self, workshop: Workshop, candidate: Candidate) -> float:
        """Return the error of a candidate on new samples."""
        fresh = Workshop.of(
            workshop.model, workshop.model.prepared, self.samples(16, 1), workshop.statistics, "q.onnx", count=16
        )
        return pooled(fresh.measured(candidate.plan, candidate.recipe).nsr)


@dataclass
class Outcome:
    """What the methods found, with the candidates before and after."""

    workshop: Workshop
    first: Candidate
    best: Candidate
    gains: tuple[MethodGain, ...]
    tried: list[Candidate] = field(default_factory=list)


def run(
    case: Case,
    build: Build,
    folder: Path,
    *methods: str,
    aim: float = math.inf,
    count: int = 32,
    until: Deadline = NEVER,
    demotions: dict[str, Demotion] | None = None,
    **effort: Any,
) -> Outcome:
    workshop = case.workshop(build, folder, count)
    first = workshop.measured(workshop.model.plan(demotions or {}), minmax(workshop))
    best, gains = improved(workshop, first, case.samples(count), AccuracyEffort(methods, **effort), aim, until)
    return Outcome(workshop, first, best, gains, list(workshop.tried.values()))


FLAT = "(float[1,6,8,8] x) => (float[1,3,8,8] y) {a = Conv(x, w) h = HardSigmoid(a) y = Conv(h, u)}"
STEEP = "(float[1,6,8,8] x) => (float[1,3,8,8] y) {a = Conv(x, w) h = LeakyRelu(a) y = Conv(h, u)}"
CONVS = "(float[1,6,8,8] x) => (float[1,3,8,8] y) {s = Sqrt(x) a = Conv(s, w) r = Relu(a) y = Conv(r, u)}"
WIDE = np.array([1, 0.05, 0.04, 0.05, 0.03, 0.05])
NORM = "(float[8,64] x) => (float[8,48] y) {n = LayerNormalization(x, s, b) a = MatMul(n, w) y = Add(a, c)}"
LOUD = np.where(np.arange(64) % 32 == 3, 30.0, 1.0).astype(np.float32)
PRODUCT = "(float[8,64] x) => (float[8,32] y) {y = MatMul(x, w)}"
MIX = np.random.default_rng(5).standard_normal((6, 64))
RANDOM = np.random.default_rng(0).standard_normal
SAME = np.eye(6, dtype=np.float32).reshape(6, 6, 1, 1)


def convolutions(channels: np.ndarray) -> Case:
    """Return convolutions whose channels have sizes, all of which count alike."""
    weight = (np.random.default_rng(0).standard_normal((8, 6, 1, 1)) / channels.reshape(1, -1, 1, 1)).astype(np.float32)
    sizes = channels.reshape(-1, 1, 1)
    return Case(CONVS, lambda one: (one.uniform(0, 1, (1, 6, 8, 8)) * sizes) ** 2, {"w": weight, "u": (3, 8, 1, 1)})


def normalized(sizes: np.ndarray) -> Case:
    shift = np.where(sizes, 0.1, 0.0).astype(np.float32)
    weights = {"s": sizes, "b": shift, "w": (64, 48), "c": (48,)}
    return Case(NORM, normal(8, 64), weights, "int4-block32")


HELPS = {
    # Values beyond 2.5 make no difference, and most are.
    "ranges": Case(FLAT, normal(1, 6, 8, 8), {"w": (9 * RANDOM((8, 6, 1, 1))).astype(np.float32), "u": (3, 8, 1, 1)}),
    "equalization": convolutions(WIDE),
    "awq": normalized(LOUD),
    # Inputs that are mixed from six others let errors cancel.
    "gptq": Case(PRODUCT, lambda one: one.standard_normal((8, 6)) @ MIX, {"w": (64, 32)}, "int4-block32"),
}
LEAVES = {
    "ranges": Case(STEEP, uniform, {"w": SAME, "u": (3, 6, 1, 1)}),
    "equalization": Case(CONVS, alike, {"w": SAME, "u": SAME[:3]}),
    "awq": normalized(np.ones(64, np.float32)),
    "gptq": Case(PRODUCT, normal(8, 64), {"w": (64, 32)}, "int4-block32"),
}


@pytest.mark.parametrize("method", HELPS)
def test_a_method_that_helps_is_kept_and_helps_on_new_samples(method: str, build: Build, tmp_path: Path) -> None:
    case = HELPS[method]
    found = run(case, build, tmp_path, method)
    [gain] = found.gains
    assert (gain.method, gain.left) == (method, "")
    assert gain.after > gain.before + 0.3
    assert gain.kept
    assert case.error(found.workshop, found.best) < 0.85 * case.error(found.workshop, found.first)
    assert found.best.sqnr > found.first.sqnr
    assert found.best in found.workshop.tried.values()


@pytest.mark.parametrize("method", LEAVES)
def test_a_method_that_does_not_help_is_left_out(method: str, build: Build, tmp_path: Path) -> None:
    found = run(LEAVES[method], build, tmp_path, method)
    assert found.best is found.first
    assert all((gain.kept, gain.left, gain.before) == ("", "no lower error", gain.after) for gain in found.gains)


def test_methods_build_on_one_another(build: Build, tmp_path: Path) -> None:
    case = normalized(LOUD)
    both, alone = (run(case, build, tmp_path, *methods) for methods in (("awq", "gptq"), ("awq",)))
    assert [gain.method for gain in both.gains] == ["awq", "gptq"]
    assert both.gains[1].before == both.gains[0].after
    assert set(both.best.recipe.config.awq.factors) == set(alone.best.recipe.config.awq.factors) == {"n"}
    assert case.error(both.workshop, both.best) < 1.02 * case.error(alone.workshop, alone.best)


def test_channels_of_which_nothing_was_seen_stay_as_they_are(build: Build, tmp_path: Path) -> None:
    sizes = np.where(np.arange(64) == 5, 0.0, LOUD).astype(np.float32)
    factors = run(normalized(sizes), build, tmp_path, "awq").best.recipe.config.awq.factors["n"].values
    assert factors[5] == 1
    assert factors[3] > 1


# What is found on some samples is judged by others, and found again on all


@pytest.mark.parametrize("method", HELPS)
def test_judges_have_no_part_in_what_they_judge(
    method: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, seen = HELPS[method], list[tuple[set[bytes], set[bytes]]]()

    def known(name: str) -> Callable[..., Any]:
        finding = getattr(accuracy_methods, name)

        def find(*given: Any) -> Any:
            workshop, samples = given[-3], given[-1]
            seen.append(tuple({one["x"].tobytes() for one in part} for part in (workshop.reference.samples, samples)))
            return finding(*given)

        return find

    for name in ("_with_ranges", "_with_factors", "_with_awq", "_with_gptq"):
        monkeypatch.setattr(accuracy_methods, name, known(name))
    run(case, build, tmp_path, method)
    (*held, (judges, found_on)) = seen
    assert held
    assert all(not judges & found_on and len(judges) == 8 and len(found_on) == 24 for judges, found_on in held)
    assert judges <= found_on
    assert len(found_on) == 32


def test_sums_of_rows_are_of_all_samples_in_the_end(build: Build, tmp_path: Path) -> None:
    statistics = run(HELPS["gptq"], build, tmp_path, "gptq").best.recipe.statistics.statistics.values()
    assert {one.count for one in statistics if isinstance(one, HessianAccumulator)} == {32 * 8}


@pytest.mark.parametrize("count", [1, 3])
def test_too_few_samples_judge_nothing(build: Build, tmp_path: Path, count: int) -> None:
    for method in HELPS:
        found = run(HELPS[method], build, tmp_path, method, count=count)
        assert (found.best, found.gains) == (found.first, ())


# What is not tried


def test_nothing_is_tried_above_the_aim_or_when_time_ran_out(build: Build, tmp_path: Path) -> None:
    for options in ({"aim": 0.0}, {"until": Deadline(0.0)}):
        found = run(HELPS["gptq"], build, tmp_path, "gptq", **options)
        assert (found.best, found.gains) == (found.first, ())


def test_a_thorough_effort_tries_all_whatever_the_aim(build: Build, tmp_path: Path) -> None:
    assert run(HELPS["gptq"], build, tmp_path, "gptq", aim=0.0, thorough=True).gains


def test_the_search_for_ranges_ends_when_clipping_more_loses_more(build: Build, tmp_path: Path) -> None:
    # The samples that were held out are compared with minimum to maximum, and with one method that clips.
    found = run(LEAVES["ranges"], build, tmp_path, "ranges")
    assert len(found.workshop.tried) == 3


def test_weights_of_more_bits_are_not_rounded_by_their_errors(build: Build, tmp_path: Path) -> None:
    for method in ("gptq", "awq"):
        found = run(HELPS[method], build, tmp_path, method, gptq_bits=3)
        assert (found.best, found.gains) == (found.first, ())


def test_plans_without_quantized_values_have_nothing_to_improve(build: Build, tmp_path: Path) -> None:
    case = HELPS["equalization"]
    floats = {name: Demotion(Mode.FLOAT, "told to") for name in case.workshop(build, tmp_path).model.plan({}).by_node}
    found = run(case, build, tmp_path, *FULL.methods, demotions=floats)
    assert (found.best, found.gains) == (found.first, ())


@pytest.mark.parametrize("scheme", ["torch-fbgemm", "burn-q8s"])
def test_specs_that_follow_another_toolkit_are_left_alone(scheme: str, build: Build, tmp_path: Path) -> None:
    for method, case in HELPS.items():
        found = run(replace(case, scheme=scheme), build, tmp_path, method)
        assert (found.best, found.gains) == (found.first, ())


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_sums_that_have_no_room_in_memory_are_not_collected(
    method: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 64 * 64 * 8
    monkeypatch.setattr(accuracy_methods, "GRAM_BYTES", room - 1)
    found = run(HELPS[method], build, tmp_path, method)
    assert (found.best, found.gains) == (found.first, ())
    monkeypatch.setattr(accuracy_methods, "GRAM_BYTES", room)
    assert run(HELPS[method], build, tmp_path, method).best.recipe.config.key != found.first.recipe.config.key


def test_a_method_that_fails_is_left_out_and_reported(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(accuracy_methods, "_with_awq", fail)
    with collect_failures() as failures:
        found = run(normalized(LOUD), build, tmp_path, "awq", "gptq")
    assert [gain.method for gain in found.gains] == ["gptq"]
    assert [failure.part for failure in failures] == ["accuracy method 'awq'"]


# Factors that cost nodes of their own

COSTLY = (
    "(float[1,6,8,8] x) => (float[1,3,8,8] y, float[1,6,8,8] z) "
    "{s = Sqrt(x) a = Conv(s, w) r = Relu(a) y = Conv(r, u) z = Tanh(s)}"
)


@pytest.mark.parametrize("is_enough", [True, False])
def test_factors_that_cost_nodes_stay_only_where_the_aim_needs_them(
    is_enough: bool, build: Build, tmp_path: Path
) -> None:
    # A float node reads what is divided, so the factors of x take a node of their own.
    case = replace(convolutions(WIDE), text=COSTLY)
    best = run(case, build, tmp_path, "equalization")
    assert "s" in best.best.recipe.config.equalization.factors
    aim = best.first.bound if is_enough else best.best.bound - 0.01
    found = run(case, build, tmp_path, "equalization", aim=aim)
    assert ("s" in found.best.recipe.config.equalization.factors) is not is_enough


# Encoders that a spec requests


@pytest.mark.parametrize("count", [1, 32])
def test_weights_whose_spec_requests_gptq_get_it_whatever_accuracy_says(count: int, tmp_path: Path) -> None:
    with np.load(MODELS / "data" / "calib.npz") as calib, np.load(MODELS / "data" / "test.npz") as test:
        samples, unseen = (
            [{"image": one["image"][index : index + 1]} for index in range(many)]
            for one, many in ((calib, count), (test, 50))
        )
    budget, reports = Budget(search="off", latency_seconds=0, accuracy="off"), {}
    for method in (Method.GPTQ, Method.MINMAX):
        spec = QuantSpec("int4", (32,), method=method)
        scheme, output = Scheme((Rule(Mode.WEIGHT_ONLY, weight=spec),)), tmp_path / f"{method}.onnx"
        reports[method] = quantize(
            MODELS / "gru.onnx", Data(samples, unseen), output, scheme=scheme, budget=budget
        ).report
    assert reports[Method.GPTQ].agreement.worst_sqnr > reports[Method.MINMAX].agreement.worst_sqnr + 1
    found = reports[Method.GPTQ].plan
    assert found.accuracy == ("gptq",)
    again = tmp_path / "again.onnx"
    quantize(MODELS / "gru.onnx", Data(samples, unseen), again, scheme=found, budget=Budget(latency_seconds=0))
    assert again.read_bytes() == (tmp_path / f"{Method.GPTQ}.onnx").read_bytes()


# A plan carried out again on the same samples is the same file, byte for byte

FORCED = Goal(force=True)
UNTIMED = Budget(search="off", latency_seconds=0, certificate=False)


def first_and_again(
    model: Any, data: Any, folder: Path, scheme: str | Scheme = "int8", accuracy: str = "fast", search: str = "off"
) -> Plan:
    """Quantize a model, and carry out its plan from a file; return the plan."""
    budget = replace(UNTIMED, search=search, accuracy=accuracy, latency_seconds=0.05 if search != "off" else 0)
    first = quantize(model, data, folder / "first.onnx", scheme=scheme, goal=FORCED, budget=budget).report
    save_plan(first.plan, folder / "plan.toml")
    replay = load_plan(folder / "plan.toml")
    assert replay == first.plan
    again = quantize(model, data, folder / "again.onnx", scheme=replay, goal=FORCED, budget=UNTIMED).report
    assert again.plan == first.plan
    assert (again.search.measured, again.encoding.gains) == (0, ())
    assert (folder / "first.onnx").read_bytes() == (folder / "again.onnx").read_bytes()
    return replay


@pytest.mark.parametrize(
    ("model", "scheme"),
    [*(("perceptron", name) for name in PRESETS), ("residual", "int8"), ("residual", "int8-storage")],
)
def test_the_plan_of_every_preset_is_carried_out_again(
    model: str, scheme: str, request: pytest.FixtureRequest, samples_for: Callable[..., Samples], tmp_path: Path
) -> None:
    given = request.getfixturevalue(model)
    first_and_again(given, samples_for(given, 6), tmp_path, scheme)


@pytest.mark.parametrize("method", HELPS)
def test_what_a_method_found_is_carried_out_again(method: str, build: Build, tmp_path: Path) -> None:
    case = HELPS[method]
    replay = first_and_again(build(case.text, **case.weights), case.samples(32), tmp_path, case.scheme, accuracy=method)
    assert {
        "ranges": any(one.ranges or one.found_range for one in replay.activations),
        "equalization": any(one.factors for one in replay.activations),
        "awq": [one.tensor for one in replay.awq] == ["n"],
        "gptq": replay.damping is not None,
    }[method]


def test_a_plan_that_was_searched_for_is_carried_out_again(tmp_path: Path) -> None:
    first_and_again(MODELS / "gru.onnx", Data(MODELS / "data" / "calib.npz", limit=12), tmp_path, search="fast")


@pytest.mark.parametrize(
    "change",
    [{"emit": "qdq"}, {"emit": "ort"}, {"ranges": lambda seen, spec: (-1 / 3, 2 / 3)}],
    ids=["qdq", "ort", "own ranges"],
)
def test_what_a_scheme_says_besides_is_in_the_plan(
    change: dict[str, Any], perceptron: Any, samples_for: Callable[..., Samples], tmp_path: Path
) -> None:
    scheme = replace(PRESETS["int8" if "ranges" in change else "int4-block32"], **change)
    first_and_again(perceptron, samples_for(perceptron), tmp_path, scheme)


def test_a_replay_takes_no_ranges_from_its_samples(
    perceptron: Any, samples_for: Callable[..., Samples], tmp_path: Path
) -> None:
    scheme = replace(PRESETS["int8"], correct_biases=False)
    budget, samples = replace(UNTIMED, accuracy="ranges"), samples_for(perceptron, 8)
    found = quantize(perceptron, samples, tmp_path / "a.onnx", scheme=scheme, goal=FORCED, budget=budget).report.plan
    louder = [{"x": 9 * samples[0]["x"]}]
    quantize(perceptron, louder, tmp_path / "b.onnx", scheme=found, goal=FORCED, budget=UNTIMED)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": "0.0.1"}, "the plan was made by onnxq 0.0.1, expected .*, which is installed; make it again"),
        ({"steps": ("UnfuseProduct",)}, "the plan has step 'UnfuseProduct', expected .*did you mean 'UnfuseProducts'"),
        ({"model": "0" * 32}, "the plan was made for another model, whose nodes are called alike"),
        (None, r"the plan has no \[preparation\] table"),
    ],
)
def test_a_plan_of_something_else_is_refused(
    change: dict[str, Any] | None, sentence: str, perceptron: Any, samples_for: Callable[..., Samples]
) -> None:
    made = plan(perceptron)
    assert made.preparation is not None
    preparation = None if change is None else replace(made.preparation, **change)
    with pytest.raises(SchemeError, match=sentence):
        quantize(perceptron, samples_for(perceptron), scheme=replace(made, preparation=preparation))
