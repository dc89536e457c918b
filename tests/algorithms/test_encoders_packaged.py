"""Encoders that packages register are rows like ours: found by name, given data, and refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Build
from packaged_encoders import HALVED, SEEING, installed_package

from onnxq.algorithms.cache import CodesCache
from onnxq.algorithms.codes import encode_with
from onnxq.algorithms.encoders import encode_array, encode_weight, encoder_named, encoder_of, weight_requests
from onnxq.algorithms.gptq import Compensation
from onnxq.algorithms.recipe import USUAL, Recipe
from onnxq.calibration.data import Data
from onnxq.calibration.statistics import Evidence, observe
from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.errors import SchemeError
from onnxq.evaluation.goal import Goal
from onnxq.ir import Graph, as_graph
from onnxq.numerics.affine import Parameters
from onnxq.numerics.pairs import Pairs
from onnxq.numerics.spec import Granularity, Method, Spec
from onnxq.pipeline import quantize
from onnxq.planning.plan import Decision, Mean, Plan, Weight
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.steps.budget import Budget

MODELS = Path(__file__).parents[2] / "models"
FORCED = Goal(force=True)
FOUR_BITS = Spec("int4", (16,))
CHANNELS = Spec("int8-narrow", Granularity.CHANNEL)
VALUES = np.random.default_rng(0).normal(size=(48, 24)).astype(np.float32)
SOME = Compensation(rows=2000, bits=0)
PRODUCT = "(float[999,48] x) => (float[999,24] y) { [n] y = Gemm(x, w, b) }"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed_package(monkeypatch):
        yield


def by(method: str, spec: Spec = FOUR_BITS) -> Weight:
    return Weight(1, "w", replace(spec, method=method), 1, VALUES.size, 0)


def plan_by(method: str, mode: Mode = Mode.STORAGE, spec: Spec = FOUR_BITS) -> Plan:
    bias = 2 if mode is Mode.STATIC else None
    return Plan((Decision("n", "Gemm", mode, "", (by(method, spec),), bias, "x", Mean("x", -1)),), (), "s", "t")


def graph_of(build: Build, bias: float = 1.0) -> Graph:
    return as_graph(build(PRODUCT, w=VALUES, b=np.full(24, bias, np.float32)))


def data(seed: int) -> np.ndarray:
    """Return data of which a few causes make all channels."""
    causes = np.random.default_rng(0).normal(size=(48, 48)) / np.arange(1, 49)
    return (np.random.default_rng(seed).normal(size=(999, 48)) @ causes.T).astype(np.float32)


def test_an_encoder_is_found_by_the_name_that_it_is_registered_by() -> None:
    assert encoder_named("halved") is HALVED
    assert encoder_named("mse").name is Method.MSE
    found = encode_array(VALUES, replace(FOUR_BITS, method="halved"), channel_axis=1, reduction_axis=0)
    assert (np.abs(found.dequantize()) <= np.abs(VALUES).max() / 2 * 8 / 7).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("halvd", "method 'halvd' is not known, nor an encoder of an installed package, .* did you mean 'halved'"),
        ("nothing", "Encoder 'nothing' of packaged_encoders:NOTHING cannot be loaded"),
        ("function", "Encoder 'function' is none, expected an onnxq.algorithms.encoders.Encoder of that name"),
        ("twice", "Encoder 'twice' is none, expected an onnxq.algorithms.encoders.Encoder of that name"),
        ("fails", "encoder 'fails' for weight w failed: ZeroDivisionError: no codes"),
        ("writes", "encoder 'writes' for weight w failed: ValueError: assignment destination is read-only"),
    ],
)
def test_one_that_is_wrong_or_fails_is_told_why(name: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        encode_weight(VALUES, by(name))


def test_scales_that_a_kernel_needs_are_kept_or_the_encoder_is_refused(build: Build) -> None:
    graph, given = graph_of(build, bias=1e9), {"x": Parameters(np.array(0.05, np.float32), None)}
    usual, halved = (
        encode_with(plan_by(name, Mode.STATIC, CHANNELS), graph, given, {}).weights["n", 1].parameters.scale
        for name in ("minmax", "halved")
    )
    np.testing.assert_array_equal(usual, halved)
    with pytest.raises(SchemeError, match="'own-scales' for weight w failed: ValueError: it found scales of its own"):
        encode_with(plan_by("own-scales", Mode.STATIC, CHANNELS), graph, given, {})


def test_codes_fit_in_pairs_where_a_kernel_takes_them_so() -> None:
    alone = by("halved", CHANNELS)
    for weight, fits in ((alone, False), (replace(alone, pairs=Pairs.ROW), True)):
        codes = encode_weight(VALUES, weight).codes.astype(int)
        assert bool(np.abs(codes[::2] + codes[1::2]).max() <= 128) is fits


def test_codes_in_a_cache_are_told_apart_by_encoder(build: Build) -> None:
    graph, cache = graph_of(build), CodesCache()
    found = [
        encode_with(plan_by(name), graph, {}, {}, cache=cache).weights["n", 1]
        for name in ("minmax", "halved", "halved")
    ]
    assert (found[0].codes != found[1].codes).any()
    assert found[1] is found[2]


def test_what_asks_for_data_gets_it_at_once_and_nothing_where_none_was_seen(build: Build) -> None:
    graph, plan = graph_of(build), plan_by("seeing")
    requests = weight_requests(plan, graph, SOME)
    assert [(request.tensor, request.kind) for request in requests] == [("x", "gram")]
    evidence = observe({"x": data(1)}, requests, "0" * 32)
    recipe = Recipe(compensation=SOME)
    seen, unseen = (encode_with(plan, graph, {}, {}, one, recipe=recipe) for one in (evidence, Evidence()))
    errors = [np.square(data(2) @ (one.weights["n", 1].dequantize() - VALUES)).sum() for one in (seen, unseen)]
    assert errors[0] < 0.8 * errors[1]
    same = encode_with(plan_by("compensated"), graph, {}, {}, evidence, recipe=recipe).weights["n", 1]
    np.testing.assert_array_equal(seen.weights["n", 1].codes, same.codes)


def test_codes_that_a_package_chooses_are_not_chosen_again(build: Build) -> None:
    graph, plan, every = graph_of(build), plan_by("halved"), Compensation(rows=2000)
    assert encoder_of(plan.decisions[0].weights[0].spec, every) is HALVED
    assert encoder_of(by("seeing").spec, every) is SEEING
    assert weight_requests(plan, graph, every) == ()
    evidence = observe({"x": data(1)}, weight_requests(plan_by("minmax"), graph, every), "0" * 32)
    one, other = (
        encode_with(plan, graph, {}, {}, evidence, recipe=recipe).weights["n", 1].codes
        for recipe in (USUAL, Recipe(compensation=every))
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("greedy", "'greedy' for weight w failed: TypeError: it asks for 'everything' of data, expected Sums whose"),
        ("lost", "'lost' for weight w failed: KeyError: 'Gemm'"),
    ],
)
def test_what_asks_for_data_in_another_way_is_told(name: str, message: str, build: Build) -> None:
    with pytest.raises(SchemeError, match=message):
        weight_requests(plan_by(name), graph_of(build), SOME)


@pytest.mark.parametrize(("method", "usual"), [("halved", "minmax"), ("seeing", "compensated")])
def test_a_scheme_asks_for_it_and_the_plan_makes_the_same_bytes_again(method: str, usual: str, tmp_path: Path) -> None:
    data, first, again, ours = Data(MODELS / "data" / "calib.npz", limit=16), *map(tmp_path.joinpath, "abc")
    off = Budget(search="off", latency=0, accuracy="off")
    scheme = Scheme((Rule(Mode.WEIGHT_ONLY, weight=Spec("int4", (32,), method=method)),))
    plan = quantize(MODELS / "gru.onnx", data, first, scheme=scheme, goal=FORCED, budget=off).report.plan
    assert {weight.spec.method for decision in plan.decisions for weight in decision.weights} == {method}
    assert plan.accuracy == (("compensation",) if method == "seeing" else ())
    save_plan(plan, tmp_path / "plan.toml")
    assert f'method = "{method}"' in (tmp_path / "plan.toml").read_text()
    kept = load_plan(tmp_path / "plan.toml")
    quantize(MODELS / "gru.onnx", data, again, scheme=kept, goal=FORCED, budget=Budget(latency=0))
    assert again.read_bytes() == first.read_bytes()
    scheme = Scheme((Rule(Mode.WEIGHT_ONLY, weight=Spec("int4", (32,), method=usual)),))
    quantize(MODELS / "gru.onnx", data, ours, scheme=scheme, goal=FORCED, budget=off)
    assert (ours.read_bytes() == first.read_bytes()) is (method == "seeing")
