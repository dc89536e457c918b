"""Processes that write models, and end in the middle of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

# --- killed processes ---------------------------------------------------------------------------------------------

needs_locks = pytest.mark.skipif(not hasattr(os, "fork"), reason="folders cannot be locked")

WRITE = """
    import os, sys
    from pathlib import Path
    from onnxq.system.publish import data_file, publish, staging

    def write(output, text):
        with staging(output) as folder:
            staged = folder / output.name
            staged.write_text(text)
            data_file(staged).write_text(text)
            publish(staged, output)

    output = Path(sys.argv[1])
"""
FOR_EVER = """
    sys.stdout.write("ready")
    sys.stdout.flush()
    for number in range(10**9):
        write(output, str(number))
"""
OFTEN = """
    for number in range(150):
        write(output, f"{os.getpid()} {number}")
"""
ENDS_AT_RENAME = """
    rename, left = Path.replace, int(sys.argv[2])
    def replace(path, target):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return rename(path, target)
    Path.replace = replace
    write(output, "new")
"""


def process(program: str, *arguments: object) -> subprocess.Popen[bytes]:
    text = textwrap.dedent(WRITE) + textwrap.dedent(program)
    return subprocess.Popen([sys.executable, "-c", text, *map(str, arguments)], stdout=subprocess.PIPE)
