"""CastLike, where the type is known."""

from __future__ import annotations

from typing import Any

from onnxq.ir import onnx_dtype
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule


class ReplaceCastLike(RewriteRule):
    """CastLike to a type that is known is a Cast."""

    def pattern(self, op: Operators) -> Call:
        """Return a CastLike."""
        return op.CastLike(op.any("x"), op.any("like"), name="cast")

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        return "" if onnx_dtype(found.like) else "the type to cast to is not known"

    def replacement(self, new: New, found: Match) -> Any:
        """Name the type."""
        saturate = found.cast.attrs.get("saturate") if found.opset >= 19 else None
        return new.Cast(found.x, to=onnx_dtype(found.like), saturate=saturate)
