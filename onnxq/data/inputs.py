"""Describe the inputs of a model, check that samples fit them, and generate seeded samples."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.errors import DataError, ModelError, did_you_mean
from onnxq.ir.declarations import declared_shape
from onnxq.ir.deserialize import variable_of
from onnxq.ir.elements import Tensor, Variable, canonical_domain
from onnxq.ir.graph import Graph
from onnxq.ir.symbolic_dims import is_symbol
from onnxq.ops import OPERATORS, facts_of

Dim: TypeAlias = int | str | None
Dims: TypeAlias = tuple[Dim, ...]

# Generated names without a meaning: s77 of torch.export, unk__12 of tf2onnx, DynamicDimension.0 of Paddle,
# x_dynamic_axes_1 and Concat461_dim_0 of torch.onnx.
_NUMBERED = re.compile(
    r"[su]\d+|unk(nown)?_*\d+|dynamic_?dim(ension)?[._]?\d*|(.*_)?(dynamic_axes|dim|axis|d)_?\d+", re.IGNORECASE
)


def counts_samples(dim: Dim) -> bool:
    """Return whether a leading dimension is a batch by itself: it is 1 or has a batch name.

    >>> [counts_samples(dim) for dim in (1, "batch_size", "N", "time", 3, None)]
    [True, True, True, False, False, False]
    """
    return dim == 1 or _named_batch(dim)


def says_nothing(dim: Dim) -> bool:
    """Return whether a dimension is open and has no name, or a name that a program numbered.

    >>> [says_nothing(dim) for dim in (None, "s0", "unk__12", "DynamicDimension.0", "frames", 1)]
    [True, True, True, True, False, False]
    """
    return dim is None or (isinstance(dim, str) and _NUMBERED.fullmatch(dim) is not None)


def open_batch(inputs: Collection[Dims | None], outputs: Collection[Dims | None]) -> bool:
    """Return whether unnamed first dimensions are batch dimensions, by all inputs and outputs of a model.

    The first dimension of every input must count samples (`counts_samples`) or be unnamed (`says_nothing`). Then they
    are batch dimensions if one of them counts samples, or if all of the following hold:

    - The first dimension of every output is unnamed or has a batch name.
    - Each input has further dimensions, because an input of one dimension is a signal.
    - No further dimension has a batch name.

    Args:
        inputs: dimensions of each input; None for an unknown rank.
        outputs: dimensions of each output; None for an unknown rank.

    >>> open_batch([(None, 3, 224, 224)], [("s1", 1000)])
    True
    >>> open_batch([(None, 80)], [(1, 40)])
    False
    """
    if not all(dims and (counts_samples(dims[0]) or says_nothing(dims[0])) for dims in inputs):
        return False
    if any(dims and counts_samples(dims[0]) for dims in inputs):
        return True
    return (
        all(dims is None or (dims and (says_nothing(dims[0]) or _named_batch(dims[0]))) for dims in outputs)
        and all(dims and len(dims) > 1 for dims in inputs)
        and not any(_named_batch(dim) for dims in (*inputs, *outputs) for dim in (dims or ())[1:])
    )


def _named_batch(dim: Dim) -> bool:
    return isinstance(dim, str) and ("batch" in dim.lower() or dim.lower() in ("b", "bs", "n"))


# The inputs of a model, and checks of samples.

Sample: TypeAlias = dict[str, NDArray[Any]]
Shape: TypeAlias = tuple[int, ...]
Signature: TypeAlias = Mapping[str, tuple[np.dtype[Any], Shape]]


class SampleSource(Protocol):
    """A sized stream of samples: `onnxq.data.samples.Samples`, or a list."""

    def __len__(self) -> int:
        """Return the number of samples that an iteration yields."""
        ...

    def __iter__(self) -> Iterator[Sample]:
        """Start again at the first sample."""
        ...


@dataclass(frozen=True)
class Input:
    """One graph input. In `shape`, a fixed dim is an int, a symbolic dim its name, an unknown dim None.

    Attributes:
        shape: None for an unknown rank.
        optional: whether samples may lack the input.
        open_batch: whether an unnamed first dim counts samples.

    >>> str(Input("x", np.dtype(np.float32), ("N", 3, None)))
    "'x' float32[N, 3, ?]"
    """

    name: str
    dtype: np.dtype[Any]
    shape: Dims | None
    optional: bool = False
    open_batch: bool = False

    @property
    def batched(self) -> bool:
        """Whether the first dim counts samples: it is 1, has a batch name, or `open_batch` is set."""
        return self.shape is not None and len(self.shape) > 0 and (self.open_batch or counts_samples(self.shape[0]))

    def __str__(self) -> str:
        dims = "any rank" if self.shape is None else ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"{self.name!r} {self.dtype.name}[{dims}]"


def inputs_of(graph: Graph) -> tuple[Input, ...]:
    """Return the inputs that a sample has to provide, in the model's order.

    Graph inputs with an initializer have a default and are left out. Placeholder dims of exporters (0, -1, ``?``,
    ``None``) are unknown dims. Unnamed first dims count samples if `onnxq.data.inputs.open_batch` is true. They do not
    if a recurrent node reads an input of the model directly, because its first axis is time.

    Raises:
        ModelError: An input is not a tensor or has no element type.
    """
    sparse = {tensor for tensor, _ in graph.sparse_initializers}
    timed = {node.inputs[0].name for node in graph.nodes if facts_of(node).recurrent and not node.attrs.get("layout")}
    return _described([tensor for tensor in graph.inputs if tensor not in sparse], graph.outputs, timed)


def model_inputs(model: onnx.ModelProto) -> tuple[Input, ...]:
    """Return the inputs that a sample has to provide, as `inputs_of` does for a graph."""
    graph = model.graph
    defaults = {tensor.name for tensor in graph.initializer} | {
        sparse.values.name for sparse in graph.sparse_initializer
    }
    inputs, outputs = ([variable_of(info.name, info) for info in infos] for infos in (graph.input, graph.output))
    timed = {node.input[0] for node in graph.node if _reads_time_first(node)}
    return _described([tensor for tensor in inputs if tensor.name not in defaults], outputs, timed)


def _described(tensors: Sequence[Variable], outputs: Sequence[Tensor], timed: Collection[str]) -> tuple[Input, ...]:
    inputs = tuple(_input(tensor) for tensor in tensors)
    if not open_batch([entry.shape for entry in inputs], [_dims(tensor) for tensor in outputs]):
        return inputs
    if any(entry.name in timed for entry in inputs):
        return inputs
    return tuple(replace(entry, open_batch=says_nothing(entry.shape[0])) if entry.shape else entry for entry in inputs)


def _input(tensor: Variable) -> Input:
    if tensor.dtype is not None:
        return Input(tensor.name, np.dtype(tensor.dtype), _dims(tensor))
    declared = onnx.TypeProto() if tensor.source is None else tensor.source.type
    kind, number = declared.WhichOneof("value") or "untyped", declared.tensor_type.elem_type
    if number:
        raise ModelError(
            f"input {tensor.name!r} has the element type {number}, which the installed onnx does not support; "
            "export the model again or upgrade onnx"
        )
    raise ModelError(
        f"Graph input {tensor.name!r} is {kind.removesuffix('_type')}, expected a tensor with an element type; "
        "samples can only feed tensors"
    )


def _dims(tensor: Tensor) -> Dims | None:
    shape = declared_shape(tensor)
    return None if shape is None else tuple(map(_dim, shape))


def _dim(size: Dim) -> Dim:
    is_known = is_symbol(size) if isinstance(size, str) else size is not None and size > 0
    return size if is_known else None


def _reads_time_first(node: onnx.NodeProto) -> bool:
    layout = next((attribute.i for attribute in node.attribute if attribute.name == "layout"), 0)
    operator = OPERATORS.get((canonical_domain(node.domain), node.op_type))
    return operator is not None and operator.recurrent and layout == 0


@cache
def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype`` is a float type, bfloat16 and float8 included."""
    return dtype.name.startswith(("float", "bfloat"))


