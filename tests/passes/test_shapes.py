"""Shape arithmetic is folded."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from model_texts import difference, model, named_graph, nodes, ops, outputs, values
from onnx import ModelProto
from rule_cases import Case, Rule, table

from onnxq.ir import Graph, as_graph
from onnxq.passes import FoldShapes

fold = Rule(
    FoldShapes(), "float[B, L, 8] x", zero=np.array(0), one=np.array(1), two=np.array(2), first=[0], second=[1],
    third=[2], minus=[-1], four=[4], half=[2], far=[9], less=np.array(-3),
)  # fmt: skip
BATCH = "s = Shape(x) i = Gather(s, zero) b = Unsqueeze(i, first)"
LENGTH = "t = Shape(x) j = Gather(t, one) l = Unsqueeze(j, first)"
BOTH = f"{BATCH} {LENGTH}"


def targets(op: str, *expected: list[int]) -> object:
    """The constants that the nodes of an operator read second."""
    return lambda graph: [list(node.inputs[1].values) for node in nodes(graph, op)] == list(expected)


def reshaped(read: str, entries: str, expected: list[int], **options: object) -> Case:
    body = f"{read} k = Concat<axis=0>({entries}) y = Reshape(x, k)"
    return fold(body, "Reshape", holds=targets("Reshape", expected), **options)


# With padding that is computed, as detectors have it.
PADDED = " ".join(
    f"s{i} = Shape(x{i}) p{i} = Slice(s{i}, third, far) d{i} = Mod(p{i}, two) z{i} = Sub(d{i}, d{i}) "
    f"f{i} = Concat<axis=0>(z{i}, z{i}, z{i}, d{i}) h{i} = Reshape(f{i}, pairs) r{i} = Transpose<perm=[0,1]>(h{i}) "
    f"q{i} = Reshape(r{i}, minus) e{i} = Pad(x{i}, q{i}) x{i + 1} = MaxPool<kernel_shape=[2,2],strides=[2,2]>(e{i})"
    for i in range(3)
)
CHAIN = "".join(
    """s{1} = Shape(x{0}) i{1} = Gather(s{1}, zero) b{1} = Unsqueeze(i{1}, first)
    k{1} = Concat<axis=0>(b{1}, minus, half, four) r{1} = Reshape(x{0}, k{1}) a{1} = Relu(r{1})
    t{1} = Shape(a{1}) h{1} = Slice(t{1}, first, half) c{1} = Concat<axis=0>(h{1}, minus)
    x{1} = Reshape(a{1}, c{1}) """.format(index, index + 1)
    for index in range(20)
)
CASES = [
    # A shape of numbers is constant with all that follows.
    reshaped(BOTH, "b, l, half, four", [2, 3, 2, 4], inputs="float[2, 3, 8] x"),
    # Dimensions of the data itself are copied, and one other is inferred.
    reshaped(BOTH, "b, l, half, four", [0, 0, 2, 4]),
    reshaped(BATCH, "b, minus, half, four", [0, -1, 2, 4]),
    reshaped(LENGTH, "minus, l, half, four", [-1, 0, 2, 4]),
    reshaped(f"{BOTH} m = Mul(b, l)", "m, half, four", [-1, 2, 4]),
    reshaped("s = Shape<end = 2>(x)", "s, half, four", [0, 0, 2, 4]),
    reshaped("s = Shape(x) c = Cast<to=6>(s) p = Slice(c, first, second) b = Cast<to=7>(p)", "b, minus", [0, -1]),
    reshaped("s = Shape(x) p = Slice(s, first, half) q = Identity(p)", "q, minus", [0, 0, -1]),
    reshaped("s = Shape(x) n = ReduceProd(s) m = Div(n, four)", "m, four", [-1, 4]),
    # What may be anything stays.
    fold("s = Shape(z) k = Concat<axis=0>(s, half) y = Reshape(x, k)", inputs="float[B, L] x, float[A, M] z",
         runs=False, stays=""),
    fold(f"{BATCH} k = Concat<axis=0>(minus, half, four, b) y = Reshape(x, k)", inputs="float[B, 8, L] x", stays=""),
    fold("y = Reshape(x, k)", inputs="float[B, L, 8] x, int64[3] k", runs=False, stays=""),
    fold(f"{BATCH} k = Concat<axis=0>(first, b) y = Reshape<allowzero=1>(x, k)", inputs="float[B, 0] x", runs=False,
         stays=""),
    # Slices to a number are bounded by their axis.
    fold(f"""r = Slice(x, first, far, first) m = Slice(r, first, less, first)
         {BATCH} k = Concat<axis=0>(b, four, half) v = Reshape(m, k) y = Expand(v, k)""", "Slice Slice Reshape Expand",
         inputs="float[B, 8] x", less=np.array([7]), holds=targets("Expand", [1, 4, 2])),
    # A range of nothing is empty.
    fold("r = Range(zero, less, one) y = Shape(r)", "Shape", inputs="float[2] x"),
    # A name of its own for an unknown dimension would be one that the model declares.
    fold(f"n = Neg(x) {BOTH} k = Concat<axis=0>(b, l, half, four) y = Reshape(n, k)", "Neg Reshape",
         inputs="float[?, ?, 8] x", holds=lambda graph: targets("Reshape", [0, 0, 2, 4])(graph)
         and graph.nodes[0].outputs[0].shape == [None, None, 8]),
    fold(f"{CHAIN} y = Relu(x20)", "Reshape Relu Reshape " * 20 + "Relu", inputs="float[B, L, 8] x0"),
    fold(f"{PADDED} y = Relu(x3)", "Pad MaxPool Pad MaxPool Pad MaxPool Relu", inputs="float[1, 2, 23, 21] x0",
         pairs=[-1, 2]),
    # What has the same entries is computed once.
    fold(f"""(float[B, L, 8] x, float[B, L] z) => (p, q) {{ {BOTH} p = Concat<axis=0>(b, l)
         u = Shape(z) v = Slice(u, first, half) q = Add(v, half) }}""",
         "Shape Gather Unsqueeze Gather Unsqueeze Concat Shape Add",
         holds=lambda graph: [len(node.outputs[0].outputs) for node in nodes(graph, "Shape")] == [2, 1]),
    # Expand keeps what the data has; the second as torch writes it.
    fold(f"{BOTH} k = Concat<axis=0>(b, l, four) y = Expand(x, k)", "Expand", inputs="float[B, L, 1] x",
         holds=targets("Expand", [1, 1, 4])),
    fold("""s = Shape(x) i = Gather(s, zero) b = Unsqueeze(i, first) k = Concat<axis=0>(b, minus, minus)
         r = Reshape(k, minus) t = Shape(r) o = ConstantOfShape<value = int64[1] {1}>(t)
         m = Mul(o, minus) e = Equal(r, m) w = Where(e, o, r) u = Unsqueeze(x, second) y = Expand(u, w)""",
         "Unsqueeze Expand", inputs="float[B, 4] x", holds=targets("Expand", [1, 1, 1])),
    fold("t = Shape(x) l = Slice(t, second, half) y = Slice(x, first, l, second)", "Slice",
         holds=lambda graph: graph.nodes[0].inputs[2].values.tolist() == [np.iinfo(np.int64).max]),
    # Positions that are cut to the data have its length.
    fold(f"""{LENGTH} p = Slice(positions, first, l, second) a = Add(x, p) {BATCH}
         k = Concat<axis=0>(b, l, half, four) y = Reshape(a, k)""", "Shape Gather Unsqueeze Slice Add Reshape",
         positions=values(1, 64, 8), holds=targets("Reshape", [0, 0, 2, 4])),
    fold("(float[2, 3] x) => (s, y) { s = Shape(x) n = Size(x) m = Reshape(n, minus) y = Reshape(x, m) }",
         "Shape Reshape", holds=lambda graph: [tensor.name for tensor in graph.outputs] == ["s", "y"]),
    fold(f"""(float[B, 8] x, bool c) => (y) {{ {BATCH} y = If (c) <
         then_branch = yes () => (t) {{ k = Concat<axis=0>(b, half, four) t = Reshape(x, k) }},
         else_branch = no () => (e) {{ q = Concat<axis=0>(b, half, minus) n = Neg(x) e = Reshape(n, q) }}> }}""",
         "If Reshape Neg Reshape", holds=targets("Reshape", [0, 2, 4], [0, 2, -1])),
    fold(f"{BATCH} r = Reshape(x, b) y = MatMul(r, w)", "Reshape MatMul", inputs="float[2, 3] x", w=values(5, 5),
         runs=False),
    # What a caller may feed is no constant.
    fold("s = Shape(x) k = Add(s, more) y = Expand(x, k)", "Add Expand", inputs="float[2, 3] x, int64[1] more",
         more=[0]),
]  # fmt: skip


@table(CASES)
def test_rules(case: Case) -> None:
    case.check()


def folded(made: ModelProto) -> Graph:
    graph = named_graph(made)
    FoldShapes().apply(graph)
    return graph


@pytest.mark.parametrize(
    ("data", "rows", "text"),
    [
        ("B, L, 2, 4", (0, 3, 2, 4), f"{BOTH} k = Concat<axis=0>(b, half, l, four) y = Reshape(x, k)"),
        ("B, 2, 4", (0, 2, 4), f"{BATCH} c = Shape(z) k = Concat<axis=0>(b, c) y = Reshape(x, k)"),
    ],
)
def test_dimensions_that_may_be_empty_are_not_inferred_beside_copied_ones(
    data: str, rows: tuple[int, ...], text: str
) -> None:
    made = fold(text, inputs=f"float[{data}] x, float[C] z").made
    graph = folded(made)
    assert ops(graph)[-2:] == ["Concat", "Reshape"]
    empty = {"x": np.zeros(rows, np.float32), "z": np.zeros(8, np.float32)}
    assert difference(outputs(graph, empty), outputs(made, empty)) == 0


@pytest.mark.parametrize(
    ("inputs", "text", "empty"),
    [
        ("float[6, L] x, float[C] z", f"c = Shape(z) {LENGTH} k = Concat<axis=0>(c, l) r = Reshape(x, k)", (6, 1)),
        ("float[3, L] x, float[C] z", f"{LENGTH} k = Concat<axis=0>(l, minus) r = Reshape(x, k)", (3, 0)),
    ],
    ids=["of another tensor", "of the data"],
)
def test_a_dimension_that_is_empty_copies_another_one(inputs: str, text: str, empty: tuple[int, ...]) -> None:
    text += " u = Shape(r) n = Gather(u, zero) y = Range(zero, n, one)"
    made = model(f"({inputs}) => (y) {{ {text} }}", zero=np.array(0), one=np.array(1), first=[0], minus=[-1])
    graph = folded(made)
    fed = {"x": np.zeros(empty, np.float32), "z": np.zeros(0, np.float32)}
    assert difference(outputs(graph, fed), outputs(made, fed)) == 0


TURNED = """s = Shape(x) b = Gather(s, zero) l = Gather(s, one) c = Unsqueeze(l, first) d = Unsqueeze(b, first)
    k = Concat<axis=0>(c, d) y = Reshape(w, k)"""
CUT = "s = Shape(w) b = Gather(s, first) y = Slice(x, first, b, first)"


@pytest.mark.parametrize(
    ("inputs", "text", "shapes"),
    [
        ("float[what, what] x, float[6] w", TURNED, {"x": (2, 3), "w": (6,)}),
        ("float[what, 2] x, float[what, 3] w", CUT, {"x": (4, 2), "w": (2, 3)}),
        ("float[n, n] x, float[6] w", TURNED, {"x": (2, 3), "w": (6,)}),
        (
            "float[A, 2] x, float[B, 3] w",
            "v = Relu(x) t = Neg(w) s = Shape(t) b = Gather(s, first) y = Slice(v, first, b, first)",
            {"x": (4, 2), "w": (2, 3)},
        ),
    ],
    ids=["placeholders of one tensor", "placeholders of two", "a name twice", "claims about inner tensors"],
)
def test_names_that_are_not_equal_dimensions(inputs: str, text: str, shapes: dict[str, tuple[int, ...]]) -> None:
    made = model(f"({inputs}) => (y) {{ {text} }}", zero=np.array(0), one=np.array(1), first=[0])
    for info in made.graph.input:
        for size in info.type.tensor_type.shape.dim:
            size.dim_param = {"what": "?"}.get(size.dim_param, size.dim_param)
    for name, width in (("v", 2), ("t", 3)) if "v = " in text else ():
        made.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, ["A", width]))
    graph = as_graph(made)
    FoldShapes().apply(graph)
    feed = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}
    assert difference(outputs(graph, feed), outputs(made, feed)) == 0
