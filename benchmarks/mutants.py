"""Break the product in places that a seed chooses, and count how often the tests notice.

    python benchmarks/mutants.py reach --output reach.json [TESTS ...]
    python benchmarks/mutants.py run --reach reach.json [--seed 1] [--count 50] [--first 0] [--last 50] [--output FILE]

`reach` runs tests once and writes which functions of the product each of them calls. `run` changes a copy of the
checkout in one place after the other, and runs the tests that call the changed function: those that call few other
functions first, until one fails. A change outside all functions reaches every test that calls a function of its file.
Changes are: another constant, a turned comparison, a swapped branch, `and` for `or`, `+` for `-`, a removed `not`, a
dropped `raise`, a deleted call. Docstrings, messages, logging and what only serves types are left alone.
"""

from __future__ import annotations

import argparse
import ast
import cProfile
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Test functions that are tried first, and at most; the first that fails ends them.
FIRST_TESTS, MOST_TESTS = 40, 600
SECONDS = 600
TURNED = {
    ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    reach = commands.add_parser("reach", help="write which functions each test calls")
    reach.add_argument("--output", type=Path, required=True)
    reach.add_argument("tests", nargs="*", default=["tests", "onnxq"])
    run = commands.add_parser("run", help="change the product and run the tests")
    run.add_argument("--reach", type=Path, nargs="+", required=True, help="files that `reach` wrote")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--count", type=int, default=50)
    run.add_argument("--first", type=int, default=0, help="first mutant that is run")
    run.add_argument("--last", type=int, help="end of the mutants that are run")
    run.add_argument("--output", type=Path, help="JSON file for the results, to which those of this run are added")
    options = parser.parse_args()
    if options.command == "reach":
        sys.exit(record(options.output, options.tests))
    mutants = choose(options.seed, options.count)[options.first : options.last]
    results = run_mutants(mutants, Reach.read(options.reach), options.output)
    print(f"{sum(results.values())} of {len(results)} mutants were caught")


# --- what tests reach ---------------------------------------------------------------------------------------------


def function_of(code: CodeType) -> str | None:
    """Return the file and name of a function of the product; lambdas count to the function around them."""
    path = Path(code.co_filename).resolve()
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in ("onnxq", "passes"):
        return None
    return f"{path.relative_to(ROOT)}:{code.co_qualname.split('.<locals>')[0]}"


class Recorder:
    """A pytest plugin that notes which functions of the product each test calls, and how long it takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.functions: dict[str, set[str]] = defaultdict(set)
        self._names: dict[CodeType, str | None] = {}

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        self._profile, self._start = cProfile.Profile(), time.perf_counter()
        self._profile.enable()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._profile.disable()
        test = nodeid.split("[")[0]
        self.seconds[test] += time.perf_counter() - self._start
        for entry in self._profile.getstats():
            if isinstance(entry.code, CodeType):
                if entry.code not in self._names:
                    self._names[entry.code] = function_of(entry.code)
                if (name := self._names[entry.code]) is not None:
                    self.functions[test].add(name)


def record(output: Path, tests: list[str]) -> int:
    """Run tests in this process, write what they reach, and return pytest's exit status."""
    import pytest

    recorder = Recorder()
    status = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *tests], [recorder])
    names = {name: number for number, name in enumerate(sorted(set().union(*recorder.functions.values())))}
    called = {test: sorted(names[name] for name in found) for test, found in recorder.functions.items()}
    output.write_text(json.dumps({"functions": list(names), "tests": called, "seconds": recorder.seconds}))
    return status


@dataclass(frozen=True)
class Reach:
    """The functions that each test calls."""

    called: dict[str, set[str]]

    @classmethod
    def read(cls, files: list[Path]) -> Reach:
        called: dict[str, set[str]] = {}
        for file in files:
            content = json.loads(file.read_text())
            names = content["functions"]
            called |= {test: {names[number] for number in numbers} for test, numbers in content["tests"].items()}
        return cls(called)

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that can notice a change, those that call few functions first."""
        function = f"{mutant.file}:{mutant.function}"
        found = [test for test, called in self.called.items() if function in called]
        if not found:
            found = [t for t, called in self.called.items() if any(n.startswith(f"{mutant.file}:") for n in called)]
        return sorted(found, key=lambda test: len(self.called[test]))


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


def run_mutants(mutants: list[Mutant], reach: Reach, output: Path | None) -> dict[Mutant, bool]:
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
            tests = reach.tests(mutant)
            how = first_failure(copy, tests)
            path.write_bytes(source)
            results[mutant] = how is not None
            seconds = time.perf_counter() - start
            print(f"{'caught' if how else 'SURVIVED'} {mutant} ({len(tests)} tests, {seconds:.0f} s) {how}", flush=True)
            if output is not None:
                kept = json.loads(output.read_text()) if output.exists() else []
                kept.append({**asdict(mutant), "tests": len(tests), "caught": how})
                output.write_text(json.dumps(kept, indent=1) + "\n")
    print(dict(Counter(mutant.kind for mutant, caught in results.items() if caught)))
    return results


def first_failure(copy: Path, tests: list[str]) -> str | None:
    """Return the first test that fails, or None if all pass."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no"]
    for some in filter(None, (tests[:FIRST_TESTS], tests[FIRST_TESTS:MOST_TESTS])):
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
