"""What a written model stores, and the types that it stores numbers in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onnxq.ir.data_types import is_known

NUMBERS = [
    value for name, value in TensorProto.DataType.items() if name not in ("UNDEFINED", "STRING") and is_known(value)
]


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def initializers(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
