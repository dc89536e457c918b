from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from onnxq.calibration import registered as module
from onnxq.calibration.registered import registered, registered_names
from onnxq.errors import SchemeError


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that packages are installed that register a function, a module and an attribute that are not there."""
    found = (("root", "math:sqrt"), ("gone", "no_such_module:thing"), ("lost", "math:no_such_function"))
    entries = EntryPoints(EntryPoint(name, target, "group") for name, target in found)
    monkeypatch.setattr(module, "entry_points", lambda **wanted: entries.select(**wanted))


def test_what_is_registered_is_found_by_group_and_name() -> None:
    assert registered_names("group") == ["root", "gone", "lost"]
    found = registered("group", "root", "Method")
    assert found is not None
    assert found(9) == 3


def test_another_group_or_name_is_none() -> None:
    assert registered_names("other") == []
    assert registered("group", "roots", "Method") is None
    assert registered("other", "root", "Method") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "Method 'gone' of no_such_module:thing cannot be loaded: No module named 'no_such_module'; install"),
        ("lost", "Method 'lost' of math:no_such_function cannot be loaded"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        registered("group", name, "Method")
