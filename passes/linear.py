"""Matrix multiplications: MatMul, Gemm and Einsum, and those inside onnxruntime's fused operators."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxq.ir import Constant, Node, Tensor, is_constant, optional_input, producer, without_absent
from onnxq.lowering.kernels import DOMAIN
from onnxq.rewrite import Match, NodePattern, OpsetPatternBuilder, RewriteContext, RewriteRule, RoundingRule
from onnxq.rewrite.soundness import is_float, rank, same_extents, stays_in_range, stored

_EQUATION = re.compile(r"([A-Za-z]+),([A-Za-z]+)->([A-Za-z]+)")


class ReplaceEinsum(RoundingRule):
    """``Einsum(A, B, "bik,bkj->bij") -> MatMul(A, B)``.

    Replace an Einsum of two tensors by MatMul, with Transposes and Reshapes if needed.

    With a constant weight, any number of axes may be rows, columns or summed over; with two computed tensors one each.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Einsum(op.any("a"), op.any("b"), name="einsum")

    def check(self, match: Match) -> str:
        letters = _letters(match)
        if letters is None:
            return "its equation is no product of two tensors, or one of them is not known well enough"
        if not letters.rows or not letters.inner or not letters.columns:
            return "it has no rows, no columns, or nothing to sum over"
        if not _is_weight(letters) and max(map(len, (letters.rows, letters.inner, letters.columns))) > 1:
            return "it has several axes of rows, of columns or to sum over"
        if any(letters.extents_a[name] in (None, 1) or letters.extents_a[name] != letters.extents_b[name]
               for name in letters.inner):  # fmt: skip
            return "the extents that it sums over are not known to be the same"
        if _is_weight(letters) and letters.term_b != letters.inner + letters.columns and len(letters.b.outputs) > 1:
            return "others read its weight as it is"
        return ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        letters = _letters(match)
        assert letters is not None, "the obstacle looked"
        make = _against_weight if _is_weight(letters) else _of_two
        return make(new, match.einsum, letters)


@dataclass(frozen=True)
class _Letters:
    """The axes of an equation by role; ``a`` is the data, ``b`` a weight or the second tensor."""

    a: Any
    b: Any
    term_a: str
    term_b: str
    result: str

    @property
    def batch(self) -> str:
        return "".join(name for name in self.result if name in self.term_a and name in self.term_b)

    @property
    def rows(self) -> str:
        return "".join(name for name in self.result if name not in self.term_b)

    @property
    def columns(self) -> str:
        return "".join(name for name in self.result if name not in self.term_a)

    @property
    def inner(self) -> str:
        return "".join(name for name in self.term_a if name in self.term_b and name not in self.result)

    @property
    def extents_a(self) -> dict[str, Any]:
        return dict(zip(self.term_a, self.a.shape, strict=True))

    @property
    def extents_b(self) -> dict[str, Any]:
        return dict(zip(self.term_b, self.b.shape, strict=True))


def _letters(match: Match) -> _Letters | None:
    equation = match.einsum.attrs.get("equation", "")
    parts = _EQUATION.fullmatch("".join(equation.split())) if isinstance(equation, str) else None
    if parts is None or any(len(set(part)) < len(part) for part in parts.groups()):
        return None
    first, second, result = parts.groups()
    names_agree = set(first) ^ set(second) <= set(result) <= set(first) | set(second)
    if not names_agree or rank(match.a) != len(first) or rank(match.b) != len(second) or not is_float(match.a):
        return None
    letters = _Letters(match.a, match.b, first, second, result)
    backwards = letters.batch + letters.columns + letters.rows == result
    if is_constant(match.a) if is_constant(match.a) != is_constant(match.b) else backwards:
        return _Letters(match.b, match.a, second, first, result)
    return letters


def _is_weight(letters: _Letters) -> bool:
    """Whether the second tensor is a constant without batch axes."""
    return is_constant(letters.b) and not letters.batch


def _against_weight(new: RewriteContext, einsum: Node, letters: _Letters) -> Any:
    rows = letters.term_a.removesuffix(letters.inner)
    rows = rows if len(rows) == len(letters.rows) else letters.rows
    data = _ordered(new, letters.a, letters.term_a, rows + letters.inner)
    extents = letters.extents_b
    inner = [extents[name] for name in letters.inner]
    columns = [extents[name] for name in letters.columns]
    if len(inner) > 1:
        data = new.Reshape(data, np.array([*[0] * len(rows), int(np.prod(inner))]))
    order = [letters.term_b.index(name) for name in letters.inner + letters.columns]
    matrix = letters.b.values.transpose(order).reshape(int(np.prod(inner)), int(np.prod(columns)))
    weight = letters.b if order == [0, 1] else new.constant(np.ascontiguousarray(matrix), "weight")
    product = new.named(einsum, new.MatMul(data, weight))
    if len(columns) > 1:
        product = new.Reshape(product, np.array([*[0] * len(rows), *columns]))
    return _ordered(new, product, rows + letters.columns, letters.result)


