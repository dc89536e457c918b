"""The ways to write weights."""

from __future__ import annotations

from onnxq.lowering import AllowedOps


def test_their_names_are_those_of_the_command_line() -> None:
    assert list(AllowedOps) == ["fastest", "qdq", "ort", "strict"]


def test_standard_onnx_has_no_operators_of_the_runtimes_own() -> None:
    assert [emit for emit in AllowedOps if emit.has_own] == ["fastest", "ort"]
