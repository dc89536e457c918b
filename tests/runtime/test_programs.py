"""What is started as an engine."""

from __future__ import annotations

import subprocess
import sys

from onnxq.runtime.programs import backend_source, python_program


def test_a_python_is_sent_its_backend_and_what_that_imports() -> None:
    program = python_program(
        sys.executable, "import sys; from onnxq.runtime import wire; print(sys.argv[2:], wire.__name__)", "f32"
    )
    done = subprocess.run(program.command, input=program.sent, capture_output=True, check=True)
    assert done.stdout.decode().split("\n")[0] == "['f32'] onnxq.runtime.wire"
    assert not program.remote


def test_backends_lie_beside_the_module() -> None:
    assert "class OpenVino" in backend_source("serve_openvino")
