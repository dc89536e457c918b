"""Constant folding: single operators in numpy or onnxruntime, and many steps together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from onnx import TensorProto, helper

from onnxq.errors import ModelError, OnnxqError
from onnxq.ir import ArrayData, Graph, Node, Tensor, TensorData, Variable, to_model
from onnxq.ir.computed_data import derived
from onnxq.ir.data_types import numpy_dtype
from onnxq.numerics.affine import Array, dequantize_linear
from onnxq.numerics.formats import FORMATS
from onnxq.rewrite.views import VIEWS, view_of
from onnxq.runtime.sessions import open_session, run

# They only move elements, so an unsigned integer type of the same size can replace any type.
_MOVERS: Final = VIEWS | {"Concat", "DepthToSpace", "Expand", "Gather", "SpaceToDepth", "Split", "Tile"}
# numpy's ``isbuiltin`` of types that a package adds.
_ADDED = 2


def is_small(dtype: np.dtype[Any]) -> bool:
    """Return whether ml_dtypes adds the type to numpy: bfloat16, 8-bit floats and below."""
    return dtype.isbuiltin == _ADDED


@dataclass(frozen=True, eq=False)
class Step:
    """One operator of a constant computation, independent of its node.

    Attributes:
        node: name of the node, for messages.
        inputs: data of constants, or outputs of earlier steps; None for an absent input.
    """

    node: str
    op: str
    attributes: Mapping[str, Any]
    inputs: tuple[TensorData | Variable | None, ...]
    outputs: tuple[Variable, ...]

    @classmethod
    def of(cls, node: Node) -> Step:
        """Return the step of a node."""
        return cls(node.name, node.op, dict(node.attrs), tuple(map(_source, node.inputs)), tuple(node.outputs))


def _source(tensor: Tensor) -> TensorData | Variable | None:
    if isinstance(tensor, Variable):
        return tensor if tensor.name else None
    return tensor.tensor_data


def is_numpys(step: Step, operands: Sequence[TensorData | None]) -> bool:
    """Return whether numpy computes a step of these inputs as onnxruntime does."""
    types = [tensor_data.dtype for tensor_data in operands if tensor_data is not None]
    if not types or operands[0] is None:
        return False
    if step.op == "Cast":
        return _is_numpys_cast(types[0], step.attributes.get("to"))
    if step.op in _SAME_TYPED:
        return len(types) == len(operands) and len(set(types)) == 1 and (types[0].kind in "iuf" or is_small(types[0]))
    return step.op in VIEWS or step.op == "Shape" or step.op in _NUMPY


def compute(step: Step, operands: Sequence[TensorData | None], opset: int) -> list[TensorData]:
    """Compute one step. Views and casts of large inputs are computed when they are loaded.

    Args:
        step: the operator.
        operands: its inputs; None for an absent one.
        opset: version of the default domain of the step.

    Returns:
        Its outputs, in order; an empty array for an absent one.

    Raises:
        ModelError: The step cannot be computed.
    """
    if is_numpys(step, operands):
        try:
            with np.errstate(all="ignore"):
                result = _by_numpy(step, operands)
        except (AttributeError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise ModelError(f"{error}; check the model") from error
        if result is not None:
            return [result]
    arrays = [None if tensor_data is None else tensor_data.load() for tensor_data in operands]
    small = next((array.dtype for array in arrays if array is not None and is_small(array.dtype)), None)
    moved = small if step.op in _MOVERS else None
    if moved is not None:
        arrays = [a if a is None or not is_small(a.dtype) else a.view(f"u{a.itemsize}") for a in arrays]
    wanted = [tensor for tensor in step.outputs if tensor.name]
    results = iter(_by_onnxruntime([step], wanted, dict(zip(step.inputs, arrays, strict=True)), opset))
    outputs = [next(results) if tensor.name else np.empty(0) for tensor in step.outputs]
    return [ArrayData(array if moved is None else array.view(moved)) for array in outputs]


def _by_numpy(step: Step, operands: Sequence[TensorData | None]) -> TensorData | None:
    first = operands[0]
    assert first is not None, "only steps with a first input are numpy's"
    if step.op == "Shape":
        ends = slice(step.attributes.get("start"), step.attributes.get("end"))
        return ArrayData(np.array(first.shape[ends], np.int64))
    if step.op == "Cast":
        dtype = helper.tensor_dtype_to_np_dtype(step.attributes["to"])
        return derived(first, lambda array: array.astype(dtype, copy=False), dtype)
    parameters = [None if tensor_data is None else tensor_data.load() for tensor_data in operands[1:]]
    if step.op in VIEWS:
        view = view_of(step.op, step.attributes, parameters)
        return None if view is None else derived(first, view)
    return ArrayData(np.asarray(_NUMPY[step.op](step.attributes, first.load(), *parameters)))


def _is_numpys_cast(dtype: np.dtype[Any], wanted: object) -> bool:
    # numpy and onnxruntime may differ where an integer type cannot hold a float.
    if not isinstance(wanted, int) or wanted not in _CAST_TO or dtype.kind in "OSU":
        return False
    target = helper.tensor_dtype_to_np_dtype(wanted)
    twice_rounded = dtype == np.float64 and target.itemsize < np.dtype(np.float32).itemsize
    return not twice_rounded and (dtype.kind != "f" or target.kind == "f" or is_small(target))


# onnxruntime rounds to smaller floats than these.
_CAST_TO: Final = frozenset(
    {
        TensorProto.BFLOAT16,
        TensorProto.DOUBLE,
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.INT64,
        TensorProto.UINT32,
        TensorProto.UINT64,
        *(row.onnx_type for row in FORMATS.values() if not row.is_float),
    }
    # The oldest supported onnx has no 2-bit integers.
) & set(TensorProto.DataType.values())


def _dequantize(
    attributes: Mapping[str, Any], quantized: Array, scale: Array, zero_point: Array | None = None
) -> Array:
    dtype = attributes.get("output_dtype")
    return dequantize_linear(
        quantized,
        scale,
        zero_point,
        attributes.get("axis", 1),
        attributes.get("block_size", 0),
        helper.tensor_dtype_to_np_dtype(dtype) if dtype else None,
    )


_SAME_TYPED: Final = frozenset({"Add", "Mul", "Sub"})
_NUMPY: Final[Mapping[str, Callable[..., Array]]] = {
    "Add": lambda _, left, right: left + right,
    "DequantizeLinear": _dequantize,
    "Mul": lambda _, left, right: left * right,
    "Sub": lambda _, left, right: left - right,
}


# Many steps -----------------------------------------------------------------------------------------------------------

# Largest input, in bytes, of a step that runs with others in one session.
_TOGETHER = 1 << 16
_TYPES = ("to", "dtype", "output_dtype")

Source = TensorData | Variable


@dataclass(frozen=True)
class Evaluated:
    """Results of steps.

    Attributes:
        values: of the wanted tensors, and of inputs of steps that failed.
        failed: reason for each step that failed; steps that depend on one are included.
    """

    values: Mapping[Variable, TensorData]
    failed: Mapping[Step, str]


def evaluate(
    steps: Sequence[Step], wanted: Variable, opset: int, feeds: Mapping[Variable, Array] | None = None
) -> Array:
    """Compute the subgraph that decodes a weight; onnxruntime runs the steps that numpy does not compute the same.

    Args:
        steps: in execution order.
        wanted: an output of one of them.
        opset: version of the default domain of the steps.
        feeds: values of tensors that no step makes.

    Raises:
        ModelError: A step cannot be computed. The message names its node.
    """
    results = evaluate_all(steps, [wanted], opset, feeds)
    for step, reason in results.failed.items():
        raise ModelError(f"node {step.node} ({step.op}) decodes a weight, but {reason}")
    return results.values[wanted].load()


def evaluate_all(
    steps: Sequence[Step],
    wanted: Collection[Variable],
    opset: int,
    feeds: Mapping[Variable, Array] | None = None,
    largest: int | None = None,
) -> Evaluated:
    """Compute steps; each value is kept until the last step has read it.

    Args:
        steps: in execution order.
        wanted: outputs of the steps.
        opset: version of the default domain of the steps.
        feeds: values of tensors that no step makes.
        largest: most bytes of a value that is kept in memory; None for any.
    """
    held: dict[Variable, TensorData] = {tensor: ArrayData(array) for tensor, array in (feeds or {}).items()}
    work = _Evaluation(opset, largest, set(wanted), held)
    for step in steps:
        for source in set(step.inputs):
            work.readers.setdefault(source, set()).add(step)
    for step in steps:
        work.take(step)
    work.flush()
    return Evaluated(work.values, work.failed)


@dataclass(eq=False)
class _Evaluation:
    """Steps in progress.

    Attributes:
        readers: the steps that have yet to read each source.
        lost: outputs of the failed steps.
        waiting: small steps to run in one session.
        coming: outputs of the waiting steps.
    """

    opset: int
    largest: int | None
    wanted: set[Variable]
    values: dict[Variable, TensorData]
    readers: dict[Source | None, set[Step]] = field(default_factory=dict)
    failed: dict[Step, str] = field(default_factory=dict)
    lost: set[Variable] = field(default_factory=set)
    waiting: list[Step] = field(default_factory=list)
    coming: set[Variable] = field(default_factory=set)

    def take(self, step: Step) -> None:
        waits = any(source in self.coming for source in step.inputs)
        operands = [self._payload(source) for source in step.inputs if source is not None and source not in self.coming]
        if not self._fits(step, operands):
            if waits:
                self.flush()
            self._alone(step)
        elif waits or not is_numpys(step, operands) or _is_half_arithmetic(step, operands):
            self.waiting.append(step)
            self.coming.update(step.outputs)
        else:
            self._alone(step)

    def flush(self) -> None:
        waiting, self.waiting, self.coming = self.waiting, [], set()
        pending = [waiting] if waiting else []
        while pending:
            steps = pending.pop()
            if len(steps) == 1:
                self._alone(steps[0])
            elif not self._together(steps):
                # Bisect, so that one failing step does not stop the others.
                half = len(steps) // 2
                pending += [steps[half:], steps[:half]]

    def _payload(self, source: Source | None) -> TensorData | None:
        return source if isinstance(source, TensorData) else self.values.get(source) if source is not None else None

    def _fits(self, step: Step, operands: Iterable[TensorData | None]) -> bool:
        """Whether a step may share a session with others."""
        types = (numpy_dtype(kind) for name in _TYPES if isinstance(kind := step.attributes.get(name), int))
        if step.op == "DequantizeLinear" or any(dtype is not None and is_small(dtype) for dtype in types):
            return False
        return all(
            tensor_data is not None and tensor_data.nbytes <= _TOGETHER and not is_small(tensor_data.dtype)
            for tensor_data in operands
        )

    def _alone(self, step: Step) -> None:
        if self._depends_on_lost(step):
            return
        try:
            results = compute(step, [self._payload(source) for source in step.inputs], self.opset)
            self._keep(step.outputs, results)
        except OnnxqError as error:
            self._fail(step, str(error))
        else:
            self._read([step])

    def _together(self, steps: Sequence[Step]) -> bool:
        able = [step for step in steps if not self._depends_on_lost(step)]
        inside = set(able)
        produced = dict.fromkeys(tensor for step in able for tensor in step.outputs if tensor.name)
        needed = [tensor for tensor in produced if tensor in self.wanted or self.readers.get(tensor, set()) - inside]
        try:
            sources = {source for step in able for source in step.inputs} - produced.keys() - {None}
            operands = {source: tensor_data.load() for source in sources if (tensor_data := self._payload(source))}
            results = _by_onnxruntime(able, needed, operands, self.opset) if needed else []
            self._keep(needed, map(ArrayData, results))
        except OnnxqError:
            return False
        self._read(able)
        return True

    def _depends_on_lost(self, step: Step) -> bool:
        if any(source in self.lost for source in step.inputs):
            self._fail(step, "one of its inputs cannot be computed")
            return True
        return False

    def _fail(self, step: Step, reason: str) -> None:
        self.failed[step] = reason
        self.lost.update(step.outputs)

    def _keep(self, tensors: Iterable[Variable], results: Iterable[TensorData]) -> None:
        new = {tensor: tensor_data for tensor, tensor_data in zip(tensors, results, strict=False) if tensor.name}
        for tensor_data in new.values():
            if tensor_data.dtype.kind not in "fiub" and not is_small(tensor_data.dtype):
                raise ModelError(f"its result is of type {tensor_data.dtype}")
            if self.largest is not None and isinstance(tensor_data, ArrayData) and tensor_data.nbytes > self.largest:
                raise ModelError(f"its result of {tensor_data.nbytes} bytes is too large")
        self.values.update(new)

    def _read(self, steps: Iterable[Step]) -> None:
        for step in steps:
            for source in set(step.inputs):
                self.readers[source].discard(step)
        for step in steps:
            for tensor in (*step.inputs, *step.outputs):
                if isinstance(tensor, Variable) and not self.readers.get(tensor) and tensor not in self.wanted:
                    self.values.pop(tensor, None)


def _is_half_arithmetic(step: Step, operands: Sequence[TensorData | None]) -> bool:
    """Whether onnxruntime may leave out the rounding of a result, as it does before a Cast."""
    return step.op in _SAME_TYPED and any(operand is not None and operand.dtype == np.float16 for operand in operands)


def _by_onnxruntime(
    steps: Sequence[Step], wanted: Sequence[Variable], operands: Mapping[Source | None, Array | None], opset: int
) -> list[Array]:
    """Return tensors that steps make of arrays, computed in one session."""
    twins: dict[Source, Variable] = {}
    feeds: dict[str, Array] = {}

    def twin(source: Source | None) -> Variable:
        if source is None or (isinstance(source, Variable) and not source.name):
            return Variable("")
        if source not in twins:
            twins[source] = Variable(f"t{len(twins)}")
            if (array := operands.get(source)) is not None:
                twins[source].dtype, twins[source].shape = array.dtype, list(array.shape)
                feeds[twins[source].name] = array
        return twins[source]

    nodes = [
        Node(step.op, f"n{index}", dict(step.attributes), list(map(twin, step.inputs)), list(map(twin, step.outputs)))
        for index, step in enumerate(steps)
    ]
    outputs = [twin(tensor) for tensor in wanted]
    graph = Graph(nodes, [tensor for tensor in twins.values() if tensor.name in feeds], outputs, "steps", opset=opset)
    results = run(open_session(to_model(graph), threads=1, optimize=False), feeds)
    # onnxruntime returns lists for sequences.
    if not all(isinstance(array, np.ndarray) for array in results):
        raise ModelError("it makes no tensor")
    return results
