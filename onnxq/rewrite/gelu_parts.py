"""Parts of activation functions that runtimes know as a whole, and that must stay together for that."""

from __future__ import annotations

from onnxq.ir.elements import Tensor


def is_gelu_before_halving(tensor: Tensor) -> bool:
    """Whether a tensor is ``x * (1 + erf(...))``, or with tanh, of which one half is Gelu."""
    return any(
        _made_by(added, "Add") and any(_made_by(inner, "Erf", "Tanh") for inner in added.inputs[0].inputs)
        for added in (tensor.inputs[0].inputs if _made_by(tensor, "Mul") else ())
    )


def _made_by(tensor: Tensor, *operators: str) -> bool:
    return bool(tensor.inputs) and tensor.inputs[0].op in operators and not tensor.inputs[0].domain
