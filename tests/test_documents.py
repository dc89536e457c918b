"""Every block of code in the documents does what it says: it runs, in a folder that holds what it names."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from cli.commands import COMMANDS
from click.testing import CliRunner
from conftest import Build
from decoder_folders import VOCABULARY, put_decoder
from recipe_models import put_recipes
from reports import FULL

import onnxq
from onnxq.calibration.kinds import ENTRY_POINTS as STATISTICS
from onnxq.calibration.methods import ENTRY_POINTS as CALIBRATION_METHODS
from onnxq.cli.main import cli
from onnxq.config.scheme import ENTRY_POINTS as ENCODERS
from onnxq.config.scheme import packaged_encoder
from onnxq.config.scheme_file import load_scheme
from onnxq.data.sources import ENTRY_POINTS as SOURCES
from onnxq.passes.preparing.named_passes import ENTRY_POINTS as PASSES
from onnxq.pipeline.request import Budget
from onnxq.runtime.engines import ENTRY_POINTS as ENGINES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
outputs, examples = import_module("outputs"), import_module("examples")
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NAME = attrgetter("name")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What Sphinx does with a block, such as a table of contents, is no code.
DIRECTIVE = re.compile(r"^```\{[\w-]+\}.*?^```$", re.MULTILINE | re.DOTALL)
MODEL = """(float[1,3,8,8] image) => (float[1,10] logits) {
    [conv] a = Conv <pads = [1,1,1,1]> (image, kernel)
    [relu] b = Relu(a)
    [drop] c = Dropout(b)
    [pool] d = GlobalAveragePool(c)
    [flat] e = Flatten(d)
    [head] scores = Gemm(e, weight)
    [soft] shares = Softmax <axis = 1> (scores)
    [log] logits = Log(shares)
}"""


# The page whose passes and rules are in the file that its commands name.
PASSES_PAGE, PASSES_FILE = "passes-and-rules.md", "my_passes.py"
# For comparing latency, where a page names no other time.
SECONDS = 0.1
# Other quantizers, whose code pages show beside ours.
OTHER_TOOLS = ("aimet_onnx", "modelopt", "nncf", "olive", "onnxruntime.quantization", "onnxsim", "optimum", "quark")


@dataclass(frozen=True)
class Block:
    """A block of code in a document."""

    document: Path
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.document.name}-{self.line}"

    @property
    def other_tool(self) -> str:
        """The module of another quantizer that it imports, if any."""
        imported = re.search(r"^(?:import|from) (" + "|".join(OTHER_TOOLS) + r")\b", self.text, re.MULTILINE)
        return imported[1] if imported else ""

    def commands(self) -> Iterator[list[str]]:
        """The commands of onnxq, each as a list of words, comments aside."""
        for line in self.text.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def text_of(document: Path) -> str:
    """The document with its directives blanked, line by line as it was."""
    return DIRECTIVE.sub(lambda found: "\n" * found[0].count("\n"), document.read_text(encoding="utf-8"))


def blocks() -> list[Block]:
    found: list[Block] = []
    for document in DOCUMENTS:
        text = text_of(document)
        found += [
            Block(document, match[1], match[2], text.count("\n", 0, match.start()) + 1)
            for match in BLOCK.finditer(text)
        ]
    return found


def of(*languages: str) -> list[Block]:
    return [block for block in blocks() if block.language in languages]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, build: Build) -> Path:
    """A folder with a model, samples, statistics and a pass under the names that the documents use."""
    files, generator = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    onnx.save(build(MODEL, kernel=(64, 3, 3, 3), weight=(64, 10)), files / "model.onnx")
    images = generator.standard_normal((8, 1, 3, 8, 8)).astype(np.float32)
    for name in ("data", "d"):
        (files / name).mkdir()
        for index, image in enumerate(images):
            np.savez(files / name / f"{index}.npz", image=image)
    for name, some in (("a.npz", images[:4]), ("b.npz", images[4:])):
        onnxq.save_statistics(onnxq.calibrate(files / "model.onnx", [{"image": image} for image in some]), files / name)
    FULL.save(files / "report.json")
    put_recipes(files, build)
    put_decoder(files / "decoder", build)
    np.savez(files / "tokens.npz", input_ids=generator.integers(0, VOCABULARY, (6, 10)))
    (files / PASSES_FILE).write_text(_classes_in(PASSES_PAGE))
    return files


@pytest.fixture
def folder(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a copy of the files."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    # Code that asks for no time is timed more briefly than a user's.
    defaults = [SECONDS if default == Budget.latency_seconds else default for default in Budget.__init__.__defaults__]
    monkeypatch.setattr(Budget.__init__, "__defaults__", tuple(defaults))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _classes_in(document: str) -> str:
    """The passes and rules that a document shows."""
    kinds = ("(Pass):", "(RewriteRule):")
    shown = [block for block in of("python") if block.document.name == document and any(map(block.text.count, kinds))]
    return "\n".join(block.text for block in shown)


def test_the_table_of_packages_names_every_package_and_no_other() -> None:
    table = (
        (ROOT / "docs" / "architecture.md")
        .read_text(encoding="utf-8")
        .partition("| package, in order | what it holds |")[2]
        .partition("\n\n")[0]
    )
    named = set(re.findall(r"`(\w+(?:\.py|(?=/`)))", table))
    files = {path.name for path in (ROOT / "onnxq").glob("*.py") if not path.name.startswith("__")}
    folders = {path.parent.name for path in (ROOT / "onnxq").glob("*/__init__.py")}
    inside = {path.parent.name for path in (ROOT / "passes").glob("*/__init__.py")}
    assert named == files | folders | inside | {"passes", "models", "benchmarks", "zoo.py"}


def test_the_files_that_an_addition_touches_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## How to add")[2].partition("\n## ")[0]
    named = re.findall(r"`((?:onnxq|passes|tests)/[\w/.]+)`", table)
    assert len(named) > 15
    assert not [path for path in named if "MODULE" not in path and not (ROOT / path).exists()]


def test_every_document_and_language_is_looked_at() -> None:
    assert {block.language for block in blocks()} == {"", "sh", "python", "toml", "console"}
    text = "".join(map(text_of, DOCUMENTS))
    assert len(blocks()) * 2 == len(re.findall("^ *```", text, re.MULTILINE))


def package_of(document: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Pretend that the package is installed whose entry points a document names; it holds what blocks have defined."""
    package = ModuleType("my_package")
    monkeypatch.setitem(sys.modules, "my_package", package)
    tables = [tomllib.loads(block.text) for block in of("toml") if block.document == document]
    groups = [table["project"]["entry-points"] for table in tables if "project" in table]
    entries = [
        EntryPoint(name, place, group)
        for one in groups
        for group, places in one.items()
        for name, place in places.items()
    ]

    def installed(**wanted: str) -> EntryPoints:
        return EntryPoints(one for one in entries if hasattr(package, one.attr)).select(**wanted)

    monkeypatch.setattr("onnxq.system.plugins.entry_points", installed)
    packaged_encoder.cache_clear()
    return package


