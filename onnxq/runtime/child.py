"""Run an engine in its own process, here or on another machine, so that a crash becomes an error message."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.errors import EngineError, ModelError
from onnxq.ir.stored_tensors import external_locations
from onnxq.runtime.engine import Engine, LoadedModel
from onnxq.runtime.interleaved_timing import Turn, balanced_orders
from onnxq.runtime.kernels import Kernel, read_profile
from onnxq.runtime.protocol import PROTOCOL, receive, send
from onnxq.runtime.sessions import Array, one_line

_SENT = ("interleaved_timing", "protocol")
# Reads modules from standard input, without reading further, and runs them; the last one serves.
_BOOT = """
import json, sys, types
pipe, data, size = open(0, "rb", 0, closefd=False), b"", int(sys.argv[1])
while len(data) < size:
    data += pipe.read(size - len(data)) or sys.exit(1)
for name, text in json.loads(data):
    sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), vars(sys.modules[name]))
"""


@dataclass(frozen=True)
class Program:
    """A command and the bytes that it receives before the first message.

    Attributes:
        command: the words of the command.
        remote: whether it has no access to local files, so that models are sent too.
    """

    command: tuple[str, ...]
    sent: bytes = b""
    remote: bool = False


def python_program(python: str, backend: str, *arguments: str) -> Program:
    """Return the program of a Python, which need not have onnxq, that serves a backend.

    Args:
        python: its path.
        backend: source of a module that ends with a call of `onnxq.runtime.protocol.serve`.
        arguments: the module finds them from ``sys.argv[2]`` on.
    """
    here = files("onnxq.runtime")
    modules = [(f"onnxq.runtime.{name}", (here / f"{name}.py").read_text(encoding="utf-8")) for name in _SENT]
    sent = json.dumps([("onnxq", ""), ("onnxq.runtime", ""), *modules, ("onnxq.runtime.backend", backend)]).encode()
    return Program((python, "-c", _BOOT, str(len(sent)), *arguments), sent)


def backend_source(name: str) -> str:
    """Return the source of a backend module in this package."""
    return (files("onnxq.runtime") / f"{name}.py").read_text(encoding="utf-8")


# An engine in its own process.

# Seconds for an answer; a model with many weights takes minutes to load.
_PATIENCE = 600.0


class ChildEngine(Engine):
    """An engine that answers messages (`onnxq.runtime.protocol`), one at a time for all threads.

    Args:
        name: the name that users write.
        program: the process to start.
        patience: seconds after which an engine that does not answer is killed.

    Raises:
        EngineError: the program does not exist.
    """

    def __init__(self, name: str, program: Program, patience: float = _PATIENCE) -> None:
        self.name, self.patience, self.remote = name, patience, program.remote
        # The path of each sent model on the other machine.
        self._sent_models: dict[Path, str] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                program.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
        except OSError as error:
            self._errors.close()
            raise EngineError(
                f"engine {name} cannot be started: {program.command[0]}: {error.strerror}; check its name"
            ) from error
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(program.sent)
        self._asking, self._has_started = threading.RLock(), False

    def started(self) -> None:
        """Wait for the start, which may proceed in the background; if it fails, the engine is closed."""
        with self._asking:
            if self._has_started:
                return
            try:
                self._greeted()
            except EngineError:
                self.close()
                raise
            self._has_started = True

    def _greeted(self) -> None:
        header, _ = self._answer({"ask": "hello"}, (), "start", self.patience)
        protocol, version = header.get("protocol"), header.get("version")
        if protocol != PROTOCOL or not isinstance(version, str):
            raise EngineError(
                f"engine {self.name} speaks version {protocol} of the protocol, expected {PROTOCOL}; use one of this "
                "version of onnxq"
            )
        self.version, self.profiles = version, header.get("profiles") is True
        self.threads = self.threads or header.get("threads")

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        """Load a model; it is sent first if the engine has no access to local files."""
        [loaded] = self.load_all([model], threads)
        return loaded

    def load_all(self, models: Sequence[Path], threads: int | None = None) -> list[LoadedModel]:
        """Load models, in parallel if the engine can."""
        self.started()
        request = {
            "ask": "load",
            "models": [self._place(model) for model in models],
            "threads": threads or self.threads,
        }
        header, _ = self.ask(request, doing=f"load {' and '.join(map(str, models))}")
        return [_ChildModel(self, entry["session"], tuple(entry["outputs"])) for entry in header["loaded"]]

    def time(
        self,
        models: Sequence[LoadedModel],
        samples: Sequence[Mapping[str, Array]],
        seconds: float,
        turn: int = 0,
        enough: int | None = None,
    ) -> list[list[Turn]]:
        """Time models in the engine's process, so that no message is part of a time."""
        numbers = [model.number for model in models if isinstance(model, _ChildModel)]
        request = {"ask": "time", "sessions": numbers, "seconds": seconds, "turn": turn, "enough": enough}
        header, _ = self.ask(
            {**request, "orders": balanced_orders(len(numbers))},
            samples,
            doing="time the models",
            patience=self.patience + seconds,
        )
        return [[tuple(turn) for turn in turns] for turns in header["times"]]

    def profile(
        self, model: Path, samples: Sequence[Mapping[str, Array]], folder: Path, repeats: int
    ) -> tuple[Kernel, ...]:
        """Return the kernels that the engine reports, or read the profile that onnxruntime wrote there."""
        self.started()
        request = {"ask": "profile", "model": self._place(model), "repeats": repeats, "threads": self.threads_given}
        header, arrays = self.ask(request, samples, doing=f"profile {model}")
        if "kernels" in header:
            return tuple(_kernel(entry) for entry in header["kernels"])
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            written = Path(scratch) / "profile.json"
            *ran, events = arrays
            written.write_bytes(events.tobytes())
            return read_profile(ran[0].tobytes() if ran else model, written, repeats)

    def close(self) -> None:
        """End the process."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._errors.close()

    def ask(
        self,
        header: Mapping[str, Any],
        samples: Sequence[Mapping[str, Array]] = (),
        *,
        doing: str = "start",
        patience: float | None = None,
    ) -> tuple[dict[str, Any], list[Array]]:
        """Send a message and return the answer.

        Args:
            header: the message.
            samples: arrays of the message.
            doing: the purpose, for errors, as in "start".
            patience: seconds; None takes that of the engine.

        Raises:
            EngineError: the engine refuses, ends, hangs or sends an invalid answer.
        """
        with self._asking:
            self.started()
            return self._answer(header, samples, doing, patience or self.patience)

    def _answer(
        self, header: Mapping[str, Any], samples: Sequence[Mapping[str, Array]], doing: str, allowed: float
    ) -> tuple[dict[str, Any], list[Array]]:
        if self._process.poll() is not None or self._errors.closed:
            raise EngineError(f"engine {self.name} has ended before it could {doing}{self._last_words()}")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arrays = [np.asarray(array) for sample in samples for array in sample.values()]
        if strange := next((array.dtype.name for array in arrays if array.dtype.kind == "V"), None):
            raise EngineError(
                f"engine {self.name} cannot {doing}: arrays of {strange} cannot be sent to another process; use the "
                "engine onnxruntime"
            )
        hung = threading.Event()

        def end() -> None:
            hung.set()
            self._process.kill()

        timer = threading.Timer(allowed, end)
        timer.start()
        try:
            named = {**header, "samples": [list(sample) for sample in samples]}
            send(self._process.stdin, named, arrays)
            answer, results = receive(self._process.stdout)
        except (EOFError, OSError):
            raise EngineError(self._ending(doing, allowed if hung.is_set() else None)) from None
        except (KeyError, TypeError, ValueError) as error:
            self._process.kill()
            raise EngineError(
                f"engine {self.name} sent an invalid answer ({error}) to the request to {doing}; check its output"
            ) from error
        finally:
            timer.cancel()
        if "error" in answer:
            raise EngineError(f"engine {self.name} cannot {doing}: {one_line(str(answer['error']))}")
        return answer, results

    def _ending(self, doing: str, seconds: float | None) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        code = self._process.poll()
        if seconds is not None:
            return f"engine {self.name} did not {doing} within {seconds:g} s and was ended; try a smaller model"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            cause = "memory ran out" if name == "SIGKILL" else "it failed on the model or on one made of it"
            return f"engine {self.name} was ended by {name} when it was to {doing}, most likely because {cause}"
        return f"engine {self.name} has ended when it was to {doing}{self._last_words()}"

    def _last_words(self) -> str:
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {one_line(lines[-1])}" if lines else ""

    def _place(self, model: Path) -> str:
        if not self.remote:
            return str(model.resolve())
        if model not in self._sent_models:
            folder = str(len(self._sent_models))
            for name in _outside(model):
                self._keep(model.parent / name, folder, name)
            self._sent_models[model] = self._keep(model, folder, model.name)
        return self._sent_models[model]

    def _keep(self, path: Path, folder: str, name: str) -> str:
        try:
            data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read to be sent to engine {self.name}: {error}") from error
        request = {"ask": "keep", "folder": folder, "name": name}
        header, _ = self.ask(request, [{"data": data}], doing=f"take {path}")
        return str(header["path"])


class _ChildModel(LoadedModel):
    def __init__(self, engine: ChildEngine, number: int, outputs: tuple[str, ...]) -> None:
        self.engine, self.number, self.outputs = engine, number, outputs

    def run(self, sample: Mapping[str, Array]) -> list[Any]:
        _, arrays = self.engine.ask({"ask": "run", "session": self.number}, [sample], doing="run the sample")
        if len(arrays) != len(self.outputs):
            raise EngineError(
                f"engine {self.engine.name} returns {len(arrays)} outputs, expected {len(self.outputs)}: "
                f"{', '.join(self.outputs)}"
            )
        return list(arrays)

    def close(self) -> None:
        self.engine.ask({"ask": "close", "session": self.number}, doing="close the model")


def _outside(model: Path) -> tuple[str, ...]:
    try:
        return external_locations(onnx.load(model, load_external_data=False))
    except (DecodeError, OSError) as error:
        raise ModelError(f"{model} cannot be read: {error}") from error


def _kernel(record: Mapping[str, Any]) -> Kernel:
    return Kernel(**{**record, "inputs": tuple(record["inputs"]), "outputs": tuple(record["outputs"])})
