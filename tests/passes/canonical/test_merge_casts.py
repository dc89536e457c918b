"""MergeCasts drops what does not change a type, and what is cast again without a loss between."""

from __future__ import annotations

import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample
from onnx import TensorProto

from onnxq.passes import MergeCasts

TYPES = {name.lower(): number for name, number in TensorProto.DataType.items()}


@pytest.mark.parametrize(
    ("source", "casts", "left"),
    [
        ("float", ["float"], []),
        ("float", ["double"], ["double"]),
        ("float16", ["float", "double"], ["double"]),
        ("float16", ["float", "int32"], ["int32"]),
        ("float", ["double", "float"], []),
        ("float", ["float16", "float"], ["float16", "float"]),
        ("int32", ["int64", "int32"], []),
        ("int32", ["int64", "float", "float"], ["float"]),
        ("int32", ["float", "int32"], ["float", "int32"]),
        ("int64", ["double", "int64"], ["double", "int64"]),
        ("uint8", ["float", "int8"], ["float", "int8"]),
        ("uint8", ["float", "int32"], ["int32"]),
        ("bool", ["int64", "float"], ["float"]),
        ("float", ["bool", "float"], ["bool", "float"]),
        ("float", ["int32", "float"], ["int32", "float"]),
    ],
)
def test_casts(source: str, casts: list[str], left: list[str]) -> None:
    body = " ".join(f"t{place + 1} = Cast<to = {TYPES[to]}>(t{place})" for place, to in enumerate(casts))
    last = {"bool": "Not"}.get(casts[-1], "Abs")
    made = model(f"g ({source}[4] x) => ({casts[-1]}[4] y) {{ t0 = Identity(x) {body} y = {last}(t{len(casts)}) }}")
    graph = named_graph(made)
    apply_once(MergeCasts(), graph)
    assert [node.attrs["to"] for node in graph.nodes if node.op == "Cast"] == [TYPES[name] for name in left]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0


def test_a_cast_that_others_read_stays_for_them() -> None:
    text = "g (float16[4] x) => (double[4] y, float[4] z) { a = Cast<to = 1>(x) y = Cast<to = 11>(a) z = Neg(a) }"
    graph = named_graph(model(text))
    assert MergeCasts().apply(graph).changed
    assert [node.inputs[0].name for node in graph.nodes] == ["x", "x", "a"]


def test_unknown_types_and_outputs_stay() -> None:
    graph = named_graph(
        model("g (float[4] x) => (float[4] y) { a = local.F(x) b = Cast<to = 1>(a) y = Cast<to = 1>(x) }")
    )
    reasons = [reason for _, reason in MergeCasts().apply(graph).skipped]
    assert reasons == ["the type of its input is not known", "its output is an output of the graph"]
    assert ops(graph) == ["F", "Cast", "Cast"]
