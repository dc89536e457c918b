"""The list of presets on the command line."""

from __future__ import annotations

from cli.commands import invoke
from onnxq.config.presets import PRESETS


def test_every_preset_is_listed_with_a_description() -> None:
    lines = [line.split("\t") for line in invoke("presets").stdout.splitlines()]
    assert [name for name, _ in lines] == list(PRESETS)
    assert all(description for _, description in lines)
