"""Reshape, Expand, Concat, Split and Slice become one or none."""

from __future__ import annotations

from model_texts import nodes
from rule_cases import Case, Rule, table

from onnxq.ir import Graph
from onnxq.passes import DropExpands, MergeConcats, MergeReshapes, MergeSlices, RemoveUnused, SimplifySplits

reshape = Rule(MergeReshapes(), then=RemoveUnused())


def between(body: str, shape: str, expected: str = "", *numbers: int, **options: object) -> Case:
    """A case between two operators, and the target or axes of the operator that is left."""

    def has_numbers(graph: Graph) -> bool:
        node = graph.nodes[1]
        return list(node.inputs[1].values if len(node.inputs) > 1 else node.attrs["axes"]) == list(numbers)

    holds = has_numbers if numbers else None
    ends = "" if "stays" in options else f"Neg {expected} Exp"
    return reshape(f"t = Neg(x) {body} y = Exp(z)", ends, inputs=f"float[{shape}] x", error=0.0, holds=holds, **options)


PAIR = "a = Reshape(t, p) z = Reshape(a, q)"
TWICE, AGAIN = "a = Unsqueeze(t, p) z = Unsqueeze(a, q)", "a = Squeeze(t, p) z = Squeeze(a, q)"
RESHAPES = [
    between(PAIR, "2,6", "Reshape", 4, 3, p=[12], q=[4, 3]),
    between(PAIR, "B,6", "Reshape", -1, 3, 2, p=[-1, 2], q=[-1, 3, 2]),
    between(PAIR, "B,6", "Reshape", 0, 6, 1, p=[0, 2, 3], q=[0, -1, 1]),
    between(PAIR, "B,L,6", "Reshape", -1, 2, p=[0, -1], q=[-1, 2]),
    between("a = Flatten(t) z = Unsqueeze(a, p)", "B,C,1,1", "Reshape", 0, 0, 1, p=[2]),
    between("a = Flatten(t) z = Reshape(a, p)", "B,8,2,2", "Reshape", 0, 32, p=[-1, 32]),
    between("a = Squeeze(t, p) z = Unsqueeze(a, q)", "B,1,8", "Reshape", 0, 8, 1, p=[1], q=[2]),
    between(TWICE, "B,8", "Unsqueeze", 1, 3, p=[1], q=[-1]),
    between(TWICE, "B,8", "Unsqueeze", 0, 2, p=[1], q=[0]),
    between(AGAIN, "1,B,1,8", "Squeeze", 0, 2, p=[0], q=[1]),
    between(AGAIN, "1,B,1,8", "Squeeze", 0, 2, p=[-2], q=[0]),
    # A Squeeze without axes takes all that are one, and axes are attributes in older models.
    between("a = Squeeze(t) z = Unsqueeze(a, p)", "2,1,6,1", "Reshape", 1, 2, 6, p=[0]),
    *(between("a = Unsqueeze<axes=[1]>(t) z = Unsqueeze<axes=[0]>(a)", "B,8", "Unsqueeze", 0, 2, opset=opset)
      for opset in (11, 12)),
    # What keeps the shape goes.
    between("z = Reshape(t, p)", "2,6", p=[2, 6]),
    between("z = Reshape(t, p)", "B,6", p=[-1, 6]),
    between("z = Reshape(t, p)", "?,6", p=[-1, 6]),
    between("z = Reshape(t, p)", "B,L,6", p=[0, 0, 6]),
    between("z = Reshape(t, p)", "B,L,6", p=[0, -1, 6]),
    between("z = Flatten(t)", "B,6"),
    between("a = Unsqueeze(t, p) z = Squeeze(a, p)", "?,?", p=[1]),
    between(PAIR, "B,6", p=[-1, 2, 3], q=[-1, 6]),
    between("z = Reshape(t, p)", "7", p=[-1]),
    # What cannot be said in one known target loses its first.
    between(PAIR, "B,L,6", "Reshape", p=[-1, 6], q=[0, 3, 2]),
    between("a = Flatten(t) z = Unsqueeze(a, p)", "B,L", "Unsqueeze", p=[1]),
    between(PAIR, "0,6", "Reshape", p=[6, 0], q=[2, 0], runs=False),
    reshape("(float[2,6] x) => (y, w) { a = Reshape(x, p) z = Unsqueeze(a, q) y = Exp(z) w = Exp(a) }",
            "Reshape Reshape Exp Exp", p=[12], q=[1]),
    # Axes of an unknown rank merge where they count from the front.
    reshape("t = local.F(x) a = Unsqueeze(t, p) z = Unsqueeze(a, q) y = Exp(z)", "F Unsqueeze Exp", p=[1], q=[0]),
    reshape("t = local.F(x) a = Unsqueeze(t, p) z = Unsqueeze(a, q) y = Exp(z)", stays="", p=[1], q=[-1]),
    *(reshape(f"{body} y = Exp(z)", inputs="float[2,6] x, int64[N] k", runs=False, stays="")
      for body in ("z = Unsqueeze(x, k)", "z = Squeeze(x, k)", "z = Reshape(x, k)")),
    reshape("a = Flatten(x) z = Squeeze(a, k) y = Exp(z)", "Squeeze Exp", inputs="float[2,6] x, int64[N] k",
            runs=False),
]  # fmt: skip

