"""What is started as an engine of its own: a Python that is sent all it needs, or any other command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

_SENT = ("wire", "turns", "serving")
# Reads the modules that it is sent on standard input, exactly, and runs them; the last one serves.
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
    """What to start, and what to send it before the first message.

    Attributes:
        command: the words of the command.
        sent: bytes.
        remote: whether it sees no files of this machine, so that models are sent too.
    """

    command: tuple[str, ...]
    sent: bytes = b""
    remote: bool = False


def python_program(python: str, backend: str, *arguments: str) -> Program:
    """Return how a Python, which need not have onnxq, serves with a backend.

    Args:
        python: its path.
        backend: source of a module that ends with a call of `onnxq.runtime.serving.serve`.
        arguments: what the module finds behind the second of `sys.argv`.
    """
    here = files("onnxq.runtime")
    modules = [(f"onnxq.runtime.{name}", (here / f"{name}.py").read_text(encoding="utf-8")) for name in _SENT]
    sent = json.dumps([("onnxq", ""), ("onnxq.runtime", ""), *modules, ("onnxq.runtime.backend", backend)]).encode()
    return Program((python, "-c", _BOOT, str(len(sent)), *arguments), sent)


def backend_source(name: str) -> str:
    """Return the source of one of the backends beside this module."""
    return (files("onnxq.runtime") / f"{name}.py").read_text(encoding="utf-8")
