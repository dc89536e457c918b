"""The house rules that a reader relies on, checked against every file."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "onnxq"
# From the ground up: a room imports only rooms before it. A row is a floor; rooms of one floor do not know each other.
ROOMS = (
    ("cores", "deadline", "errors", "html_tables", "option_values", "progress", "remembering", "version"),
    ("stored_tensors",),
    ("large_models",),
    ("failures", "publish", "records"),
    ("extensions", "isolation", "numbers"),
    ("graph",),
    ("capabilities", "operators", "runtime"),
    ("targets",),
    ("modelfile",),
    ("constants", "onnx_tools", "lowering"),
    ("samples",),
    ("engines", "evidence"),
    ("data", "scheme"),
    ("presets",),
    ("execution", "scheme_file"),
    ("planning", "dequantizing"),
    ("equivalence", "encoding", "judging", "inspection"),
    ("passes",),
    ("integer_steps", "named_passes", "placing", "preparation"),
    ("candidates", "dequantization", "rewriting", "workbench"),
    ("optimization", "trials"),
    ("switchboard",),
    ("accuracy",),
    ("searching",),
    ("budget", "report", "wanted"),
    ("opening", "preparation_check"),
    ("calibrating", "explanation", "steps"),
    ("forms", "reporting"),
    ("pipeline",),
    ("sessions", "training"),
    ("web_folder",),
    ("cli",),
)


def modules() -> list[Path]:
    inside = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "passes" not in path.parents]
    return sorted([*inside, *(ROOT / "passes").rglob("*.py")])


def module_name(path: Path) -> str:
    inside = path.relative_to(PACKAGE) if PACKAGE in path.parents else path.relative_to(ROOT)
    return ".".join(("onnxq", *inside.with_suffix("").parts)).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Yield the full names of what a module imports anywhere, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers_of(wanted: str, inside: str) -> list[str]:
    """Return the modules below ``inside`` that import ``wanted`` or anything in it."""
    return [
        module_name(path)
        for path in modules()
        if module_name(path).startswith(inside)
        and any(name == wanted or name.startswith(f"{wanted}.") for name in imports(path))
    ]


def test_the_walk_sees_all_rooms() -> None:
    names = {module_name(path) for path in modules()}
    assert {
        "onnxq",
        "onnxq.graph.model",
        "onnxq.samples.data",
        "onnxq.passes.place.planned",
        "onnxq.cli.main",
    } <= names
    assert {name.rpartition(".")[0] for name in importers_of("click", "onnxq")} == {"onnxq.cli"}


def test_only_the_runtime_and_execution_import_onnxruntime() -> None:
    found = importers_of("onnxruntime", "onnxq")
    outside = {name for name in found if not name.startswith("onnxq.execution.")}
    # A process that serves another onnxruntime has nothing of onnxq's.
    assert outside == {"onnxq.engines.serve_onnxruntime", "onnxq.runtime"}


@pytest.mark.parametrize("wanted", ["onnxq.graph", "onnx_graphsurgeon", "onnxq.passes", "onnxq.planning"])
def test_arrays_know_no_graphs(wanted: str) -> None:
    assert importers_of(wanted, "onnxq.numbers") == []


@pytest.mark.parametrize("wanted", ["onnxq.passes", "onnxq.planning", "onnxq.evidence", "onnxq.scheme"])
def test_graphs_know_no_passes(wanted: str) -> None:
    assert importers_of(wanted, "onnxq.graph") == []


@pytest.mark.parametrize("wanted", ["onnxq.cli", "onnxq.pipeline", "click", "rich"])
def test_passes_know_no_command_line(wanted: str) -> None:
    assert importers_of(wanted, "onnxq.passes") == []


def test_only_the_terminal_draws() -> None:
    drawing = {"onnxq.cli.console", "onnxq.cli.measured", "onnxq.cli.progress_bars", "onnxq.cli.terminal"}
    assert set(importers_of("rich", "onnxq")) == drawing


@pytest.mark.parametrize("room", ["onnxq.planning", "onnxq.searching"])
@pytest.mark.parametrize(
    "name", ["graph.insert_nodes", "graph.remove_nodes", "graph.replace_uses", "modelfile.save", "passes"]
)
def test_what_decides_edits_nothing(room: str, name: str) -> None:
    assert importers_of(f"onnxq.{name}", room) == []


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_no_module_is_a_drawer_for_odds_and_ends(path: Path) -> None:
    assert not {"util", "utils", "helper", "helpers", "common", "manager", "misc"} & set(path.stem.split("_"))


def room_of(module: str) -> str:
    """Return the folder or module below ``onnxq`` that a module stands in; the package's own face has none."""
    return module.split(".")[1] if "." in module else ""


def test_every_room_has_one_floor() -> None:
    floors = [room for floor in ROOMS for room in floor]
    assert sorted(floors) == sorted({room_of(module_name(path)) for path in modules()} - {"", "__main__"})


@pytest.mark.parametrize("path", [path for path in modules() if path.stem != "__main__"], ids=module_name)
def test_a_room_knows_only_rooms_below_it(path: Path) -> None:
    room = room_of(module_name(path))
    if not room:
        return
    floor = next(number for number, rooms in enumerate(ROOMS) if room in rooms)
    allowed = {"", room, *(below for rooms in ROOMS[:floor] for below in rooms)}
    assert {room_of(name) for name in imports(path) if name.split(".")[0] == "onnxq"} <= allowed


def test_no_modules_import_each_other() -> None:
    known = {module_name(path) for path in modules()}
    needs = {module_name(path): known & set(imports(path)) - {module_name(path)} for path in modules()}
    # A package's face shows its modules; they do not look at it.
    order = TopologicalSorter({name: needed - {name.rpartition(".")[0]} for name, needed in needs.items()})
    assert len(list(order.static_order())) == len(known)


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert listed == sorted(module_name(path) for path in modules() if path.name == "__init__.py")


@pytest.mark.skipif(not (PACKAGE / "passes").exists(), reason="an sdist holds no links")
def test_passes_lie_at_the_top_and_in_the_package() -> None:
    assert (ROOT / "passes").samefile(PACKAGE / "passes")


@pytest.mark.parametrize("module", ["onnxq", "onnxq.cli.main", "onnxq.isolation"])
def test_importing_is_cheap(module: str) -> None:
    heavy = ("numpy", "onnx", "onnxruntime", "rich")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_importing_leaves_logging_and_warnings_alone() -> None:
    code = (
        "import logging, warnings; before = list(warnings.filters)\n"
        "import onnxq.pipeline, onnxq.passes, onnxq.cli.terminal\n"
        "print(logging.getLogger().handlers, logging.getLogger().level == logging.WARNING)\n"
        "print([one for one in warnings.filters if one not in before and 'onnxq' in str(one)])\n"
        "logging.getLogger('onnxq.pipeline').error('not printed')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("[] True\n[]\n", "")


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_the_package_prints_nothing_and_swallows_nothing(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print")
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None)
        assert not (isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node))
