"""The ways to write weights."""

from __future__ import annotations

from onnxq.lowering import Emit


def test_their_names_are_those_of_the_command_line() -> None:
    assert list(Emit) == ["fastest", "qdq", "ort", "strict"]


def test_standard_onnx_has_no_operators_of_the_runtimes_own() -> None:
    assert [emit for emit in Emit if emit.has_own] == ["fastest", "ort"]
