"""Quantize each model named on the command line with bounded memory, and print one JSON line before and after it.

The models take one input x, float32 of shape [2,16]. A model that takes too long ends the process, wherever it hangs.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
import traceback
from pathlib import Path

import numpy as np

# A hundred tensors of 200 MB take 20 s on idle cores.
SECONDS = 60
BYTES = 2 << 30


def outcome(path: Path) -> str:
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


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    for name in sys.argv[1:]:
        tell(starts=name)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        found = outcome(Path(name))
        faulthandler.cancel_dump_traceback_later()
        tell(ends=name, outcome=found)


if __name__ == "__main__":
    main()