def _of_two(new: RewriteContext, einsum: Node, letters: _Letters) -> Any:
    a = _ordered(new, letters.a, letters.term_a, letters.batch + letters.rows + letters.inner)
    b = _ordered(new, letters.b, letters.term_b, letters.batch + letters.inner + letters.columns)
    product = new.named(einsum, new.MatMul(a, b))
    return _ordered(new, product, letters.batch + letters.rows + letters.columns, letters.result)


def _ordered(new: RewriteContext, tensor: Any, term: str, wanted: str) -> Any:
    return tensor if term == wanted else new.Transpose(tensor, perm=[term.index(name) for name in wanted])


# MatMul and Gemm ------------------------------------------------------------------------------------------------------


class ReplaceMatMulOfMatrices(RoundingRule):
    """``Add(MatMul(X, W), B) -> Gemm(X, W, B)``.

    Replace MatMul of a matrix and Add of a bias by Gemm.

    Not if the rank of the data is unknown or not 2, or the bias is not one value for each channel.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Add(op.MatMul(op.any("x"), op.constant("weight"), name="product"), op.constant("bias"))

    def check(self, match: Match) -> str:
        if rank(match.x) != 2 or len(match.weight.shape) != 2:
            return "its data or weight is not known to be a matrix"
        if not is_float(match.weight) or match.weight.dtype.itemsize > 4:
            return f"it is of type {match.weight.dtype}"
        channels = match.weight.shape[1]
        if match.bias.shape not in ((), (1,), (1, 1), (channels,), (1, channels)) or not channels:
            return "its bias is not one value for each channel"
        return ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        channels, bias = match.weight.shape[1], match.bias
        if bias.shape != (channels,):
            bias = new.constant(np.broadcast_to(bias.values.reshape(-1), channels).copy(), "bias")
        return new.named(match.product, new.Gemm(match.x, match.weight, bias))


class ReplaceMatMulBetweenReshapes(RoundingRule):
    """``Reshape(Add(MatMul(Reshape(X), W), B)) -> Reshape(Gemm(Reshape(X), W, B))``.

    Replace MatMul and Add between two Reshapes by Gemm, which has its own bias.

    Not if the last Reshape restores the shape of the data: there `ReplaceGemmBetweenReshapes` makes MatMul and Add.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        product = op.MatMul(op.Reshape(op.any("x"), op.any("rows")), op.constant("weight"), name="product")
        return op.Reshape(op.Add(product, op.constant("bias")), op.constant("target"))

    def check(self, match: Match) -> str:
        x, target = match.x.shape, match.target.values.reshape(-1).tolist()
        if x is None or len(match.weight.shape) != 2:
            return "the shape of its data is unknown, or its weight is no matrix"
        inner, outer = match.weight.shape
        if not inner or not outer or 0 in target:
            return "an extent is 0, or copied from the data"
        back = [*x[:-1], outer]
        if len(target) == len(back) and all(extent in (-1, own) for extent, own in zip(target, back, strict=True)):
            return "its result may have the shape of its data"
        if not is_float(match.bias) or match.bias.shape[-1:] != (outer,) or match.bias.values.size != outer:
            return "its bias is not one value for each channel"
        if len(match.bias.shape) > (len(match.root.inputs[0].shape or ())):
            return "its bias may have more dimensions than its data"
        return ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        rows = new.Reshape(match.x, np.array([-1, match.weight.shape[0]]))
        flat = len(match.bias.shape) == 1
        bias = match.bias if flat else new.constant(match.bias.values.reshape(-1), "bias")
        product = new.named(match.product, new.Gemm(rows, match.weight, bias))
        return new.like(match.root, product, match.target)


