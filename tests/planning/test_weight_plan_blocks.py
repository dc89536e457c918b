"""Blocks of weights that are not whole, which some runtimes do not read."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.ir import Node, Variable, constant
from onnxq.planning.weights import decide_weights


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("rows", "per"), [(64, (32,)), (120, Granularity.CHANNEL), (120, (32,))])
def test_parts_of_blocks_are_stored_where_they_are_not_read(
    rows: int, per: Granularity | tuple[int, ...], whole: bool
) -> None:
    weight, data = constant("w", np.zeros((rows, 8), np.float32)), Variable("x", np.dtype(np.float32), [3, rows])
    node = Node("MatMul", "node", {}, [data, weight], [Variable("y", np.dtype(np.float32))])
    found = decide_weights(node, Mode.WEIGHT_ONLY, QuantSpec("int4", per), "so", in_body=False, whole_blocks=whole)
    if whole and rows == 120 and isinstance(per, tuple):
        assert found.mode is Mode.STORAGE
        assert found.reason == "computes in float from int4 weights: 120 values are not whole blocks of 32"
    else:
        assert found.mode is Mode.WEIGHT_ONLY
