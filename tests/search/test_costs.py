"""What nodes and borders cost, and the choice of least cost, with times and errors that are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Build
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.ir import as_graph
from onnxq.lowering import AllowedOps
from onnxq.planning.plan import Demotion
from onnxq.runtime.sessions import multiplies_experts
from onnxq.runtime.targets import target_named
from onnxq.search.assignment import Border
from onnxq.search.costs import FINER, FINEST, Costs, Offer, offers_of
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.search.sensitivity import SILENT, QuantizerId, Sensitivities

Open = Callable[..., PreparedModel]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Return a function: a model, a scheme and a target to the prepared model."""

    def opened(
        model: ModelProto, scheme: str = "int8", target: str = "onnxruntime-cpu", emit: AllowedOps = AllowedOps.QDQ
    ) -> PreparedModel:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return open_prepared_model(as_graph(model), preset_named(scheme), target_named(target), folder, emit)

    return opened


def times(nodes: Mapping[str, float], borders: Mapping[str, float] | None = None) -> NodeTimes:
    return NodeTimes(nodes, borders or {}, dict.fromkeys(nodes, 1_000.0), 0.0)


def costs_of(model: PreparedModel, floats: NodeTimes, scheme: NodeTimes, dynamic: NodeTimes | None = None) -> Costs:
    """Return the costs of a model whose profiles are given."""
    full = model.plan({})
    offers = [offer for offer in offers_of(model, full) if offer.mode is Mode.DYNAMIC] if dynamic else []
    return Costs.of(model, full, (floats, scheme), tuple(replace(one, times=dynamic) for one in offers if dynamic))


def errors(nodes: Mapping[str, float], **tensors: float) -> Sensitivities:
    """Return the errors of one output: ratios by node and by tensor."""
    ratios = {QuantizerId(node, is_node=True): np.array([ratio]) for node, ratio in nodes.items()}
    return Sensitivities({**ratios, **{QuantizerId(tensor): np.array([ratio]) for tensor, ratio in tensors.items()}})


# Times of nodes and borders


@pytest.fixture
def gated(build: Build) -> ModelProto:
    """Return two convolutions with a node between them that is never an integer kernel."""
    return build(
        "(float[1,8,8,8] x) => (float[1,8,6,6] y) { [a] p = Conv(x, w0) [tanh] q = Tanh(p) [b] y = Conv(q, w1) }",
        w0=(8, 8, 2, 2),
        w1=(8, 8, 2, 2),
    )


@pytest.mark.parametrize(("tanh", "expected"), [((1.0, 5.0), 7.0), ((5.0, 1.0), 3.0)])
def test_a_node_is_charged_for_slower_nodes_behind_it_and_not_credited_for_faster_ones(
    gated: ModelProto, opened: Open, tanh: tuple[float, float], expected: float
) -> None:
    floats, static = (times({"a": own, "tanh": other, "b": own}) for own, other in zip((9.0, 3.0), tanh, strict=True))
    assert costs_of(opened(gated), floats, static).static_times == {"a": expected, "b": 3.0}


def test_measured_borders_count_in_their_direction_and_others_by_size(gated: ModelProto, opened: Open) -> None:
    floats = times({"a": 9.0, "tanh": 1.0, "b": 9.0})
    static = times({"a": 3.0, "tanh": 1.0, "b": 3.0}, {"p": 5_000.0, "q": 4_000.0})
    costs = costs_of(opened(gated), floats, static)
    assert costs.borders == (
        Border(None, ("a",), 3_000, 3_000, tensor="x"),
        Border("a", ("tanh",), 7_000, 5_000, tensor="p"),
        Border(None, ("b",), 4_000, 8_000, tensor="q"),
        Border("b", ("",), 7_000, 8_000, tensor="y"),
    )
    # No node is worth its borders.
    assert costs.best(SILENT, 0.0).static == frozenset()
    # Where a kernel outputs either, floats cost their bytes.
    other = replace(costs, target=target_named("openvino"))
    assert [one for one in other.borders if one.tensor in ("", "p")] == [
        Border("a", ("tanh",), 7_000, 5_000),
        Border(None, ("tanh",), 0, 0, tensor="p"),
        Border("b", ("",), 7_000, 200),
    ]
    assert other.whole.nanoseconds == 3.0 + 1.0 + 3.0 + 3_000 + 4_000 + 5_000 + 200


