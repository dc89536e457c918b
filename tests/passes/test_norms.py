"""Normalizations that are written out become one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import save
from onnxq.passes import (
    DivideBySquareRoot,
    FoldAffineIntoNormalization,
    FuseLayerNormalization,
    FuseRmsNormalization,
)
from onnxq.passes.norms import normalization_obstacle
from onnxq.rewrite import RewriteRules

# DivideBySquareRoot ---------------------------------------------------------------------------------------------------

INPUTS = {"x": np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4), "v": np.array([[0.5], [2], [3]], np.float32)}


@pytest.mark.parametrize("body", ["r = Reciprocal(s) y = Mul(x, r)", "r = Div(one, s) y = Mul(r, x)"])
def test_becomes_a_division(body: str) -> None:
    made = model(
        f"g (float[3, 4] x, float[3, 1] v) => (float[3, 4] y) {{ s = Sqrt(v) {body} }}", one=np.ones(1, np.float32)
    )
    graph = named_graph(made)
    apply_once(DivideBySquareRoot(), graph)
    assert ops(graph) == ["Sqrt", "Div"]
    assert difference(outputs(graph, INPUTS), outputs(made, INPUTS)) < 1e-6


def test_a_one_that_widens_stays() -> None:
    made = model(
        "g (float[4] x, float[4] v) => (float[1, 4] y) { s = Sqrt(v) r = Div(one, s) y = Mul(r, x) }",
        one=np.ones((1, 1), np.float32),
    )
    ((_, reason),) = DivideBySquareRoot().apply(named_graph(made)).skipped
    assert reason == "its constant may have more dimensions than its data"


def test_a_reciprocal_that_others_read_stays() -> None:
    made = model(
        """g (float[4] x, float[4] v) => (float[4] y, float[4] z) {
            s = Sqrt(v) r = Reciprocal(s) y = Mul(r, x) z = Neg(r) }"""
    )
    assert not DivideBySquareRoot().apply(named_graph(made))


# FuseLayerNormalization -----------------------------------------------------------------------------------------------

RunningGraph = Callable[[Path], onnx.GraphProto]

CENTRES = ("c = Sub(x, u)", "c = Sub(x, u) d = Sub(x, u)")
FUSE_LAYER_NORMALIZATION_SQUARES = ("p = Pow({0}, two)", "p = Mul({0}, {0})")
FUSE_LAYER_NORMALIZATION_ENDS = ("n = Div(c, s)", "r = Reciprocal(s) n = Mul(c, r)", "r = Div(one, s) n = Mul(r, c)")
FUSE_LAYER_NORMALIZATION_FORMS = list(product(CENTRES, FUSE_LAYER_NORMALIZATION_SQUARES, FUSE_LAYER_NORMALIZATION_ENDS))


def spelled_layer(
    centre: str, square: str, end: str, *, opset: int = 17, shape: str = "2, N, 8", axis: int = -1
) -> ModelProto:
    mean = f"ReduceMean <axes = [{axis}]>({{0}})" if opset < 18 else "ReduceMean({0}, axes)"
    source = "d" if "d =" in centre else "c"
    axes = {} if opset < 18 else {"axes": np.array([axis])}
    return model(
        f"""g (float[{shape}] x) => (float[{shape}] y) {{
            u = {mean.format("x")} {centre} {square.format(source)} v = {mean.format("p")}
            e = Add(v, epsilon) s = Sqrt(e) {end} m = Mul(n, w) b = Add(m, bias) y = Neg(b) }}""",
        opset=opset, epsilon=np.array(1e-5, np.float32), two=np.array(2, np.float32), one=np.array(1, np.float32),
        w=values(8), bias=values(8, seed=1), **axes,
    )  # fmt: skip


@pytest.mark.parametrize("opset", [17, 18])
@pytest.mark.parametrize("form", FUSE_LAYER_NORMALIZATION_FORMS)
def test_fuse_layer_normalization_becomes_one_node(form: tuple[str, str, str], opset: int) -> None:
    made = spelled_layer(*form, opset=opset)
    graph = named_graph(made)
    apply_once(RewriteRules((DivideBySquareRoot(), FuseLayerNormalization(), FoldAffineIntoNormalization())), graph)
    assert ops(graph) == ["LayerNormalization", "Neg"]
    assert np.array_equal(graph.nodes[0].inputs[1].values, values(8))
    assert np.array_equal(graph.nodes[0].inputs[2].values, values(8, seed=1))
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize("form", FUSE_LAYER_NORMALIZATION_FORMS)
def test_before_opset_17_becomes_what_onnxruntime_fuses(
    form: tuple[str, str, str], tmp_path: Path, running_graph: RunningGraph
) -> None:
    made = spelled_layer(*form, opset=14)
    graph = named_graph(made)
    changes = apply_once(RewriteRules((FuseLayerNormalization(), DivideBySquareRoot())), graph)
    assert bool(changes) == ("Mul" in "".join(form))
    assert [reason for _, reason in FuseLayerNormalization().apply(graph).skipped] == [
        "ONNX has LayerNormalization from opset 17 on"
    ]
    save(graph, tmp_path / "model.onnx")
    assert [node.op_type for node in running_graph(tmp_path / "model.onnx").node] == ["LayerNormalization", "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (spelled_layer(*FUSE_LAYER_NORMALIZATION_FORMS[0], axis=1, shape="2, 8, 8"), "another axis than the last"),
        (
            spelled_layer(*FUSE_LAYER_NORMALIZATION_FORMS[0], shape="2, N, K"),
            "length of its normalized axis is unknown",
        ),
    ],
)
def test_fuse_layer_normalization_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = FuseLayerNormalization().apply(named_graph(made)).skipped
    assert reason in found


def test_leaves_the_spread_around_another_mean() -> None:
    made = spelled_layer(*FUSE_LAYER_NORMALIZATION_FORMS[0])
    made.graph.node[1].input[0] = "bias"
    assert not FuseLayerNormalization().apply(named_graph(made)).changed


def test_fuse_layer_normalization_works_in_a_body() -> None:
    made = model(
        """g (float[2, 8] x, bool k) => (float[2, 8] y) {
            y = If (k) <
                then_branch = yes () => (float[2, 8] n) {
                    u = ReduceMean <axes = [-1]> (x) c = Sub(x, u) p = Mul(c, c) v = ReduceMean <axes = [1]> (p)
                    e = Add(epsilon, v) s = Sqrt(e) n = Div(c, s) },
                else_branch = no () => (float[2, 8] m) { m = Neg(x) }> }""",
        epsilon=np.array(1e-5, np.float32),
    )
    graph = named_graph(made)
    apply_once(FuseLayerNormalization(), graph)
    assert ops(graph) == ["If", "LayerNormalization", "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


def test_fuse_layer_normalization_doubles_keep_their_precision() -> None:
    made = model(
        """g (double[2, 8] x) => (double[2, 8] n) {
            u = ReduceMean <axes = [-1]> (x) c = Sub(x, u) p = Mul(c, c) v = ReduceMean <axes = [-1]> (p)
            e = Add(epsilon, v) s = Sqrt(e) n = Div(c, s) }""",
        opset=17, epsilon=np.array(1e-5),
    )  # fmt: skip
    ((_, reason),) = FuseLayerNormalization().apply(named_graph(made)).skipped
    assert reason == "float64 would be normalized with float32"


# FuseRmsNormalization -------------------------------------------------------------------------------------------------

FUSE_RMS_NORMALIZATION_SQUARES = ("p = Pow(x, two)", "p = Mul(x, x)")
FUSE_RMS_NORMALIZATION_ENDS = ("n = Div(x, s)", "r = Reciprocal(s) n = Mul(x, r)", "r = Div(one, s) n = Mul(r, x)")
FUSE_RMS_NORMALIZATION_FORMS = list(product(FUSE_RMS_NORMALIZATION_SQUARES, FUSE_RMS_NORMALIZATION_ENDS))


def spelled_rms(square: str, end: str, *, opset: int, shape: str = "2, N, 8", axis: int = -1) -> ModelProto:
    mean = f"ReduceMean <axes = [{axis}]>(p)" if opset < 18 else "ReduceMean(p, axes)"
    axes = {} if opset < 18 else {"axes": np.array([axis])}
    return model(
        f"""g (float[{shape}] x) => (float[{shape}] y) {{
            {square} v = {mean} e = Add(v, epsilon) s = Sqrt(e) {end} m = Mul(w, n) y = Neg(m) }}""",
        opset=opset, ir_version=8 if opset < 23 else 11, epsilon=np.array(1e-6, np.float32),
        two=np.array(2, np.float32), one=np.array(1, np.float32), w=values(8), **axes,
    )  # fmt: skip


@pytest.mark.parametrize("form", FUSE_RMS_NORMALIZATION_FORMS)
def test_fuse_rms_normalization_becomes_one_node(form: tuple[str, str]) -> None:
    made = spelled_rms(*form, opset=23)
    graph = named_graph(made)
    apply_once(
        RewriteRules(
            (DivideBySquareRoot(), FuseRmsNormalization(), FuseLayerNormalization(), FoldAffineIntoNormalization())
        ),
        graph,
    )
    assert ops(graph) == ["RMSNormalization", "Neg"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize("opset", [14, 18])
@pytest.mark.parametrize("form", FUSE_RMS_NORMALIZATION_FORMS)
def test_before_opset_23_becomes_what_onnxruntime_fuses(
    form: tuple[str, str], opset: int, tmp_path: Path, running_graph: RunningGraph
) -> None:
    made = spelled_rms(*form, opset=opset)
    graph = named_graph(made)
    changes = apply_once(RewriteRules((FuseRmsNormalization(), DivideBySquareRoot())), graph)
    assert bool(changes) == (form != FUSE_RMS_NORMALIZATION_FORMS[0])
    assert [reason for _, reason in FuseRmsNormalization().apply(graph).skipped] == [
        "ONNX has RMSNormalization from opset 23 on"
    ]
    save(graph, tmp_path / "model.onnx")
    running = running_graph(tmp_path / "model.onnx")
    assert [node.op_type for node in running.node] == ["SimplifiedLayerNormalization", "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            spelled_rms(*FUSE_RMS_NORMALIZATION_FORMS[0], opset=23, axis=1, shape="2, 8, 8"),
            "another axis than the last",
        ),
        (
            spelled_rms(*FUSE_RMS_NORMALIZATION_FORMS[0], opset=23, shape="2, N, K"),
            "length of its normalized axis is unknown",
        ),
    ],
)
def test_fuse_rms_normalization_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = FuseRmsNormalization().apply(named_graph(made)).skipped
    assert reason in found


def test_fuse_rms_normalization_works_in_a_body() -> None:
    made = model(
        """g (float[2, 8] x, bool k) => (float[2, 8] y) {
            y = If (k) <
                then_branch = yes () => (float[2, 8] n) {
                    p = Mul(x, x) v = ReduceMean <axes = [1]> (p) e = Add(epsilon, v) s = Sqrt(e) n = Div(x, s) },
                else_branch = no () => (float[2, 8] m) { m = Neg(x) }> }""",
        epsilon=np.array(1e-5, np.float32),
    )
    graph = named_graph(made)
    apply_once(FuseRmsNormalization(), graph)
    assert ops(graph) == ["If", "Pow", "ReduceMean", "Add", "Sqrt", "Div", "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


def test_fuse_rms_normalization_doubles_keep_their_precision() -> None:
    made = model(
        """g (double[2, 8] x) => (double[2, 8] n) {
            p = Mul(x, x) v = ReduceMean(p, axes)
            e = Add(epsilon, v) s = Sqrt(e) n = Div(x, s) }""",
        opset=23, epsilon=np.array(1e-5), axes=np.array([-1]),
    )  # fmt: skip
    ((_, reason),) = FuseRmsNormalization().apply(named_graph(made)).skipped
    assert reason == "float64 would be normalized with float32"


# FoldAffineIntoNormalization ------------------------------------------------------------------------------------------


def norm(
    tail: str, *, given: str = "x, w, b", shape: str = "2, N, 8", axis: int = -1, **constants: np.ndarray
) -> object:
    text = f"g (float[{shape}] x) => (float[{shape}] y) {{ n = LayerNormalization <axis = {axis}> ({given}) {tail} }}"
    return model(text, w=values(8), b=values(8, seed=1), **constants)


@pytest.mark.parametrize("given", ["x, w, b", "x, w"])
@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8), (1,), (), (1, 1, 1)])
@pytest.mark.parametrize("tail", ["y = Mul(n, k)", "y = Add(k, n)", "m = Mul(k, n) a = Add(m, k) y = Mul(a, k)"])
def test_scale_and_bias_take_them(tail: str, shape: tuple[int, ...], given: str) -> None:
    made = norm(tail, given=given, k=values(*shape, seed=2))
    graph = named_graph(made)
    apply_once(FoldAffineIntoNormalization(), graph)
    assert ops(graph) == ["LayerNormalization"]
    assert graph.nodes[0].attrs["axis"] == -1
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


def test_rms_normalization_takes_a_scale() -> None:
    made = model(
        "g (float[2, 8] x) => (float[2, 8] y) { n = RMSNormalization(x, w) m = Mul(n, k) y = Add(m, k) }",
        opset=23, ir_version=11, w=values(8), k=values(8, seed=2),
    )  # fmt: skip
    graph = named_graph(made)
    apply_once(FoldAffineIntoNormalization(), graph)
    assert ops(graph) == ["RMSNormalization", "Add"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (norm("y = Mul(n, k)", shape="2, 3, 8", k=values(3, 1)), "varies along another axis"),
        (norm("y = Mul(n, k)", shape="2, 8", k=values(1, 2, 8)), "more dimensions than its data"),
        (norm("y = Mul(n, k)", shape="2, 8", given="x, v", axis=0, v=values(2, 8), k=values(8)), "several axes"),
    ],
)
def test_fold_affine_into_normalization_a_refusal_has_its_reason(made: object, reason: str) -> None:
    ((_, found),) = FoldAffineIntoNormalization().apply(named_graph(made)).skipped
    assert reason in found


def test_leaves_a_normalization_that_others_read() -> None:
    made = model(
        "g (float[2, 8] x) => (float[2, 8] y, float[2, 8] z) { n = LayerNormalization(x, w) y = Mul(n, w) z = Neg(n) }",
        w=values(8),
    )
    assert not FoldAffineIntoNormalization().apply(named_graph(made))


# Normalizations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape", "axes", "opset", "reason"),
    [
        ("float", "2, 8", [-1], 23, ""),
        ("float", "2, 8", [1], 23, ""),
        ("float", "2, 8", [0], 23, "it normalizes along another axis than the last"),
        ("float", "2, 8", [-1], 22, "ONNX has RMSNormalization from opset 23 on"),
        ("float", "2, K", [-1], 23, "the type or length of its normalized axis is unknown"),
        ("double", "2, 8", [-1], 23, "float64 would be normalized with float32"),
    ],
)
def test_an_obstacle_has_its_reason(kind: str, shape: str, axes: Sequence[int], opset: int, reason: str) -> None:
    graph = named_graph(
        model(f"g ({kind}[{shape}] x) => ({kind}[2, 1] y) {{ y = ReduceMean(x, axes) }}", opset=18, axes=np.array(axes))
    )
    (mean,) = graph.nodes
    found = SimpleNamespace(opset=opset, values={}, nodes=[mean], x=graph.inputs[0])
    assert normalization_obstacle(found, "RMSNormalization", 23, mean) == reason
    assert normalization_obstacle(found, "RMSNormalization", 23) != "it normalizes along another axis than the last"
