"""Normalization by the mean square in every spelling becomes one node, or the one spelling that runtimes know."""

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
from onnxq.passes import (
    DivideBySquareRoot,
    FoldAffineIntoNormalization,
    FuseLayerNormalization,
    FuseRmsNormalization,
)
from onnxq.rewrite import RewriteRules

RunningGraph = Callable[[Path], onnx.GraphProto]

SQUARES = ("p = Pow(x, two)", "p = Mul(x, x)")
ENDS = ("n = Div(x, s)", "r = Reciprocal(s) n = Mul(x, r)", "r = Div(one, s) n = Mul(r, x)")
FORMS = list(product(SQUARES, ENDS))


def spelled(square: str, end: str, *, opset: int, shape: str = "2, N, 8", axis: int = -1) -> ModelProto:
    mean = f"ReduceMean <axes = [{axis}]>(p)" if opset < 18 else "ReduceMean(p, axes)"
    axes = {} if opset < 18 else {"axes": np.array([axis])}
    return model(
        f"""g (float[{shape}] x) => (float[{shape}] y) {{
            {square} v = {mean} e = Add(v, epsilon) s = Sqrt(e) {end} m = Mul(w, n) y = Neg(m) }}""",
        opset=opset, ir_version=8 if opset < 23 else 11, epsilon=np.array(1e-6, np.float32),
        two=np.array(2, np.float32), one=np.array(1, np.float32), w=values(8), **axes,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_becomes_one_node(form: tuple[str, str]) -> None:
    made = spelled(*form, opset=23)
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
@pytest.mark.parametrize("form", FORMS)
def test_before_opset_23_becomes_what_onnxruntime_fuses(
    form: tuple[str, str], opset: int, tmp_path: Path, running_graph: RunningGraph
) -> None:
    made = spelled(*form, opset=opset)
    graph = named_graph(made)
    changes = apply_once(RewriteRules((FuseRmsNormalization(), DivideBySquareRoot())), graph)
    assert bool(changes) == (form != FORMS[0])
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
        (spelled(*FORMS[0], opset=23, axis=1, shape="2, 8, 8"), "another axis than the last"),
        (spelled(*FORMS[0], opset=23, shape="2, N, K"), "length of what it normalizes is unknown"),
    ],
)
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = FuseRmsNormalization().apply(named_graph(made)).skipped
    assert reason in found


def test_works_in_a_body() -> None:
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


def test_doubles_keep_their_precision() -> None:
    made = model(
        """g (double[2, 8] x) => (double[2, 8] n) {
            p = Mul(x, x) v = ReduceMean(p, axes)
            e = Add(epsilon, v) s = Sqrt(e) n = Div(x, s) }""",
        opset=23, epsilon=np.array(1e-5), axes=np.array([-1]),
    )  # fmt: skip
    ((_, reason),) = FuseRmsNormalization().apply(named_graph(made)).skipped
    assert reason == "float64 would be normalized with float32"
