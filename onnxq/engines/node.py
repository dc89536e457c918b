"""onnxruntime in JavaScript: the npm packages onnxruntime-node, and onnxruntime-web as WebAssembly, run by Node."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

from onnxq.engines.child import ChildEngine, Program
from onnxq.engines.engine import Engine
from onnxq.errors import EngineError


def node_engine(package: str, folder: str) -> Engine:
    """Start an npm package.

    Args:
        package: its name.
        folder: the one that holds ``node_modules``, or one inside of that; empty for the current one.

    Raises:
        EngineError: there is no Node, or no such package in reach of the folder.
    """
    node = shutil.which("node")
    if node is None:
        raise EngineError(f"engine {package} needs Node, and there is no program node; install Node 18 or later")
    if folder and not Path(folder).is_dir():
        raise EngineError(
            f"engine {package} cannot be started: there is no folder {folder}; give the one of node_modules"
        )
    server = str(files("onnxq.engines") / "node_server.js")
    return ChildEngine(package, Program((node, server, package, str(Path(folder or ".").resolve()))))
