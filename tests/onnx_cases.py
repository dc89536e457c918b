"""The operator tests that onnx itself ships."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import onnx
from onnx import ModelProto, numpy_helper

Cases = dict[str, tuple[ModelProto, Sequence[tuple[Sequence[object], Sequence[object]]]]]


@functools.cache
def operator_cases() -> Cases:
    """Models of mostly one node, with their inputs and outputs, by name."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    return {case.name: (case.model, case.data_sets) for case in sorted(cases, key=lambda case: case.name)}


def feeds_of(model: ModelProto, values: Sequence[object]) -> dict[str, object]:
    return {
        info.name: numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
        for info, value in zip(model.graph.input, values, strict=False)
    }
