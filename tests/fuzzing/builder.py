"""A graph that grows node by node; onnxruntime computes each at once, so that shapes are known and nodes are sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from fuzzing.parts import captured
from fuzzing.runtime import evaluated, ir_version, value_info

F16, F32, F64 = np.float16, np.float32, np.float64
I32, I64 = np.int32, np.int64
_UNNAMED = ("?", "", None, "unk__1")


class RefusedError(Exception):
    """onnxruntime does not compute a node; whoever wanted it does without."""


class Builder:
    """A graph, or a body of one, under construction.

    Attributes:
        random: where all chances come from.
        opset: version of the default domain.
        dtype: type of most of its floats.
        calm: whether constants are initializers of ordinary values.
        values: what each tensor holds for the first feed.
        declared: types of inner tensors that the graph declares.
    """

    def __init__(self, random: np.random.Generator, opset: int, dtype: Any, parent: Builder | None = None) -> None:
        self.random, self.opset, self.dtype, self.parent = random, opset, dtype, parent
        self.nodes: list[NodeProto] = []
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.stored: dict[str, Any] = {}
        self.overridable: set[str] = set()
        self.values: dict[str, Any] = {}
        self.read: dict[str, int] = {}
        self.returned: list[str] = []
        self.hidden: set[str] = set()
        self.lengths: dict[str, int] = {} if parent is None else parent.lengths
        self.functions: list[Any] = [] if parent is None else parent.functions
        self.declared: list[ValueInfoProto] = []
        self.count: list[int] = [0] if parent is None else parent.count
        self.prefix = self.fed = ""
        self.calm = False
        self.unnamed = self.pick(_UNNAMED)

    # Chances

    def chance(self, share: float) -> bool:
        """Say yes as often as a share says."""
        return bool(self.random.random() < share)

    def pick(self, options: Sequence[Any]) -> Any:
        """Choose one of a few."""
        return options[int(self.random.integers(len(options)))]

    def word(self, words: str) -> str:
        """Choose one of a few words."""
        return str(self.pick(words.split()))

    def fresh(self, stem: str = "t") -> str:
        """Return a name that is not taken in any graph of the model."""
        self.count[0] += 1
        return f"{self.prefix}{stem}{self.count[0]}"

    # Tensors

    def value(self, name: str) -> Any:
        """Return what a tensor holds, also of a graph around this one."""
        if name in self.values:
            return self.values[name]
        if self.parent is None:
            raise KeyError(name)
        return self.parent.value(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor for the first feed."""
        return tuple(self.value(name).shape)

    def rank(self, name: str) -> int:
        """Return how many axes a tensor has."""
        return len(self.shape(name))

    def normal(self, *shape: int, dtype: Any = None) -> Any:
        """Return values as layers have them."""
        return self.random.standard_normal(shape).astype(dtype or self.dtype)

    def input(self, *shape: int, dtype: Any = None, values: Any = None, fixed: float = 0.6) -> str:
        """Add an input of the model; in bodies what the graph around has of this kind."""
        if self.parent is not None:
            return self.parent.input(*shape, dtype=dtype, values=values, fixed=fixed)
        name = self.fresh("x")
        if values is None:
            values = filled(self.random, shape, dtype or self.dtype)
        self.values[name] = values
        self.inputs[name] = tuple(length if self.chance(fixed) else self._dimension(length) for length in values.shape)
        return name

    def _dimension(self, length: int) -> Any:
        if self.chance(0.5):
            return self.unnamed if self.chance(0.8) else self.pick(_UNNAMED)
        alike = [name for name, known in self.lengths.items() if known == length]
        if alike and self.chance(0.6):
            return self.pick(alike)
        name = f"N{len(self.lengths)}"
        self.lengths[name] = length
        return name

    def constant(self, values: Any, dtype: Any = None, plain: float = 0.75) -> str:
        """Store values: as an initializer, a Constant node, of a graph around, or computed from such."""
        array = np.asarray(values, dtype)
        for name, known in self.stored.items() if self.chance(0.1) else ():
            if known.dtype == array.dtype and known.shape == array.shape and np.array_equal(known, array):
                return name
        if self.parent is not None and self.chance(0.4):
            return self.parent.constant(array, plain=plain)
        name = self.fresh("c")
        self.values[name] = array
        if self.calm or self.chance(plain):
            self.stored[name] = array
        elif self.chance(0.6) or array.dtype.kind == "b" or self.parent is not None:
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        elif self.chance(0.3) and not self.overridable:
            self.stored[name] = array
            self.overridable.add(name)
            self.fed = name
        else:
            del self.values[name]
            return self.op("Identity", self.constant(array, plain=1.0))
        return name

    def numbers(self, *numbers: int) -> str:
        """Store whole numbers, as axes and shapes are."""
        return self.constant(np.array(numbers, I64))

    def scalar(self, value: float, like: str, ranked: bool = True) -> str:
        """Store one number of the type that a tensor has, now and then in more axes."""
        shapes: list[tuple[int, ...]] = [(), (), (), (1,), (1,), (1, 1)] if ranked else [()]
        dtype = self.value(like).dtype
        with np.errstate(over="ignore"):
            return self.constant(np.full(self.pick(shapes), value).astype(dtype))

    def sources(self) -> list[str]:
        """Return the tensors that a new node may read."""
        own = [name for name in self.values if name not in self.stored]
        return own if self.parent is None else [*own, *self.parent.sources()]

    def find(
        self, rank: int | tuple[int, ...] | None = None, kinds: str = "f", dtype: Any = None, known: bool = False
    ) -> str:
        """Choose a tensor that is there, the last ones first, or add an input.

        Args:
            rank: how many axes it has to have, or one of several numbers of them.
            kinds: kinds of types as numpy has them.
            dtype: its type; by default that of most floats.
            known: whether it is rather an input of declared lengths.
        """
        wanted = np.dtype(dtype or (self.dtype if kinds == "f" else I64))
        ranks = (rank,) if isinstance(rank, int) else rank
        found = [
            name
            for name in self.sources()
            if self.value(name).dtype == wanted and (ranks is None or self.rank(name) in ranks)
        ]
        if found and self.chance(0.2 if known else 0.7):
            return str(found[-1] if self.chance(0.5) else self.pick(found))
        axes = self.pick(ranks or (1, 2, 3, 4))
        shape = [int(length) for length in self.random.choice([1, 2, 3, 4, 5], size=axes)]
        if axes == 4:
            shape = [
                int(self.pick([1, 2])),
                int(self.pick([2, 3, 4])),
                int(self.pick([4, 5, 6])),
                int(self.pick([4, 5, 6])),
            ]
        return self.input(*shape, dtype=wanted, fixed=0.95 if known else 0.6)

    # Nodes

    def op(self, op_type: str, *inputs: str | None, domain: str = "", **attributes: Any) -> str:
        """Add a node of one output and return that."""
        return self.ops(op_type, *inputs, outputs=1, domain=domain, **attributes)[0]

    def ops(self, op_type: str, *inputs: str | None, outputs: int, domain: str = "", **attributes: Any) -> list[str]:
        """Add a node and return its outputs.

        Raises:
            RefusedError: onnxruntime does not compute it.
        """
        names = [self.fresh() for _ in range(outputs)]
        given = {name: value for name, value in attributes.items() if value is not None}
        node = helper.make_node(op_type, [name or "" for name in inputs], names, domain=domain, **given)
        if self.chance(0.7):
            node.name = f"{op_type}_{names[0]}"
        self.emit([node], names)
        return names

    def emit(self, nodes: Sequence[NodeProto], outputs: Sequence[str]) -> None:
        """Add nodes that are computed together, and only some of whose outputs others may read."""
        needed = {name: self.value(name) for name in captured(nodes)}
        try:
            results = evaluated(nodes, needed, outputs, self.opset, self.functions)
        # onnxruntime has a class for each kind of refusal.
        except Exception as error:
            raise RefusedError(f"{[node.op_type for node in nodes]}: {error}") from error
        if any(getattr(one, "size", 0) > 20_000 for one in results):
            raise RefusedError("it makes too much")
        if self.calm and any(getattr(one, "size", 1) == 0 for one in results):
            raise RefusedError("it makes nothing")
        self.nodes.extend(nodes)
        for name in needed:
            self.read[name] = self.read.get(name, 0) + 1
        self.values.update(zip(outputs, results, strict=True))

    # Operators that were changed by an opset

    def axes_op(self, op_type: str, data: str, axes: Sequence[int] | None, since: int, **attributes: Any) -> str:
        """Add an operator whose axes are an attribute before an opset, and an input since."""
        if self.opset < since or axes is None:
            return self.op(op_type, data, axes=list(axes) if axes is not None else None, **attributes)
        return self.op(op_type, data, self.numbers(*axes), **attributes)

    def reduce(self, op_type: str, data: str, axes: Sequence[int] | None, keepdims: int = 1) -> str:
        if axes is not None and self.opset < 11:
            # Axes count from the end since this opset; onnx infers wrong shapes before.
            axes = [axis % self.rank(data) for axis in axes]
        return self.axes_op(op_type, data, axes, 13 if op_type == "ReduceSum" else 18, keepdims=keepdims)

    def squeeze(self, data: str, axes: Sequence[int] | None) -> str:
        return self.axes_op("Squeeze", data, axes, 13)

    def unsqueeze(self, data: str, axes: Sequence[int]) -> str:
        if self.opset < 11:
            # Axes count from the end since this opset.
            axes = [axis % (self.rank(data) + len(axes)) for axis in axes]
        return self.axes_op("Unsqueeze", data, axes, 13)

    def reshape(self, data: str, target: str | Sequence[int], **attributes: Any) -> str:
        return self.op("Reshape", data, target if isinstance(target, str) else self.numbers(*target), **attributes)

    def slice(
        self, data: str, starts: list[int], ends: list[int], axes: list[int], steps: list[int] | None = None
    ) -> str:
        if self.opset < 10:
            return self.op("Slice", data, starts=starts, ends=ends, axes=axes)
        parts = [self.numbers(*part) for part in (starts, ends, axes, *([] if steps is None else [steps]))]
        return self.op("Slice", data, *parts)

    def clip(self, data: str, low: float | None, high: float | None) -> str:
        if self.opset < 11:
            return self.op("Clip", data, min=low, max=high)
        limits = [None if limit is None else self.scalar(limit, data, ranked=False) for limit in (low, high)]
        while limits and limits[-1] is None:
            limits.pop()
        return self.op("Clip", data, *limits)

    def pad(self, data: str, pads: Sequence[int], value: float = 0.0, mode: str = "constant") -> str:
        if self.opset < 11:
            return self.op("Pad", data, pads=list(pads), mode=mode, value=value)
        extra = [self.scalar(value, data, ranked=False)] if value or self.chance(0.5) else []
        return self.op("Pad", data, self.numbers(*pads), *extra, mode=mode)

    def split(self, data: str, sizes: Sequence[int], axis: int) -> list[str]:
        if self.opset < 13:
            return self.ops("Split", data, outputs=len(sizes), axis=axis, split=list(sizes))
        return self.ops("Split", data, self.numbers(*sizes), outputs=len(sizes), axis=axis)

    # Graphs

    def body(self) -> Builder:
        """Return a builder of a body that may read all that is here."""
        made = Builder(self.random, self.opset, self.dtype, self)
        made.calm = self.calm
        if self.chance(0.5):
            # Bodies beside each other may use the same names.
            made.count, made.prefix = [0], f"{self.prefix}in_"
        return made

    def formal(self, values: Any, stem: str = "s") -> str:
        """Declare an input of a body, which holds these values for now."""
        name = self.fresh(stem)
        self.values[name] = np.asarray(values)
        self.inputs[name] = tuple(np.shape(values))
        return name

    def list_all(self) -> None:
        """List every initializer as an input, as old exporters do."""
        self.overridable.update(self.stored)

    def graph(self, outputs: Sequence[str], declared: bool = True) -> GraphProto:
        """Return the graph with these outputs."""
        blank = self.parent is not None and not declared
        entries = [
            value_info(name, self.values[name].dtype, None if blank and dims else dims)
            for name, dims in self.inputs.items()
        ]
        entries += [
            value_info(name, self.stored[name].dtype, self.stored[name].shape) for name in sorted(self.overridable)
        ]
        made = [
            value_info(name, self.value(name).dtype, None if blank and self.rank(name) else self._declared(name))
            for name in outputs
        ]
        stored = [numpy_helper.from_array(values, name) for name, values in self.stored.items()]
        return helper.make_graph(self.nodes, self.fresh("graph"), entries, made, stored, value_info=self.declared)

    def _declared(self, name: str) -> list[Any]:
        """Return how an output is declared: its lengths where no input has others, and claims of nothing else."""
        root = self
        while root.parent is not None:
            root = root.parent
        fixed = all(isinstance(dim, int) for dims in root.inputs.values() for dim in dims) and self.parent is None
        share = 0.7 if fixed else 0.0
        return [length if self.chance(share) else self.pick(("?", "", None)) for length in self.shape(name)]

    def model(self) -> ModelProto:
        """Return the model: what nobody reads is an output, and so is some of what others read."""
        made = [name for name in self.values if name not in self.stored and name not in self.inputs]
        outputs = [name for name in made if (not self.read.get(name) and name not in self.hidden) or self.chance(0.12)]
        outputs += [name for name in self.returned if name not in outputs]
        if not outputs:
            raise RefusedError("it makes nothing")
        imports = [helper.make_opsetid("", self.opset)]
        imports += [helper.make_opsetid(domain, 1) for domain in sorted({node.domain for node in self.nodes} - {""})]
        version = ir_version(self.opset, bool(self.functions))
        if not self.calm and self.chance(0.3 if self.opset < 9 else 0.03):
            self.list_all()
            version = 3 if self.opset < 9 else version
        model = helper.make_model(self.graph(outputs), opset_imports=imports, ir_version=version)
        model.functions.extend(self.functions)
        return model