class ReplaceGemmBetweenReshapes(RoundingRule):
    """``Reshape(Gemm(Reshape(X), W, B)) -> Add(MatMul(X, W), B)``.

    Replace Reshape, Gemm and a Reshape back by MatMul and Add.

    If the first Reshape merges the last axes of the data and the target of the last is computed, one Reshape remains.
    Not if the last Reshape gives another shape: there `ReplaceMatMulBetweenReshapes` makes a Gemm.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        data = op.Reshape(op.any("x"), op.any("rows"), allow_other_consumers=True)
        bias = op.optional("bias", constant=True)
        gemm = op.Gemm(data, op.constant("weight"), bias, name="gemm", alpha=1.0, beta=1.0, transA=0)
        return op.Reshape(gemm, op.any("target"))

    def check(self, match: Match) -> str:
        x, result = match.x.shape, match.root.outputs[0].shape
        if x is None or result is None or len(x) < 3 or len(match.weight.shape) != 2:
            return "shapes around it are unknown, or its data is a matrix already"
        inner, outer = match.weight.shape[:: -1 if match.gemm.attrs.get("transB", 0) else 1]
        if not same_extents(result, [*x[: len(result) - 1], outer]) or not _has_rows(x[len(result) - 1 :], inner):
            return "its result does not have the shape of its data"
        if len(x) != len(result) and isinstance(match.target, Constant):
            return "its data needs a Reshape anyway"
        if match.bias is not None and match.bias.shape not in ((outer,), (1, outer)):
            return "its bias is not one value for each channel"
        if match.gemm.attrs.get("transB", 0) and len(set(match.weight.outputs)) > 1:
            return "others read its weight, which it transposes"
        return ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        weight = match.weight
        if match.gemm.attrs.get("transB", 0):
            weight = new.constant(weight.values.T, "weight")
        kept = len(match.root.outputs[0].shape) - 1
        flat = len(match.x.shape) == kept + 1
        data = match.x if flat else new.Reshape(match.x, np.array([*[0] * kept, weight.shape[0]]))
        product = new.named(match.gemm, new.MatMul(data, weight))
        if match.bias is None:
            return product
        return new.Add(
            product, match.bias if len(match.bias.shape) == 1 else new.constant(match.bias.values.reshape(-1), "bias")
        )


def _has_rows(extents: Sequence[Any], length: int) -> bool:
    return all(isinstance(extent, int) for extent in extents) and math.prod(extents) == length


class FlattenBatchedWeight(RoundingRule):
    """``MatMul(X, W[1, K, N]) -> MatMul(X, W[K, N])``.

    Drop leading dimensions of size 1 of a MatMul's weight.

    Not if the data may have fewer dimensions than the weight, or operators other than MatMul read the weight.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.MatMul(op.any("x"), op.constant("weight"))

    def check(self, match: Match) -> str:
        batch = match.weight.shape[:-2]
        if not batch or any(extent != 1 for extent in batch):
            return "its weight has no leading dimensions, or one that is not 1"
        if (rank(match.x) or 0) < len(match.weight.shape):
            return "its data has fewer dimensions than its weight, as far as these are known"
        if any(reader.op != "MatMul" for reader in match.weight.outputs):
            return "others than products read its weight"
        return ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return new.like(
            match.root, match.x, new.constant(match.weight.values.reshape(match.weight.shape[-2:]), "weight")
        )


# Fused operators of onnxruntime ---------------------------------------------------------------------------------------

_BIAS_IS_OPTIONAL = 11
_MATRIX = 2
_TRANSPOSES = ("transA", "transB", "transBatchA", "transBatchB")
_SPLIT_TAKES_SIZES = 13
_ACTIVATIONS = frozenset({"Relu", "Sigmoid", "Tanh"})
_OF_ATTENTION = frozenset({"mask_filter_value", "num_heads", "scale", "unidirectional"})


