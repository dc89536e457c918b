"""A model appears whole or not at all, and nothing else is left behind."""

from __future__ import annotations

import errno
import random
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from publishing_processes import ENDS_AT_RENAME, FOR_EVER, OFTEN, needs_locks, process

from onnxq.errors import OutputError
from onnxq.system.publish import (
    NoRoomError,
    check_output,
    data_file,
    on_staging,
    publish,
    remove_abandoned,
    replace_file,
    staging,
    stored_bytes,
    write_text,
)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A model that lies there with its external data."""
    output = tmp_path / "model.onnx"
    output.write_text("old")
    data_file(output).write_text("old")
    return output


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("has_data", [False, True])
@pytest.mark.parametrize("was_there", [False, True])
def test_a_staged_model_takes_the_place_of_the_old_one(has_data: bool, was_there: bool, tmp_path: Path) -> None:
    output = tmp_path / "model.onnx"
    if was_there:
        output.write_text("old")
    with staging(output) as folder:
        (folder / "model.onnx").write_text("new")
        if has_data:
            data_file(folder / "model.onnx").write_text("data")
        assert output.exists() == was_there
        publish(folder / "model.onnx", output)
    assert output.read_text() == "new"
    assert names(tmp_path) == ["model.onnx", *(["model.onnx.data"] if has_data else [])]
    assert not has_data or data_file(output).read_text() == "data"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("write", [staging, lambda path: replace_file(path, "report")], ids=["staging", "replacing"])
def test_an_error_halfway_leaves_the_old_file_alone(
    write: Callable[[Path], AbstractContextManager[Path]], error: type[BaseException], tmp_path: Path
) -> None:
    output = tmp_path / "model.onnx"
    output.write_text("old")

    def write_half() -> None:
        with write(output) as fresh:
            (fresh / "model.onnx" if fresh.is_dir() else fresh).write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert output.read_text() == "old"
    assert names(tmp_path) == ["model.onnx"]


def test_staging_lies_on_the_file_system_of_the_output(tmp_path: Path) -> None:
    with staging(tmp_path / "model.onnx") as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(".onnxq-")
    with staging(None) as folder:
        assert tmp_path not in folder.parents
    assert not folder.exists()


def test_staging_beside_nothing_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"a temporary folder in .* cannot be made: No such file"),
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
        ("/dev/null", "output /dev/null is a device or pipe, expected a file"),
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


# No room


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_told_by_the_name_of_the_output(wrapped: bool, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "prepared.onnx")
    reported = NoRoomError("prepared.onnx cannot be written")
    reported.__cause__ = full

    def write() -> None:
        with staging(tmp_path / "model.onnx"):
            raise reported if wrapped else full

    with pytest.raises(
        OutputError, match=r"^/.*/model\.onnx cannot be written: No space left on device; free disk space"
    ):
        write()
    assert names(tmp_path) == []


def test_other_errors_while_staging_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), staging(tmp_path / "model.onnx") as folder:
        (folder / "missing").read_text()
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutputError, match=r"^costs\.json is full$"), staging(tmp_path / "model.onnx"):
        raise OutputError("costs.json is full") from full


@needs_locks
def test_a_folder_in_use_stays_and_an_abandoned_one_goes(tmp_path: Path) -> None:
    (tmp_path / ".onnxq-abandoned").mkdir()
    (tmp_path / ".onnxq-abandoned" / "large").write_text("weights")
    (tmp_path / ".onnxq-file").touch()
    (tmp_path / ".onnxq-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with staging(tmp_path / "a.onnx") as used, staging(tmp_path / "b.onnx"):
        assert used.exists()
        assert not (tmp_path / ".onnxq-abandoned").exists()
    assert names(tmp_path) == [".onnxq-file", ".onnxq-link", "elsewhere"]


@needs_locks
@pytest.mark.parametrize("renames", range(4))
def test_a_process_that_ends_between_two_renames_mixes_nothing(renames: int, pair: Path) -> None:
    assert process(ENDS_AT_RENAME, pair, renames).wait() == 9
    assert pair.exists() == (renames == 0)
    remove_abandoned(pair.parent)
    assert names(pair.parent) == ["model.onnx", "model.onnx.data"]
    assert (pair.read_text(), data_file(pair).read_text()) == ("old", "old")


@needs_locks
def test_what_was_set_aside_never_replaces_a_later_model(pair: Path) -> None:
    assert process(ENDS_AT_RENAME, pair, 2).wait() == 9
    pair.write_text("later")
    remove_abandoned(pair.parent)
    assert names(pair.parent) == ["model.onnx"]
    assert pair.read_text() == "later"


@needs_locks
def test_killed_at_any_moment_a_process_leaves_whole_pairs(tmp_path: Path) -> None:
    output, chance = tmp_path / "model.onnx", random.Random(0)
    for _ in range(20):
        with process(FOR_EVER, output) as writer:
            assert writer.stdout is not None
            writer.stdout.read(5)
            time.sleep(chance.uniform(0.001, 0.05))
            writer.send_signal(signal.SIGKILL)
        if output.exists():
            assert output.read_text() == data_file(output).read_text()
        remove_abandoned(tmp_path)
        assert names(tmp_path) in ([], ["model.onnx", "model.onnx.data"])


@needs_locks
def test_two_processes_at_once_never_mix(tmp_path: Path) -> None:
    output = tmp_path / "model.onnx"
    for _ in range(3):
        writers = [process(OFTEN, output) for _ in range(2)]
        assert [writer.wait() for writer in writers] == [0, 0]
        assert output.read_text() == data_file(output).read_text()
        assert names(tmp_path) == ["model.onnx", "model.onnx.data"]


def test_a_rename_that_fails_leaves_the_old_pair(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if path.read_text() == "new model":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with staging(pair) as folder:
        (folder / "model.onnx").write_text("new model")
        data_file(folder / "model.onnx").write_text("new data")
        with pytest.raises(OutputError, match=r"output .*model\.onnx cannot be written: Operation not permitted"):
            publish(folder / "model.onnx", pair)
    assert names(pair.parent) == ["model.onnx", "model.onnx.data"]
    assert (pair.read_text(), data_file(pair).read_text()) == ("old", "old")


def test_whoever_outlives_the_process_is_told_of_staging(tmp_path: Path) -> None:
    reported: list[Path] = []
    token = on_staging.set(reported.append)
    try:
        with staging(tmp_path / "model.onnx"):
            assert reported == [tmp_path]
    finally:
        on_staging.reset(token)


# Single files that are replaced as a whole


def test_a_text_takes_the_place_of_another_and_is_alone_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    write_text(path, "first\nsecond ä\n", "report")
    assert path.read_bytes() == "first\nsecond ä\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def write() -> None:
        with replace_file(path, "report") as fresh:
            fresh.write_text("half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match=r"^report .*report\.json cannot be written: No space left on device; free"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to("there/report.json")
    write_text(tmp_path / "link.json", "new", "report")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "there" / "report.json").read_text() == "new"


@pytest.mark.parametrize("taken", ["folder", "/dev/null"])
def test_folders_and_devices_are_not_replaced(taken: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"^page .* cannot be written: it is no file; give another name"):
        write_text(tmp_path / taken, "new", "page")
    assert (tmp_path / taken).exists()
    assert not (tmp_path / taken).is_file()