def filled(random: np.random.Generator, shape: Sequence[int], dtype: Any) -> Any:
    """Return ordinary values of a type."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return random.random(shape) < 0.5
    if kind in "iu":
        return random.integers(0, 5, shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


EDGES: Mapping[str, tuple[float, ...]] = {
    "huge": (3e38, -3e38, 1e30, -1e30, 1e20, 3.4028235e38),
    "tiny": (1e-30, -1e-38, 1e-45, 0.0, -0.0, 1e-20),
    "special": (np.inf, -np.inf, np.nan, 1.0, -0.0),
    "grid": (0.0, 0.5, 1.0, -1.0, 2.0, 3.0, -2.5, 41.0, 6.0, -6.0, -3.0, 123.0),
}
_HALF = {"huge": (65504.0, -65504.0, 6e4, -3e4, 300.0), "tiny": (6e-8, -6e-5, 1e-4, 0.0, -0.0)}
_DOUBLE = {"huge": (1.7e308, -1e300, 1e200), "tiny": (1e-300, 5e-324, -1e-310, 0.0)}


def edges(kind: str, dtype: Any) -> tuple[float, ...]:
    """Return the values at an edge of a type."""
    special = {2: _HALF, 8: _DOUBLE}.get(np.dtype(dtype).itemsize, {})
    return special.get(kind, EDGES[kind])