def execute(block: Block, names: dict[str, object]) -> None:
    exec(compile(block.text, f"{block.document}:{block.line}", "exec", dont_inherit=True), names)


@pytest.mark.parametrize("block", [block for block in of("python") if block.other_tool], ids=str)
def test_code_of_other_tools_runs(block: Block, folder: Path) -> None:
    pytest.importorskip(block.other_tool, reason=f"{block.other_tool} is not installed")
    execute(block, {})
    assert [*folder.rglob("*.theirs.onnx"), *(folder / "theirs").rglob("*.onnx*")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_python_runs_one_block_after_the_other(document: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = vars(package_of(document, monkeypatch))
    for block in of("python"):
        if block.document == document and block.other_tool in ("", "onnxruntime.quantization"):
            execute(block, names)
            missing = [name for name in re.findall(r"[\w.]+\.onnx", block.text) if not (folder / name).is_file()]
            assert not missing, f"{block} does not write {missing}"
    for name, test in names.items():
        if name.startswith("test_"):
            test()


@pytest.mark.parametrize("block", of(""), ids=str)
def test_commands_run_one_after_the_other(block: Block, folder: Path) -> None:
    for program, *arguments in block.commands():
        assert program == "onnxq"
        timed = any("--latency-seconds" in option.opts for option in COMMANDS[arguments[0]].params)
        if timed and "--latency-seconds" not in arguments:
            arguments += ["--latency-seconds", str(SECONDS)]
        done = CliRunner().invoke(cli, arguments)
        # OpenVINO decides whether so small a model is slower; then there is no file for the commands that follow.
        if "openvino" in arguments and "expected no slower than float" in str(done.exception):
            break
        assert done.exit_code == 0, f"{arguments}: {done.output} {done.exception!r}"
        assert done.stdout.strip(), arguments


def check_outputs(page: Path, run: Callable[[str, bool], tuple[str, ...]], *, zoo: bool) -> None:
    measured = False
    for example in outputs.page_examples(page, zoo=zoo):
        measured = measured or outputs.is_measured(example.command)
        printed = run(example.command, measured)
        # What is fast decides what is written, so these runs print the same table with other values.
        if measured:
            rows = outputs.ALWAYS if zoo else outputs.ALWAYS - {"latency"}
            wrong = sorted((outputs.names_of_rows(example.shown) - outputs.names_of_rows(printed)) & rows)
        else:
            wrong = outputs.differences(example.shown, printed)
        assert not wrong, "\n".join((example.command, *printed, "", "not printed:", *wrong))


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if outputs.page_examples(page, zoo=False)], ids=NAME)
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", outputs.COLUMNS)
    outputs.put_models(tmp_path, None)

    def run(command: str, measured: bool) -> tuple[str, ...]:
        program, *arguments = shlex.split(command)
        assert program == "onnxq"
        if measured and arguments[0] in ("quantize", "compare"):
            arguments += ["--limit", "32"]
        if measured and arguments[0] == "quantize":
            # A busy machine may not reach the goal in time.
            arguments += ["--latency-seconds", "0", "--force"]
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code in (0, 3), f"{command}: {done.output} {done.exception!r}"
        return outputs.lines_of(done.output)

    check_outputs(page, run, zoo=False)


