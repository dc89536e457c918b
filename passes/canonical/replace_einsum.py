"""Write sums of products as MatMul."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxq.ir import Constant, Node
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.ranks import rank

_EQUATION = re.compile(r"([A-Za-z]+),([A-Za-z]+)->([A-Za-z]+)")


class ReplaceEinsum(RewriteRule):
    """An Einsum of two tensors that is a product of matrices becomes MatMul, with Transposes and Reshapes where needed.

    Against a constant weight, any number of axes may be rows, summed over or columns; of two computed tensors one each.
    """

    def pattern(self, op: Operators) -> Call:
        """Return an Einsum of two tensors."""
        return op.Einsum(op.any("a"), op.any("b"), name="einsum")

    def obstacle(self, found: Match) -> str:
        """Refuse what is no product of matrices, and extents that are not proven to be the same."""
        letters = _letters(found)
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

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the product and what brings its operands and result into order."""
        letters = _letters(found)
        assert letters is not None, "the obstacle looked"
        make = _against_weight if _is_weight(letters) else _of_two
        return make(new, found.einsum, letters)


@dataclass(frozen=True)
class _Letters:
    """The axes of an equation by what they are; the data comes first, a weight second."""

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


def _letters(found: Match) -> _Letters | None:
    equation = found.einsum.attrs.get("equation", "")
    parts = _EQUATION.fullmatch("".join(equation.split())) if isinstance(equation, str) else None
    if parts is None or any(len(set(part)) < len(part) for part in parts.groups()):
        return None
    first, second, result = parts.groups()
    names_agree = set(first) ^ set(second) <= set(result) <= set(first) | set(second)
    if not names_agree or rank(found.a) != len(first) or rank(found.b) != len(second) or not _is_float(found.a):
        return None
    letters = _Letters(found.a, found.b, first, second, result)
    backwards = letters.batch + letters.columns + letters.rows == result
    if _is_fixed(found.a) if _is_fixed(found.a) != _is_fixed(found.b) else backwards:
        return _Letters(found.b, found.a, second, first, result)
    return letters


def _is_float(tensor: Any) -> bool:
    return tensor.dtype is not None and np.dtype(tensor.dtype).kind == "f"


def _is_fixed(tensor: Any) -> bool:
    return isinstance(tensor, Constant) and tensor.input_source is None


def _is_weight(letters: _Letters) -> bool:
    """Whether the second tensor is a constant that lies along no axis of a batch."""
    return _is_fixed(letters.b) and not letters.batch


def _against_weight(new: New, einsum: Node, letters: _Letters) -> Any:
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
    unchanged = order == [0, 1] and len(letters.term_b) == 2
    weight = letters.b if unchanged else new.constant(np.ascontiguousarray(matrix), "weight")
    product = new.named(einsum, new.MatMul(data, weight))
    if len(columns) > 1:
        product = new.Reshape(product, np.array([*[0] * len(rows), *columns]))
    return _ordered(new, product, rows + letters.columns, letters.result)


def _of_two(new: New, einsum: Node, letters: _Letters) -> Any:
    a = _ordered(new, letters.a, letters.term_a, letters.batch + letters.rows + letters.inner)
    b = _ordered(new, letters.b, letters.term_b, letters.batch + letters.inner + letters.columns)
    product = new.named(einsum, new.MatMul(a, b))
    return _ordered(new, product, letters.batch + letters.rows + letters.columns, letters.result)


def _ordered(new: New, tensor: Any, term: str, wanted: str) -> Any:
    return tensor if term == wanted else new.Transpose(tensor, perm=[term.index(name) for name in wanted])
