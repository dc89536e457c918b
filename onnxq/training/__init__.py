"""Quantization-aware training: a prepared model as a torch module with fake quantization, and what trains it.

The public names load, and with them torch, when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from onnxq.errors import SchemeError

if TYPE_CHECKING:
    from onnxq.training.module import FakeQuantized
    from onnxq.training.preparing import (
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
    "FakeQuantized",
    "Training",
    "convert",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "prepare",
]

_HOMES = {
    "onnxq.training.module": ("FakeQuantized",),
    "onnxq.training.preparing": (
        "convert",
        "disable_fake_quant",
        "disable_observer",
        "enable_fake_quant",
        "enable_observer",
        "prepare",
    ),
    "onnxq.training.quantizers": ("FakeQuantize",),
    "onnxq.training.settings": ("Training",),
}


def require_torch() -> None:
    """Check that torch is there, before anything takes time.

    Raises:
        SchemeError: it is not.
    """
    try:
        import_module("torch")
    except ImportError as error:
        raise SchemeError(f"training needs torch ({error}); install it with pip install 'onnxq[train]'") from error


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            require_torch()
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'onnxq.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
