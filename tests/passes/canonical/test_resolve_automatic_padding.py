"""ResolveAutomaticPadding writes auto_pad as the pads that it means."""

from __future__ import annotations

import pytest
from model_texts import difference, model, nodes, outputs, sample, values

from onnxq.ir import as_graph
from onnxq.passes import ResolveAutomaticPadding

WINDOWS = [
    ("Conv", "", "(x, w)"),
    ("Conv", "strides = [2, 3],", "(x, w)"),
    ("Conv", "strides = [4, 4],", "(x, w)"),
    ("AveragePool", "kernel_shape = [3, 2], strides = [2, 2],", "(x)"),
    ("AveragePool", "kernel_shape = [3, 2], count_include_pad = 1,", "(x)"),
    ("MaxPool", "kernel_shape = [2, 4], strides = [1, 3],", "(x)"),
]


@pytest.mark.parametrize("way", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize(("op", "attributes", "operands"), WINDOWS)
def test_the_pads_mean_the_same(op: str, attributes: str, operands: str, way: str) -> None:
    text = f"""g (float[N, 4, 9, 8] x) => (float[N, c, h, w] y) {{
        y = {op}<{attributes} auto_pad = "{way}">{operands} }}"""
    made = model(text, **({"w": values(6, 4, 3, 2)} if op == "Conv" else {}))
    graph = as_graph(made)
    assert ResolveAutomaticPadding().apply(graph)
    assert "auto_pad" not in nodes(graph)[0].attrs
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0
    assert not ResolveAutomaticPadding().apply(graph)


@pytest.mark.parametrize(
    ("size", "attributes", "reason"),
    [
        ("H, 8", 'kernel_shape = [2, 2], auto_pad = "SAME_UPPER"', "the size of its data or kernel is not known"),
        ("9, 8", 'kernel_shape = [2, 2], auto_pad = "SAME_UPPER", ceil_mode = 1', "it rounds up"),
        ("9, 8", 'kernel_shape = [2, 2], auto_pad = "SAME_UPPER", dilations = [2, 2]', "its window has gaps"),
    ],
)
def test_what_is_not_known_stays(size: str, attributes: str, reason: str) -> None:
    text = f"g (float[N, 4, {size}] x) => (float[N, c, h, w] y) {{ [pool] y = MaxPool<{attributes}>(x) }}"
    changes = ResolveAutomaticPadding().apply(as_graph(model(text)))
    assert (changes.changed, changes.skipped) == ((), (("pool", reason),))
