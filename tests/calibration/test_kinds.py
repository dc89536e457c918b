"""Kinds by name: the table, and those that installed packages register."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from onnxq.calibration.accumulators import Accumulator, Request, TensorSample
from onnxq.calibration.kinds import ENTRY_POINTS, KINDS, default_request, find_kind
from onnxq.calibration.statistics import load_statistics, observe, save_statistics
from onnxq.errors import SchemeError
from onnxq.system import plugins


@dataclass(frozen=True, eq=False)
class Zeros(Accumulator):
    """A kind of somebody else: how many elements are zero."""

    kind: ClassVar[str] = "zeros"
    count: int = 0

    @classmethod
    def observed(cls, seen: TensorSample, request: Request) -> Zeros:
        return cls(int(np.count_nonzero(seen.values == 0)))

    def merge(self, other: Zeros) -> Zeros:
        return Zeros(self.count + other.count)

    def arrays(self) -> dict[str, Any]:
        return {"count": np.array([self.count])}

    @classmethod
    def restored(cls, arrays: Any) -> Zeros:
        return cls(int(arrays["count"][0]))


class Other:
    kind = "other"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a package is installed that registers the kind above, and some that are broken."""
    entries = EntryPoints(
        EntryPoint(name, f"{__name__}:{target}", ENTRY_POINTS)
        for name, target in (("zeros", "Zeros"), ("other", "Other"), ("twice", "Zeros"), ("broken", "Nothing"))
    )
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: entries.select(**wanted))


@pytest.mark.parametrize("name", KINDS)
def test_every_row_is_named_as_its_kind(name: str) -> None:
    assert KINDS[name].kind == name
    assert find_kind(name) is KINDS[name]
    assert default_request("t", name, 1) == Request("t", name, 1, KINDS[name].options)


@pytest.mark.usefixtures("installed")
def test_a_kind_of_an_installed_package_is_observed_merged_and_kept(tmp_path: Path) -> None:
    request = default_request("t", "zeros")
    a, b = (observe({"t": np.float32(values)}, [request], sample) for values, sample in (([0, 1], "a"), ([0, 0], "b")))
    save_statistics(a.merge(b), tmp_path / "s.npz")
    assert load_statistics(tmp_path / "s.npz").of("t").need(Zeros).count == 3


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zeroes", "Statistic 'zeroes' is unknown, expected one of range, .*, zeros, .*did you mean 'zeros'"),
        ("broken", "Statistic 'broken' of .*:Nothing cannot be loaded"),
        ("other", "'other' is no class of that kind"),
        ("twice", "'twice' is no class of that kind"),
    ],
)
def test_a_wrong_kind_is_told_why(name: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        observe({}, [Request("t", name)])


def fails(*_: Any) -> Any:
    raise ZeroDivisionError("no counts")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("observer", fails, "ZeroDivisionError: no counts"),
        ("observed", fails, "ZeroDivisionError: no counts"),
        ("merge", fails, "ZeroDivisionError: no counts"),
        ("merge", lambda one, other: None, "TypeError: it is None, expected Zeros"),
        ("merge", lambda one, other: 3, "TypeError: it is 3, expected Zeros"),
        ("arrays", lambda one: {"count": one.count}, "TypeError: what holds it in a file are no arrays"),
        ("arrays", lambda one: None, "AttributeError: 'NoneType'"),
    ],
)
def test_a_kind_that_fails_is_told_with_the_tensor(
    method: str, given: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Zeros, method, given)
    with pytest.raises(SchemeError, match=f"Statistic 'zeros' of tensor 't' failed: {message}"):
        observe({"t": np.float32([0, 1])}, [Request("t", "zeros")])
