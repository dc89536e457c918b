"""The three ways to write weights."""

from __future__ import annotations

from onnxq.lowering import Emit


def test_their_names_are_those_of_the_command_line() -> None:
    assert list(Emit) == ["qdq", "ort", "strict"]