def required(inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Return the inputs that every sample has to provide."""
    return tuple(entry for entry in inputs if not entry.optional)


def check_signature(signature: Signature, inputs: Sequence[Input], where: str) -> None:
    """Check the names, dtypes, ranks and dims of one sample.

    Args:
        signature: Dtype and shape by name.
        inputs: The inputs of the model.
        where: The name of the file or sample in errors.

    Raises:
        DataError: The sample does not fit; the message names the first mismatch and a remedy.
    """
    wanted = {entry.name: entry for entry in inputs}
    for name in signature:
        if name not in wanted:
            raise DataError(
                f"{where}: {name!r} is not an input of the model, expected {_names(wanted)}{did_you_mean(name, wanted)}"
            )
    for entry in required(inputs):
        if entry.name not in signature:
            raise DataError(f"{where}: input {entry} is missing, found {_names(signature)}; add an array of that name")
    for name, (dtype, shape) in signature.items():
        _check_dtype(dtype, wanted[name], where)
        _check_shape(shape, wanted[name], where)
    _check_symbols({name: shape for name, (_, shape) in signature.items()}, inputs, where)


def _check_dtype(dtype: np.dtype[Any], entry: Input, where: str) -> None:
    if dtype == entry.dtype or (entry.dtype.hasobject and dtype.kind in "UO"):
        return
    if entry.dtype.hasobject:
        raise DataError(f"{where}: {entry.name!r} is {dtype.name}, expected strings; save it as a numpy array of str")
    if is_floating(entry.dtype) and dtype.kind in "iub":
        raise DataError(
            f"{where}: {entry.name!r} is {dtype.name}, expected {entry.dtype.name}; save what the model "
            f"was trained on, such as array.astype({entry.dtype.name!r}) / 255 where it takes pixels in 0..1"
        )
    raise DataError(
        f"{where}: {entry.name!r} is {dtype.name}, expected {entry.dtype.name}; "
        f"save it as array.astype({entry.dtype.name!r}) if no value is lost"
    )


def _check_shape(shape: Shape, entry: Input, where: str) -> None:
    if entry.shape is None:
        return
    if len(shape) != len(entry.shape):
        raise DataError(
            f"{where}: {entry.name!r} has shape {list(shape)} of rank {len(shape)}, "
            f"expected rank {len(entry.shape)} as in {entry}; add or remove an axis"
        )
    for axis, (dim, wanted) in enumerate(zip(shape, entry.shape, strict=True)):
        if isinstance(wanted, int) and dim != wanted:
            raise DataError(
                f"{where}: {entry.name!r} has shape {list(shape)}, expected {wanted} and found {dim} on axis {axis} "
                f"of {entry}; preprocess the sample to that shape"
            )


def _check_symbols(shapes: Mapping[str, Shape], inputs: Sequence[Input], where: str) -> None:
    seen: dict[str, tuple[str, int]] = {}
    for entry in inputs:
        for wanted, dim in zip(entry.shape or (), shapes.get(entry.name, ()), strict=False):
            if not isinstance(wanted, str):
                continue
            earlier, size = seen.setdefault(wanted, (entry.name, dim))
            if size != dim:
                raise DataError(
                    f"{where}: dim {wanted!r} is {size} in {earlier!r} and {dim} in {entry.name!r}, expected one size; "
                    "save both from the same sample"
                )


def sample_bytes(sample: Sample) -> int:
    """Return the total bytes of a sample's arrays."""
    return sum(int(np.asarray(value).nbytes) for value in sample.values())


def cast_type(dtype: np.dtype[Any], entry: Input | None) -> np.dtype[Any]:
    """Return the type that values for an input are cast to: the input's, from floats to floats and whole to whole.

    Other types stay, as the cast would change the meaning of values, such as of pixels that become floats.
    """
    if entry is None:
        return dtype
    both_floats = is_floating(dtype) and is_floating(entry.dtype)
    both_whole = dtype.kind in "iub" and entry.dtype.kind in "iub"
    return entry.dtype if both_floats or both_whole else dtype


def cast(array: NDArray[Any], entry: Input | None) -> NDArray[Any]:
    """Return an array as the type of an input, see `cast_type`; whole numbers stay as they are if one would change."""
    dtype = cast_type(array.dtype, entry)
    if dtype == array.dtype:
        return array
    # Values beyond the range of the type become infinite, which the check of the sample refuses.
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    return converted if is_floating(dtype) or bool((converted == array).all()) else array


def checked(sample: Mapping[str, NDArray[Any]], inputs: Sequence[Input], where: str) -> Sample:
    """Return the arrays of a sample as the types of the inputs, after `check_sample`."""
    wanted = {entry.name: entry for entry in inputs}
    if isinstance(sample, Mapping):
        sample = {
            name: cast(np.asarray(value), wanted.get(name)) if isinstance(value, np.ndarray | np.generic) else value
            for name, value in sample.items()
        }
    check_sample(sample, inputs, where)
    return dict(sample)


def check_sample(sample: Mapping[str, NDArray[Any]], inputs: Sequence[Input], where: str) -> None:
    """Check one sample with `check_signature`, and that every float value is finite.

    Raises:
        DataError: The sample does not fit the inputs, is not a dict of arrays, is empty, or has NaN or infinite values.
    """
    if not isinstance(sample, Mapping):
        raise DataError(
            f"{where} is {type(sample).__name__}, expected a dict from input name to numpy array; "
            "wrap single samples as [{'name': array}]"
        )
    for name, value in sample.items():
        if not isinstance(value, np.ndarray | np.generic):
            raise DataError(
                f"{where}: {name!r} is {type(value).__name__}, expected a numpy array; convert it with numpy.asarray"
            )
    check_signature({name: (value.dtype, value.shape) for name, value in sample.items()}, inputs, where)
    if sample and not any(value.size for value in sample.values()):
        # Some kernels of onnxruntime end the process on empty inputs, and all quantized models agree on them.
        shapes = ", ".join(f"{name!r} {list(value.shape)}" for name, value in sample.items())
        raise DataError(f"{where} is empty ({shapes}), expected values in one input at least; leave it out")
    for name, value in sample.items():
        if value.dtype.hasobject and (
            kinds := {type(item).__name__ for item in value.flat if not isinstance(item, str)}
        ):
            raise DataError(f"{where}: {name!r} holds {min(kinds)}, expected strings alone; convert it with str")
        if is_floating(value.dtype) and (bad := value.size - int(np.count_nonzero(np.isfinite(value)))):
            raise DataError(
                f"{where}: {name!r} holds {bad} NaN or infinite values of {value.size}, expected finite values; "
                "fix or remove the sample"
            )


def _names(names: Mapping[str, object]) -> str:
    return ", ".join(repr(name) for name in list(names)[:8]) + (", ..." if len(names) > 8 else "") or "nothing"


# Seeded samples of the types and shapes that a model declares.

_LARGEST_DIM = 4
# Small integers are valid indices, axes and lengths; zeros and ones are masks.
_INTEGERS = ((0, 3), (0, 1), (-2, 3))
_LARGE = 10.0
_SHARE_OF_ZEROS = 0.05


def generate_samples(inputs: Sequence[Input], count: int) -> Iterator[Sample]:
    """Yield samples that fit the inputs of a model, the same ones each time; a model may refuse some or all of them.

    - Open dims of one name are equal, all others differ. In every second sample all open dims are equal, because some
      models do not name dims that belong together. Lengths start at 1.
    - Floats are standard normal, a few are 0. In every fourth sample they are 10 times as large.
    - Integers are small, in some samples negative.

    >>> wanted = Input("x", np.dtype(np.int64), ("N", 2))
    >>> [sample["x"].shape for sample in generate_samples([wanted], 3)]
    [(3, 2), (2, 2), (3, 2)]
    """
    wanted = required(inputs)
    named = {dim for entry in wanted for dim in entry.shape or () if isinstance(dim, str)}
    free = len(named) + sum(dim is None for entry in wanted for dim in entry.shape or ())
    for seed in range(count):
        generator = np.random.default_rng(seed)
        common = int(generator.integers(1, _LARGEST_DIM + 1))
        lengths = [common] * free if seed % 2 else list(generator.permutation(max(free, _LARGEST_DIM)) + 1)
        by_name = dict(zip(sorted(named), map(int, lengths), strict=False))
        remaining = iter(lengths[len(named) :])
        sample = {}
        for entry in wanted:
            shape = [
                dim if isinstance(dim, int) else by_name[dim] if dim is not None else int(next(remaining))
                for dim in entry.shape or ()
            ]
            sample[entry.name] = _values(generator, entry.dtype, tuple(shape), seed)
        yield sample


def _values(
    generator: np.random.Generator, dtype: np.dtype[np.generic], shape: tuple[int, ...], seed: int
) -> NDArray[np.generic]:
    if is_floating(dtype):
        drawn = generator.standard_normal(shape) * (_LARGE if seed % 4 == 2 else 1.0)
        return np.where(generator.random(shape) < _SHARE_OF_ZEROS, 0.0, drawn).astype(dtype)
    if dtype.hasobject or dtype.kind in "SU":
        return np.full(shape, "text", dtype=object)
    if dtype.kind == "c":
        return (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)).astype(dtype)
    least, most = _INTEGERS[seed % len(_INTEGERS)]
    return generator.integers(least if dtype.kind == "i" else 0, most + 1, shape).astype(dtype)
