"""The version, which plans, times of nodes and reports are of."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.2.0"
