"""Models of one recurrent cell, and samples for them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

LARGE, SMALL, STEPS, READ = 296, 8, 5, 6


def cell(
    size: int,
    *,
    batch: int | str = "N",
    state: bool = False,
    bias: bool = True,
    lengths: bool = False,
    **attributes: object,
) -> onnx.ModelProto:
    """Return a model of one GRU that gives all states and the last."""
    numbers = np.random.default_rng(0)
    shapes = {"w": (1, 3 * size, READ), "r": (1, 3 * size, size), "b": (1, 6 * size)}
    weights = [
        numpy_helper.from_array((numbers.normal(size=shape) / np.sqrt(size)).astype(np.float32), name)
        for name, shape in shapes.items()
        if bias or name != "b"
    ]
    given = [helper.make_tensor_value_info("x", 1, ["T", batch, READ])]
    names = ["x", "w", "r", "b" if bias else "", "l" if lengths else "", "h" if state else ""]
    given += [helper.make_tensor_value_info("h", 1, [1, batch, size])] if state else []
    given += [helper.make_tensor_value_info("l", 6, [batch])] if lengths else []
    node = helper.make_node("GRU", names, ["y", "z"], name="cell", hidden_size=size, **attributes)
    made = [helper.make_tensor_value_info(name, 1, None) for name in ("y", "z")]
    graph = helper.make_graph([node], "g", given, made, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def sample(rows: int, size: int, *, state: bool = False) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(1)
    given = {"x": numbers.normal(size=(STEPS, rows, READ)).astype(np.float32)}
    return {**given, "h": numbers.normal(size=(1, rows, size)).astype(np.float32)} if state else given
