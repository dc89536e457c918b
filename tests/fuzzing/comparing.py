"""Whether two models compute the same, but for rounding: as much as the first one's own rounding may change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper
from onnx.reference import ReferenceEvaluator

from fuzzing.parts import captured, pruned
from fuzzing.runtime import Feed, is_float, opened, run, values_of

# What an element may differ by that no rounding on the way explains.
_RELATIVE = {2: 4e-3, 4: 1e-5, 8: 1e-10}
# A few units in the last place, so that few draws round to the same number.
_ROUNDING = {TensorProto.FLOAT16: 2.0**-8, TensorProto.FLOAT: 2.0**-22, TensorProto.DOUBLE: 2.0**-46}
_BRAIN = 2.0**-5
# onnxruntime has no kernels of random numbers since this opset, but a Dropout in training still draws.
_NO_RANDOM_NUMBERS = 22
# Some kernels have steps, such as that of Sigmoid near 0, which few draws would miss.
_RUNS = 32
_OF_APPROXIMATIONS = 1e-6
_ALLOWANCE = {2: 4.0, 4: 32.0, 8: 32.0}
# A factor of the largest number that sums of a few products may go beyond.
_NEAR = 1e-3
_SUMS = frozenset(
    {"Conv", "ConvTranspose", "Einsum", "Gemm", "LSTM", "GRU", "RNN", "MatMul", "ReduceMean", "ReduceSum"}
)
# By these a last bit decides.
_DECIDING = frozenset(
    {"ArgMax", "ArgMin", "Cast", "Ceil", "Equal", "Floor", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod"}
    | {"Binarizer", "NonZero", "Round", "Sign", "TopK", "Unique"}
)
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
# Their kernels approximate functions whose values are around one, and err by a part of one also where they are near 0.
_APPROXIMATED = _RECURRENT | {"Sigmoid"}
# Maxima compare NaN in any order, and recurrent kernels clamp it.
_LOSING_NAN = frozenset({"ArgMax", "ArgMin", "GlobalMaxPool", "MaxPool", "ReduceMax", "ReduceMin", "TopK"}) | _RECURRENT


@dataclass(frozen=True)
class Difference:
    """How an output differs.

    Attributes:
        kind: ``type``, ``shape``, ``values``, ``decision`` (of whole or truth values that rounding changes),
            ``nonfinite`` (NaN and infinity at other places), ``overflow`` (only the second model leaves the range of
            its type), ``range`` (the first one leaves it on the way, or nearly so in a sum), ``nan`` (the first one
            makes NaN of infinity, or onnxruntime's kernels lose NaN), or ``invalid`` (onnxruntime gives what it has not
            computed: it joins or broadcasts what does not fit, follows an
            empty sequence, or runs no round of a loop).
        detail: a line about it.
        output: index of the output.
    """

    kind: str
    detail: str
    output: int = 0


@dataclass
class Original:
    """A model, and what it answers.

    Attributes:
        model: the model.
        feeds: what it is fed, those that it refuses left out.
    """

    model: ModelProto
    feeds: Mapping[str, Feed]
    answers: dict[str, list[Any]] = field(default_factory=dict)
    _noisy: Any = None
    _spreads: dict[str, list[list[Any]]] = field(default_factory=dict)
    _parts: dict[int, ModelProto] = field(default_factory=dict)

    @staticmethod
    def of(model: ModelProto, feeds: Mapping[str, Feed]) -> Original | None:
        """Run a model; None where it does not run on the first feed."""
        try:
            session = opened(model)
        # onnxruntime has a class for each kind of refusal; what it refuses is nobody's model.
        except Exception:  # noqa: BLE001
            return None
        answers = {}
        for name, feed in feeds.items():
            try:
                answers[name] = run(session, feed)
            except Exception:  # noqa: BLE001
                if not answers:
                    return None
        return Original(model, {name: feeds[name] for name in answers}, answers)

    def noisy(self, name: str) -> list[list[Any]]:
        """Return answers to a feed when every value on the way is rounded otherwise."""
        if name not in self._spreads:
            if self._noisy is None:
                onnxruntime.set_seed(0)
                self._noisy = [session for high in self._highest() if (session := _noisy_session(self.model, high))]
            self._spreads[name] = found = []
            for session in self._noisy:
                for _ in range(_RUNS):
                    # What is decided by a rounded number may not fit what follows.
                    with suppress(Exception):
                        found.append(run(session, self.feeds[name]))
        return self._spreads[name]

    def _highest(self) -> tuple[float, ...]:
        """Return the largest factors of noise.

        onnxruntime computes float16 in float32 and rounds only where a node has a kernel of its own for float16. So
        what stands between two nodes may also be larger than float16 says, and decide otherwise.
        """
        decides = _operators(self.model.graph) & _DECIDING
        return (1.0, 1.0 + _ROUNDING[TensorProto.FLOAT16]) if decides and has_halves(self.model) else (1.0,)

    def difference(self, name: str, found: list[Any]) -> Difference | None:
        """Return the worst difference between the model's answers to a feed and another's."""
        kinds = ("type", "shape", "values", "nonfinite", "overflow", "decision", "range", "nan", "invalid")
        differences = sorted(self._differences(name, found), key=lambda one: kinds.index(one.kind))
        if not differences or differences[0].kind in ("type", "range", "nan"):
            return differences[0] if differences else None
        worst = differences[0]
        reason = self._excuse(name, worst)
        return replace(worst, kind=reason) if reason else worst

    def _excuse(self, name: str, difference: Difference) -> str:
        """Return the kind of a difference where what the model computes on the way explains it."""
        part = self._part(difference.output)
        operators = _operators(part.graph)
        known = self._on_the_way(name, part)
        if not all(_fits(node, known) for node in part.graph.node if node.op_type == "Concat"):
            return "invalid"
        if operators & _RECURRENT and not all(array.size for array in known.values()):
            return "invalid"
        if not all(_keeps_shape(node, known) for node in part.graph.node if node.op_type == "PRelu"):
            return "invalid"
        values = [array for array in known.values() if array.dtype.kind == "f"]
        if operators & _LOSING_NAN and any(np.isnan(array).any() for array in values):
            return "nan"
        if operators & _RECURRENT and not all(np.isfinite(array).all() for array in values):
            return "nan"
        # Where a Clip makes numbers of infinity, these overflow beside NaN.
        ways = (known, *(self._on_the_way(name, part, is_replaced) for is_replaced in (np.isnan, _is_not_finite)))
        if any(_leaves_range(part, way) for way in ways):
            return "range"
        if not self._is_finite(name, part):
            return ""
        near = any(array.size and np.abs(array).max() > _NEAR * np.finfo(array.dtype).max for array in values)
        # Sums inside of recurrent kernels are not seen; they end in functions that no infinity leaves.
        hidden = operators & _RECURRENT and difference.kind in ("overflow", "values")
        return "range" if near and (hidden or (difference.kind == "overflow" and operators & _SUMS)) else ""

    def _part(self, output: int) -> ModelProto:
        """Return the model as far as an output needs it."""
        if output not in self._parts:
            part = ModelProto.FromString(self.model.SerializeToString())
            kept = ValueInfoProto.FromString(part.graph.output[output].SerializeToString())
            del part.graph.output[:]
            part.graph.output.append(kept)
            self._parts[output] = pruned(part)
        return self._parts[output]

    def _on_the_way(self, name: str, part: ModelProto, is_replaced: Any = None) -> dict[str, Any]:
        """Return what a part of the model is fed, stores and computes, as far as it is in its main graph.

        It is fed and stores 1 in the place of elements for which ``is_replaced`` is true, which tells what overflows
        beside them.
        """
        whole = ModelProto.FromString(part.SerializeToString())
        feed = dict(self.feeds[name])
        if is_replaced is not None:
            feed = {key: _with_ones(array, is_replaced) for key, array in feed.items()}
            for tensor in _stored(whole.graph):
                array = onnx.numpy_helper.to_array(tensor)
                tensor.CopyFrom(onnx.numpy_helper.from_array(_with_ones(array, is_replaced), tensor.name))
        try:
            found = values_of(whole, feed)
        # Types that cannot come out: the answers say as much as can be known.
        except Exception:  # noqa: BLE001
            found = dict(zip((entry.name for entry in self.model.graph.output), self.answers[name], strict=True))
        stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in whole.graph.initializer}
        read = {entry.name for entry in part.graph.input}
        known = {**stored, **{tensor: array for tensor, array in feed.items() if tensor in read}, **found}
        return {tensor: array for tensor, array in known.items() if isinstance(array, np.ndarray)}

    def _differences(self, name: str, found: list[Any]) -> Iterator[Difference]:
        for index, (one, other) in enumerate(zip(self.answers[name], found, strict=True)):
            if not isinstance(one, np.ndarray):
                continue
            if one.dtype != other.dtype:
                yield Difference("type", f"output {index}: {one.dtype} became {other.dtype}", index)
            elif one.shape != other.shape:
                varies = any(noisy[index].shape != one.shape for noisy in self.noisy(name))
                # A Loop of no rounds has shapes of results that nothing says.
                rounds = one.size or other.size or "Loop" not in _operators(self.model.graph)
                kind = "decision" if varies else "shape" if rounds else "invalid"
                yield Difference(kind, f"output {index}: {one.shape} became {other.shape}", index)
            elif one.dtype.kind != "f":
                if not np.array_equal(one, other):
                    varies = any(not np.array_equal(noisy[index], one) for noisy in self.noisy(name))
                    yield Difference("decision" if varies else "values", _shown(index, one, other, one != other), index)
            else:
                yield from self._of_floats(name, index, one, other)

    def _of_floats(self, name: str, index: int, one: Any, other: Any) -> Iterator[Difference]:
        before, after = one.astype(np.float64), other.astype(np.float64)
        relative = _RELATIVE[one.dtype.itemsize]
        floor = float(np.finfo(one.dtype).tiny)
        casts = (node for node in self.model.graph.node if node.op_type == "Cast")
        if any(one.name == "to" and one.i in _HALVES for node in casts for one in node.attribute):
            # What is wider than 16 bits keeps what those lose.
            floor = max(floor, float(np.finfo(np.float16).tiny))
        if _operators(self.model.graph) & _APPROXIMATED:
            floor = max(floor, _OF_APPROXIMATIONS)
        with np.errstate(all="ignore"):
            finite = np.isfinite(before) & np.isfinite(after)
            same = finite & (np.abs(before - after) <= relative * np.abs(before) + floor)
            same |= (before == after) | (np.isnan(before) & np.isnan(after))
        if same.all():
            return
        noisy = [answer[index].astype(np.float64) for answer in self.noisy(name)]
        noisy = [values for values in noisy if values.shape == before.shape]
        with np.errstate(all="ignore"):
            spread = np.max([np.abs(values - before) for values in noisy], axis=0, initial=0.0)
            varies = (
                np.any([~np.isfinite(values) != ~np.isfinite(before) for values in noisy], axis=0) if noisy else False
            )
            close = (
                np.abs(before - after)
                <= _ALLOWANCE[one.dtype.itemsize] * np.nan_to_num(spread, nan=np.inf)
                + relative * np.abs(before)
                + floor
            )
        wrong = finite & ~close & ~same
        if wrong.any():
            yield Difference("values", _shown(index, one, other, wrong), index)
        placed = ~finite & ~same & ~np.asarray(varies)
        if not placed.any():
            return
        part = self._part(index)
        if not self._is_finite(name, part):
            invented = np.isnan(before) & ~self._has_nan(name, part)
            kind = "nan" if not (placed & ~invented).any() else "nonfinite"
            yield Difference(kind, _shown(index, one, other, placed), index)
            return
        left = placed & np.isfinite(before)
        if left.any():
            yield Difference("overflow", _shown(index, one, other, left), index)
        else:
            yield Difference("range", _shown(index, one, other, placed), index)

    def _has_nan(self, name: str, part: ModelProto) -> bool:
        """Whether anything that a part of the model is fed or stores is NaN."""
        return any(np.isnan(array).any() for array in self._given(name, part))

    def _is_finite(self, name: str, part: ModelProto) -> bool:
        """Whether all that a part of the model is fed and stores is finite."""
        return all(np.isfinite(array).all() for array in self._given(name, part))

    def _given(self, name: str, part: ModelProto) -> list[Any]:
        stored = [onnx.numpy_helper.to_array(tensor) for tensor in _stored(part.graph)]
        fed = [self.feeds[name][entry.name] for entry in part.graph.input if entry.name in self.feeds[name]]
        return [array for array in (*fed, *stored) if array.dtype.kind == "f"]


def _shown(index: int, one: Any, other: Any, wrong: Any) -> str:
    place = np.argwhere(np.atleast_1d(wrong))[0]
    where = tuple(int(axis) for axis in place) if np.ndim(one) else ()
    return (
        f"output {index}{list(where)}: {one[where]!r} became {other[where]!r}, {int(np.sum(wrong))} of {np.size(one)}"
    )


def agree_in_numpy(one: ModelProto, other: ModelProto, feed: Feed) -> bool:
    """Return whether two models give the same where every node rounds to float16, as onnx's evaluator does.

    onnxruntime computes float16 in float32 and rounds only between some nodes, so that a decision may depend on which
    nodes stand beside each other. False where the evaluator does not run a model.
    """
    try:
        before, after = (_in_numpy(model, feed) for model in (one, other))
    # The evaluator has a class for each kind of refusal, and lacks operators of onnxruntime.
    except Exception:  # noqa: BLE001
        return False
    return len(before) == len(after) and all(map(_alike, before, after))


def _in_numpy(model: ModelProto, feed: Feed) -> list[Any]:
    session = ReferenceEvaluator(model)
    with np.errstate(all="ignore"):
        return list(session.run(None, {name: feed[name] for name in session.input_names if name in feed}))


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    relative, floor = _RELATIVE[one.dtype.itemsize], float(np.finfo(np.float16).tiny)
    return bool(np.allclose(one, other, rtol=relative, atol=floor, equal_nan=True))


def stores_denormals(model: ModelProto) -> bool:
    """Return whether a constant of a model has an element below the smallest normal number of its type."""
    arrays = (onnx.numpy_helper.to_array(tensor) for tensor in _stored(model.graph))
    floats = (np.abs(array) for array in arrays if array.dtype.kind == "f")
    return any(((array > 0) & (array < np.finfo(array.dtype).tiny)).any() for array in floats)


def _is_not_finite(array: Any) -> Any:
    return ~np.isfinite(array)


def _with_ones(array: Any, is_replaced: Any) -> Any:
    return np.where(is_replaced(array), array.dtype.type(1), array) if array.dtype.kind == "f" else array


def _leaves_range(part: ModelProto, known: Mapping[str, Any]) -> bool:
    """Whether a node makes infinity or NaN of finite numbers, so that any other order of operations may differ.

    What is infinite because it was fed or stored so says nothing of the data beside it.
    """

    def is_finite(names: Iterable[str]) -> bool:
        arrays = (known[name] for name in names if name in known)
        return all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in arrays)

    return any(is_finite(captured([node])) and not is_finite(node.output) for node in part.graph.node)


def _fits(concat: NodeProto, known: Mapping[str, Any]) -> bool:
    """Whether what a Concat joins differs along its axis alone; onnxruntime does not ask that of empty tensors."""
    axis = next((one.i for one in concat.attribute if one.name == "axis"), 1)
    shapes = [list(known[name].shape) for name in concat.input if name in known]
    for shape in shapes:
        shape[axis] = 0
    return all(shape == shapes[0] for shape in shapes)


def _keeps_shape(prelu: NodeProto, known: Mapping[str, Any]) -> bool:
    """Whether a slope is broadcast to its data; onnxruntime also broadcasts the data to the slope."""
    shapes = [known[name].shape for name in prelu.input if name in known]
    return len(shapes) < 2 or np.broadcast_shapes(*shapes) == shapes[0]


def _operators(graph: GraphProto) -> set[str]:
    found = {node.op_type for node in graph.node}
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                found |= _operators(attribute.g)
    return found


def has_halves(model: ModelProto) -> bool:
    """Return whether a model is fed, stores or makes float16."""
    declared = (entry.type.tensor_type.elem_type for entry in model.graph.input)
    casts = (one.i for node in model.graph.node if node.op_type == "Cast" for one in node.attribute if one.name == "to")
    stored = (tensor.data_type for tensor in _stored(model.graph))
    return TensorProto.FLOAT16 in (*declared, *casts, *stored)


def _noisy_session(model: ModelProto, high: float) -> Any:
    try:
        return opened(with_noise(model, high=high))
    # onnxruntime has a class for each kind of refusal; without noise the tolerances stand alone.
    except Exception:  # noqa: BLE001
        return None


def _stored(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == AttributeProto.GRAPH:
                yield from _stored(attribute.g)


# Other roundings


def with_noise(model: ModelProto, rounding: float = 0.0, high: float = 1.0) -> ModelProto:
    """Return a model that multiplies each float tensor by random numbers a little below one.

    No number gets larger by it, so none leaves the range of its type that did not before.

    Args:
        model: any model.
        rounding: how much a number may change, relative to it; by default two units in the last place of its type.
        high: the largest factor; above one it is used in the place of a small one.
    """
    try:
        made = onnx.shape_inference.infer_shapes(model)
    # What cannot be inferred has no noise of its own.
    except Exception:  # noqa: BLE001
        made = ModelProto.FromString(model.SerializeToString())
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    for entry in (*made.graph.input, *made.graph.value_info, *made.graph.output):
        for dim in entry.type.tensor_type.shape.dim:
            # Extents of one name that differ are no matter until onnxruntime shares memory between more tensors.
            dim.ClearField("dim_param")
    _add_noise(made.graph, {}, _Noise(opset, rounding, high), top=True)
    return made


def _add_noise(graph: GraphProto, renamed: dict[str, str], nsr: _Noise, *, top: bool) -> None:
    types = {entry.name: entry.type.tensor_type.elem_type for entry in (*graph.value_info, *graph.output, *graph.input)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    first: list[NodeProto] = []
    inner = dict(renamed)
    for name in {entry.name: None for entry in (*(graph.input if top else ()), *graph.initializer)}:
        if is_float(types.get(name, 0)):
            inner[name] = f"{name}~"
            first += _nsr(name, f"{name}~", types[name], nsr)
    made: list[NodeProto] = []
    for node in graph.node:
        # Rounding changes how many elements a Resize makes, but not the factors that say so.
        exact = node.input[1:] if node.op_type in ("Resize", "Upsample") else ()
        node.input[:] = [renamed.get(name, name) if name in exact else inner.get(name, name) for name in node.input]
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _add_noise(attribute.g, inner, nsr, top=False)
        behind = []
        if (
            node.op_type == "Cast"
            and node.input[0]
            and any(one.name == "to" and one.i == TensorProto.BFLOAT16 for one in node.attribute)
        ):
            # No noise can be made of these; their rounding is that of what becomes them.
            made += _nsr(
                node.input[0],
                f"{node.output[0]}~cast",
                types.get(node.input[0].rstrip("~"), 0),
                nsr._replace(rounding=_BRAIN),
            )
            node.input[0] = f"{node.output[0]}~cast"
        for index, name in enumerate(node.output):
            if name and is_float(types.get(name, 0)):
                node.output[index] = f"{name}~raw"
                behind += _nsr(f"{name}~raw", name, types[name], nsr)
        made += [node, *behind]
    copies = [NodeProto.FromString(node.SerializeToString()) for node in (*first, *made)]
    del graph.node[:]
    graph.node.extend(copies)


class _Noise(NamedTuple):
    opset: int
    rounding: float
    high: float = 1.0


def _nsr(name: str, result: str, elem: int, wanted: _Noise) -> list[NodeProto]:
    low, nsr = 1.0 if wanted.high > 1 else 1 - 2 * (wanted.rounding or _ROUNDING[elem]), f"{result}~noise"
    product = helper.make_node("Mul", [name, nsr], [result])
    dtype = helper.tensor_dtype_to_np_dtype(elem)
    if wanted.opset < _NO_RANDOM_NUMBERS and elem != TensorProto.DOUBLE:
        return [helper.make_node("RandomUniformLike", [name], [nsr], low=low, high=wanted.high), product]
    if wanted.opset < _NO_RANDOM_NUMBERS:
        # The bounds of RandomUniformLike are float32, in which the rounding of doubles is nothing.
        bounds = {"width": wanted.high - low, "low": low}
        return [
            *(_constant(f"{nsr}~{part}", dtype.type(value)) for part, value in bounds.items()),
            helper.make_node("RandomUniformLike", [name], [f"{nsr}~share"], low=0.0, high=1.0),
            helper.make_node("Mul", [f"{nsr}~share", f"{nsr}~width"], [f"{nsr}~excess"]),
            helper.make_node("Add", [f"{nsr}~excess", f"{nsr}~low"], [nsr]),
            product,
        ]
    parts = {
        "half": np.float32(0.5),
        "yes": np.True_,
        "high": dtype.type((low + wanted.high) / 2),
        "low": dtype.type(low),
    }
    stored = [_constant(f"{nsr}~{part}", value) for part, value in parts.items()]
    half, yes, high, less = (f"{nsr}~{part}" for part in parts)
    mask = helper.make_node("Dropout", [name, half, yes], [f"{nsr}~unused", f"{nsr}~mask"])
    return [*stored, mask, helper.make_node("Where", [f"{nsr}~mask", high, less], [nsr]), product]


def _constant(name: str, value: Any) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(np.asarray(value)))
