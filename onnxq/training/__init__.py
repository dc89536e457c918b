"""Quantization-aware training: a prepared model as a torch module with fake quantization, and its training.

The public names load, and with them torch, when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from onnxq.errors import SchemeError

if TYPE_CHECKING:
    from onnxq.training.module import (
        QATModule,
        convert,
        disable_fake_quant,
        disable_observer,
        enable_fake_quant,
        enable_observer,
        prepare,
    )
    from onnxq.training.quantizers import FakeQuantize
    from onnxq.training.settings import Training

__all__ = [
    "FakeQuantize",
    "QATModule",
    "Training",
    "convert",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "prepare",
]

# Names that are not in onnxq.training.module.
_ELSEWHERE = {"FakeQuantize": "onnxq.training.quantizers", "Training": "onnxq.training.settings"}


def require_torch() -> None:
    """Check that torch is installed, before anything takes time.

    Raises:
        SchemeError: torch cannot be imported.
    """
    try:
        import_module("torch")
    except ImportError as error:
        raise SchemeError(f"training needs torch ({error}); install it with pip install 'onnxq[train]'") from error


def __getattr__(name: str) -> object:
    if name in __all__:
        require_torch()
        return getattr(import_module(_ELSEWHERE.get(name, "onnxq.training.module")), name)
    raise AttributeError(f"module 'onnxq.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
