"""Quantize each model named on the command line with bounded memory, and print one JSON line before and after it.

The models take one input x, float32 of shape [2,16]. A model on which the processor works without end ends the process,
wherever it hangs; how long it waits for its turn on a busy machine does not count.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

# Of the processor, for one model: none takes a tenth of it.
SECONDS = 300
BYTES = 640 << 20
# Each of a pool has a stack, which counts as memory.
CORES = 2


def outcome(path: Path) -> str:
    import numpy as np

    from onnxq import Budget, quantize
    from onnxq.errors import OnnxqError

    sample = {"x": np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)}
    try:
        quantize(path, [sample], path.with_suffix(".int8.onnx"), budget=Budget(latency_seconds=0))
    except OnnxqError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - finding them is what this is for
        return f"crash: {traceback.format_exc()}"
    return "valid"


def tell(**event: str) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def allow_more_seconds() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + SECONDS, most))


def main() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    faulthandler.register(signal.SIGXCPU, chain=True)
    for name in sys.argv[1:]:
        tell(starts=name)
        allow_more_seconds()
        tell(ends=name, outcome=outcome(Path(name)))


if __name__ == "__main__":
    main()
