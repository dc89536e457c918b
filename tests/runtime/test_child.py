"""An engine in a process of its own: what it answers, and every way in which it can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto
from small_models import small

from onnxq.errors import EngineError, ModelError
from onnxq.runtime.child import ChildEngine, Program, backend_source, python_program
from onnxq.runtime.kernels import Kernel
from onnxq.system.resources import available_cores

from .fake_engine import SOURCE, fake_engine

SAMPLE = {"x": np.arange(4, dtype=np.float32)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(small(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("fault", ["", "print"])
def test_it_runs_times_and_profiles(model: Path, fault: str) -> None:
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
        (
            "crash",
            "engine fake was ended by SIGSEGV when it was to run the sample, most likely because it failed on",
        ),
        (
            "memory",
            "engine fake was ended by SIGKILL when it was to run the sample, most likely because memory ran out",
        ),
        ("exit", "engine fake has ended when it was to run the sample: no licence"),
        ("hang", "engine fake did not run the sample within 2 s and was ended"),
        ("allocation", "engine fake cannot run the sample: MemoryError: 3 GB"),
        ("many", "engine fake returns 2 outputs, expected 1: y"),
    ],
)
def test_a_run_that_fails_is_a_sentence(model: Path, fault: str, sentence: str) -> None:
    with fake_engine(fault, 60.0) as engine:
        loaded = engine.load(model)
        # A busy machine may take longer to start one.
        engine.patience = 2.0 if fault == "hang" else 60.0
        with pytest.raises(EngineError, match=sentence):
            loaded.run(SAMPLE)
        if fault not in ("allocation", "many"):
            with pytest.raises(EngineError, match="engine fake has ended before it could load"):
                engine.load(model)


@pytest.mark.parametrize("fault", ["shape", "nan"])
def test_what_it_computes_is_for_others_to_judge(model: Path, fault: str) -> None:
    with fake_engine(fault) as engine:
        [found] = engine.load(model).run(SAMPLE)
        assert found.shape == (8,) if fault == "shape" else np.isnan(found).all()


def test_a_model_that_it_refuses_is_a_sentence(model: Path) -> None:
    with fake_engine("refuse") as engine, pytest.raises(EngineError, match=r"engine fake cannot load .*model.onnx: "):
        engine.load(model)


def test_it_may_be_killed_between_two_messages(model: Path) -> None:
    with fake_engine() as engine:
        loaded = engine.load(model)
        os.kill(engine._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="engine fake"):
            loaded.run(SAMPLE)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("/nowhere/python",), "engine odd cannot be started: /nowhere/python: No such file"),
        (("sh", "-c", "echo hello; cat > /dev/null"), "engine odd answers what is no message"),
        (("sh", "-c", "echo no such host >&2; exit 255"), "engine odd has ended .* start: no such host"),
        ((sys.executable, "-c", SOURCE), "engine odd has ended when it was to start: IndexError"),
    ],
)
def test_what_is_no_engine_is_a_sentence(command: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        ChildEngine("odd", Program(command), 20.0).started()


@pytest.mark.parametrize(
    "answer", ['{"protocol": 1, "version": "x"}', '{"protocol": 2}', '{"protocol": 2, "version": 5}']
)
def test_an_engine_of_another_version_is_a_sentence(answer: str) -> None:
    program = f"import sys; t = b'{answer}'; sys.stdout.buffer.write(len(t).to_bytes(4, 'big') + t)"
    with pytest.raises(EngineError, match=r"engine odd speaks version . of the protocol, expected 2"):
        ChildEngine(
            "odd", Program((sys.executable, "-c", program + "; sys.stdout.flush(); sys.stdin.read()")), 20.0
        ).started()


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
class Backend:
    version = "far"
    profiles = False
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
    assert engine._process.returncode == 0
    with pytest.raises(EngineError, match="engine fake has ended before it could start"):
        engine.started()


def test_arrays_that_numpy_itself_lacks_are_refused_before_they_are_sent(model: Path) -> None:
    with fake_engine("") as engine:
        loaded = engine.load(model, 1)
        with pytest.raises(EngineError, match="cannot run the sample: arrays of bfloat16, which numpy itself lacks"):
            loaded.run({"x": np.zeros(4, ml_dtypes.bfloat16)})
        assert loaded.run(SAMPLE)[0].tolist() == [1, 2, 3, 4]


def test_a_python_is_sent_its_backend_and_what_that_imports() -> None:
    program = python_program(
        sys.executable, "import sys; from onnxq.runtime import protocol; print(sys.argv[2:], protocol.__name__)", "f32"
    )
    done = subprocess.run(program.command, input=program.sent, capture_output=True, check=True)
    assert done.stdout.decode().split("\n")[0] == "['f32'] onnxq.runtime.protocol"
    assert not program.remote


def test_backends_lie_beside_the_module() -> None:
    assert "class OpenVino" in backend_source("serve_openvino")
