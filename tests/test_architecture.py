"""The rules of the architecture that a reader relies on, checked against every file."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "onnxq"
# From the ground up: a package imports only packages before it, lazily and for types included.
ORDER = (
    "version",
    "errors",
    "system",
    "numerics",
    "ir",
    "ops",
    "onnx_api",
    "data",
    "runtime",
    "rewrite",
    "lowering",
    "calibration",
    "config",
    "planning",
    "algorithms",
    "passes",
    "evaluation",
    "certificate",
    "search",
    "report",
    "pipeline",
    "training",
    "cli",
)


def modules() -> list[Path]:
    inside = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "passes" not in path.parents]
    return sorted([*inside, *(ROOT / "passes").rglob("*.py")])


def module_name(path: Path) -> str:
    inside = path.relative_to(PACKAGE) if PACKAGE in path.parents else path.relative_to(ROOT)
    return ".".join(("onnxq", *inside.with_suffix("").parts)).removesuffix(".__init__")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the full names of what a module imports anywhere, at its top or inside functions."""
    names = set[str]()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def importers_of(wanted: str, inside: str) -> list[str]:
    """Return the modules below ``inside`` that import ``wanted`` or anything in it."""
    return [
        module_name(path)
        for path in modules()
        if module_name(path).startswith(inside)
        and any(name == wanted or name.startswith(f"{wanted}.") for name in imports(path))
    ]


def test_the_walk_sees_all_packages() -> None:
    names = {module_name(path) for path in modules()}
    assert {
        "onnxq",
        "onnxq.ir.graph",
        "onnxq.data.samples",
        "onnxq.passes.quantize.planned",
        "onnxq.cli.main",
    } <= names
    assert {name.rpartition(".")[0] for name in importers_of("click", "onnxq")} == {"onnxq.cli"}


def test_few_modules_import_onnxruntime() -> None:
    found = importers_of("onnxruntime", "onnxq")
    outside = {name for name in found if not name.startswith("onnxq.calibration.")}
    # A process that serves another onnxruntime, and the checker that applications ship, have nothing of onnxq's.
    alone = {"onnxq.runtime.serve_onnxruntime", "onnxq.certificate.onnxq_verify"}
    assert outside == {*alone, "onnxq.runtime.sessions"}


def test_only_training_imports_torch() -> None:
    found = importers_of("torch", "onnxq")
    assert found
    assert {name.split(".")[1] for name in found} == {"training"}


@pytest.mark.parametrize("wanted", ["onnxq.cli", "onnxq.pipeline.quantization", "click", "rich"])
def test_passes_know_no_command_line(wanted: str) -> None:
    assert importers_of(wanted, "onnxq.passes") == []


def test_only_the_terminal_draws() -> None:
    drawing = {"onnxq.cli.progress_bars", "onnxq.cli.terminal"}
    assert set(importers_of("rich", "onnxq")) == drawing


# The encodings of a plan are placed by passes; what chooses among plans hands them over and edits nothing itself.
@pytest.mark.parametrize("package", ["onnxq.planning", "onnxq.algorithms"])
@pytest.mark.parametrize(
    "name", ["ir.insert_nodes", "ir.remove_nodes", "ir.replace_uses", "ir.save", "ir.edit", "passes"]
)
def test_what_decides_edits_nothing(package: str, name: str) -> None:
    assert importers_of(f"onnxq.{name}", package) == []


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    vague = {"util", "utils", "helper", "helpers", "common", "manager", "misc"}
    assert not [module_name(path) for path in modules() if vague & set(path.stem.split("_"))]


def package_of(module: str) -> str:
    """Return the name below ``onnxq`` that a module belongs to; the package's own face has none."""
    return module.split(".")[1] if "." in module else ""


def test_every_package_has_a_place_in_the_order() -> None:
    assert sorted(ORDER) == sorted({package_of(module_name(path)) for path in modules()} - {"", "__main__"})


def test_a_package_imports_only_those_before_it() -> None:
    later = []
    for path in modules():
        package = package_of(module_name(path))
        if package and path.stem != "__main__":
            behind = ORDER[ORDER.index(package) + 1 :]
            later += [
                (module_name(path), name)
                for name in imports(path)
                if name.startswith("onnxq.") and package_of(name) in behind
            ]
    assert not later


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


@pytest.mark.parametrize("module", ["onnxq", "onnxq.cli.main", "onnxq.system.isolation"])
def test_importing_is_cheap(module: str) -> None:
    heavy = ("numpy", "onnx", "onnxruntime", "rich")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_importing_leaves_logging_and_warnings_alone() -> None:
    code = (
        "import logging, warnings; before = list(warnings.filters)\n"
        "import onnxq.pipeline.quantization, onnxq.passes, onnxq.cli.terminal\n"
        "print(logging.getLogger().handlers, logging.getLogger().level == logging.WARNING)\n"
        "print([one for one in warnings.filters if one not in before and 'onnxq' in str(one)])\n"
        "logging.getLogger('onnxq.pipeline.quantization').error('not printed')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("[] True\n[]\n", "")


def is_unfit(node: ast.AST) -> bool:
    prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    swallows = isinstance(node, ast.ExceptHandler) and node.type is None
    return prints or swallows or (isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node))


def test_the_package_prints_nothing_and_swallows_nothing() -> None:
    unfit = [(module_name(path), node.lineno) for path in modules() for node in nodes(path) if is_unfit(node)]
    assert not unfit