def test_outputs_of_graphs_are_floats_and_bodies_share_the_borders_around_them(build: Build, opened: Open) -> None:
    model = build(
        """(float[1,8,8,8] x, bool c) => (float[1,8,6,6] p, float[1,8,4,4] y) {
            [a] p = Conv(x, w0)
            [choose] y = If (c) <
                then_branch = yes () => (float[1,8,4,4] u) { [inner] u = Conv(p, w1) },
                else_branch = no () => (float[1,8,4,4] v) { [other] q = Conv(p, w1) [tanh] v = Tanh(q) }>
        }""",
        w0=(8, 8, 3, 3),
        w1=(8, 8, 3, 3),
    )
    names = ("a", "inner", "other", "tanh")
    costs = costs_of(opened(model), times(dict.fromkeys(names, 9e5)), times(dict.fromkeys(names, 1e5), {"p": 4e3}))
    assert [(one.producer, one.consumers) for one in costs.borders] == [
        (None, ("a",)),
        ("a", ("inner", "other", "")),
        ("inner", ("",)),
        ("other", ("tanh",)),
    ]
    assert costs.best(SILENT, 0.0).static == {"a", "inner", "other"}


def test_clamps_stay_with_their_producer_and_followers_with_their_data(residual: ModelProto, opened: Open) -> None:
    model = opened(residual)
    names = [one.name for one in model.graph.nodes]
    costs = costs_of(model, times(dict.fromkeys(names, 2.0)), times(dict.fromkeys(names, 1.0)))
    followers = set(costs.followers)
    assert {("stem_relu", "stem"), ("stem", "stem_relu")} <= followers
    assert {("sum", "right"), ("sum", "stem_relu"), ("sum_relu", "sum"), ("sum", "sum_relu")} <= followers
    assert ("left", "stem_relu") not in followers


# Other ways to run nodes


@pytest.mark.parametrize(
    ("model", "scheme", "target", "expected"),
    [
        ("perceptron", "int8", "onnxruntime-cpu", {"first", "second"}),
        # The scheme already computes the scales in each run.
        ("perceptron", "int8-dynamic", "onnxruntime-cpu", {"first", "second"}),
        ("perceptron", "int8-storage", "onnxruntime-cpu", None),
        ("perceptron", "int8", "tensorrt", None),
        ("residual", "int8", "onnxruntime-cpu", None),
    ],
)
def test_nodes_may_be_dynamic_where_the_target_has_kernels(
    model: str, scheme: str, target: str, expected: set[str] | None, opened: Open, request: pytest.FixtureRequest
) -> None:
    bench = opened(request.getfixturevalue(model), scheme, target)
    found = {offer.mode: offer.nodes for offer in offers_of(bench, bench.plan({}))}
    assert found == ({Mode.DYNAMIC: expected} if expected else {})


@pytest.mark.skipif(not multiplies_experts(), reason="an old onnxruntime")
@pytest.mark.parametrize(("scheme", "takes"), [("int8", True), ("int8-storage", False)])
def test_experts_may_be_multiplied_unless_the_scheme_stores_them(
    build: Build, opened: Open, scheme: str, takes: bool
) -> None:
    model = build(
        """(float[6,128] x, float[6,4] r) => (float[6,128] y) {
            [experts] y = com.microsoft.MoE <k = 1, activation_type = "relu"> (x, r, w1, b1, w2) }""",
        w1=(4, 128, 128), b1=(4, 128), w2=(4, 128, 128),
    )  # fmt: skip
    model.opset_import.add(domain="com.microsoft", version=1)
    bench = opened(model, scheme, emit=AllowedOps.FASTEST)
    offers = [one for one in offers_of(bench, bench.plan({})) if one.mode is Mode.WEIGHT_ONLY]
    assert [one.nodes for one in offers] == ([{"experts"}] if takes else [])
    assert all(one.weight == bench.target.kernels.multiplied[0] for one in offers)


