from __future__ import annotations

import pytest

from onnxq.cli.terminal import open_console


def test_names_are_shown_as_they_are_and_obeyed_in_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    open_console(stderr=True).print("[red]a[/red] :smile: b\x1b[31mc")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("[red]a[/red] :smile: b")
    assert "\x1b" not in err
