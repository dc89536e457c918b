"""A runtime of a few lines that adds one to its input, and the ways in which it can go wrong."""

from __future__ import annotations

import sys

from onnxq.runtime.child import ChildEngine, python_program

SOURCE = """
import os, signal, sys, time
import numpy as np
from onnxq.runtime import protocol

fault = sys.argv[2]

class Session:
    outputs = ["y"]

    def run(self, sample):
        x = next(iter(sample.values()))
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "memory":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exit":
            sys.stderr.write("no licence\\n")
            sys.stderr.flush()
            os._exit(3)
        if fault == "hang":
            time.sleep(60)
        if fault == "print":
            os.write(1, b"hello")
            print("hello")
        if fault == "allocation":
            raise MemoryError("3 GB")
        if fault == "many":
            return [x, x]
        if fault == "shape":
            return [np.concatenate([x, x])]
        if fault == "nan":
            return [x * np.nan]
        return [x + 1]

class Backend(protocol.Backend):
    version = "fake 1.0"
    profiles = True

    def load(self, model, threads):
        if fault == "threads":
            raise ValueError(f"loaded in {threads}")
        if fault == "refuse":
            raise ValueError(f"{open(model, 'rb').read(4)} is no model")
        return Session()

    def profile(self, model, samples, repeats, threads):
        if fault == "threads":
            raise ValueError(f"profiled in {threads}")
        one = {"name": "a", "op_type": "Add", "inputs": ["x"], "outputs": ["y"], "nanoseconds": 5.0, "elements": 4.0}
        return {"kernels": [one]}, ()

protocol.serve(Backend())
"""


def fake_engine(fault: str = "", patience: float = 60.0) -> ChildEngine:
    return ChildEngine("fake", python_program(sys.executable, SOURCE, fault), patience)