def test_a_scheme_with_dynamic_nodes_measures_them_itself(perceptron: ModelProto, opened: Open) -> None:
    dynamic = times({"first": 2.0, "relu": 1.0, "second": 20.0})
    costs = costs_of(opened(perceptron, "int8-dynamic"), FLOATS, dynamic)
    assert costs.offered[Mode.DYNAMIC] == {"first": 2.0, "second": 20.0}
    choice = costs.best(SILENT, 0.0)
    assert {name: side.mode for name, side in choice.sides.items()} == {
        "first": Mode.DYNAMIC,
        "relu": Mode.FLOAT,
        "second": Mode.STORAGE,
    }
    assert costs.demotions(choice) == {
        "second": Demotion(
            Mode.STORAGE,
            "not faster as an integer kernel on this machine",
            "0.000 ms in float, 0.000 ms as integers",
        )
    }
    assert costs.demotions(costs.whole) == {}


# The choice of least cost

FLOATS = times({"first": 9.0, "relu": 1.0, "second": 9.0})
SLOW = times({"first": 9e3, "relu": 1e3, "second": 9e3})


def test_a_node_runs_in_the_way_that_is_cheapest_at_a_price(perceptron: ModelProto, opened: Open) -> None:
    dynamic = times({"first": 2.0, "relu": 1.0, "second": 20.0})
    costs = costs_of(opened(perceptron), FLOATS, FLOATS, dynamic)
    noise = replace(errors({"first": 0.01, "second": 0.5}), modes={Mode.DYNAMIC: {"first": 0.5}})

    def sides(price: float) -> list[Mode]:
        return [costs.best(noise, price).sides[name].mode for name in ("first", "second")]

    assert sides(0.0) == [Mode.DYNAMIC, Mode.STORAGE]
    # What is slower than float would only cost accuracy, so it is no choice at any price.
    assert sides(100.0) == [Mode.STORAGE, Mode.STORAGE]
    assert costs.best(SILENT, 0.0, integers=False).sides["first"].mode is Mode.STORAGE
    assert sum(side.error for side in costs.best(noise, 100.0).sides.values()) == pytest.approx(0.51)


def test_a_choice_has_the_time_and_the_error_of_all_its_quantizers(perceptron: ModelProto, opened: Open) -> None:
    static = times({"first": 3e3, "relu": 1e3, "second": 3e3}, {"x": 3e3, "a": 3.5e3})
    costs = costs_of(opened(perceptron), SLOW, static)
    noise = errors({"first": 0.01, "second": 0.02}, x=0.1, h=0.05, b=0.2)
    choice = costs.choice(frozenset({"first", "relu"}), costs.best(noise, 1e9).sides, noise)
    assert choice.static == {"first", "relu"}
    assert choice.nanoseconds >= 3e3 + 1e3 + 9e3 + 3e3
    # Its own weights, what it reads, and what it hands on.
    assert choice.error == pytest.approx(0.01 + 0.02 + 0.1 + 0.2, abs=0.21)
    assert costs.error_of("first", noise) == pytest.approx(0.11)
    assert costs.loudest({"first", "second"}, noise) == ["second", "first"]
    assert str(choice).startswith("2 static, 0 dynamic, 0 finer")