class UnfuseProducts(RewriteRule):
    """``FusedGemm(X, W, B, activation="Relu") -> Relu(Gemm(X, W, B))``.

    Replace Attention, FusedMatMul, FusedGemm and FusedConv by MatMul, Gemm and Conv.

    The rest of an Attention becomes MultiHeadAttention. onnxruntime fuses activations again in float. Not for computed
    tensors that are transposed or scaled, and activations with parameters. Not for attention with past state, rotary
    embeddings or a mask of ends and beginnings.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        return tuple(op.call(DOMAIN, name, op.any("data"), op.any("weight"), ..., name="fused") for name in _FORMS)

    def rounds(self, match: Match) -> bool:
        return match.fused.op == "Attention" or float(match.fused.attrs.get("alpha", 1.0)) != 1.0

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        return _FORMS[match.fused.op](new, match)


def _matmul(new: RewriteContext, match: Match) -> Any:
    attributes, weight = match.fused.attrs, match.weight
    alpha, turned = float(attributes.get("alpha", 1.0)), [name for name in _TRANSPOSES if attributes.get(name, 0)]
    if alpha == 1.0 and not turned:
        return new.MatMul(match.data, weight)
    if turned not in ([], ["transB"]) or not is_constant(weight) or len(weight.shape) != _MATRIX:
        return "it transposes or scales a tensor that is computed at run time"
    if weight.dtype.name != "float32":
        return f"its weight is {weight.dtype.name}, not float32"
    values = np.ascontiguousarray(weight.values.T if turned else weight.values)
    if alpha != 1.0:
        # A factor of zero would turn infinity into a number.
        exact, fits = values.astype(np.float64), bool(alpha) and stays_in_range(alpha, np.float32)
        scaled = stored(exact * alpha, weight.dtype, exact) if fits else None
        if scaled is None:
            return "its weight or result may leave the range of float32"
        values = scaled
    return new.MatMul(match.data, new.constant(values, "turned", of=weight))


def _gemm(new: RewriteContext, match: Match) -> Any:
    if optional_input(match.fused, 2) is None and match.opset < _BIAS_IS_OPTIONAL:
        return "Gemm needs a bias at this opset"
    return _activated(new, match, "Gemm", ("alpha", "beta", "transA", "transB"))


def _conv(new: RewriteContext, match: Match) -> Any:
    return _activated(new, match, "Conv", ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"))


def _activated(new: RewriteContext, match: Match, op: str, kept: Sequence[str]) -> Any:
    fused, activation = match.fused, str(match.fused.attrs.get("activation", ""))
    if activation and activation not in _ACTIVATIONS:
        return f"its activation {activation} has parameters"
    attributes = {name: fused.attrs[name] for name in kept if name in fused.attrs}
    bias, added = optional_input(fused, 2), optional_input(fused, 3)
    inputs = (match.data, match.weight) if bias is None else (match.data, match.weight, bias)
    result = new.named(fused, new.call("", op, *inputs, **attributes))
    if added is not None:
        result = new.named("sum", new.Add(result, added))
    return new.named(activation.lower(), new.call("", activation, result)) if activation else result


def _attention(new: RewriteContext, match: Match) -> Any:
    fused, data, weight = match.fused, match.data, match.weight
    bias, mask, past, bias_of_scores = (optional_input(fused, index) for index in range(2, 6))
    others = {name for name in fused.attrs if fused.attrs[name]} - _OF_ATTENTION - {"qkv_hidden_sizes"}
    if not is_constant(weight) or len(weight.shape) != _MATRIX:
        return "its weight is no constant matrix"
    if past is not None or others or any(output.name for output in fused.outputs[1:]):
        return "it has a past, or rotary embeddings"
    if mask is not None and not _is_plain(mask, data):
        return "MultiHeadAttention may not know its mask, such as one that begins elsewhere in each row"
    if match.opset < _SPLIT_TAKES_SIZES:
        return f"Split takes sizes from opset {_SPLIT_TAKES_SIZES} on"
    sizes = [int(size) for size in fused.attrs.get("qkv_hidden_sizes", ())] or [weight.shape[1] // 3] * 3
    if sum(sizes) != weight.shape[1] or len(sizes) != len("qkv"):
        return f"its weight has {weight.shape[1]} columns, expected {sizes}"
    product = new.named(fused, new.MatMul(data, weight))
    if bias is not None:
        product = new.named("bias", new.Add(product, bias))
    parts = new.Split(product, new.constant(sizes, "sizes"), axis=-1, outputs=len(sizes))
    attributes = {name: value for name, value in fused.attrs.items() if name in _OF_ATTENTION}
    inputs = without_absent([*parts, None, mask, bias_of_scores])
    return new.named("heads", new.call(DOMAIN, "MultiHeadAttention", *inputs, **attributes))


def _is_plain(mask: Tensor, data: Tensor) -> bool:
    """Whether a mask has a value for each position or pair of positions, or one length for each row."""
    maker = producer(mask)
    if maker is not None and (maker.domain, maker.op) == (DOMAIN, "EmbedLayerNormalization"):
        return True
    if mask.shape is None or not _MATRIX <= len(mask.shape) <= _MATRIX + 1:
        return False
    # A single column masks nothing, whatever the number of positions.
    return mask.shape[-1] != 1 or (data.shape is not None and data.shape[1] == 1)


_FORMS: Mapping[str, Callable[[RewriteContext, Match], Any]] = {
    "Attention": _attention,
    "FusedConv": _conv,
    "FusedGemm": _gemm,
    "FusedMatMul": _matmul,
}