@pytest.mark.zoo
@pytest.mark.parametrize("page", [page for page in DOCUMENTS if outputs.page_examples(page, zoo=True)], ids=NAME)
def test_commands_on_fetched_models_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    zoo = Path(os.environ.get("ONNXQ_ZOO", ROOT / "zoo"))
    if not (zoo / "data").is_dir():
        pytest.skip(f"{zoo} has no samples in data/")
    named = {
        path for one in outputs.page_examples(page, zoo=True) for path in re.findall(r"zoo/(\S+\.onnx)", one.command)
    }
    if missing := [path for path in named if not (zoo / path).is_file()]:
        pytest.skip(f"{zoo} lacks {', '.join(missing)}")
    outputs.put_models(tmp_path, zoo)
    check_outputs(page, lambda command, measured: outputs.run(command, tmp_path), zoo=True)


@pytest.mark.parametrize("name", examples.SAMPLES)
def test_samples_that_are_made_for_a_page_are_the_same_every_time_and_new_for_evaluation(name: str) -> None:
    first, again, other = (next(examples.samples_for(name, part)) for part in ("calib", "calib", "eval"))
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert any(not np.array_equal(first[key], other[key]) for key in first)


def test_an_example_whose_model_cannot_be_fetched_exits_with_the_reason_and_makes_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "zoo"
    blocked.write_text("a file where the folder should be")
    command = [sys.executable, ROOT / "docs" / "examples.py", "minilm-l3", "--into", blocked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("zoo: ")
    assert not done.stdout


def test_pages_make_samples_only_for_models_that_have_some() -> None:
    named = re.findall(r"docs/examples\.py ([\w-]+)", "".join(map(text_of, DOCUMENTS)))
    assert set(named) == set(examples.SAMPLES)


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_what_is_installed_and_run_from_a_clone_is_there(block: Block) -> None:
    for words in block.commands():
        paths = [word for word in words if word.startswith("models/")]
        assert all((ROOT / path).is_file() for path in paths)
        for extra in re.findall(r"\.\[(\w+)\]", " ".join(words)):
            assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        called = [place for place, word in enumerate(words) if word == "onnxq" or word.endswith("bin/onnxq")]
        for onnxq_at in called:
            command = COMMANDS[words[onnxq_at + 1]]
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words[onnxq_at + 2 :] if word.startswith("-")} <= known


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_toml_is_a_scheme_or_names_a_group_of_entry_points(block: Block, tmp_path: Path) -> None:
    found = tomllib.loads(block.text)
    if "project" in found:
        groups = found["project"]["entry-points"]
        assert set(groups) <= {ENCODERS, ENGINES, CALIBRATION_METHODS, PASSES, SOURCES, STATISTICS}
        assert all(re.fullmatch(r"\w+:\w+", value) for names in groups.values() for value in names.values())
        return
    (tmp_path / "scheme.toml").write_text(block.text)
    assert len(load_scheme(tmp_path / "scheme.toml").rules) > len(found["rule"])


PUBLIC = [name for name in onnxq.__all__ if inspect.isclass(getattr(onnxq, name)) or callable(getattr(onnxq, name))]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_sentence_its_arguments_and_an_example(name: str) -> None:
    public = getattr(onnxq, name)
    text = inspect.getdoc(public) or ""
    first, _, rest = text.partition("\n")
    assert first.endswith((".", ":")), first
    assert ">>>" in rest
    if inspect.isfunction(public):
        missing = [one for one in inspect.signature(public).parameters if not re.search(rf"\b{one}\b", rest)]
        assert not missing, missing


def test_the_help_of_quantize_in_python_fits_a_screen() -> None:
    assert len(pydoc.plain(pydoc.render_doc(onnxq.quantize)).rstrip().splitlines()) <= 30