@pytest.mark.parametrize(
    ("price", "without", "expected"),
    [
        (0.0, set(), {"first", "relu", "second"}),
        (0.0, {"second"}, {"first", "relu"}),
        (1e8, set(), {"second"}),
        (1e12, set(), set()),
    ],
)
def test_a_price_of_error_and_what_is_left_out_move_the_cut(
    perceptron: ModelProto, opened: Open, price: float, without: set[str], expected: set[str]
) -> None:
    nodes = {"first": 9e6, "relu": 1e6, "second": 9e6}
    costs = costs_of(opened(perceptron), times(nodes), times({name: time / 3 for name, time in nodes.items()}))
    noise = errors({}, x=0.1, b=1e-4)
    choice = costs.best(noise, price, without=frozenset(without))
    assert choice.static == expected
    assert set(choice.sides) == {"first", "relu", "second"} - expected


def test_the_whole_scheme_is_a_choice_too(residual: ModelProto, opened: Open) -> None:
    model = opened(residual)
    nodes = dict.fromkeys((one.name for one in model.graph.nodes), 1.0)
    costs = costs_of(model, times(nodes), times(nodes))
    assert costs.whole.static == {one.node for one in costs.full.decisions if one.mode is Mode.STATIC}
    assert costs.demotions(costs.whole) == {}


def test_without_times_the_largest_weights_are_worth_most(build: Build, opened: Open) -> None:
    model = opened(
        build("(float[4,64] x) => (float[4,8] y) { [large] a = MatMul(x, w0) [small] y = MatMul(a, w1) }",
              w0=(64, 64), w1=(64, 8))
    )  # fmt: skip
    full = model.plan({})
    costs = Costs.of(model, full, None, ())
    assert costs.best(SILENT, 0.0).static == {"large", "small"}
    noise = errors({}, x=0.1, a=0.1)
    static = [costs.best(noise, 1.1**power).static for power in range(200)]
    assert static[0] == {"large", "small"}
    assert {"large"} in static
    assert {"small"} not in static
    assert static[-1] == frozenset()
    [reason] = {one.reason for one in costs.demotions(costs.best(noise, 1e8), noise).values()}
    assert reason == "an integer kernel of it would cost too much accuracy"


# Weights of more bits


@pytest.fixture
def products(build: Build) -> ModelProto:
    """Return products with weights of 4,096, 2,048 and 512 values."""
    return build(
        "(float[4,64] x) => (float[4,16] y) { [a] p = MatMul(x, w0) [b] q = MatMul(p, w1) [c] y = MatMul(q, w2) }",
        w0=(64, 64),
        w1=(64, 32),
        w2=(32, 16),
    )


NODES = dict.fromkeys("abc", 9e5)


@pytest.mark.parametrize(
    ("scheme", "specs"),
    [("int8", (FINEST,)), ("int8-storage", (FINEST,)), ("int4-block32", (FINER, FINEST)), ("int16-storage", (None,))],
)
def test_weights_can_have_finer_specs_and_floats_where_there_are_none(
    products: ModelProto, opened: Open, scheme: str, specs: tuple[QuantSpec | None, ...]
) -> None:
    if scheme == "int16-storage":
        model = opened(products, "int8-storage")
        rules = tuple(replace(rule, weight=FINEST) for rule in model.scheme.rules)
        model = replace(model, scheme=replace(model.scheme, rules=rules))
    else:
        model = opened(products, scheme)
    costs = Costs.of(model, model.plan({}), (times(NODES), times(NODES)), ())
    assert costs.finer == dict.fromkeys("abc", specs)