expand = Rule(DropExpands(), "float[B, 1] x, float[B, 4] z, float[B, 1] w", ones=[1, 1], wide=[1, 4], deep=[2, 1, 1])
EXPANDS = [
    expand("e = Expand(x, ones) y = Exp(e)", "Exp"),
    expand("e = Expand(x, wide) y = Exp(e)", stays=""),
    expand("e = Expand(x, wide) y = Add(e, z)", "Add"),
    expand("e = Expand(x, wide) y = Sub(z, e)", "Sub"),
    expand("e = Expand(x, wide) y = Mul(e, w)", stays=""),
    expand("e = Expand(x, wide) c = Greater(e, z) y = Where(c, z, e)", "Greater Where"),
    expand("s = Shape(z) e = Expand(x, s) y = Add(e, z)", stays=""),
    expand("e = Expand(x, wide) f = Expand(z, wide) y = Mul(e, f)", "Mul"),
    expand("e = Expand(x, deep) y = Add(e, z)", stays=""),
    expand("a = local.F(x) e = Expand(a, ones) y = Exp(e)", stays="the shape that it makes is not known"),
]

concat = Rule(MergeConcats(), "float[2, 3] x, float[2, 3] z", then=RemoveUnused())


def joins(*names: str) -> object:
    return lambda graph: [[tensor.name for tensor in node.inputs] for node in nodes(graph, "Concat")] == [list(names)]


CONCATS = [
    concat("a = Concat<axis=1>(x, z) y = Concat<axis=1>(z, a, x)", "Concat", holds=joins("z", "x", "z", "x")),
    concat("a = Concat<axis=-1>(x, z) y = Concat<axis=1>(z, a, x)", "Concat", holds=joins("z", "x", "z", "x")),
    concat("a = Concat<axis=1>(x, z) b = Concat<axis=1>(a, x) y = Concat<axis=1>(b, z)", "Concat",
           holds=joins("x", "z", "x", "z")),
    concat("a = Concat<axis=1>(x) b = Neg(a) y = Exp(b)", "Neg Exp"),
    concat("a = Concat<axis=0>(x, z) b = Concat<axis=0>(z, x) y = Concat<axis=1>(a, b)", stays=""),
    concat("a = Concat<axis=1>(x, z) y = Concat<axis=1>(a, a)", stays=""),
    concat("a = Concat<axis=0>(x, x) b = Concat<axis=0>(a, x) c = ReduceMax(a) y = Add(b, c)", stays=""),
]  # fmt: skip

split = Rule(SimplifySplits(), "float[B, 9] x", sizes=[2, 3, 4])
SPLITS = [
    split("a = Split<axis=1>(x) y = Exp(a)", "Exp"),
    split("a, b, c = Split<axis=1>(x, sizes) y = Exp(b)", "Slice Exp"),
    split("a, b, c = Split<axis=-1, split=[2, 3, 4]>(x) y = Exp(c)", "Slice Exp", opset=11),
    split("a, b, c = Split<axis=1>(x) y = Exp(a)", "Slice Exp", opset=13),
    split("a, b = Split<axis=1, num_outputs=2>(x) y = Exp(b)", "Slice Exp", opset=18),
    split("a, b, c = Split<axis=1>(x) y = Add(b, b)", "Slice Add"),
    split("(float[B, 9] x) => (b) { a, b, c = Split<axis=1>(x) }", "Slice"),
    split("a, b, c = Split<axis=1>(x) y = Add(a, b)", stays="several of its parts are read"),
    split("a, b = Split(x) y = Exp(a)", runs=False, stays="the sizes of its parts are not known"),
    split("a, b = Split<axis=1, split=[4, 5]>(x) y = Exp(a)", opset=9,
          stays="the bounds of a Slice are attributes at this opset"),
]  # fmt: skip

cut = Rule(MergeSlices(), "float[B, 8, 8] x", then=RemoveUnused(), zero=[0], one=[1], two=[2], minus=[-1],
           far=[2**63 - 1], eight=[8], back=[-8])  # fmt: skip
SLICES = [
    *(cut(f"t = Neg(x) {body} y = Exp(z)", f"Neg {left} Exp") for body, left in [
        ("a = Slice(t, one, far, one, two) z = Slice(a, zero, far, two, two)", "Slice"),
        ("a = Slice(t, one, far, one) z = Slice(a, zero, minus, minus)", "Slice"),
        ("z = Slice(t, zero, far, zero)", ""),
        ("z = Slice(t, zero, eight, one)", ""),
        ("z = Slice(t, back, far, minus)", ""),
        ("a = Slice(t, zero, far, one) z = Slice(a, zero, far, two)", "")]),
    *(cut(f"t = Neg(x) {body} y = Exp(z)", stays="") for body in [
        "a = Slice(t, one, far, one) z = Slice(a, zero, minus, one)",
        "z = Slice(t, zero, eight, zero)",
        "z = Slice(t, zero, far, one, two)",
        "z = Slice(t, minus, back, one, minus)"]),
    # A first that only slices read goes.
    cut("""a = Slice(x, one, far, one, two) b = Slice(a, zero, far, two, two) c = Slice(a, one, far, two, two)
        d = Sum(b) e = Sum(c) y = Concat<axis=2>(d, e)""", "Slice Slice Sum Sum Concat"),
    cut("z = Slice<starts=[0], ends=[8]>(x) y = Exp(z)", opset=9, stays="its bounds are attributes at this opset"),
    cut("k = Shape(x) z = Slice(x, zero, k) y = Exp(z)", runs=False, stays="its bounds are not constant"),
    cut("t = local.F(x) a = Slice(t, one, far, one) z = Slice(a, one, far, minus) y = Exp(z)",
        stays="the rank is not known"),
    cut("z = Slice(x, one, far) y = Exp(z)", stays="it takes a part"),
]  # fmt: skip


@table(RESHAPES, EXPANDS, CONCATS, SPLITS, SLICES)
def test_rules(case: Case) -> None:
    case.check()
