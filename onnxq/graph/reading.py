"""Words for what a pass reads off a graph."""

from __future__ import annotations

from typing import Any, TypeGuard

from onnxq.graph.elements import Constant


def is_fixed(tensor: Any) -> TypeGuard[Constant]:
    """Whether a tensor is a constant whose values no caller of the model can replace by others.

    >>> import numpy as np
    >>> from onnxq.graph import Variable, constant
    >>> is_fixed(constant("w", np.ones(3))), is_fixed(Variable("x"))
    (True, False)
    """
    return isinstance(tensor, Constant) and tensor.input_source is None
