"""Casts that change nothing, and pairs of which the first loses nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxq.ir import onnx_dtype
from onnxq.ir.data_types import numpy_dtype
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule


class MergeCasts(RewriteRule):
    """A Cast to the type that the tensor has is nothing; of two Casts the first goes where it loses nothing."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Return both forms."""
        return (
            op.Cast(op.Cast(op.any("x"), name="first", shared=True), name="last"),
            op.Cast(op.any("x"), name="last"),
        )

    def obstacle(self, found: Match) -> str:
        """Return why the type may matter."""
        known, last = onnx_dtype(found.x), found.last.attrs.get("to")
        if not known:
            return "the type of its input is not known"
        if "first" not in found.values:
            return "" if known == last else "it changes the type"
        types = [numpy_dtype(number or 0) for number in (known, found.first.attrs.get("to"), last)]
        return "" if _loses_nothing(*types) else "the Cast before it may lose something"

    def replacement(self, new: New, found: Match) -> Any:
        """Leave out what does nothing."""
        return new.like(found.last, found.x) if "first" in found.values else found.x


def _loses_nothing(source: Any, between: Any, last: Any) -> bool:
    if not _holds(between, source):
        return False
    # Out of range, integers wrap and floats saturate.
    kinds = source.kind + between.kind
    return _holds(last, source) or (
        last is not None and last.kind in "fiu" and (kinds == "ff" or set(kinds) <= {*"iu"})
    )


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether a type has every value of another; numpy takes float64 to hold all of int64."""
    if wide is None or narrow is None or any(dtype.kind not in "fiub" for dtype in (wide, narrow)):
        return False
    large = narrow.kind in "iu" and narrow.itemsize == 8 and wide.kind == "f"
    return bool(np.can_cast(narrow, wide, "safe")) and not large
