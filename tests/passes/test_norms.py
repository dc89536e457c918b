"""Normalizations that are written out become one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from model_texts import apply_once, difference, model, named_graph, outputs, sample, values, variances
from rule_cases import Case, Rule, table

from onnxq.ir import save
from onnxq.passes import (
    DivideBySquareRoot,
    FoldAffineIntoNormalization,
    FuseLayerNormalization,
    FuseRmsNormalization,
)
from onnxq.passes.norms import normalization_obstacle
from onnxq.rewrite import RewriteRules

RunningGraph = Callable[[Path], onnx.GraphProto]

root = Rule(DivideBySquareRoot(), "float[3, 4] x, float[3, 1] v", one=np.ones(1, np.float32))
ROOTS = [
    *(root(f"s = Sqrt(v) {body}", "Sqrt Div", feed={"x": values(3, 4), "v": variances(3, 1)})
      for body in ("r = Reciprocal(s) y = Mul(x, r)", "r = Div(one, s) y = Mul(r, x)")),
    root("s = Sqrt(v) r = Div(one, s) y = Mul(r, x)", inputs="float[4] x, float[4] v", runs=False,
         one=np.ones((1, 1), np.float32), stays="its constant may have more dimensions than its data"),
    root("s = Sqrt(v) r = Reciprocal(s) z = Mul(r, x) w = Neg(r) y = Add(w, z)", runs=False, stays=""),
]  # fmt: skip

CENTRES = ("c = Sub(x, u) p = {0}", "c = Sub(x, u) d = Sub(x, u) p = {1}")
SQUARES = ("Pow({0}, two)", "Mul({0}, {0})")
ENDS = ("n = Div({0}, s)", "r = Reciprocal(s) n = Mul({0}, r)", "r = Div(one, s) n = Mul(r, {0})")
LAYERS = [
    f"u = MEAN(x) {centre.format(square.format('c'), square.format('d'))} v = MEAN(p) e = Add(v, epsilon) s = Sqrt(e) "
    f"{end.format('c')}"
    for centre, square, end in product(CENTRES, SQUARES, ENDS)
]
ROOT_MEAN_SQUARES = [
    f"p = {square.format('x')} v = MEAN(p) e = Add(v, epsilon) s = Sqrt(e) {end.format('x')}"
    for square, end in product(SQUARES, ENDS)
]
AFFINE = " m = Mul(n, w) b = Add(m, bias) y = Neg(b)"
SCALED = " m = Mul(w, n) y = Neg(m)"
written_out = Rule(
    (DivideBySquareRoot(), FuseLayerNormalization(), FuseRmsNormalization(), FoldAffineIntoNormalization()),
    "float[2, N, 8] x", epsilon=1e-5, two=2, one=1, w=values(8), bias=values(8, seed=1), axes=[-1],
)  # fmt: skip


def averaged(body: str, opset: int, axis: int = -1) -> str:
    """The body with means as the opset writes them."""
    for tensor in "xp":
        mean = f"ReduceMean<axes = [{axis}]>({tensor})" if opset < 18 else f"ReduceMean({tensor}, axes)"
        body = body.replace(f"MEAN({tensor})", mean)
    return body


def stays(rule: type, body: str, why: str, *, inputs: str = "", opset: int = 17, **options: object) -> Case:
    body = averaged(body, opset, axis=1 if "another axis" in why else -1)
    return written_out(body, step=rule(), inputs=inputs, opset=opset, runs=False, stays=why, **options)


NORMALIZATIONS = [
    *(written_out(averaged(body + AFFINE, opset), "LayerNormalization Neg", opset=opset,
                  holds=lambda graph: all(np.array_equal(graph.nodes[0].inputs[1 + seed].values, values(8, seed=seed))
                                          for seed in (0, 1)))
      for opset in (17, 18) for body in LAYERS),
    *(written_out(averaged(body + SCALED, 23), "RMSNormalization Neg", opset=23) for body in ROOT_MEAN_SQUARES),
    stays(FuseLayerNormalization, f"{LAYERS[0]} y = Neg(n)", "another axis than the last", inputs="float[2, 8, 8] x"),
    stays(FuseLayerNormalization, f"{LAYERS[0]} y = Neg(n)", "length of its normalized axis is unknown",
          inputs="float[2, N, K] x"),
    stays(FuseLayerNormalization, f"{LAYERS[0]} y = Neg(n)", "float64 would be normalized with float32",
          inputs="double[2, 8] x", epsilon=np.array(1e-5), two=np.array(2.0)),
    stays(FuseLayerNormalization, f"{LAYERS[0].replace('Sub(x', 'Sub(bias')} y = Neg(n)", ""),
    stays(FuseRmsNormalization, f"{ROOT_MEAN_SQUARES[0]} y = Neg(n)", "another axis than the last", opset=23,
          inputs="float[2, 8, 8] x", axes=[1]),
    stays(FuseRmsNormalization, f"{ROOT_MEAN_SQUARES[0]} y = Neg(n)", "length of its normalized axis is unknown",
          opset=23, inputs="float[2, N, K] x"),
    stays(FuseRmsNormalization, f"{ROOT_MEAN_SQUARES[3]} y = Neg(n)", "float64 would be normalized with float32",
          opset=23, inputs="double[2, 8] x", epsilon=np.array(1e-5)),
    # An opset that has no RMSNormalization gets the spelling that onnxruntime fuses, in bodies too.
    *(written_out(
        f"""(float[2, 8] x, bool k) => (y) {{ y = If (k) <then_branch = yes () => (n) {{ {averaged(body, 17)} }},
        else_branch = no () => (m) {{ m = Neg(x) }}> }}""", expected, step=step)
      for step, body, expected in [
          (FuseLayerNormalization(), LAYERS[3], "If LayerNormalization Neg"),
          (FuseRmsNormalization(), ROOT_MEAN_SQUARES[3], "If Pow ReduceMean Add Sqrt Div Neg")]),
]  # fmt: skip

fold = Rule(FoldAffineIntoNormalization(), "float[2, N, 8] x", w=values(8), b=values(8, seed=1), v=values(2, 8))
NORM = "n = LayerNormalization <axis = -1>"
AFFINES = [
    *(fold(f"{NORM} ({given}) {tail}", "LayerNormalization", k=values(*shape, seed=2),
           holds=lambda graph: graph.nodes[0].attrs["axis"] == -1)
      for given in ("x, w, b", "x, w") for shape in ((8,), (1, 8), (1, 1, 8), (1,), (), (1, 1, 1))
      for tail in ("y = Mul(n, k)", "y = Add(k, n)", "m = Mul(k, n) a = Add(m, k) y = Mul(a, k)")),
    fold("n = RMSNormalization(x, w) m = Mul(n, k) y = Add(m, k)", "RMSNormalization Add", inputs="float[2, 8] x",
         opset=23, k=values(8, seed=2)),
    fold(f"{NORM} (x, w, b) y = Mul(n, k)", inputs="float[2, 3, 8] x", k=values(3, 1),
         stays="varies along another axis"),
    fold(f"{NORM} (x, w, b) y = Mul(n, k)", inputs="float[2, 8] x", k=values(1, 2, 8),
         stays="more dimensions than its data"),
    fold("n = LayerNormalization <axis = 0> (x, v) y = Mul(n, w)", inputs="float[2, 8] x", stays="several axes"),
    fold(f"{NORM} (x, w) m = Mul(n, w) z = Neg(n) y = Add(m, z)", stays=""),
]  # fmt: skip


@table(ROOTS, NORMALIZATIONS, AFFINES)
def test_rules(case: Case) -> None:
    case.check()


@pytest.mark.parametrize(
    ("rule", "opset", "body", "fused"),
    [
        *((FuseLayerNormalization, 14, body, "LayerNormalization") for body in LAYERS),
        *((FuseRmsNormalization, opset, body, "SimplifiedLayerNormalization")
          for opset in (14, 18) for body in ROOT_MEAN_SQUARES),
    ],
)  # fmt: skip
def test_older_opsets_get_what_onnxruntime_fuses(
    rule: type, opset: int, body: str, fused: str, tmp_path: Path, running_graph: RunningGraph
) -> None:
    made = written_out(averaged(body + (AFFINE if rule is FuseLayerNormalization else SCALED), opset), opset=opset).made
    graph = named_graph(made)
    changes = apply_once(RewriteRules((rule(), DivideBySquareRoot())), graph)
    assert bool(changes) == ("Mul(" in body)
    ((_, reason),) = rule().apply(graph).skipped
    assert reason.startswith("ONNX has ")
    assert reason.endswith(f"Normalization from opset {17 if rule is FuseLayerNormalization else 23} on")
    save(graph, tmp_path / "model.onnx")
    assert [node.op_type for node in running_graph(tmp_path / "model.onnx").node] == [fused, "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


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
    graph = named_graph(model(f"({kind}[{shape}] x) => (y) {{ y = ReduceMean(x, axes) }}", opset=18, axes=axes))
    (mean,) = graph.nodes
    match = SimpleNamespace(opset=opset, values={}, nodes=[mean], x=graph.inputs[0])
    assert normalization_obstacle(match, "RMSNormalization", 23, mean) == reason
    assert normalization_obstacle(match, "RMSNormalization", 23) != "it normalizes along another axis than the last"
