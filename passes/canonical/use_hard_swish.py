"""HardSigmoid and HardSwish, which older exporters write as formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onnxq.ir import Node
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.ranks import may_widen

# onnxruntime has no kernel for float64.
_WIDEST = 4


class UseHardSwish(RewriteRule):
    """A sixth of x + 3 between 0 and 6 is HardSigmoid, and x times that is HardSwish where the opset has it."""

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for the formulas, and for HardSigmoid times its data."""
        x = op.any("x")
        moved = op.Add(x, 3.0)
        forms: list[Call] = [op.Mul(x, op.HardSigmoid(x, name="gate"))]
        by_sixth: Callable[[Any], Call] = lambda value: op.Mul(value, 1 / 6)  # noqa: E731
        by_six: Callable[[Any], Call] = lambda value: op.Div(value, 6.0)  # noqa: E731
        sixths = (by_sixth, by_six)
        for limited in (op.Clip(moved, 0.0, 6.0), op.Clip(moved, min=0.0, max=6.0)):
            for scaled in sixths:
                forms.append(scaled(limited))
                forms.append(scaled(op.Mul(x, limited)))
                forms.append(op.Mul(x, scaled(limited)))
                forms.append(op.Mul(scaled(x), limited))
        return tuple(forms)

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        dtype = np.dtype(found.x.dtype or "O")
        if found.opset < 7 or dtype.kind != "f" or dtype.itemsize > _WIDEST:
            return "its data is not known to be floats of 32 bits or fewer"
        if may_widen(found, found.x):
            return "a constant may raise the rank"
        if "gate" not in found.values:
            return ""
        if found.opset < 14:
            return "HardSwish came with opset 14"
        return "" if has_slope_of_sixth(found.gate) else "its slope is not one sixth"

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the one node, or two where the opset has no HardSwish."""
        reads = [tensor for node in found.nodes for tensor in node.inputs if tensor is found.x]
        multiplied = len(reads) > 1
        if multiplied and found.opset >= 14:
            return new.HardSwish(found.x)
        gate = new.HardSigmoid(found.x, alpha=1 / 6, beta=0.5)
        return new.Mul(found.x, gate) if multiplied else gate


def has_slope_of_sixth(gate: Node) -> bool:
    """Return whether a HardSigmoid is the one that HardSwish multiplies its data with."""
    slope, middle = gate.attrs.get("alpha", 0.2), gate.attrs.get("beta", 0.5)
    return bool(abs(slope - 1 / 6) < 1e-6 and middle == 0.5)
