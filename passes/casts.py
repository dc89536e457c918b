"""Casts without effect, and 16-bit floats that become float32."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
from onnx import AttributeProto, TensorProto, TypeProto, ValueInfoProto

from onnxq.ir import (
    Graph,
    Names,
    Node,
    NodeBuilder,
    OpaqueAttribute,
    Tensor,
    TensorData,
    Variable,
    all_graphs,
    all_nodes,
    constants,
    insert_nodes,
    is_composite,
    onnx_dtype,
    producer,
    remove_nodes,
    replace_uses,
)
from onnxq.ir.computed_data import computed
from onnxq.ir.data_types import numpy_dtype
from onnxq.lowering.kernels import DOMAIN
from onnxq.ops import facts_of
from onnxq.rewrite import Changes, Match, NodePattern, OpsetPatternBuilder, Pass, RewriteContext, RewriteRule
from onnxq.rewrite.soundness import Uses


class MergeCasts(RewriteRule):
    """``Cast(Cast(x, float32), float16) -> Cast(x, float16)``.

    Drop a Cast to the type that its input has, and the first of two Casts if it loses nothing.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        return (
            op.Cast(op.Cast(op.any("x"), name="first", allow_other_consumers=True), name="last"),
            op.Cast(op.any("x"), name="last"),
        )

    def check(self, match: Match) -> str:
        source, last = onnx_dtype(match.x), match.last.attrs.get("to")
        if not source:
            return "the type of its input is not known"
        if "first" not in match.values:
            return "" if source == last else "it changes the type"
        types = [numpy_dtype(number or 0) for number in (source, match.first.attrs.get("to"), last)]
        return "" if _loses_nothing(*types) else "the Cast before it may lose something"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.like(match.last, match.x) if "first" in match.values else match.x


def _loses_nothing(source: Any, between: Any, last: Any) -> bool:
    if not _holds(between, source):
        return False
    # Out of range, integers wrap and floats saturate.
    kinds = source.kind + between.kind
    return _holds(last, source) or (
        last is not None and last.kind in "fiu" and (kinds == "ff" or set(kinds) <= {*"iu"})
    )


def _holds(wide: Any, narrow: Any) -> bool:
    # numpy counts int64 to float64 as safe, which loses digits.
    if wide is None or narrow is None or any(dtype.kind not in "fiub" for dtype in (wide, narrow)):
        return False
    large = narrow.kind in "iu" and narrow.itemsize == 8 and wide.kind == "f"
    return bool(np.can_cast(narrow, wide, "safe")) and not large