@pytest.mark.parametrize(
    ("scheme", "price", "finer", "expected"),
    [
        # Ties go to the smaller file, and only nodes that may have more bits get them.
        ("int8-storage", 0.0, "abc", {}),
        ("int8-storage", 1e9, "ab", {"a": FINEST}),
        ("int8-storage", 1e9, "bc", {"c": FINEST}),
        ("int4-block32", 1e7, "abc", {"a": FINER, "c": FINER}),
        ("int4-block32", 1e12, "abc", {"a": FINEST, "c": FINEST}),
    ],
)
def test_weights_get_the_bits_that_their_error_is_worth(
    products: ModelProto, opened: Open, scheme: str, price: float, finer: str, expected: dict[str, QuantSpec]
) -> None:
    model = opened(products, scheme)
    costs = Costs.of(model, model.plan({}), (times(NODES), times(NODES)), ())
    noise = errors({"a": 0.5, "c": 0.5})
    choice = costs.best(noise, price, finer=frozenset(finer))
    assert {name: side.weight for name, side in choice.sides.items() if side.weight} == expected
    demotions = costs.demotions(choice, noise)
    assert {name: one.weight for name, one in demotions.items()} == expected
    bits = 8 if scheme == "int8-storage" else 4
    assert {one.finer for one in demotions.values()} <= {f"weights of {bits} bits would cost too much accuracy"}


@pytest.mark.parametrize(("most", "expected"), [(0, ""), (512, "c"), (2_600, "bc"), (4_700, "ac"), (1e9, "abc")])
def test_the_bytes_of_finer_weights_go_to_the_most_error_a_byte(
    products: ModelProto, opened: Open, most: float, expected: str
) -> None:
    model = opened(products)
    costs = Costs.of(model, model.plan({}), (times(NODES), times(NODES)), ())
    # Ratios a byte: c, then a, then b; a node without error needs none.
    found = costs.worth_more_bits(errors({"a": 0.04, "b": 0.01, "c": 0.1}), most)
    assert "".join(sorted(found)) == expected
    assert costs.worth_more_bits(SILENT, math.inf) == frozenset()


# Figures and reasons


@pytest.mark.parametrize(
    ("static", "ratio", "reason", "figures"),
    [
        (3e6, 0.01, "the speedup does not justify the accuracy loss", ", 20.0 dB as integers alone"),
        (3e6, 0.0, "its conversions take longer than the integer kernel saves", ""),
        (9e6, 0.01, "not faster as an integer kernel on this machine", ", 20.0 dB as integers alone"),
    ],
)
def test_a_reason_is_what_decided(
    perceptron: ModelProto, opened: Open, static: float, ratio: float, reason: str, figures: str
) -> None:
    floats = {"first": 9e6, "relu": 1e6, "second": 9e6}
    costs = costs_of(opened(perceptron), times(floats), times({**floats, "first": static}))
    noise = errors({"first": ratio})
    choice = costs.choice(frozenset(), costs.best(noise, 0.0, integers=False).sides, noise)
    found = costs.demotions(choice, noise)["first"]
    assert (found.mode, found.reason) == (Mode.STORAGE, reason)
    # It is another reason that weights are too coarse, also where nothing but float is finer.
    assert replace(costs, finer={"first": (None,)}).demotions(choice, noise)["first"] == found
    assert found.figures == f"9.000 ms in float, {static / 1e6:.3f} ms as integers{figures}"


def test_times_of_a_plan_are_those_of_each_node_in_its_mode(perceptron: ModelProto, opened: Open) -> None:
    model = opened(perceptron)
    static = times({"first": 3.0, "relu": 1.0, "second": 2.0}, {"x": 4.0, "b": 5.0})
    costs = costs_of(model, FLOATS, static, times({"first": 1.5, "relu": 1.0, "second": 1.25}))
    expected: dict[str, tuple[dict[str, Demotion], Any]] = {
        "the scheme": ({}, static.nodes),
        "stored": ({"first": Demotion(Mode.STORAGE, "why")}, {**static.nodes, "first": 9.0}),
        "dynamic": ({"second": Demotion(Mode.DYNAMIC, "why")}, {**static.nodes, "second": 1.25}),
    }
    for name, (demotions, nodes) in expected.items():
        plan = model.plan(demotions)
        found = costs.times_of(plan)
        assert found.nodes == nodes, name
        assert found.borders == {one: time for one, time in static.borders.items() if one in plan.by_tensor}, name
    assert isinstance(costs.offers[0], Offer)
