"""Layer normalization in every spelling becomes one node, or the one spelling that runtimes know."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import save
from onnxq.passes import DivideBySquareRoot, FoldAffineIntoNormalization, FuseLayerNormalization
from onnxq.rewrite import RewriteRules

RunningGraph = Callable[[Path], onnx.GraphProto]

CENTRES = ("c = Sub(x, u)", "c = Sub(x, u) d = Sub(x, u)")
SQUARES = ("p = Pow({0}, two)", "p = Mul({0}, {0})")
ENDS = ("n = Div(c, s)", "r = Reciprocal(s) n = Mul(c, r)", "r = Div(one, s) n = Mul(r, c)")
FORMS = list(product(CENTRES, SQUARES, ENDS))


def spelled(
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
@pytest.mark.parametrize("form", FORMS)
def test_becomes_one_node(form: tuple[str, str, str], opset: int) -> None:
    made = spelled(*form, opset=opset)
    graph = named_graph(made)
    apply_once(RewriteRules((DivideBySquareRoot(), FuseLayerNormalization(), FoldAffineIntoNormalization())), graph)
    assert ops(graph) == ["LayerNormalization", "Neg"]
    assert np.array_equal(graph.nodes[0].inputs[1].values, values(8))
    assert np.array_equal(graph.nodes[0].inputs[2].values, values(8, seed=1))
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_before_opset_17_becomes_what_onnxruntime_fuses(
    form: tuple[str, str, str], tmp_path: Path, running_graph: RunningGraph
) -> None:
    made = spelled(*form, opset=14)
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
        (spelled(*FORMS[0], axis=1, shape="2, 8, 8"), "another axis than the last"),
        (spelled(*FORMS[0], shape="2, N, K"), "length of what it normalizes is unknown"),
    ],
)
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = FuseLayerNormalization().apply(named_graph(made)).skipped
    assert reason in found


def test_leaves_the_spread_around_another_mean() -> None:
    made = spelled(*FORMS[0])
    made.graph.node[1].input[0] = "bias"
    assert not FuseLayerNormalization().apply(named_graph(made)).changed


def test_works_in_a_body() -> None:
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


def test_doubles_keep_their_precision() -> None:
    made = model(
        """g (double[2, 8] x) => (double[2, 8] n) {
            u = ReduceMean <axes = [-1]> (x) c = Sub(x, u) p = Mul(c, c) v = ReduceMean <axes = [-1]> (p)
            e = Add(epsilon, v) s = Sqrt(e) n = Div(c, s) }""",
        opset=17, epsilon=np.array(1e-5),
    )  # fmt: skip
    ((_, reason),) = FuseLayerNormalization().apply(named_graph(made)).skipped
    assert reason == "float64 would be normalized with float32"