class ReplaceCastLike(RewriteRule):
    """``CastLike(x, y) -> Cast(x, to=type of y)``.

    Replace CastLike by Cast. Not if the type to cast to is unknown.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.CastLike(op.any("x"), op.any("like"), name="cast")

    def check(self, match: Match) -> str:
        return "" if onnx_dtype(match.like) else "the type to cast to is not known"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        saturate = match.cast.attrs.get("saturate") if match.opset >= 19 else None
        return new.Cast(match.x, to=onnx_dtype(match.like), saturate=saturate)


# Float16 and bfloat16 -------------------------------------------------------------------------------------------------

_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_FLOAT = np.dtype(np.float32)
# Attributes that set the type of a result.
_TYPES = ("to", "dtype", "output_dtype", "output_datatype")
# Their kernels take float32 too; other domains are unknown.
_WIDENED_DOMAINS = ("", DOMAIN)
# It reads the bits of numbers.
_BITS = "BitCast"


class WidenFloats(Pass):
    """Replace float16 and bfloat16 by float32 inside a model, in every graph.

    Constants are converted when they are read. Inputs, overridable initializers and outputs of the model keep their
    types, with a Cast beside each. Casts between float types go, unless a discrete operator depends on their rounding,
    or rounding is all they are for: nothing computes with their result before it is widened. Not for models that are
    fed or return sequences of 16-bit floats, or with operators that read their bits or are unknown.
    """

    def apply(self, graph: Graph) -> Changes:
        if obstacle := _obstacle(graph):
            return Changes(skipped=((graph.name, obstacle),))
        names = Names(graph)
        fed = (tensor for tensor in graph.initializers if tensor.overridable_input is not None)
        # In order, because new names depend on it.
        border = dict.fromkeys((*graph.inputs, *filter(_is_half, graph.outputs), *fed))
        rounding = _rounding_casts(graph)
        changed = [*_widen_constants(graph, border), *_widen_nodes(graph, border, rounding)]
        changed += _read_widened(graph, [tensor for tensor in border if _is_half(tensor)], names)
        changed += _read_rounded(graph, rounding, names)
        changed += _return_narrowed(graph, names)
        changed += _drop_casts(graph) if changed else ()
        return Changes(tuple(changed))


def half_type(graph: Graph) -> int:
    """Return the ``TensorProto.DataType`` of the first 16-bit float constant of a graph; 0 if there is none."""
    return next((onnx_dtype(tensor) for tensor in constants(graph) if _is_half(tensor)), 0)


def _obstacle(graph: Graph) -> str:
    for tensor in (*graph.inputs, *graph.outputs):
        if is_composite(tensor) and _widened_type(tensor.source.type) != tensor.source.type:
            return f"{tensor.name} is no tensor, and contains values of 16 bits"
    for _, node in all_nodes(graph):
        if node.op == _BITS or node.domain not in _WIDENED_DOMAINS:
            touched = [tensor for tensor in (*node.inputs, *node.outputs) if tensor.name]
            if any(onnx_dtype(tensor) in (*_HALVES, 0) for tensor in touched):
                return f"{node.op} node {node.name} may need floats of 16 bits"
    return ""


def _is_half(tensor: Tensor) -> bool:
    return onnx_dtype(tensor) in _HALVES


def _widen_constants(graph: Graph, border: Collection[Tensor]) -> Iterator[str]:
    for tensor in constants(graph):
        if _is_half(tensor) and tensor not in border:
            tensor_data = tensor.tensor_data
            tensor.values = computed(partial(_widened, tensor_data), TensorProto.FLOAT, tensor_data.shape)
            yield tensor.name


def _widened(tensor_data: TensorData) -> Any:
    return tensor_data.load().astype(_FLOAT)


def _widen_nodes(graph: Graph, border: Collection[Tensor], rounding: list[Node]) -> Iterator[str]:
    kept = set(rounding)
    for scope in all_graphs(graph):
        for tensor in (*scope.inputs, *scope.outputs) if scope is not graph else ():
            _widen_type(tensor)
        for node in scope.nodes:
            if node in kept or _makes_output(node, graph):
                continue
            for name in _TYPES:
                if node.attrs.get(name) in _HALVES:
                    node.attrs[name] = int(TensorProto.FLOAT)
                    yield node.name
            for name, value in node.attrs.items():
                if isinstance(value, OpaqueAttribute) and value.proto.type == AttributeProto.TYPE_PROTO:
                    proto = AttributeProto.FromString(value.proto.SerializeToString())
                    proto.tp.CopyFrom(_widened_type(proto.tp))
                    node.attrs[name] = OpaqueAttribute(proto)
            for tensor in node.outputs:
                if tensor not in border:
                    _widen_type(tensor)


def _rounding_casts(graph: Graph) -> list[Node]:
    """Return the Casts to 16 bits that only round, or on whose rounding a discrete operator depends.

    A Cast from one 16-bit type to the other rounds too.
    """
    uses = Uses(graph)
    return [
        node
        for _, node in all_nodes(graph)
        if node.op == "Cast"
        and node.attrs.get("to") in _HALVES
        and onnx_dtype(node.inputs[0]) != node.attrs["to"]
        and not node.outputs[0].graph_output_of
        and (uses.decides(node.outputs) or _only_rounds(node))
    ]


def _only_rounds(cast: Node) -> bool:
    """Whether nothing computes with the result in 16 bits: nodes move it, and other Casts widen it."""
    pending, seen = list(cast.outputs), set[Tensor]()
    while pending:
        tensor = pending.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        for reader in tensor.outputs:
            if reader.op == "Cast" and not reader.domain:
                continue
            if reader.op != "Identity" and not facts_of(reader).moves:
                return False
            pending.extend(reader.outputs)
    return True


def _read_rounded(graph: Graph, rounding: list[Node], names: Names) -> Iterator[str]:
    casts = {node: cast for node in rounding if (cast := _widened_for_readers(node.outputs[0], names))}
    insert_nodes(graph, after=casts)
    yield from (cast.name for after in casts.values() for cast in after)


def _widened_for_readers(tensor: Tensor, names: Names) -> list[Node]:
    """Let all but Casts read a tensor in float32; return the Cast that makes it, if there are any."""
    readers = [reader for reader in tensor.outputs if reader.op != "Cast"]
    wide = _wide(tensor, names) if readers else None
    if wide is None:
        return []
    replace_uses(tensor, wide, readers)
    return [_cast(tensor, wide, names)]


def _widen_type(tensor: Tensor) -> None:
    if isinstance(tensor, Variable) and _is_half(tensor):
        tensor.dtype = _FLOAT
    elif is_composite(tensor) and tensor.source is not None:
        source = ValueInfoProto.FromString(tensor.source.SerializeToString())
        source.type.CopyFrom(_widened_type(source.type))
        tensor.source = source


def _widened_type(declared: TypeProto) -> TypeProto:
    """Return a type whose elements, however deep, are float32 where they were 16-bit floats."""
    wide: TypeProto = TypeProto.FromString(declared.SerializeToString())
    pending = [wide]
    while pending:
        inner = pending.pop()
        kind = inner.WhichOneof("value")
        if kind in ("sequence_type", "optional_type"):
            pending.append(getattr(inner, kind).elem_type)
        elif kind == "map_type":
            pending.append(inner.map_type.value_type)
        elif kind in ("tensor_type", "sparse_tensor_type") and getattr(inner, kind).elem_type in _HALVES:
            getattr(inner, kind).elem_type = TensorProto.FLOAT
    return wide


def _makes_output(node: Node, graph: Graph) -> bool:
    result = node.outputs[0] if node.outputs else None
    return (
        node.op == "Cast"
        and node.attrs.get("to") in _HALVES
        and result is not None
        and graph in result.graph_output_of
        and not result.outputs
    )


def _read_widened(graph: Graph, fed: list[Tensor], names: Names) -> Iterator[str]:
    casts = [cast for tensor in fed if producer(tensor) is None for cast in _widened_for_readers(tensor, names)]
    insert_nodes(graph, first={graph: casts})
    yield from (node.name for node in casts)


def _return_narrowed(graph: Graph, names: Names) -> Iterator[str]:
    for tensor in list(dict.fromkeys(graph.outputs)):
        maker = producer(tensor)
        if maker is None or not _is_half(tensor) or _makes_output(maker, graph):
            continue
        wide = _wide(tensor, names)
        maker.outputs[maker.outputs.index(tensor)] = wide
        replace_uses(tensor, wide, set(tensor.outputs))
        graph.nodes.append(_cast(wide, tensor, names))
        yield graph.nodes[-1].name


def _wide(tensor: Tensor, names: Names) -> Variable:
    return NodeBuilder(tensor.name, names).variable("float32", _FLOAT, like=tensor)


def _cast(source: Tensor, result: Variable, names: Names) -> Node:
    new = NodeBuilder(result.name, names)
    new.node("Cast", "cast", [source], result, to=int(onnx_dtype(result)))
    return new.nodes[0]


def _drop_casts(graph: Graph) -> list[str]:
    useless = [
        node
        for _, node in all_nodes(graph)
        if node.op == "Cast"
        and node.attrs.get("to") == TensorProto.FLOAT
        and onnx_dtype(node.inputs[0]) == TensorProto.FLOAT
        and not node.outputs[0].graph_output_of
    ]
    for node in useless:
        replace_uses(node.outputs[0], node.inputs[0])
    remove_nodes(graph, useless)
    return [node.name for node in useless]
