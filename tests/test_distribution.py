"""What is published: an sdist whose tests run, and a wheel that works and is typed, outside the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONSUMER = """
from pathlib import Path

import onnxq

data = onnxq.Data(Path("data"), limit=4)
done = onnxq.quantize("model.onnx", data, goal=25, budget=onnxq.Budget(search="off"))
sqnr: float = done.report.agreement.worst_sqnr
modes: list[onnxq.Mode] = [decision.mode for decision in done.report.plan.decisions]
onnxq.quantize("model.onnx", data, goal="high")  # expected: an error
"""

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    # What leads to a checkout would hide what is installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(one) for one in command]
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    if not (ROOT / ".git").exists():
        pytest.skip("an sdist is built from a checkout")
    clone = folder / "clone"
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    done = run(sys.executable, "-m", "build", "-o", folder, clone, cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel, and the dependencies of the one that runs."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    place = folder / "bin" / "python"
    assert run(place, "-m", "pip", "install", "-q", "--no-deps", built[1], cwd=folder).returncode == 0
    (packages,) = folder.glob("lib/python*/site-packages")
    # A file of this kind inside the other folder is not looked at, so that the checkout stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return place


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"onnxq"}
    assert {"onnxq/py.typed", "onnxq/passes/quantize/__init__.py", "onnxq/data/sources.py"} <= set(names)


def test_the_sdist_holds_what_tests_and_documents_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    tracked = set(run("git", "ls-files", cwd=ROOT).stdout.splitlines())
    assert not {name for name in tracked - names if name not in (".gitignore", "onnxq/passes", "MANIFEST.in")}


def test_the_wheel_quantizes_outside_the_checkout(python: Path, tmp_path: Path) -> None:
    models = ROOT / "models"
    command = ("-m", "onnxq", "quantize", models / "gru.onnx", "--calib", models / "data" / "calib.npz", "--limit", 8)
    done = run(python, *command, "--latency-seconds", 0, "-o", "q.onnx", cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "q.onnx"), done.stderr
    shown = run(python, "-c", "import onnxq; print(onnxq.__file__, onnxq.__version__)", cwd=tmp_path).stdout
    assert str(python.parents[1]) in shown


def test_tests_of_the_sdist_run_with_the_wheel(
    built: tuple[Path, Path], python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(built[0]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    tests = ("tests/test_smoke.py", "tests/test_architecture.py", "tests/samples", "tests/planning/test_planner.py")
    # Without what lies in the current folder, whose passes no link leads to.
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    done = run(python, "-m", "pytest", "-q", *tests, cwd=unpacked)
    assert done.returncode == 0, done.stdout[-3000:]


WRONG = 1 + next(number for number, line in enumerate(CONSUMER.splitlines()) if "expected" in line)


def test_whoever_uses_it_is_told_by_mypy_what_is_wrong(python: Path, tmp_path: Path) -> None:
    (tmp_path / "consumer.py").write_text(CONSUMER)
    done = run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "consumer.py", cwd=tmp_path)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line.split(":")[:2] for line in errors] == [["consumer.py", str(WRONG)]], done.stdout
    assert "goal" in errors[0]


def test_whoever_uses_it_is_told_by_pyright_what_is_wrong(python: Path, tmp_path: Path) -> None:
    pyright = shutil.which("pyright") or pytest.skip("needs pip install pyright, which fetches Node's package")
    (tmp_path / "consumer.py").write_text(CONSUMER)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    done = run(pyright, "--outputjson", "--pythonpath", python, "consumer.py", cwd=tmp_path)
    (error,) = json.loads(done.stdout)["generalDiagnostics"]
    assert (error["severity"], error["range"]["start"]["line"] + 1) == ("error", WRONG)
    assert '"goal"' in error["message"]
