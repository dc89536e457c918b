from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from onnxq.errors import DataError, SchemeError
from onnxq.system import plugins as module
from onnxq.system.plugins import import_plugin, load_registered, registered_names, wrap_plugin_errors


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that packages are installed that register a function, a module and an attribute that are not there."""
    found = (
        ("root", "math:sqrt"),
        ("gone", "no_such_module:thing"),
        ("lost", "math:no_such_function"),
        ("bad", "bad_module:thing"),
    )
    entries = EntryPoints(EntryPoint(name, target, "group") for name, target in found)
    monkeypatch.setattr(module, "entry_points", lambda **wanted: entries.select(**wanted))


def test_what_is_registered_is_found_by_group_and_name() -> None:
    assert registered_names("group") == ["root", "gone", "lost", "bad"]
    found = load_registered("group", "root", "Method")
    assert found is not None
    assert found(9) == 3


def test_another_group_or_name_is_none() -> None:
    assert registered_names("other") == []
    assert load_registered("group", "roots", "Method") is None
    assert load_registered("other", "root", "Method") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "Method 'gone' of no_such_module:thing cannot be loaded: No module named 'no_such_module'; install"),
        ("lost", "Method 'lost' of math:no_such_function cannot be loaded"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        load_registered("group", name, "Method")


def test_a_package_that_fails_while_it_is_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "bad_module.py").write_text("thing = None\n1 / 0\n")
    with pytest.raises(SchemeError, match="Method 'bad' of bad_module:thing cannot be loaded: ZeroDivisionError: div"):
        load_registered("group", "bad", "Method")
    (tmp_path / "bad_module.py").write_text("thing = None\n")
    with pytest.raises(SchemeError, match="Method 'bad' of bad_module:thing is None there; correct its package"):
        load_registered("group", "bad", "Method")


def test_what_fails_is_blamed_by_name_and_what_is_told_already_stays() -> None:
    reported = (
        r"source 'mine' failed: ValueError: no rows \(.*test_plugins\.py, line \d+\); correct it, or do without it"
    )
    with pytest.raises(DataError, match=reported), wrap_plugin_errors("source 'mine'", DataError):
        raise ValueError("no rows")
    with pytest.raises(DataError, match=r"^no samples$"), wrap_plugin_errors("source 'mine'"):
        raise DataError("no samples")


def test_a_module_is_imported_by_its_name() -> None:
    assert import_plugin("math", "pass 'math:sqrt'").sqrt(9) == 3


def test_a_file_is_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from dataclasses import dataclass\n@dataclass\nclass Mine:\n    size: int = 3\n")
    assert import_plugin(str(file), "pass 'mine.py:Mine'").Mine().size == 3
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "pass 'X' cannot be imported: there is no file"),
        ("1 / 0", "pass 'X' cannot be imported: ZeroDivisionError: division by zero"),
        ("def", "pass 'X' cannot be imported: SyntaxError"),
        ("raise SystemExit(0)", "pass 'X' cannot be imported: SystemExit: 0"),
    ],
)
def test_a_file_that_cannot_be_run_is_one_sentence(tmp_path: Path, code: str | None, message: str) -> None:
    file = tmp_path / "mine.py"
    if code is not None:
        file.write_text(code)
    with pytest.raises(SchemeError, match=message):
        import_plugin(str(file), "pass 'X'")
    assert not [name for name in sys.modules if str(file) in name]


def test_a_module_that_is_not_there_is_one_sentence_with_the_nearest_name() -> None:
    with pytest.raises(SchemeError, match=r"metric 'X' cannot be imported: ModuleNotFoundError: .*did you mean 'top1'"):
        import_plugin("topp1", "metric 'X'", ["top1"])
