"""Passes by name: ours, those of packages, modules and files, with options, and what is wrong with a text."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from onnxq.errors import SchemeError
from onnxq.passes import PASSES, FoldConstants, NameNodes, UpgradeOpset
from onnxq.passes.preparing.named_passes import ENTRY_POINTS, as_passes, option_texts, pass_named, passes_by_name
from onnxq.system import plugins

MINE = """
from dataclasses import dataclass
from onnxq import Changes, Pass
from onnxq.planning.plan import Plan

@dataclass(frozen=True)
class Mine(Pass):
    ops: tuple[str, ...] = ("Add",)
    largest: int | None = 3

    def apply(self, graph):
        return Changes()

class Bare(Mine):
    '''No dataclass of its own.'''

@dataclass(frozen=True)
class Needs(Mine):
    size: int = None
    plan: Plan = None

@dataclass(frozen=True)
class Required(Pass):
    size: int

    def apply(self, graph):
        if self.size < 0:
            return None
        return Changes()

    def __post_init__(self):
        if self.size < 0:
            raise ValueError("size is negative")

READY = Mine(largest=9)
number = 3

def function(graph):
    return Changes()
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a package is installed that registers a pass, a pass that is made already, and what is none."""
    found = {"Name": "onnxq.passes:NameNodes", "Odd": "math:sqrt", "Gone": "no_such_module:Pass"}
    entries = EntryPoints(EntryPoint(name, target, ENTRY_POINTS) for name, target in found.items())
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: entries.select(**wanted))


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_of_ours_has_a_name_or_needs_what_no_text_can_be(name: str) -> None:
    if name in passes_by_name():
        assert pass_named(name) == PASSES[name]()
    else:
        with pytest.raises(
            SchemeError, match=f"pass '{name}' needs its option '(plan|encodings)', which no text can be"
        ):
            pass_named(name)


def test_the_passes_that_need_a_plan_are_those_that_place_codes() -> None:
    assert {step.__module__.split(".")[2] for name, step in PASSES.items() if name not in passes_by_name()} == {
        "quantize"
    }


def test_options_have_the_types_of_the_fields(mine: str) -> None:
    assert pass_named("FoldConstants:largest=1000") == FoldConstants(1000)
    found = pass_named(f"{mine}:Mine:ops=Mul,Sub:largest=none")
    assert found.options() == {"ops": ("Mul", "Sub"), "largest": None}


def test_what_holds_no_equals_sign_continues_the_value_in_front(mine: str) -> None:
    assert pass_named(f"{mine}:Mine:ops=a:b,c:d").options()["ops"] == ("a:b", "c:d")


def test_a_pass_of_a_module_of_a_file_and_one_that_is_made_already(mine: str) -> None:
    assert pass_named("onnxq.passes:NameNodes") == NameNodes()
    assert pass_named(f"{mine}:Bare").options() == {"ops": ("Add",), "largest": 3}
    assert pass_named(f"{mine}:READY").options()["largest"] == 9


def test_texts_and_passes_mix_in_one_list() -> None:
    assert as_passes(["NameNodes", UpgradeOpset(21)]) == (NameNodes(), UpgradeOpset(21))
    with pytest.raises(SchemeError, match="the passes are 'NameNodes', expected a list of passes"):
        as_passes("NameNodes")


@pytest.mark.usefixtures("installed")
def test_a_pass_of_an_installed_package_is_found_by_its_name() -> None:
    assert pass_named("Name") == NameNodes()
    with pytest.raises(SchemeError, match="pass 'Odd' is of type builtin_function_or_method, expected a subclass"):
        pass_named("Odd")
    with pytest.raises(SchemeError, match="Pass 'Gone' of no_such_module:Pass cannot be loaded"):
        pass_named("Gone")
    with pytest.raises(SchemeError, match="pass 'Odd' is of type"):
        passes_by_name()


@pytest.mark.usefixtures("installed")
def test_names_of_installed_packages_are_suggested() -> None:
    with pytest.raises(SchemeError, match=r"pass 'Nome' is unknown, .*; did you mean 'Name'"):
        pass_named("Nome")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "FoldConstant",
            "pass 'FoldConstant' is unknown, .* onnxq run --list shows all names; did you mean 'FoldConstants'",
        ),
        ("", "pass '' is unknown"),
        ("DropDefaults", "pass 'DropDefaults' is no longer part of onnxq: attributes with default values stay"),
        (":", "is not written as NAME, MODULE:CLASS"),
        ("mine.py:", "is not written as NAME, MODULE:CLASS"),
        ("FoldConstants:large=3", "has no option 'large'; did you mean 'largest'.; its options are largest"),
        ("NameNodes:x=3", "pass 'NameNodes' has no option 'x'; it has none"),
        ("FoldConstants:largest=x", "option 'largest' of pass 'FoldConstants' is 'x', expected int"),
        ("FoldConstants:largest=1:largest=2", "has the option 'largest' twice"),
        ("mine.py:READY:largest=2", "has its options already, expected none; leave out 'largest'"),
        ("mine.py:Min", "mine.py holds no 'Min'; did you mean 'Mine'"),
        ("mine.py:function", "pass 'mine.py:function' is of type function, expected a subclass of onnxq.Pass"),
        ("mine.py:number", "is of type int, expected a subclass of onnxq.Pass"),
        ("mine.py:Required", "needs its option 'size'; write mine.py:Required:size=VALUE"),
        ("mine.py:Required:size=-1", "cannot be made: ValueError: size is negative"),
        ("mine.py:Needs:plan=x", "option 'plan' of pass 'mine.py:Needs' is of a type that no text can be"),
        ("onnxq:Pass", "cannot be made: TypeError: Can't instantiate abstract class"),
        ("no_such_module:Pass", "cannot be imported: ModuleNotFoundError"),
        ("gone.py:Pass", "cannot be imported: there is no file gone.py"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_what_is_wrong_with_a_text_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        pass_named(text)


def test_options_are_listed_with_defaults(mine: str) -> None:
    assert option_texts(UpgradeOpset) == {"version": "13"}
    assert option_texts(NameNodes) == {}
    assert option_texts(type(pass_named(f"{mine}:Mine"))) == {"ops": "Add", "largest": "3"}
    assert option_texts(type(pass_named(f"{mine}:Required:size=1"))) == {"size": ""}
