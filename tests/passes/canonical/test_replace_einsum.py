"""Equations that are products of matrices become MatMul."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.passes import ReplaceEinsum

EXTENTS = {"b": "2", "s": "N", "q": "3", "k": "5", "h": "2", "d": "4", "n": "2", "i": "3", "j": "4", "m": "6"}


def dims(term: str) -> str:
    return ", ".join(EXTENTS[name] for name in term)


def einsum(equation: str, *, constant: str = "", kind: str = "float") -> ModelProto:
    """The equation with the operand of that name (x or w) as a constant."""
    terms, result = equation.replace(" ", "").split("->")
    first, second = terms.split(",")
    inputs = [f"{kind}[{dims(term)}] {name}" for name, term in (("x", first), ("w", second)) if name != constant]
    term = {"x": first, "w": second}.get(constant)
    given = {} if term is None else {constant: values(*(int(EXTENTS[name]) for name in term))}
    return model(
        f"""g ({", ".join(inputs)}) => ({kind}[{dims(result)}] y) {{ y = Einsum <equation = "{equation}"> (x, w) }}""",
        **given,
    )


@pytest.mark.parametrize(
    ("equation", "constant", "expected"),
    [
        ("bsj,jk->bsk", "w", ["MatMul"]),
        ("bsj,kj->bsk", "w", ["MatMul"]),
        ("bsd,hnd->bshn", "w", ["MatMul", "Reshape"]),
        ("bshd,hdm->bsm", "w", ["Reshape", "MatMul"]),
        ("bshd, hdnm -> bsnm", "w", ["Reshape", "MatMul", "Reshape"]),
        ("bsj,jk->bks", "w", ["MatMul", "Transpose"]),
        ("bjs,jk->bsk", "w", ["Transpose", "MatMul"]),
        ("jk,bsj->bsk", "x", ["MatMul"]),
        ("qd,kd->qk", "", ["Transpose", "MatMul"]),
        ("bhqd,bhkd->bhqk", "", ["Transpose", "MatMul"]),
        ("bhqk,bhkd->bhqd", "", ["MatMul"]),
        ("bqhd,bkhd->bhqk", "", ["Transpose", "Transpose", "MatMul"]),
        ("bhqk,bkhd->bqhd", "", ["Transpose", "MatMul", "Transpose"]),
        ("bhkd,bhqk->bhqd", "", ["MatMul"]),
        ("hqd,hdk->hqk", "w", ["MatMul"]),
    ],
)
def test_becomes_a_product(equation: str, constant: str, expected: list[str]) -> None:
    made = einsum(equation, constant=constant)
    graph = named_graph(made)
    apply_once(ReplaceEinsum(), graph)
    assert ops(graph) == expected
    assert [node.op for node in graph.nodes if node.name == "Einsum_y"] == ["MatMul"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (einsum("ij,ij->ij"), "it has no rows, no columns"),
        (einsum("ij,km->ijkm"), "it has no rows, no columns"),
        (einsum("ij,jk->k"), "no product of two tensors"),
        (einsum("bsqd,bhd->bsqh"), "several axes"),
        (einsum("bis,bsj->bij"), ""),
        (einsum("ij,jk->ik", kind="int32"), "not known well enough"),
    ],
)
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    changes = ReplaceEinsum().apply(named_graph(made))
    assert [reason in found for _, found in changes.skipped] == ([True] if reason else [])
    assert bool(changes) == (not reason)


def test_extents_that_may_differ_are_left() -> None:
    made = einsum("bis,bsj->bij")
    made.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "M"
    ((_, reason),) = ReplaceEinsum().apply(named_graph(made)).skipped
    assert reason == "the extents that it sums over are not known to be the same"


def test_a_weight_that_is_in_order_is_not_copied() -> None:
    graph = named_graph(einsum("bsj,jk->bsk", constant="w"))
    weight = graph.nodes[0].inputs[1]
    ReplaceEinsum().apply(graph)
    assert graph.nodes[0].inputs[1] is weight
    assert isinstance(weight.values, np.ndarray)


def test_a_weight_that_others_read_is_not_turned() -> None:
    made = einsum("bsj,kj->bsk", constant="w")
    made.graph.node.add(op_type="Neg", input=["w"], output=["other"])
    ((_, reason),) = ReplaceEinsum().apply(named_graph(made)).skipped
    assert reason == "others read its weight as it is"
