"""Stateful models: an output of one sample is an input of the next, as when the model runs on a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import numpy as np
import onnx

from onnxq.errors import SchemeError, nearest
from onnxq.runtime import Array, open_session, run
from onnxq.samples.data import Samples
from onnxq.samples.inputs import Input, Sample, SampleSource

Chain = Mapping[str, str]
"""Input by the output that it is taken from."""


def parse_chain(texts: Sequence[str]) -> dict[str, str]:
    """Return the inputs by output for texts such as ``stateN=state``: the output, and the input that it becomes.

    Raises:
        SchemeError: A text is none of that form, or names an input twice.

    >>> parse_chain(["stateN=state"])
    {'stateN': 'state'}
    """
    chain: dict[str, str] = {}
    for text in texts:
        source, separator, target = text.partition("=")
        if not (source and separator and target):
            raise SchemeError(f"Chain {text!r} is not OUTPUT=INPUT, expected two names such as 'stateN=state'")
        if source in chain or target in chain.values():
            raise SchemeError(f"Chain {text!r} names an output or input again, expected each one once; leave it out")
        chain[source] = target
    return chain


def with_optional(inputs: Sequence[Input], chain: Chain) -> tuple[Input, ...]:
    """Return the inputs of which samples may leave out those that are chained.

    Raises:
        SchemeError: The chain names an input that is not there, or there is nothing else to feed.
    """
    names = [entry.name for entry in inputs]
    for target in chain.values():
        if target not in names:
            raise SchemeError(
                f"Chain ends in {target!r}, expected an input of the model{nearest(target, names) or ': ' + str(names)}"
            )
    if chain and set(names) <= set(chain.values()):
        raise SchemeError("Every input is chained, expected one that samples feed; leave a chain out")
    return tuple(replace(entry, optional=entry.name in chain.values()) for entry in inputs)


class ChainedSamples:
    """Samples completed by the states that the float model leaves behind, in the order of the samples.

    The first sample of a sequence starts from the state that it holds, else from zeros: the samples of a file that
    holds several are a sequence, and so are the files of a folder. Each iteration runs the model anew.
    """

    def __init__(self, samples: SampleSource, model: onnx.ModelProto | Path, chain: Chain) -> None:
        self._samples = samples
        self._session = open_session(model, threads=1)
        self._chain = dict(chain)
        outputs = [value.name for value in self._session.get_outputs()]
        for source in chain:
            if source not in outputs:
                raise SchemeError(
                    f"Chain begins with {source!r}, expected an output of the model{nearest(source, outputs)}"
                )
        self._inputs = {value.name: value for value in self._session.get_inputs()}

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        states: dict[str, Array] = {}
        sequences = self._samples.sequences() if isinstance(self._samples, Samples) else repeat("")
        previous = None
        for index, (sample, sequence) in enumerate(zip(self._samples, sequences, strict=False)):
            if sequence != previous:
                previous = sequence
                states = {target: sample.get(target, self._zeros(target)) for target in self._chain.values()}
            complete = {**sample, **states}
            yield complete
            values = run(self._session, complete, list(self._chain), index=index)
            states = dict(zip(self._chain.values(), values, strict=True))

    def _zeros(self, name: str) -> Array:
        entry = self._inputs[name]
        dtype = _DTYPES.get(entry.type)
        if dtype is None:
            raise SchemeError(f"Chained input {name!r} is {entry.type}, expected a tensor of numbers; do not chain it")
        return np.zeros([dim if isinstance(dim, int) and dim > 0 else 1 for dim in entry.shape], dtype)


_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}
