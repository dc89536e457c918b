"""Models from ONNX's text form, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, helper, numpy_helper, parser

from onnxq.ir import Graph, Node, all_graphs, as_graph, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import NameNodes
from onnxq.rewrite import Changes, Pass
from onnxq.runtime.sessions import open_session, run

Array = npt.NDArray[Any]
Stored = tuple[int, ...] | npt.ArrayLike


def values(*shape: int, seed: int = 0, dtype: npt.DTypeLike = np.float32, scale: float = 0.5) -> Array:
    """Normally distributed numbers, the same for the same arguments."""
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(dtype)


def variances(*shape: int, seed: int = 0, dtype: npt.DTypeLike = np.float32) -> Array:
    return np.random.default_rng([seed, *shape]).uniform(0.5, 2.0, shape).astype(dtype)


def model(
    text: str, *, opset: int = 17, ir_version: int = 0, domains: str = "", functions: str = "", **stored: Stored
) -> ModelProto:
    """A model of a graph in text form.

    Args:
        text: with or without a name of the graph.
        ir_version: 0 for the first, from 8 on, that the opset allows.
        domains: opset imports beside that of ONNX, such as ``"ms" : 1``.
        functions: in text form, of the domain ``local``.
        stored: initializers by name: arrays, or the shapes of random ones, normally distributed with a spread that
            keeps the spread of what a weight multiplies.
    """
    local = '"local" : 1' if "local" in text + functions else ""
    imports = ", ".join(part for part in (f'"" : {opset}', local, domains) if part)
    ir_version = ir_version or max(
        8, helper.find_min_ir_version_for([helper.make_opsetid("", opset)], ignore_unknown=True)
    )
    name = "" if text.lstrip()[0].isalpha() else "main "
    proto = parser.parse_model(f"<ir_version: {ir_version}, opset_import: [{imports}]> {name}{text} {functions}")
    generator = np.random.default_rng(0)
    for initializer, array in stored.items():
        if isinstance(array, tuple):
            fan_in = max(1, int(np.prod(array[1:])))
            array = (generator.standard_normal(array) / np.sqrt(fan_in)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), initializer))
    return proto


def batch_norm(prefix: str, channels: int, seed: int = 0, dtype: npt.DTypeLike = np.float32) -> dict[str, Array]:
    """Scale, shift, mean and variance of a BatchNormalization, named after ``prefix``."""
    return {
        f"{prefix}s": values(channels, seed=seed, dtype=dtype) + np.array(1, dtype),
        f"{prefix}b": values(channels, seed=seed + 1, dtype=dtype),
        f"{prefix}m": values(channels, seed=seed + 2, dtype=dtype),
        f"{prefix}v": variances(channels, seed=seed + 3, dtype=dtype),
    }


def sample(model: ModelProto, seed: int = 0, free: int = 2) -> dict[str, Array]:
    """Random inputs; free dimensions get the extent ``free``, conditions are true for even seeds."""
    generator = np.random.default_rng(seed)
    stored = {tensor.name for tensor in model.graph.initializer}
    found = {}
    for info in model.graph.input:
        if info.name in stored:
            continue
        shape = [dimension.dim_value or free for dimension in info.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        if dtype == np.bool_:
            found[info.name] = np.full(shape, seed % 2 == 0)
        else:
            found[info.name] = np.asarray(generator.normal(size=shape)).astype(dtype)
    return found


def outputs(model: ModelProto | Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What onnxruntime computes, by output name, without optimisation, so that a difference is the model's."""
    proto = to_model(model) if isinstance(model, Graph) else model
    session = open_session(proto, threads=1, optimize=False)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, run(session, inputs), strict=True))


def running(graph: Graph, folder: Path) -> Graph:
    """What runs after onnxruntime's optimisations."""
    open_session(to_model(graph), optimized_copy=folder / "runs.onnx")
    return as_graph(onnx.load(folder / "runs.onnx"))


def difference(found: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """The largest error of any output, relative to that output's largest magnitude.

    It is infinite for another shape, and where infinities or NaN lie in other places.
    """
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, array in expected.items():
        if found[name].shape != array.shape or found[name].dtype != array.dtype:
            return float("inf")
        values, reference = found[name].astype(np.float64), array.astype(np.float64)
        finite = np.isfinite(reference)
        if not np.array_equal(values[~finite], reference[~finite], equal_nan=True):
            return float("inf")
        error = np.abs(values[finite] - reference[finite]).max(initial=0.0)
        worst = max(worst, float(error / max(np.abs(reference[finite]).max(initial=0.0), 1e-30)))
    return worst


def named_graph(made: ModelProto | Graph) -> Graph:
    """The model as most passes get it: every node has a name, every tensor a shape."""
    graph = as_graph(made)
    NameNodes().apply(graph)
    infer_shapes(graph)
    return graph


def apply_once(step: Pass, graph: Graph) -> Changes:
    """Apply a pass; a second time there is nothing left to do."""
    changes = step.apply(graph)
    assert not step.apply(graph)
    return changes


def nodes(graph: Graph, op: str = "") -> list[Node]:
    """The nodes of all scopes, or those of one op type."""
    return [node for scope in all_graphs(graph) for node in scope.nodes if op in ("", node.op)]


def ops(graph: Graph) -> list[str]:
    return [node.op for node in nodes(graph)]


def node_named(graph: Graph, name: str) -> Node:
    (found,) = (node for node in nodes(graph) if node.name == name)
    return found


def initializer_names(model: ModelProto) -> set[str]:
    return {tensor.name for tensor in model.graph.initializer}
