"""Models of a few nodes on onnxruntime, without its optimisations and without its threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

Feed = Mapping[str, Any]

onnxruntime.set_default_logger_severity(4)


def ir_version(opset: int, functions: bool = False) -> int:
    """Return a version of the file format that knows an opset, and defaults of the attributes of functions."""
    version = 5 if opset < 11 else 8 if opset < 19 else 10
    return max(version, 9) if functions else version


def opened(model: ModelProto) -> onnxruntime.InferenceSession:
    """Open a session that computes every node as it is written."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, feed: Feed, outputs: Sequence[str] | None = None) -> list[Any]:
    """Run a session on what it reads of a feed."""
    known = {entry.name for entry in (*session.get_inputs(), *session.get_overridable_initializers())}
    return list(session.run(outputs, {name: value for name, value in feed.items() if name in known}))


def values_of(model: ModelProto, feed: Feed) -> dict[str, Any]:
    """Return what the nodes of the main graph make, but for bfloat16, which numpy lacks."""
    whole = ModelProto.FromString(model.SerializeToString())
    del whole.graph.output[:]
    whole.graph.output.extend(ValueInfoProto(name=name) for node in model.graph.node for name in node.output if name)
    session = opened(whole)
    names = [entry.name for entry in session.get_outputs() if "bfloat16" not in entry.type]
    return dict(zip(names, run(session, feed, names), strict=True))


def value_info(name: str, dtype: Any, dims: Sequence[Any] | None) -> ValueInfoProto:
    """Return a declaration; a dimension is a number, a name, or None."""
    made = ValueInfoProto(name=name)
    made.type.tensor_type.elem_type = elem_type(dtype)
    if dims is not None:
        made.type.tensor_type.shape.SetInParent()
    for dim in dims or ():
        one = made.type.tensor_type.shape.dim.add()
        if isinstance(dim, str):
            one.dim_param = dim
        elif dim is not None:
            one.dim_value = dim
    return made


def elem_type(dtype: Any) -> int:
    """Return the number that ONNX has for a type of numpy."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def evaluated(
    nodes: Sequence[NodeProto], inputs: Feed, outputs: Sequence[str], opset: int, extra: Any = ()
) -> list[Any]:
    """Run a few nodes on their own; onnxruntime says what is wrong with them.

    Args:
        nodes: in an order of execution.
        inputs: what they read.
        outputs: the tensors that are wanted.
        opset: version of the default domain.
        extra: model-local functions.
    """
    given = [value_info(name, value.dtype, value.shape) for name, value in inputs.items()]
    graph = helper.make_graph(list(nodes), "few", given, [ValueInfoProto(name=name) for name in outputs])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1), helper.make_opsetid("com.microsoft", 1)]
    imports.append(helper.make_opsetid("ai.onnx.ml", 1))
    model = helper.make_model(
        graph, opset_imports=imports, ir_version=ir_version(opset, bool(extra)), functions=list(extra)
    )
    return run(opened(model), inputs)


def is_float(elem: int) -> bool:
    """Whether a type of ONNX is one that RandomUniformLike makes noise of."""
    return elem in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


def checked(model: ModelProto) -> str:
    """Return what onnx's full check says against a model, or nothing."""
    try:
        onnx.checker.check_model(model, full_check=True)
    # onnx raises errors of several unrelated classes.
    except Exception as error:  # noqa: BLE001
        return " ".join(str(error).split()) or type(error).__name__
    return ""
