"""Where models can be written, and what is left where they cannot."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import onnx
import pytest

from ir.written_models import external_model, files, model
from onnxq.errors import OutputError
from onnxq.ir import read_model, save


def test_an_existing_file_is_replaced_whole(tmp_path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"x" * 10**6)

    save(read_model(model()), tmp_path / "m.onnx")

    assert onnx.load(tmp_path / "m.onnx") == model()


def test_new_files_have_the_usual_permissions(tmp_path) -> None:
    (tmp_path / "plain").touch()

    path = external_model(tmp_path)

    for name in (path, tmp_path / "m.onnx.data"):
        assert name.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("lost/m.onnx", "the folder .*lost does not exist; create it first"),
        ("file/m.onnx", "the folder .*file does not exist"),
        ("folder", "it is a folder; give the name of a file in it"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path, target: str, message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    with pytest.raises(OutputError, match=message):
        save(read_model(model()), tmp_path / target)
    assert files(tmp_path) == ["file", "folder"]


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)

    with pytest.raises(OutputError, match=r"cannot write .*m\.onnx: Permission denied"):
        save(read_model(model()), tmp_path / "m.onnx")


@pytest.mark.parametrize("external", [True, False])
def test_a_full_disk_leaves_the_old_files_and_nothing_else(tmp_path, external: bool) -> None:
    path = external_model(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    script = f"""
    import resource
    from onnxq.errors import OutputError
    from onnxq.ir import load, save
    graph = load({str(path)!r})
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
    try:
        save(graph, {str(path)!r}, external_data={external})
    except OutputError as error:
        print(error)
    """

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)

    assert "File too large" in done.stdout
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before
