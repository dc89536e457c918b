"""Encoders of somebody else, and a package that registers them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
from numpy.typing import NDArray

from onnxq.algorithms.encoders import ENCODERS, Encoder
from onnxq.algorithms.gptq import GemmView, HessianInfo, gemm_view_of
from onnxq.config.scheme import ENTRY_POINTS, packaged_encoder
from onnxq.ir import Node
from onnxq.numerics.affine import QTensor, QuantParams
from onnxq.planning.plan import Weight
from onnxq.system import plugins

NEAREST, CANCELLING = ENCODERS["minmax"], ENCODERS["gptq"]


def halved(values: NDArray[Any], weight: Weight, parameters: QuantParams | None, terms: HessianInfo | None) -> QTensor:
    """Clip to half of the largest magnitude."""
    if parameters is None:
        reach = abs(values).max() / 2
        parameters = NEAREST.encode(values.clip(-reach, reach), weight, None, None).parameters
    return NEAREST.encode(values, weight, parameters, None)


def own_scales(
    values: NDArray[Any], weight: Weight, parameters: QuantParams | None, terms: HessianInfo | None
) -> QTensor:
    return NEAREST.encode(values, weight, None, None)


def fails(*_: object) -> QTensor:
    raise ZeroDivisionError("no codes")


def writes(values: NDArray[Any], *_: object) -> QTensor:
    values[:] = 0
    raise AssertionError


def asks_for_much(*_: object) -> GemmView:
    return "everything"  # type: ignore[return-value]


def asks_and_fails(node: Node, *_: object) -> GemmView:
    raise KeyError(node.op)


HALVED = Encoder("halved", halved)
SEEING = Encoder("seeing", CANCELLING.encode, gemm_view_of)
OWN_SCALES = Encoder("own-scales", own_scales)
FAILS = Encoder("fails", fails)
WRITES = Encoder("writes", writes)
GREEDY = Encoder("greedy", halved, asks_for_much)
LOST = Encoder("lost", halved, asks_and_fails)
NOT_ONE = halved
REGISTERED = {one.name: name for name, one in tuple(globals().items()) if isinstance(one, Encoder)} | {
    "nothing": "NOTHING",
    "function": "NOT_ONE",
    "twice": "HALVED",
}


@contextmanager
def installed_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that a package is installed that registers the encoders above, and some that are none."""
    entries = EntryPoints(EntryPoint(name, f"{__name__}:{target}", ENTRY_POINTS) for name, target in REGISTERED.items())
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: entries.select(**wanted))
    # What is installed is looked up once in a process.
    packaged_encoder.cache_clear()
    yield
    packaged_encoder.cache_clear()
