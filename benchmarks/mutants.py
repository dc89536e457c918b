"""Break the product in places that a seed chooses, and count how often the tests notice.

    python benchmarks/mutants.py [--seed 1] [--count 50] [--first 0] [--last 50] [--output FILE]

A copy of the checkout is changed in one place after the other, and tests run until one fails: those of the changed
module, then of its package, then of what imports the package. Changes are: another constant, a turned comparison, a
swapped branch, `and` for `or`, `+` for `-`, a removed `not`, a dropped `raise`, a deleted call. Docstrings, messages,
logging and what only serves types are left alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# For the tests of one mutant; one that is over makes the tests hang.
SECONDS = 900
TURNED = {
    ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="first mutant that is run")
    parser.add_argument("--last", type=int, help="end of the mutants that are run")
    parser.add_argument("--output", type=Path, help="JSON file for the results, to which those of this run are added")
    options = parser.parse_args()
    results = run_mutants(choose(options.seed, options.count)[options.first : options.last], options.output)
    print(f"{sum(results.values())} of {len(results)} mutants were caught")


# --- what a change can reach -----------------------------------------------------------------------------------


def tests_of(mutant: Mutant) -> list[list[str]]:
    """Return test files in the order of their nearness: of the module, of its package, and of what imports the package.

    A test file is of a module if it has its name or imports it.
    """
    module = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    module = f"onnxq.{module}" if mutant.file.startswith("passes/") else module
    package = module.rpartition(".")[0]
    named, own, near, wide = set[str](), set[str](), set[str](), set[str]()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if path.stem == f"test_{module.rpartition('.')[2]}":
            named.add(name)
        elif re.search(rf"{re.escape(module)}\b", text):
            own.add(name)
        elif name.startswith(f"tests/{package.removeprefix('onnxq.').replace('.', '/')}/"):
            near.add(name)
        elif re.search(rf"{re.escape(package)}\b", text):
            wide.add(name)
    return [sorted(some) for some in (named, own, near, wide) if some]


# --- mutants ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A change of one place."""

    file: str
    line: int
    start: int
    end: int
    kind: str
    old: str
    new: str
    function: str

    def __str__(self) -> str:
        def short(text: str) -> str:
            return " ".join(text.split())[:60]

        return f"{self.file}:{self.line} {self.function}: {self.kind}: {short(self.old)} -> {short(self.new)}"


def choose(seed: int, count: int) -> list[Mutant]:
    """Return mutants of a seed, with each kind of change as likely as another."""
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for top in ("onnxq", "passes"):
        for path in sorted((ROOT / top).rglob("*.py")):
            # onnxq/passes is a link to passes.
            if path.resolve() == path:
                for mutant in Places(path).all():
                    kinds[mutant.kind].append(mutant)
    random_numbers, found = random.Random(seed), dict[Mutant, None]()
    while len(found) < count:
        found[random_numbers.choice(kinds[random_numbers.choice(sorted(kinds))])] = None
    return list(found)


class Places:
    """The places of a file that can be changed."""

    def __init__(self, path: Path) -> None:
        self.file, self.source = str(path.relative_to(ROOT)), path.read_bytes()
        self.lines = [0]
        for line in self.source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def all(self) -> Iterator[Mutant]:
        """Yield the mutants of the file."""
        yield from self._walk(ast.parse(self.source), "")

    def _walk(self, node: ast.AST, function: str) -> Iterator[Mutant]:
        if is_left_alone(node):
            return
        yield from self._here(node, function)
        inner = function
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ".<" not in function:
            # What is inside of a function counts to it.
            inner = f"{function}.{node.name}" if function and not function.endswith("()") else function or node.name
            inner += "()" if isinstance(node, ast.FunctionDef) and not inner.endswith("()") else ""
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases", "exc", "msg"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child, inner)

    def _here(self, node: ast.AST, function: str) -> Iterator[Mutant]:
        match node:
            case ast.Constant(value=bool(value)):
                yield self._mutant("constant", node, str(not value), function)
            case ast.Constant(value=int() | float() as value):
                yield self._mutant("constant", node, repr(value + 1), function)
            case ast.Compare(ops=[op]) if type(op) in TURNED:
                new = f"({self._text(node.left)} {TURNED[type(op)]} {self._text(node.comparators[0])})"
                yield self._mutant("comparison", node, new, function)
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                parts = f" {new} ".join(f"({self._text(value)})" for value in node.values)
                yield self._mutant(f"{old} for {new}" if old == "and" else "and for or", node, f"({parts})", function)
            case ast.BinOp() if type(node.op) in ARITHMETIC:
                new = f"({self._text(node.left)} {ARITHMETIC[type(node.op)][1]} {self._text(node.right)})"
                yield self._mutant("arithmetic", node, new, function)
            case ast.UnaryOp(op=ast.Not()):
                yield self._mutant("removed not", node, f"({self._text(node.operand)})", function)
            case ast.If() | ast.IfExp() | ast.While():
                yield self._mutant("swapped branch", node.test, f"(not ({self._text(node.test)}))", function)
            case ast.Raise(exc=ast.Call()):
                yield self._mutant("dropped raise", node, "pass", function)
            case ast.Expr(value=ast.Call()):
                yield self._mutant("deleted call", node, "pass", function)

    def _span(self, node: Any) -> tuple[int, int]:
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        text = self.source[start:end].decode()
        return f"({text})" if "\n" in text else text

    def _mutant(self, kind: str, node: Any, new: str, function: str) -> Mutant:
        start, end = self._span(node)
        old = self.source[start:end].decode()
        return Mutant(self.file, node.lineno, start, end, kind, old, new, function.removesuffix("()"))


def is_left_alone(node: ast.AST) -> bool:
    """True for what only serves types, for messages and for logging."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "log" | "_log" | "_LOG")))):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="debug" | "info" | "warning"))):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
    return False


# --- running ------------------------------------------------------------------------------------------------------


def run_mutants(mutants: list[Mutant], output: Path | None) -> dict[Mutant, bool]:
    """Try mutants in a copy of the checkout, and return which were caught."""
    results: dict[Mutant, bool] = {}
    with tempfile.TemporaryDirectory(prefix="onnxq-mutants-") as folder:
        copy = Path(folder) / "onnxq"
        left = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "results", "node_modules")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=left)
        for mutant in mutants:
            path, start = copy / mutant.file, time.perf_counter()
            source = path.read_bytes()
            path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
            how = first_failure(copy, tests_of(mutant))
            path.write_bytes(source)
            results[mutant] = how is not None
            seconds = time.perf_counter() - start
            print(f"{'caught' if how else 'SURVIVED'} {mutant} ({seconds:.0f} s) {how}", flush=True)
            if output is not None:
                kept = json.loads(output.read_text()) if output.exists() else []
                kept.append({**asdict(mutant), "caught": how})
                output.write_text(json.dumps(kept, indent=1) + "\n")
    print(dict(Counter(mutant.kind for mutant, caught in results.items() if caught)))
    return results


def first_failure(copy: Path, tests: list[list[str]]) -> str | None:
    """Return the first test that fails, or None if all pass."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no"]
    for some in tests:
        try:
            done = subprocess.run(
                [*command, *some],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return "ran too long"
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
            return lines[0][:200] if lines else f"pytest ended with {done.returncode}"
    return None


if __name__ == "__main__":
    main()
