"""A model appears whole or not at all, and nothing else is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxq.errors import OutputError
from onnxq.publish import check_output, data_file, publish, staging, stored_bytes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_staged_model_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    output = tmp_path / "model.onnx"
    output.write_text("old")
    with staging(output) as folder:
        (folder / "model.onnx").write_text("new")
        assert output.read_text() == "old"
        publish(folder / "model.onnx", output)
    assert output.read_text() == "new"
    assert names(tmp_path) == ["model.onnx"]


def test_external_data_is_published_with_its_model(tmp_path: Path) -> None:
    output = tmp_path / "model.onnx"
    with staging(output) as folder:
        (folder / "model.onnx").write_text("model")
        data_file(folder / "model.onnx").write_text("data")
        publish(folder / "model.onnx", output)
    assert names(tmp_path) == ["model.onnx", "model.onnx.data"]
    assert data_file(output).read_text() == "data"


def test_an_error_while_staging_leaves_the_old_model(tmp_path: Path) -> None:
    output = tmp_path / "model.onnx"
    output.write_text("old")

    def write_half() -> None:
        with staging(output) as folder:
            (folder / "model.onnx").write_text("half")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        write_half()
    assert output.read_text() == "old"
    assert names(tmp_path) == ["model.onnx"]


def test_an_interrupt_while_staging_leaves_the_old_model(tmp_path: Path) -> None:
    output = tmp_path / "model.onnx"
    output.write_text("old")
    with pytest.raises(KeyboardInterrupt), staging(output):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["model.onnx"]


def test_staging_lies_on_the_file_system_of_the_output(tmp_path: Path) -> None:
    with staging(tmp_path / "model.onnx") as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(".model.onnx.onnxq-")
    with staging(None) as folder:
        assert tmp_path not in folder.parents
    assert not folder.exists()


def test_staging_beside_nothing_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"a temporary folder beside .* cannot be made: No such file"),
        staging(tmp_path / "no" / "x.onnx"),
    ):
        pass


def test_publishing_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"output .*out\.onnx cannot be written: No such file"):
        publish(tmp_path / "missing.onnx", tmp_path / "out.onnx")


def test_an_output_that_can_be_written_passes(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    source.write_text("float")
    check_output(tmp_path / "out.onnx", source)
    check_output(tmp_path / "out.onnx", None)
    check_output(tmp_path / "out.onnx", tmp_path / "missing.onnx")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", r"is a folder; give a file such as .*model\.onnx$"),
        ("no/out.onnx", r"^folder .*no of the output does not exist; create it first$"),
        ("model.onnx/out.onnx", r"^folder .*model\.onnx of the output does not exist; create it first$"),
        ("model.onnx", "is the model itself; give another name, the float model is worth keeping"),
        ("sub/../model.onnx", "is the model itself"),
        ("link.onnx", "is the model itself"),
        ("hard.onnx", "is the model itself"),
        ("x" * 300 + ".onnx", "File name too long"),
    ],
)
def test_an_output_that_cannot_be_written_is_told(output: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    source.write_text("float")
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.onnx").symlink_to(source)
    (tmp_path / "hard.onnx").hardlink_to(source)
    with pytest.raises(OutputError, match=message):
        check_output(tmp_path / output, source)
    assert source.read_text() == "float"


def test_a_folder_without_permission_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(OutputError, match="is not writable; choose another"):
        check_output(tmp_path / "out.onnx", None)


def test_sizes_count_external_data_that_exists(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(bytes(10))
    (tmp_path / "data").write_bytes(bytes(7))
    assert stored_bytes(tmp_path / "model.onnx") == 10
    assert stored_bytes(tmp_path / "model.onnx", (tmp_path / "data", tmp_path / "missing")) == 17
