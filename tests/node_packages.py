"""Where the npm packages are that engines in JavaScript need: of ONNXQ_NODE_MODULES, or installed into tests/node."""

from __future__ import annotations

import os
from pathlib import Path

PLACE = os.environ.get("ONNXQ_NODE_MODULES") or str(Path(__file__).parent / "node")
