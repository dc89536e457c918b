"""MergeTransposes composes, drops and turns into Reshapes."""

from __future__ import annotations

import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample
from onnx import ModelProto

from onnxq.passes import MergeTransposes


def between(shape: str, body: str) -> ModelProto:
    made = model(f"g (float[{shape}] x) => (float y) {{ t = Neg(x) {body} y = Exp(z) }}")
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


@pytest.mark.parametrize(
    ("shape", "body", "left"),
    [
        ("B,3,4,5", "a = Transpose<perm=[0,2,3,1]>(t) z = Transpose<perm=[0,3,1,2]>(a)", []),
        ("B,3,4,5", "a = Transpose<perm=[0,2,3,1]>(t) z = Transpose<perm=[0,2,3,1]>(a)", ["Transpose"]),
        ("B,C", "a = Transpose(t) z = Transpose(a)", []),
        ("B,3,4", "z = Transpose<perm=[0,1,2]>(t)", []),
        ("40,2,1,128", "z = Transpose<perm=[0,2,1,3]>(t)", ["Reshape"]),
        ("B,1,64", "z = Transpose<perm=[1,0,2]>(t)", ["Reshape"]),
        ("B,L,1,64", "z = Transpose<perm=[0,2,1,3]>(t)", ["Transpose"]),
        ("B,L,64", "z = Transpose<perm=[0,2,1]>(t)", ["Transpose"]),
        ("1,B,8,C", "a = Transpose<perm=[1,0,2,3]>(t) z = Transpose<perm=[0,1,3,2]>(a)", ["Transpose"]),
    ],
)
def test_transposes(shape: str, body: str, left: list[str]) -> None:
    made = between(shape, body)
    graph = named_graph(made)
    apply_once(MergeTransposes(), graph)
    assert ops(graph) == ["Neg", *left, "Exp"]
    for free in (1, 2):
        assert difference(outputs(graph, sample(made, 0, free)), outputs(made, sample(made, 0, free))) == 0


@pytest.mark.parametrize("perm", ["<perm=[0,0,1]>", "<perm=[0,1]>", ""])
def test_orders_that_are_none_stay(perm: str) -> None:
    graph = named_graph(between("2,3,4", f"u = local.F(t) z = Transpose{perm}({'t' if perm else 'u'})"))
    changes = MergeTransposes().apply(graph)
    assert not changes
    assert changes.skipped[0][1] == "its order of dimensions is not known"
