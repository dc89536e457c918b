"""A model with branches, samples that take each, and what all results are checked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.config.scheme import Mode
from onnxq.report import Report

STATIC, STORAGE = Mode.STATIC, Mode.STORAGE
IDLE = "computes in float, int8-narrow weights dequantized at load: its subgraph ran on no sample"
PADS = "<pads = [1,1,1,1]>"
KERNEL = (8, 8, 3, 3)
IMAGE = (1, 8, 8, 8)
Samples = list[dict[str, NDArray[Any]]]


def varied(shape: tuple[int, ...], others: Mapping[str, list[object]], name: str = "x") -> Samples:
    """Return as many samples as the other inputs have values."""
    generator = np.random.default_rng(2)
    rows = [dict(zip(others, row, strict=True)) for row in zip(*others.values(), strict=True)]
    return [
        {name: generator.standard_normal(shape).astype(np.float32)}
        | {key: np.asarray(value) for key, value in row.items()}
        for row in rows
    ]


def checked(path: Path, report: Report) -> Report:
    """Return the report of a model that is valid and faithful."""
    onnx.checker.check_model(path, full_check=True)
    assert report.agreement.sound
    assert report.agreement.worst_sqnr >= 30
    return report


BRANCHES = f"""(float[1,8,8,8] x, bool c) => (float[1,8,8,8] y) {{
    [stem] a = Conv {PADS} (x, w0)
    [choice] y = If (c) <
        then_branch = t () => (float[1,8,8,8] u) {{
            [t1] p = Conv {PADS} (a, w1) [relu] q = Relu(p) [t2] u = Conv {PADS} (q, w2)
        }},
        else_branch = e () => (float[1,8,8,8] v) {{ [e1] r = Conv {PADS} (a, w1) [e2] v = Conv {PADS} (r, w3) }}>
}}"""
