"""Serve tract, an inference engine in Rust."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import onnx
import tract

from onnxq.runtime.protocol import Array, Backend, Loaded, serve

# tract's names of types, without the number of bits.
_KINDS = MappingProxyType({"float": "f", "int": "i", "uint": "u"})


class Tract(Backend):
    """tract, with one compiled model for each combination of input shapes and types."""

    version = f"tract {tract.version()}"
    threads = 1

    def load(self, model: str, threads: int | None) -> Loaded:
        """Load a model file; it runs in one thread."""
        return _Session(model)


class _Session:
    def __init__(self, path: str) -> None:
        # Read the model now, so that a model that cannot be read fails before the first sample.
        with _shortened():
            model = tract.onnx().load(path)
        self.path, self.names = path, [model.input_name(place) for place in range(model.input_count())]
        # tract names outputs after the nodes that make them.
        self.outputs = [value.name for value in onnx.load(path, load_external_data=False).graph.output]
        self.runnable: dict[tuple[str, ...], Any] = {}

    def run(self, sample: Mapping[str, Array]) -> Sequence[Array]:
        arrays = [sample[name] for name in self.names]
        facts = tuple(",".join([*map(str, array.shape), _type(array)]) for array in arrays)
        if facts not in self.runnable:
            self.runnable[facts] = self._made_for(facts)
        return [found.to_numpy() for found in self.runnable[facts].run(arrays)]

    def _made_for(self, facts: Sequence[str]) -> Any:
        with _shortened():
            model = tract.onnx().load(self.path)
            for place, fact in enumerate(facts):
                model.set_input_fact(place, fact)
            return model.into_model().into_runnable()


@contextmanager
def _shortened() -> Iterator[None]:
    """Raise tract's errors without the stack backtrace."""
    try:
        yield
    except tract.TractError as error:
        raise ValueError(" ".join(str(error).partition("Stack backtrace")[0].split())) from error


def _type(array: Array) -> str:
    kind = array.dtype.name.rstrip("0123456789")
    return f"{_KINDS[kind]}{8 * array.dtype.itemsize}" if kind in _KINDS else array.dtype.name


if __name__ == "onnxq.runtime.backend":
    serve(Tract())
